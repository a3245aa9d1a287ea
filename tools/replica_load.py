"""How evenly runs spread over env-server replicas, and what one server weighs against one replica per node.

Writes docs/results/replicas.json and a section of docs/results.md.

    python -m tools.replica_load

Real env servers and the real client, on this machine, with an engine that answers after a set time with arrays made from the tokens alone.
*Spread* is the difference between the most and the fewest runs in flight over the replicas, looked at every 20 ms while all runs of the
test were in flight. *Memory* is the proportional set size of a server's processes (pages that several share are divided among them).
"""

import asyncio
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from fsref.episodes import EpisodeClient
from tests.envserver.engine import Engine
from tests.envserver.support import EVL, SAMPLING, Replica, Run, make_run, source, task
from tools.results import RESULTS, replace_section

REPLICAS: Final = 4
IN_FLIGHT: Final = 32
RUNS: Final = 160
MEMORY_RUNS: Final = 64
LOOK_S: Final = 0.02
ANSWER_S: Final = 0.5
SLOW_S: Final = 2.0
LONG: Final = {**SAMPLING, "max_tokens": 256, "logprobs": 20}
OUT: Final = RESULTS.parent / "results" / "replicas.json"


class Timed(Engine):
    """Answers after a set time."""

    def __init__(self, answer_s: float) -> None:
        super().__init__()
        self._answer_s = answer_s

    async def _pass_gate(self) -> None:
        await asyncio.sleep(self._answer_s)


async def work(client: EpisodeClient, run: Run, *, runs: int, by_node: dict[str, str], sampling: dict[str, Any]) -> list[dict[str, int]]:
    """Keeps ``IN_FLIGHT`` runs going until ``runs`` are done; runs in flight by replica, at each look while all of them were."""
    target = dataclasses.replace(run.target, by_node=by_node)
    slots = asyncio.Semaphore(IN_FLIGHT)
    looks: list[dict[str, int]] = []

    async def one() -> None:
        async with slots:
            episode = await client.run(task(), target=target, sampling=sampling)
        if not episode.ok:
            raise RuntimeError(f"an episode failed: {episode.errors}")

    async def look() -> None:
        while True:
            now = {label: c.in_flight for label, c in client.counts().items()}
            if sum(now.values()) == IN_FLIGHT:
                looks.append(now)
            await asyncio.sleep(LOOK_S)

    looker = asyncio.create_task(look())
    await asyncio.gather(*(one() for _ in range(runs)))
    looker.cancel()
    return looks


def with_client(run: Run, env: str, body: Callable[[EpisodeClient], Any]) -> Any:
    """A started client of a source; what it does not return is left to the folder's end."""

    async def go() -> Any:
        table = next(e for e in run.config.env if e.name == env)
        client = EpisodeClient(
            env=table,
            envs_dir=run.folder / "envs",
            run=run.info.run,
            run_uuid=run.info.run_uuid,
            session=EVL,
            abandoned=lambda *_: None,
        )
        async with client:
            await client.start(deadline_s=300.0)
            return await body(client)

    return asyncio.run(go())


def spread_of(run: Run, slow_node: dict[str, str]) -> dict[str, Any]:
    """One measurement of the load."""

    async def body(client: EpisodeClient) -> dict[str, Any]:
        before = {label: c.finished for label, c in client.counts().items()}
        start = time.monotonic()
        looks = await work(client, run, runs=RUNS, by_node=slow_node, sampling=SAMPLING)
        took_s = time.monotonic() - start
        spreads = [max(x.values()) - min(x.values()) for x in looks]
        done = {label: c.finished - before[label] for label, c in client.counts().items()}
        return {
            "looks": len(spreads),
            "spread_max": max(spreads),
            "spread_mean": round(sum(spreads) / len(spreads), 3),
            "in_flight_mean": {label: round(sum(x[label] for x in looks) / len(looks), 2) for label in sorted(done)},
            "finished": dict(sorted(done.items())),
            "seconds": round(took_s, 1),
        }

    found: dict[str, Any] = with_client(run, "four", body)
    return found


