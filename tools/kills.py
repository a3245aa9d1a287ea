"""``kill -9`` at random instants of the real pipeline, role by role, and the proof that nothing was lost, leaked or left behind.

    python -m tools.kills --count 50 --seed 1 --out docs/results/kills.jsonl    # goes on where the file ends, then writes its section

Each case runs ``fsref run`` on a small config with the demo engine, kills one role (or everything at once) when the run's journals have
grown to a random share of what a whole run writes, waits for the end, and then, by the seed, starts the same command again or runs ``fsref
recover`` and ``fsref close``. The oracle, of every case:

- the audit says PROVED, and a raw look under ``obj/`` finds no file;
- no process is left;
- a run that went on has trained every step exactly once in its final lineage, and went on from its newest checkpoint;
- a run that survives by itself (env worker, env broker) ends with 0 without help.

One JSON line per case, with what is needed to repeat it. The command goes on where the file ends. Exit code 1 if a case failed.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fsref import folders
from fsref.ledger.records import Open, StepRecord, decode_line, line_ok
from tools.results import replace_section

ROOT: Final = Path(__file__).resolve().parent.parent
STEPS: Final = 5
DEADLINE_S: Final = 420.0
"""A launch that takes longer hangs: a failed case."""
RECORD: Final = ROOT / "docs" / "results" / "kills.jsonl"
POLL_S: Final = 0.02
MARK: Final = "FSREF_KILLS"
OPTIONS: Final = (
    f"--run.steps={STEPS}",
    "--orchestrator.batch_size=8",
    "--orchestrator.group_size=4",
    "--orchestrator.filter_zero_advantage=false",
    "--env.0.replicas=1",
    "--env.0.workers=2",
    "--env.0.concurrent_max=8",
    "--sampling.tokens_max=8",
    "--trainer.checkpoint_every=2",
    "--store.durability=process",
    "--ledger.adopt_poll_s=0.2",
    "--ledger.adopt_drain_s=0.5",
    "--launcher.stop_s=15",
)
WORDS: Final = """\
`python -m tools.kills --count {count} --seed {seed} --out {out}` (resumable; victim, instant and what came of
each case are in the file, the seed repeats them). Each case starts the real pipeline, kills one role or everything with `kill -9` at a
random share of the run's progress, and then starts the same command again or runs `fsref recover` and `fsref close`.

**{count} cases, {proved} PROVED**, nothing under `obj/`, no process left. {alone} runs went on by themselves, {again} when they were
started again; both trained every step exactly once from the newest checkpoint on. The others were recovered and closed.
By victim: {victims}.
"""
SURVIVED: Final = ("env worker", "env broker")
VICTIMS: Final = ("inference", "env worker", "env broker", "orchestrator", "trainer rank 0", "trainer rank 1", "launcher", "everything")


@dataclass(frozen=True)
class Case:
    """What a seed chooses."""

    seed: int
    number: int
    victim: str
    share: float
    """Of the journal lines of a whole run at which it strikes."""
    delay_s: float
    then: str
    """``relaunch`` or ``close``."""
    replay: str
    """``run.replay``."""


def choose(seed: int, number: int) -> Case:
    """The case of a number; victims take turns, so that few cases see all of them."""
    rng = random.Random(f"{seed}/{number}")
    turn = random.Random(f"{seed}/turn/{number // len(VICTIMS)}").sample(VICTIMS, len(VICTIMS))
    return Case(
        seed=seed,
        number=number,
        victim=turn[number % len(VICTIMS)],
        share=rng.uniform(0.02, 0.97),
        delay_s=rng.uniform(0.0, 0.3),
        then=rng.choice(("relaunch", "relaunch", "close")),
        replay=rng.choice(("keep", "drop")),
    )


def processes(mark: str) -> Iterator[tuple[int, list[str], dict[str, str]]]:
    """Pid, arguments and environment of every live process of a case."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if (entry / "stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                continue
            env = dict(p.partition("=")[::2] for p in (entry / "environ").read_bytes().decode(errors="replace").split("\0"))
            argv = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if env.get(MARK) == mark:
            yield int(entry.name), argv, env


