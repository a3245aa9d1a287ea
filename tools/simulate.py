"""The simulation of the ledger, to any number of seeds: crashes, forgetful disks, a lossy network, then PROVED or a seed.

    python -m tools.simulate --seeds 200000 --out sim.jsonl --jobs 2   # goes on where the file ends; one line per block of seeds
    python -m tools.simulate --seeds 1 --from 4711                     # one history again
    python -m tools.simulate --seeds 500 --mutant no_w1                # a broken rule: how many histories notice
    python -m tools.simulate --mutants --out mutants.json              # every broken rule: the seeds that it took
    python -m tools.simulate --table sim.jsonl --mutants mutants.json  # docs/results/simulation.json and its section of docs/results.md

Exit code 1 if a history of the correct rules went wrong, or a broken rule was not noticed.
"""

import argparse
import hashlib
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Final

from tests.support.simulation.play import MUTANTS, play
from tools.results import replace_section

ROOT: Final = Path(__file__).resolve().parent.parent
BLOCK_SEEDS: Final = 250
MUTANT_SEEDS_MAX: Final = 5_000
CAUGHT_ENOUGH: Final = 10
"""Histories of a mutant are played until so many have noticed it."""


def digest() -> str:
    """Names the code that was simulated: the state machine and the simulation itself."""
    files = sorted([*(ROOT / "fsref" / "ledger").glob("*.py"), *(ROOT / "tests" / "support" / "simulation").glob("*.py")])
    return hashlib.blake2b(b"".join(f.read_bytes() for f in files), digest_size=6).hexdigest()


def play_block(first: int, count: int, mutant: str = "") -> dict[str, Any]:
    """Consecutive seeds, counted together."""
    start = time.process_time()
    total: Counter[str] = Counter()
    verdicts: Counter[str] = Counter()
    events: Counter[str] = Counter()
    bad = []
    for seed in range(first, first + count):
        found = play(seed, mutant=mutant)
        verdicts[found.verdict] += 1
        events.update(found.events)
        total.update(ops=found.ops, crashes=found.crashes, objects=found.objects)
        if found.faults:
            bad.append({"seed": seed, "faults": found.faults[:3]})
    seconds = round(time.process_time() - start, 3)
    return {"from": first, "count": count, "verdicts": dict(verdicts), **total, "events": dict(events), "bad": bad, "seconds": seconds}


def play_seeds(first: int, count: int, *, jobs: int, mutant: str = "", known: Mapping[int, int] | None = None) -> Iterator[dict[str, Any]]:
    """Blocks of seeds as they get ready, without those that are ``known``: first seed to how many."""
    done = known or {}
    blocks = [(at, min(BLOCK_SEEDS, first + count - at)) for at in range(first, first + count, BLOCK_SEEDS)]
    left = [(at, size) for at, size in blocks if done.get(at, 0) < size]
    if jobs == 1 or len(left) <= 1:
        yield from (play_block(*b, mutant) for b in left)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for future in as_completed([pool.submit(play_block, *b, mutant) for b in left]):
            yield future.result()


def seeds(args: argparse.Namespace) -> int:
    """Plays seeds; with ``--out`` remembers blocks and skips them the next time."""
    code = digest()
    blocks = {} if args.mutant else _blocks(args.out, code)
    start, fresh = time.monotonic(), 0
    known = {at: b["count"] for at, b in blocks.items()}
    for block in play_seeds(args.first, args.seeds, jobs=args.jobs, mutant=args.mutant, known=known):
        blocks[block["from"]] = block
        fresh += block["count"]
        if args.out:
            with args.out.open("a", encoding="utf-8") as out:
                out.write(json.dumps({"code": code, **block}) + "\n")
        for violation in block["bad"] if not args.mutant else block["bad"][:1]:
            print(f"seed {violation['seed']}: {violation['faults'][0]}\n    {_again(violation['seed'], args.mutant)}")
        played, bad = sum(b["count"] for b in blocks.values()), sum(len(b["bad"]) for b in blocks.values())
        print(f"{played:,} seeds, {bad:,} with a violation, {fresh / (time.monotonic() - start):,.0f} seeds/s", flush=True)
    bad = sum(len(b["bad"]) for b in blocks.values())
    if args.mutant:
        print(f"{args.mutant}: {MUTANTS[args.mutant]}: noticed in {bad:,} of {fresh:,} histories")
        return int(not bad)
    return int(bad > 0)


