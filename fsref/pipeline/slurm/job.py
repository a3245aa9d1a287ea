"""The launcher inside a job: the process of the batch script, on the first node.

It does what the launcher of one machine does, with steps in place of processes: settle what earlier starts left, go on from the newest
checkpoint, start the nodes, the ranks and the orchestrator, end all of them when one fails or a signal comes, settle the ledger, and ask
for another start where there is work left. Owns that, and the ``.dead`` markers on Slurm's word.
"""

import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from fsref.addresses import find_inference
from fsref.config import Config
from fsref.errors import RoleFailed, StoreError
from fsref.pipeline.board import PlainBoard
from fsref.pipeline.layout import RoleCommand
from fsref.pipeline.processes import Child
from fsref.pipeline.run import Plan, launch
from fsref.pipeline.slurm.allocation import Allocation, read_allocation
from fsref.pipeline.slurm.attempts import declare_dead, declare_ended, write_attempt
from fsref.pipeline.slurm.commands import Slurm
from fsref.pipeline.slurm.plan import section
from fsref.pipeline.slurm.steps import JOURNALS, NAMES, steps
from fsref.pipeline.slurm.views import look
from fsref.pipeline.supervise import answers
from fsref.store import open_root

POLL_S: Final = 0.5
STOP_ASKED: Final = 128 + signal.SIGUSR1


def main(config: Config, *, verbose: bool = False) -> int:
    """Runs the job's run to its end; the exit code: the audit's, 128 plus a signal, 0 where the job was put back to start again.

    Raises ``RoleFailed`` with the reason of the first role that failed, and what ``pipeline.run.launch`` raises.
    """
    slurm = Slurm()
    settings = section(config)
    allocation = read_allocation(os.environ, settings, slurm)
    config = replace(config, run=replace(config.run, attempt=allocation.attempt))
    os.environ.update(settings.env)  # for the steps and for what this process itself starts
    board = PlainBoard(sys.stdout)
    board.say(
        f"job {allocation.job}, start {allocation.restarts + 1}: inference on {', '.join(n.name for n in allocation.inference)},"
        f" trainer on {', '.join(n.name for n in allocation.trainer)}"
    )
    plan = Plan(
        config=config,
        roles=tuple(steps(config, allocation, verbose=verbose)),
        healthy=functools.partial(_serves, config),
        before=functools.partial(_before, allocation, slurm),
        ended=functools.partial(_ended, allocation, slurm),
    )
    try:
        code = launch(plan, board)
    except RoleFailed as e:
        if allocation.restarts >= settings.retries_max:
            raise
        board.say(f"start {allocation.restarts + 1} of {settings.retries_max + 1} failed, the job is put back: {e}")
        slurm.requeue(allocation.job)
        return 1
    if code == STOP_ASKED and settings.requeue:
        board.say("the time is up, or was asked back: the run goes on when Slurm starts the job again")
        slurm.requeue(allocation.job)
        return 0
    return code


def _serves(config: Config, address: str) -> bool:
    """Whether every inference node has published, which it does once its server answers; or the server that the config names."""
    if not config.inference.servers:
        return answers(address)
    try:
        there = [r for _, r in find_inference(Path(config.run.run_dir)) if r.attempt == config.run.attempt]
    except OSError:
        return False  # the next look will do
    return len(there) >= config.inference.servers


def _before(allocation: Allocation, slurm: Slurm, config: Config, say: Callable[[str], None]) -> None:
    """Under the run's lock, before anything is settled: the processes of earlier starts are declared dead, this start is recorded."""
    run_dir = Path(config.run.run_dir)
    if section(config).check_nodes and not allocation.heterogeneous:
        _check_nodes(run_dir, slurm, say)
    with open_root(config.run.root, run=config.run.id, settings=config.store) as store:
        declare_ended(store, run_dir, slurm, current=allocation, say=say)
    for stale in (run_dir / "inference").glob("*.address"):
        stale.unlink(missing_ok=True)
    write_attempt(run_dir, allocation)


def _check_nodes(run_dir: Path, slurm: Slurm, say: Callable[[str], None]) -> None:
    """A node that does not see the run's folder as the others do would fail the run later, and less clearly."""
    views, missing = look(run_dir, "all", slurm, os.environ)
    for view in views:
        if view.failure:
            raise RoleFailed(f"node {view.node}: {view.failure}")
    if missing:
        raise RoleFailed(
            f"{missing} of the job's nodes do not see {run_dir}: the run's folder must lie on a filesystem that all nodes share"
        )
    lag_s = max((v.lag_s for v in views if v.lag_s is not None), default=0.0)
    spread_s = max((abs(v.clock_s) for v in views if v.clock_s is not None), default=0.0)
    say(f"{len(views)} nodes see each other's files within {lag_s * 1000:.0f} ms, their clocks are within {spread_s:.2f} s")


def _ended(allocation: Allocation, slurm: Slurm, config: Config, role: RoleCommand, child: Child) -> None:
    """A step's srun has ended: once Slurm says that the step has ended everywhere, what it left open is declared dead."""
    del child
    name = NAMES[role.part]
    end = time.monotonic() + section(config).settle_s
    while running := slurm.steps(allocation.jobs, name):
        for step in running:
            slurm.kill_step(step)
        if time.monotonic() >= end:
            raise StoreError(
                f"step {running[0]} ({name}) has not ended {section(config).settle_s:g} s after its srun: nothing of it is declared dead"
            )
        time.sleep(POLL_S)
    hosts = {n.host for n in allocation.nodes}
    with open_root(config.run.root, run=config.run.id, settings=config.store) as store:
        why = f"Slurm says that the step {name} of job {allocation.attempt} has ended"
        declare_dead(store, Path(config.run.run_dir), hosts=hosts, roles=JOURNALS[role.part], why=why)