def is_victim(victim: str, argv: Sequence[str], env: dict[str, str]) -> bool:
    role = argv[3] if argv[1:3] == ["-m", "fsref"] and len(argv) > 3 else ""
    if victim == "everything":
        return True
    if victim == "env worker":
        return any("spawn_main" in a for a in argv)
    if victim.startswith("trainer"):
        return role == "trainer" and env.get("RANK") == victim[-1]
    return role == {"env broker": "env-server", "launcher": "run"}.get(victim, victim)


@dataclass
class Scene:
    """One case's folder and what happened in it."""

    folder: Path
    model: Path
    case: Case
    mark: str
    problems: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        return self.folder / "runs" / "k"

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, MARK: self.mark, "PYTHONPATH": str(ROOT)}

    def launch(self) -> "subprocess.Popen[bytes]":
        command = [
            *(sys.executable, "-m", "fsref", "run", str(ROOT / "configs/local.toml"), "--run.root", str(self.folder / "runs")),
            *("--run.id", "k", "--model.path", str(self.model), "--run.replay", self.case.replay, *OPTIONS),
        ]
        with (self.folder / "launcher.log").open("ab") as log:
            return subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, env=self.env, start_new_session=True)

    def fsref(self, *args: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "fsref", *args]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
        with (self.folder / "launcher.log").open("a") as log:
            log.write(f"$ fsref {' '.join(args)}: {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}\n")
        return done

    def lines(self) -> int:
        """How many records the run's journals have."""
        return sum(path.read_bytes().count(b"\n") for path in (self.run_dir / "ledger").glob("*.jnl"))

    def checkpoint(self) -> int:
        return max(folders.published(self.run_dir / "checkpoints"), default=0)

    def wait(self, condition: Callable[[], bool], what: str) -> bool:
        end = time.monotonic() + DEADLINE_S
        while not condition():
            if time.monotonic() >= end:
                self.problems.append(f"{what} within {DEADLINE_S:g} s")
                return False
            time.sleep(POLL_S)
        return True

    def ended(self, launcher: "subprocess.Popen[bytes]") -> int | None:
        """The launcher's exit code, once no process of the case is left (the guard stops what a killed launcher leaves)."""
        self.wait(lambda: launcher.poll() is not None, "the launcher did not end")
        self.wait(lambda: not any(processes(self.mark)), "processes are left: not all ended")
        return launcher.poll()

    def sweep(self) -> None:
        for pid, _, _ in processes(self.mark):
            kill(pid)


def kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def strike(scene: Scene, launcher: "subprocess.Popen[bytes]", lines_whole: int) -> None:
    """Waits for the instant and kills; notes whom. If the run ends before, nobody."""
    case, target = scene.case, int(scene.case.share * lines_whole)

    def over() -> bool:
        return launcher.poll() is not None

    def victims() -> list[int]:
        found = [pid for pid, argv, env in processes(scene.mark) if is_victim(case.victim, argv, env)]
        return found if case.victim == "everything" else sorted(found)[: 1 + case.number % 2] if case.victim == "env worker" else found

    scene.wait(lambda: over() or scene.lines() >= target, "the instant did not come")
    time.sleep(case.delay_s)
    scene.wait(lambda: over() or bool(victims()), f"there was no {case.victim}")
    killed = [pid for pid in victims() if kill(pid)]
    while case.victim == "everything" and any(processes(scene.mark)):  # what was just being started
        killed += [pid for pid, _, _ in processes(scene.mark) if kill(pid)]
    scene.facts |= {"lines": scene.lines(), "target": target, "killed": sorted(set(killed))}


