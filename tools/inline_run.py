"""The pipeline inline and by reference, in the same run conditions: the tables of the problem statement at the size that fits.

Writes docs/results/inline.json and a section of docs/results.md.

    python -m tools.inline_run            # seeds x transports, then one server against replicas; about twelve minutes on two cores
    python -m tools.inline_run 2          # only the next two of the runs that docs/results/inline.json does not have yet
    python -m tools.inline_run --write    # the section again; measures nothing

Every run is ``configs/local.toml`` with heads and masks of up to ``HEAD`` entries, so that a token's arrays weigh about what they do in a
large model's run, and with every sample of the weights that train it (``ahead_max = 0``). Inline runs carry the same repaired arrays in
the same messages (``tools.inline``); a pair of runs has the same seed, config, model and tasks, and one follows the other, each
transport being the first in turn. Memory of env servers is looked at from outside.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from fsref.bench.measure import machine
from fsref.bench.report import show_bytes
from tools.replica_load import pss_bytes
from tools.results import RESULTS, paragraph, replace_section, series

ROOT: Final = Path(__file__).resolve().parent.parent
JSON: Final = RESULTS.parent / "results" / "inline.json"
TRANSPORTS: Final = ("reference", "inline")
SEEDS: Final = (0, 1, 2)
STEPS: Final = 5
HEAD: Final = 256
BATCH: Final = 64
OPTIONS: Final = (
    f"--run.steps={STEPS}",
    f"--sampling.top_logprobs={HEAD}",
    f"--sampling.top_k={HEAD}",
    "--sampling.tokens_max=48",
    "--orchestrator.ahead_max=0",
    f"--orchestrator.batch_size={BATCH}",
    "--orchestrator.tokens_per_micro_batch=4096",
    f"--trainer.checkpoint_every={STEPS}",
    "--env.0.taskset=tools.inline.tasks",
)
SERVERS: Final = {
    "one server": ("--env.0.replicas=1", "--env.0.workers=2", "--env.0.concurrent_max=64", "--run.steps=2", "--trainer.checkpoint_every=2"),
    "four replicas": (
        "--env.0.replicas=4",
        "--env.0.workers=2",
        "--env.0.concurrent_max=16",
        "--run.steps=2",
        "--trainer.checkpoint_every=2",
    ),
}
TITLE: Final = "Inline against by reference"
LOOK_S: Final = 0.25
MEAN_OF: Final = {
    "reward": ("orchestrator", "reward/mean"),
    "mismatch KL": ("trainer", "mismatch_kl/mean"),
    "gradient norm": ("trainer", "optimizer/grad_norm"),
    "step, s": ("trainer", "time/step"),
    "of it training, s": ("trainer", "time/train"),
    "payload fetch, s": ("trainer", "payload/fetch_time"),
    "of it waited for, s": ("trainer", "payload/fetch_time_exposed"),
    "dropped micro batches": ("trainer", "payload/dropped_micro_batches"),
    "into the orchestrator, bytes": ("orchestrator", "wire/bytes_received"),
}
"""What is reported of a run, as means over its steps: label, role and metric."""
PEAK_OF: Final = {"orchestrator peak RSS, bytes": "orchestrator", "trainer rank 0 peak RSS, bytes": "trainer"}


def run(folder: Path, *, transport: str, seed: int, options: Sequence[str] = ()) -> dict[str, Any]:
    """One run, watched from outside; raises ``SystemExit`` with its output unless it ended PROVED."""
    name = f"{transport}-{seed}-{len(list(folder.iterdir()))}"
    step_bytes = folder / f"{name}.bytes"
    command = [
        sys.executable,
        "-m",
        "fsref",
        "run",
        str(ROOT / "configs" / "local.toml"),
        "--run.root",
        str(folder / "runs"),
        "--run.id",
        name,
    ]
    env = {
        **os.environ,
        "FSREF_TRANSPORT": transport,
        "FSREF_STEP_BYTES": str(step_bytes),
        "PYTHONPATH": os.pathsep.join((str(ROOT / "tools" / "inline" / "site"), str(ROOT))),
    }
    process = subprocess.Popen(
        [*command, *OPTIONS, f"--run.seed={seed}", *options],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    watch = Watch(process.pid)
    output, _ = process.communicate(timeout=540)
    watch.stop()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}\n{output[-4000:]}")
    return figures(folder / "runs" / name, step_bytes) | {"transport": transport, "seed": seed, "env_servers": watch.servers()}


def figures(run_dir: Path, step_bytes: Path) -> dict[str, Any]:
    """What a finished run says of itself."""
    out: dict[str, Any] = {label: statistics.mean(series(run_dir, role, metric)) for label, (role, metric) in MEAN_OF.items()}
    out |= {label: max(series(run_dir, role, "memory/rss_peak_bytes")) for label, role in PEAK_OF.items()}
    sizes = [int(line.split()[1]) for line in step_bytes.read_text(encoding="ascii").splitlines()]
    out["to the trainer, bytes"] = statistics.mean(sizes)
    out["rewards"] = series(run_dir, "orchestrator", "reward/mean")
    return out


class Watch:
    """Looks at the env servers below a launcher until it is stopped: each one's processes together, at its highest."""

    def __init__(self, launcher: int) -> None:
        self._launcher, self._stop = launcher, threading.Event()
        self._peaks: dict[int, int] = {}
        self._first: dict[int, int] = {}
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def stop(self) -> None:
        """Ends the looking."""
        self._stop.set()
        self._thread.join()

    def servers(self) -> dict[str, list[int]]:
        """Bytes of each server at its highest."""
        return {"peak_bytes": [self._peaks[pid] for pid in sorted(self._peaks)]}

    def _look(self) -> None:
        while not self._stop.wait(LOOK_S):
            for pid, family in env_servers(self._launcher).items():
                self._peaks[pid] = max(self._peaks.get(pid, 0), pss_bytes(family))