def mutants(args: argparse.Namespace) -> int:
    """Plays every mutant until it was noticed often enough."""
    out: dict[str, Any] = {"code": digest(), "mutants": {}}
    for name in MUTANTS:
        first: int | None = None
        caught = played = 0
        example = ""
        while caught < CAUGHT_ENOUGH and played < MUTANT_SEEDS_MAX:
            found = play(played, mutant=name)
            played += 1
            if found.faults:
                caught, first, example = caught + 1, first or played, example or found.faults[0]
        out["mutants"][name] = {"rule": MUTANTS[name], "first": first, "caught": caught, "played": played, "example": example}
        print(f"{name:26} {'never' if first is None else f'after {first}':>12}   {caught} of {played}   {example[:90]}", flush=True)
    if args.out:
        args.out.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")
    return int(any(m["first"] is None for m in out["mutants"].values()))


def table(args: argparse.Namespace) -> int:
    """Writes docs/results/simulation.json and its section of docs/results.md."""
    code = _lines(args.table)[-1]["code"]
    blocks = list(_blocks(args.table, code).values())
    found = json.loads(args.mutants.read_text(encoding="utf-8"))["mutants"]
    verdicts: Counter[str] = Counter()
    events: Counter[str] = Counter()
    for block in blocks:
        verdicts.update(block["verdicts"])
        events.update(block["events"])
    totals = {name: sum(b[name] for b in blocks) for name in ("count", "ops", "crashes", "objects", "seconds")}
    bad = [v for b in blocks for v in b["bad"]]
    result = {"command": "python -m tools.simulate --seeds 200000 --out sim.jsonl --jobs 2", "code": code, **totals}
    result |= {"seconds": round(totals["seconds"]), "verdicts": dict(verdicts), "violations": bad}
    result |= {"events": dict(events.most_common()), "mutants": found}
    (ROOT / "docs" / "results" / "simulation.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    lines = [
        f"`{result['command']}` (goes on where it stopped; each history ends",
        "with faults off, recovery, audit and a reference model that saw everything):",
        f"{totals['count']:,} seeds, {totals['ops']:,} operations, {totals['crashes']:,} crashes, {totals['objects']:,} objects,",
        f"**{len(bad)} violations**, {totals['seconds']:,.0f} s of processor time. {verdicts['PROVED']:,} histories ended PROVED; in the",
        "others somebody outside removed objects, or a process lived on after it was declared dead, and the audit had to say exactly that.",
        "",
        f"What happened in them: {', '.join(f'{name} {n:,}' for name, n in sorted(events.items()))}.",
        "",
        "Each rule broken on purpose (`--mutants`), with the number of histories until the first one noticed, and how many noticed:",
        "",
        "| rule that is broken | noticed after | noticed in |",
        "|---|---|---|",
        *(f"| {m['rule']} (`{name}`) | {m['first']} | {m['caught']} of {m['played']} |" for name, m in found.items()),
    ]
    replace_section("The ledger survives a simulation", lines)
    return int(bool(bad))


def _lines(path: Path | None) -> list[dict[str, Any]]:
    if path is None or not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _blocks(path: Path | None, code: str) -> dict[int, dict[str, Any]]:
    """First seed to its block, as this code played it; of two with the same first seed the longer one."""
    blocks = [b for b in _lines(path) if b["code"] == code]
    return {b["from"]: b for b in sorted(blocks, key=lambda b: int(b["count"]))}


def _again(seed: int, mutant: str) -> str:
    return f"python -m tools.simulate --seeds 1 --from {seed}" + (f" --mutant {mutant}" if mutant else "")


def main(argv: list[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.simulate", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5_000)
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--mutant", default="", choices=["", *MUTANTS])
    parser.add_argument("--mutants", type=Path, nargs="?", const=True)
    parser.add_argument("--table", type=Path)
    args = parser.parse_args(argv)
    if args.table:
        return table(args)
    return mutants(args) if args.mutants else seeds(args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