def used_steps(run_dir: Path) -> list[list[int]]:
    """What each trainer trained, by the ledger, in order of their starts."""
    found: list[tuple[int, list[int]]] = []
    for path in (run_dir / "ledger").glob("trn.*.jnl"):
        lines = [line for line in path.read_bytes().split(b"\n") if line and line_ok(line)]
        parsed = [decode_line(line) for line in lines]
        opened = next(r.ms for r in parsed if isinstance(r, Open))
        found.append((opened, [r.step for r in parsed if isinstance(r, StepRecord) and r.st == "used"]))
    return [steps for _, steps in sorted(found)]


def check_lineage(scene: Scene, *, resumed_at: int | None) -> None:
    """From the last trainer back to the first: together they trained every step once."""
    lives = [steps for steps in used_steps(scene.run_dir) if steps]
    scene.facts["trained"] = [f"{s[0]}-{s[-1]}" for s in lives]
    need = STEPS
    for steps in reversed(lives):
        if steps != list(range(steps[0], steps[-1] + 1)):
            scene.problems.append(f"a trainer used the steps {steps}: not each once, in order")
        if need and not steps[0] < need <= steps[-1] + 1:
            scene.problems.append(f"the lineage {scene.facts['trained']} has a hole before step {need}")
        need = min(need, steps[0])
    if need:
        scene.problems.append(f"nobody trained the steps below {need}")
    if scene.checkpoint() != STEPS:
        scene.problems.append(f"the newest checkpoint has {scene.checkpoint()} steps, not {STEPS}")
    if resumed_at is not None and resumed_at < STEPS and lives and lives[-1][0] != resumed_at:
        scene.problems.append(f"it went on with step {lives[-1][0]}, its checkpoint had {resumed_at}")


def check_settled(scene: Scene) -> None:
    done = scene.fsref("audit", str(scene.run_dir), "--json")
    found = json.loads(done.stdout) if done.stdout else {}
    scene.facts |= {"verdict": found.get("verdict", done.stderr.strip()), "exit_code": done.returncode}
    if done.returncode:
        scene.problems.append(f"the audit ends with {done.returncode}: {scene.facts['verdict']}")
    if left := [str(p.relative_to(scene.run_dir)) for p in (scene.run_dir / "obj").rglob("*") if p.is_file()]:
        scene.problems.append(f"{len(left)} files are left: {left[:3]}")
    if alive := [(pid, argv[:5]) for pid, argv, _ in processes(scene.mark)]:
        scene.problems.append(f"processes are left: {alive[:3]}")


def settle(scene: Scene) -> None:
    """``fsref recover`` as an operator would, then ``fsref close``."""
    done = scene.checkpoint()
    keep = ("--keep-steps",) if scene.case.replay == "keep" else ()
    if not (scene.run_dir / "run.json").exists():
        return  # it died before there was a run
    recovered = scene.fsref("recover", str(scene.run_dir), "--resume-step", str(done - 1), *keep)
    if recovered.returncode not in (0, 10):
        scene.problems.append(f"recover ends with {recovered.returncode}: {(recovered.stdout + recovered.stderr)[-300:]}")
    closed = scene.fsref("close", str(scene.run_dir))
    if closed.returncode:
        scene.problems.append(f"close ends with {closed.returncode}: {(closed.stdout + closed.stderr)[-300:]}")
    covered = {step for steps in used_steps(scene.run_dir) for step in steps}
    if not covered >= set(range(done)):
        scene.problems.append(f"the checkpoint covers {done} steps, the ledger has only {sorted(covered)} as trained")