def env_servers(launcher: int) -> dict[int, list[int]]:
    """Pid of each env server below a process to the pids of its family."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it ended
            continue
    servers = [pid for pid in below(launcher, parents) if "env-server" in command_of(pid)[:4]]
    return {pid: below(pid, parents) for pid in servers}


def below(pid: int, parents: dict[int, int]) -> list[int]:
    """A process and everything under it."""
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def command_of(pid: int) -> list[str]:
    """Its arguments; none if it ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return []


HOW: Final = (
    "*Reference*: the product. *Inline*: the same pipeline, and the same repaired arrays in the replies of the env servers, in the "
    "orchestrator's memory until their sample is shipped or dropped, and in the step files; trainer ranks pack them by plain numpy "
    "(`tools/inline`: patches of that tool's processes, no switch of the product). A pair of runs has one seed, and each goes "
    "first in turn."
)
SERVERS_READ: Final = (
    "Most of that is Python with its libraries; [the other table](#load-over-replicas-and-what-they-weigh) has what grows under the work."
)
CAVEATS: Final = (
    "What is not comparable. Two runs of one seed do not sample the same tokens: the demo server decodes in bfloat16 in whatever "
    "batches arrive, so rewards of a pair differ as those of two runs of one kind do; look at them beside the scatter of seeds. "
    "That both transports bring the trainer the same bytes is tested apart (`tests/proofs/test_inline.py`, and on every micro batch "
    "of a run in `tests/proofs`). The inline run still encodes each branch, for what a reference says of it, and still keeps a "
    "ledger over objects of a few bytes, so its env servers do more than an inline design's. Step time here is sampling on the "
    "same two cores; the arrays are a thousandth of the large model's batch, so what grows is small beside Python and torch "
    "themselves, and no inline step is slow yet. The problem statement's 128 x 8 rollouts of 16k tokens do not fit here; `fsref "
    "bench memory` has the slope per sample for that shape."
)


