"""One of four trainer ranks has broken storage: what every rank does.

Writes docs/results/fault_ranks.json and its section of docs/results.md.

    python -m tools.fault_ranks         # half a minute

Four processes over gloo run the loader over two steps of two micro batches for each data rank; every micro batch's forward is an
all-reduce over all four, as FSDP's is. Rank 1's store is broken for one object of step 0, or for every one, for a whole step file, or for
removals. What is shown is what the processes reported.
"""

import json
import os
import platform
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fsref.loader.agreement import KINDS
from fsref.refs import object_name
from tests.loader.four_ranks import FETCH_DEADLINE_S, ONE_BATCH, PAIRS, Outcome, load, settings, small_run
from tests.loader.rank_process import SLOW_S, Breakage, Kind, Report
from tests.trainer.runs import SmallRun
from tools.results import replace_section

OUT: Final = Path(__file__).resolve().parent.parent / "docs" / "results" / "fault_ranks.json"
BROKEN: Final = 1
HEAD_TEXT: Final = """
`python -m tools.fault_ranks`: four processes over gloo, two steps of two micro batches each; the storage of rank 1 is broken. *pairs*:
two data ranks of two context ranks, so that ranks 0 and 1 train the same micro batches; *one*: four context ranks of one data rank.
Deadlines: {deadline:g} s for a step's arrays (`store.fetch_deadline_s`) and for a step file. A dropped micro batch's forward runs on
every rank, with routing that repeats real rows.
"""
TAIL_TEXT: Final = """
*without 0.1*: micro batch 1 of step 0 does not count in the loss. Seconds are the slowest rank's, from joining to its end, on {machine}.
*left*: objects in the store afterwards; of a run that stopped they are all there, for the trainer that is started next.
"""


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    what: str
    layout: str
    kind: Kind | None
    where: str
    """``sample``: the first of step 0; ``objects``: all; ``steps``: step files; ``removals``."""


CASES: Final = (
    Case("nothing is broken", "pairs", None, ""),
    Case("one object is not there (404)", "pairs", "404", "sample"),
    Case("one object is damaged", "pairs", "corrupt", "sample"),
    Case("one object is refused (503)", "pairs", "refused", "sample"),
    Case(f"every read takes {SLOW_S:g} s more", "pairs", "slow", "objects"),
    Case("reads of one object hang for ever", "pairs", "hanging", "sample"),
    Case("all reads hang for ever", "pairs", "hanging", "objects"),
    Case("no object is there (404)", "one", "404", "objects"),
    Case("all reads hang for ever", "one", "hanging", "objects"),
    Case("step files cannot be read: hanging", "pairs", "hanging step file", "steps"),
    Case("rank 0, which removes for both: its removals hang", "pairs", "hanging removal", "removals"),
)


def run_case(case: Case, folder: Path) -> dict[str, Any]:
    """One run of four ranks."""
    parallel = PAIRS if case.layout == "pairs" else ONE_BATCH
    run = small_run(folder, parallel)
    # A data rank's objects are removed by its first rank.
    rank = 0 if case.where == "removals" else BROKEN
    breakage = None if case.kind is None else Breakage(rank, case.kind, _names(case, run))
    limits: dict[str, Any] = {"step_wait_s": FETCH_DEADLINE_S} if case.where == "steps" else {}
    limits |= {"collective_s": 2 * FETCH_DEADLINE_S} if case.where == "removals" else {}
    got = load(run, settings(run, parallel, **limits), breakage)
    shipped = sum(len(ids) for step in run.objects.values() for ids in step)
    run.close()
    return {
        "case": case.what,
        "layout": case.layout,
        "broken_rank": None if case.kind is None else rank,
        "ranks": [did(r) for r in got.ranks],
        "dropped": _dropped(got),
        "kinds": _kinds(got),
        "seconds": round(max(r.seconds for r in got.ranks), 1),
        "objects_left": f"{got.left} of {shipped}",
    }


def _names(case: Case, run: SmallRun) -> tuple[str, ...]:
    if case.where == "sample":
        return (object_name(run.objects[0][0][0]),)
    return ("steps/",) if case.where == "steps" else ("obj/",)


def did(report: Report) -> str:
    """One rank's doings in a few words."""
    forwards = sum(len(step["batches"]) for step in report.steps)
    dropped = [f"{n}.{m}" for n, step in enumerate(report.steps) for m, b in enumerate(step["batches"]) if b["dropped"]]
    done = f"{forwards} forwards" + (f", without {' '.join(dropped)}" if dropped else "")
    if report.removed_failed:
        done += f", {report.removed_failed} removals left to the close"
    if not report.error:
        return done
    name = report.error.partition(":")[0]
    return name if not forwards else f"{done}, then {name}"


def _dropped(got: Outcome) -> int:
    """Micro batches over all data ranks, as every rank counts them."""
    return max((int(sum(s["shared"]["payload/dropped_micro_batches"] for s in r.steps)) for r in got.ranks), default=0)


def _kinds(got: Outcome) -> list[str]:
    """As every rank calls what failed, in its metrics or in the error that ended it."""
    found = {kind for r in got.ranks for step in r.steps for kind in step["missed"].values()}
    return sorted(found | {kind for r in got.ranks if r.error.startswith("StepLost") for kind in KINDS if f" {kind}" in r.error})


def section(found: dict[str, Any]) -> list[str]:
    lines = [
        *_paragraph(HEAD_TEXT.format(deadline=FETCH_DEADLINE_S)),
        "| rank 1's storage | layout | rank 0 | rank 1 | rank 2 | rank 3 | dropped | called | s | left |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case in found["cases"]:
        cells = [case["case"], case["layout"], *case["ranks"], case["dropped"], ", ".join(case["kinds"]) or "-", case["seconds"]]
        lines.append("| " + " | ".join(map(str, [*cells, case["objects_left"]])) + " |")
    return [*lines, "", *_paragraph(TAIL_TEXT.format(machine=found["machine"]))[:-1]]


def _paragraph(text: str) -> list[str]:
    return [*textwrap.wrap(text.strip(), 140), ""]


def main() -> int:
    cases = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            cases.append(run_case(case, Path(folder)))
            print(cases[-1], flush=True)
    found = {"machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}", "cases": cases}
    OUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    replace_section("One of four ranks with broken storage", section(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