def play(case: Case, *, folder: Path, model: Path, lines_whole: int) -> dict[str, Any]:
    """Runs a case; its line."""
    start = time.monotonic()
    scene = Scene(folder, model, case, mark=f"{os.getpid()}-{case.seed}-{case.number}-{time.time_ns()}")
    try:
        launcher = scene.launch()
        strike(scene, launcher, lines_whole)
        code = scene.ended(launcher)
        resumed_at: int | None = None
        scene.facts |= {"launcher": code, "checkpoint": scene.checkpoint()}
        if code and case.victim in SURVIVED:
            scene.problems.append(f"the run did not survive the {case.victim}: the launcher ended with {code}")
        if code and case.then == "relaunch":
            resumed_at = scene.checkpoint()
            again = scene.ended(scene.launch())
            scene.facts["relaunched"] = again
            if again:
                scene.problems.append(f"the relaunch ended with {again}")
        elif code:
            settle(scene)
        if not code or case.then == "relaunch":
            check_lineage(scene, resumed_at=resumed_at)
        check_settled(scene)
    finally:
        scene.sweep()
    wall_s = round(time.monotonic() - start, 1)
    line = {name: getattr(case, name) for name in ("seed", "number", "victim", "share", "delay_s", "then", "replay")}
    return {**line, **scene.facts, "ok": not scene.problems, "problems": scene.problems, "wall_s": wall_s}


def calibrate(folder: Path, model: Path) -> int:
    """Journal lines of a whole run in which nobody dies."""
    folder.mkdir(parents=True)
    scene = Scene(folder, model, choose(0, 0), mark=f"{os.getpid()}-whole-{time.time_ns()}")
    try:
        code = scene.ended(scene.launch())
    finally:
        scene.sweep()
    if code:
        raise SystemExit(f"the run fails without any kill ({code}): see {folder}")
    return scene.lines()


def make_model(folder: Path) -> Path:
    code = "import sys; from fsref.inference.model import make_model; make_model(sys.argv[1], seed=0)"
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    return folder


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, required=True, help="cases in all; those in the file count")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines; appended to")
    args = parser.parse_args(argv)
    before = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    lines_whole = next((r["lines_whole"] for r in before if "lines_whole" in r), 0)
    records = [r for r in before if "number" in r and r["seed"] == args.seed]
    work = Path(tempfile.mkdtemp(prefix="fsref-kills-"))
    model = make_model(work / "model")
    if not lines_whole:
        lines_whole = calibrate(work / "whole", model)
        append(args.out, {"lines_whole": lines_whole, "options": list(OPTIONS)})
    for number in sorted(set(range(args.count)) - {r["number"] for r in records}):
        case = choose(args.seed, number)
        folder = work / str(number)
        folder.mkdir()
        print(
            f"case {number}: kill {case.victim} at {case.share:.2f} of the run + {case.delay_s:.2f} s, then {case.then} ({case.replay})",
            flush=True,
        )
        record = play(case, folder=folder, model=model, lines_whole=lines_whole)
        append(args.out, record)
        records.append(record)
        print(
            f"  {'ok' if record['ok'] else 'FAILED'} in {record['wall_s']} s: {record.get('verdict')}, trained {record.get('trained')}",
            flush=True,
        )
        if record["ok"]:
            shutil.rmtree(folder)
        else:
            print(f"  {record['problems']}; its folder stays: {folder}", flush=True)
    if args.out.resolve() == RECORD:
        write_results(records, seed=args.seed)
    failed = [r for r in records if not r["ok"]]
    print(f"{len(records)} cases, {len(failed)} failed; by victim: {dict(Counter(r['victim'] for r in records))}")
    return 1 if failed else 0


def write_results(records: Sequence[dict[str, Any]], *, seed: int) -> None:
    """Its section of docs/results.md."""
    good = [r for r in records if r["ok"]]
    victims = sorted(Counter(r["victim"] for r in records).items())
    text = WORDS.format(
        count=len(records),
        seed=seed,
        out=RECORD.relative_to(ROOT),
        proved=sum(r["verdict"] == "PROVED" for r in good),
        alone=sum(r["launcher"] == 0 for r in good),
        again=sum(r["launcher"] != 0 and r["then"] == "relaunch" for r in good),
        victims=", ".join(f"{name} {number}" for name, number in victims),
    )
    replace_section("Killed at random instants", text.splitlines())


def append(out: Path, record: dict[str, Any]) -> None:
    with out.open("a") as file:
        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    sys.exit(main())