def lines(found: dict[str, Any]) -> Iterator[str]:
    """The section."""
    runs = found["runs"]
    pairs = [[runs[f"{transport}, seed {seed}"] for seed in SEEDS] for transport in TRANSPORTS]
    yield (
        f"`python -m tools.inline_run` on {found['machine']} ([data](results/inline.json)): `configs/local.toml`, {STEPS} steps of {BATCH}"
        f" episodes, heads and masks of up to {HEAD} entries, `ahead_max = 0`, seeds {', '.join(map(str, SEEDS))}. Means over steps and"
        " seeds, the seeds' range in brackets."
    )
    yield ""
    yield from paragraph(HOW)
    yield ""
    yield "| | by reference | inline | inline / reference |"
    yield "|---|---|---|---|"
    for label in (*PEAK_OF, *MEAN_OF, "to the trainer, bytes"):
        yield row(label, *([r[label] for r in of] for of in pairs))
    yield ""
    yield "One env server for all episodes against four replicas with the same workers each, two steps; memory of each server's processes:"
    yield ""
    yield "| | by reference | inline |"
    yield "|---|---|---|"
    for servers in SERVERS:
        peaks = [runs[f"{transport}, {servers}"]["env_servers"]["peak_bytes"] for transport in TRANSPORTS]
        yield f"| {servers}, highest | {' | '.join(span(p) for p in peaks)} |"
    yield ""
    yield from paragraph(SERVERS_READ)
    yield ""
    yield from paragraph(CAVEATS)


def row(label: str, reference: list[float], inline: list[float]) -> str:
    """One line of the table; the ratio is that of each seed's pair."""
    ratios = [i / r for r, i in zip(reference, inline, strict=True) if r]
    shown = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})" if ratios else "-"
    return f"| {label.removesuffix(', bytes')} | {cell(label, reference)} | {cell(label, inline)} | {shown} |"


def cell(label: str, values: list[float]) -> str:
    """Mean and range over seeds."""
    show: Callable[[float], str] = show_bytes if label.endswith("bytes") else "{:.3g}".format
    if min(values) == max(values):
        return show(values[0])
    return f"{show(statistics.mean(values))} ({show(min(values))} to {show(max(values))})"


def span(values: list[int]) -> str:
    """From the least to the most."""
    return show_bytes(values[0]) if len(values) == 1 else f"{show_bytes(min(values))} to {show_bytes(max(values))}"


def planned() -> dict[str, tuple[str, int, tuple[str, ...]]]:
    """Label to transport, seed and options, in the order in which they run."""
    out: dict[str, tuple[str, int, tuple[str, ...]]] = {}
    for n, seed in enumerate(SEEDS):
        for transport in TRANSPORTS if n % 2 == 0 else TRANSPORTS[::-1]:
            out[f"{transport}, seed {seed}"] = (transport, seed, ())
    for servers, options in SERVERS.items():
        for transport in TRANSPORTS:
            out[f"{transport}, {servers}"] = (transport, 0, options)
    return out


def main(argv: list[str]) -> int:
    """The command line."""
    if len(argv) > 1 or (argv and argv[0] != "--write" and not argv[0].isdigit()):
        print(__doc__)
        return 2
    found: dict[str, Any] = (
        json.loads(JSON.read_text(encoding="utf-8")) if JSON.exists() else {"machine": machine(), "options": list(OPTIONS), "runs": {}}
    )
    left = [label for label in planned() if label not in found["runs"]]
    if argv:
        left = [] if argv[0] == "--write" else left[: int(argv[0])]
    for label in left:
        transport, seed, options = planned()[label]
        with tempfile.TemporaryDirectory(prefix="fsref-inline-") as folder:
            found["runs"][label] = run(Path(folder), transport=transport, seed=seed, options=options)
        JSON.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(label, flush=True)
    if all(label in found["runs"] for label in planned()):
        replace_section(TITLE, list(lines(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
