"""Four trainer ranks as processes, one of which has a broken store; used by the tests and by ``tools/fault_ranks.py``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fsref.config import Config, ParallelSection
from tests.loader.rank_process import Breakage, Report, run_rank
from tests.support.forks import fork_context
from tests.support.ports import free_port
from tests.trainer.runs import DEADLINE_S, SmallRun

FETCH_DEADLINE_S = 2.0
PAIRS = ParallelSection(data=2, context=2, layout="zigzag", order=("data", "context"))
"""Two data ranks of two context ranks each: ranks 0 and 1 train the same micro batches, 2 and 3 others."""
ONE_BATCH = ParallelSection(data=1, context=4, layout="zigzag", order=("data", "context"))
"""All four ranks train the same micro batches."""


@dataclass(frozen=True)
class Outcome:
    """What came of a run."""

    ranks: list[Report]
    left: int
    """Objects that are still in the store."""


def small_run(folder: Path, parallel: ParallelSection, *, steps: int = 2) -> SmallRun:
    """``steps`` published steps of two micro batches of two samples for each data rank."""
    run = SmallRun(folder, data_ranks=parallel.data)
    for step in range(steps):
        run.publish_step(step)
    return run


def settings(run: SmallRun, parallel: ParallelSection, *, steps: int = 2, store: dict[str, Any] | None = None, **trainer: Any) -> Config:
    config = run.config(steps=steps)
    replace = msgspec.structs.replace
    return replace(
        config,
        trainer=replace(config.trainer, parallel=parallel, **trainer),
        store=replace(config.store, **{"fetch_deadline_s": FETCH_DEADLINE_S, "abandon_s": 0.2, **(store or {})}),
    )


def load(run: SmallRun, config: Config, breakage: Breakage | None) -> Outcome:
    """All ranks to their end. None may outlast the deadline."""
    context, port = fork_context(), free_port()
    started = []
    parallel = config.trainer.parallel
    for rank in range(parallel.data * parallel.context * parallel.tensor * parallel.pipeline):
        parent, child = context.Pipe(duplex=False)
        process = context.Process(target=run_rank, args=(config, rank, port, breakage, child), name=f"rank-{rank}", daemon=True)
        process.start()
        child.close()
        started.append((process, parent))
    reports = []
    for process, outcome in started:
        assert outcome.poll(DEADLINE_S), f"{process.name} neither ended nor failed"
        reports.append(Report(**outcome.recv()))
        process.join(DEADLINE_S)
        assert process.exitcode == 0, f"{process.name} ended with {process.exitcode}"
    return Outcome(reports, len(run.present()))