def pss_bytes(pids: list[int]) -> int:
    """Proportional set size of processes together."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return total


def family(replica: Replica) -> list[int]:
    """A server's process and everything below it."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = [replica.process.pid]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def memory_of(run: Run, env: str, replicas: list[Replica]) -> dict[str, Any]:
    """Idle and highest memory of each server while the same runs go over them."""

    async def body(client: EpisodeClient) -> dict[str, Any]:
        families = [family(r) for r in replicas]
        idle = [pss_bytes(f) for f in families]
        peaks = list(idle)

        async def look() -> None:
            while True:
                for n, pids in enumerate(families):
                    peaks[n] = max(peaks[n], pss_bytes(pids))
                await asyncio.sleep(0.25)

        looker = asyncio.create_task(look())
        await work(client, run, runs=MEMORY_RUNS, by_node={}, sampling=LONG)
        looker.cancel()
        mib = [round(b / 2**20, 1) for b in idle], [round(b / 2**20, 1) for b in peaks]
        return {"idle_mib": mib[0], "peak_mib": mib[1], "grown_mib": [round(p - i, 1) for i, p in zip(*mib, strict=True)]}

    found: dict[str, Any] = with_client(run, env, body)
    return found


def measure(folder: Path) -> dict[str, Any]:
    """Everything."""
    limits = {"concurrent_max": IN_FLIGHT, "health_s": 60.0}
    with Timed(ANSWER_S) as engine, Timed(SLOW_S) as slow:
        run = make_run(folder, engine, envs=(source("four", replicas=REPLICAS, **limits), source("lone", **limits)))
        try:
            lone = run.start("lone")
            alone = memory_of(run, "lone", [lone])
            lone.stop()
            four = [run.start("four", n) for n in range(REPLICAS)]
            return {
                "even": spread_of(run, {}),
                "one_slow": spread_of(run, {"local-3": slow.url}),
                "one_server": alone,
                "replicas": memory_of(run, "four", four),
            }
        finally:
            run.stop()


def lines(found: dict[str, Any]) -> list[str]:
    """The section of docs/results.md."""
    even, slow, one, four = found["even"], found["one_slow"], found["one_server"], found["replicas"]

    def row(title: str, load: dict[str, Any]) -> str:
        flights = " / ".join(f"{v:g}" for v in load["in_flight_mean"].values())
        done = " / ".join(map(str, load["finished"].values()))
        return f"| {title} | {load['looks']} | {load['spread_max']} | {load['spread_mean']:g} | {flights} | {done} |"

    def weight(values: list[float]) -> str:
        return f"{min(values):.0f}" if len(values) == 1 else f"{min(values):.0f} to {max(values):.0f}"

    how = (
        f"`python -m tools.replica_load` ([data](results/replicas.json)): {IN_FLIGHT} runs in flight over {REPLICAS} real env servers on"
        f" one machine of 2 busy cores, {RUNS} runs each. The engine answers after {ANSWER_S:g} s; that of the slow replica after"
        f" {SLOW_S:g} s."
    )
    memory = (
        f"Env-server memory for the same {MEMORY_RUNS} runs of {LONG['max_tokens']} sampled tokens with heads of {LONG['logprobs']},"
        f" {IN_FLIGHT} in flight:"
    )
    weights = [[weight(x[key]) for key in ("idle_mib", "peak_mib", "grown_mib")] for x in (one, four)]
    return [
        how,
        "",
        "| replicas | looks | largest difference in flight | mean difference | mean in flight of each | runs finished by each |",
        "|---|---|---|---|---|---|",
        row("four alike", even),
        row("the last one slow", slow),
        "",
        "Runs go to the replica with the fewest in flight, so a slow one has as many in flight as the others and finishes fewer.",
        "",
        memory,
        "",
        "| servers | idle, MiB each | highest, MiB each | grown under the work, MiB each |",
        "|---|---|---|---|",
        f"| one for all | {' | '.join(weights[0])} |",
        f"| one replica for each of {REPLICAS} nodes | {' | '.join(weights[1])} |",
        "",
        "Arrays leave a server with their episode, so what grows is what is in flight on it, and replicas divide that.",
    ]


def main() -> int:
    """Measures, writes, prints."""
    with tempfile.TemporaryDirectory(prefix="fsref-load-") as folder:
        found = measure(Path(folder))
    OUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    text = lines(found)
    replace_section("Load over replicas, and what they weigh", text)
    sys.stdout.write("\n".join(text) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
