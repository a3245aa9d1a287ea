"""The starts of a run as jobs: which there were, on which hosts, and the word that their processes are gone.

Owns ``<run_dir>/slurm/attempts/<job>.<restarts>.json`` and the rule of design.md section 5: a process on a lost node is declared dead by
whoever was told by Slurm that its step, or its job, has ended, and by nobody else. Refuses to declare anything while Slurm says that a job
of the run goes on, or does not answer.
"""

import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

import msgspec

from fsref.errors import RoleFailed, RunBusy
from fsref.journal.file import sync_folder
from fsref.journal.markers import is_dead, write_dead
from fsref.journal.place import Ledger
from fsref.pipeline.settle import unclosed
from fsref.pipeline.slurm.allocation import Allocation
from fsref.pipeline.slurm.commands import JobState, Slurm
from fsref.store import Store
from fsref.store.posix import raise_mapped

ROLES: Final = ("env", "orc", "trn", "rec")
"""Whose journals a job's processes write."""


def folder(run_dir: Path) -> Path:
    """Where the records are."""
    return run_dir / "slurm" / "attempts"


def write_attempt(run_dir: Path, allocation: Allocation) -> None:
    """Before any role starts, durable: whoever comes later must know on which hosts processes may be."""
    path = folder(run_dir) / f"{allocation.attempt}.json"
    staging = path.with_name(f".{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        staging.write_bytes(msgspec.json.encode(allocation))
        staging.replace(path)
        sync_folder(path.parent)
    except OSError as e:
        raise_mapped(e, f"writing {path}")


def read_attempt(run_dir: Path, attempt: str) -> Allocation:
    """One start's record. Raises ``RoleFailed`` if it is not there or cannot be read."""
    path = folder(run_dir) / f"{attempt}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Allocation)
    except (OSError, msgspec.DecodeError) as e:
        raise RoleFailed(f"{path}, which the job's launcher writes, cannot be read here: {e}") from e


def attempts(run_dir: Path) -> list[Allocation]:
    """Every start that is recorded."""
    return [read_attempt(run_dir, path.stem) for path in sorted(folder(run_dir).glob("*.json"))]


def declare_ended(
    store: Store, run_dir: Path, slurm: Slurm, *, current: Allocation | None = None, say: Callable[[str], object] | None = None
) -> list[str]:
    """Writes ``.dead`` for what earlier starts of the run left open, all of which must be over; returns the incarnations.

    ``current``: the start that asks, of which no process has opened a journal yet. Raises ``RunBusy`` naming a job that goes on,
    ``RoleFailed`` if Slurm does not say, ``StoreError``.
    """
    hosts: set[str] = set()
    states: dict[str, JobState] = {}
    for found in attempts(run_dir):
        if current is not None and found.job == current.job:
            over = found.restarts < current.restarts
            state = JobState("RUNNING", current.restarts)
        else:
            for job in found.jobs:
                states.setdefault(job, slurm.job(job))
            state = min((states[job] for job in found.jobs), key=lambda s: s.over(found.restarts))
            over = state.over(found.restarts)
        if over:
            hosts |= {n.host for n in found.nodes}
        elif current is None or found.attempt != current.attempt:
            raise RunBusy(f"job {found.job} of this run is {state.state}: wait for it, or end it with scancel {found.job}")
    dead = declare_dead(store, run_dir, hosts=hosts, roles=ROLES, why="Slurm says that its job has ended")
    if dead and say is not None:
        say(f"{len(dead)} processes of earlier starts are gone, as Slurm says: {', '.join(dead[:8])}{' ...' * (len(dead) > 8)}")
    return dead


def declare_dead(store: Store, run_dir: Path, *, hosts: Collection[str], roles: Collection[str], why: str) -> list[str]:
    """Writes ``.dead`` for every journal of these roles that a process on these hosts left open. Only for whoever knows that all of them
    have ended. Raises ``StoreError``.
    """
    ledger_dir = run_dir / "ledger"
    if not ledger_dir.is_dir():
        return []
    ledger = Ledger.of(store, ledger_dir)
    short = {h.partition(".")[0] for h in hosts}
    wanted = re.compile(rf"(?:{'|'.join(roles)})\.[a-z0-9-]+\.[0-9a-f]{{16}}", re.ASCII)
    dead = []
    for path in sorted(ledger_dir.glob("*.jnl")):
        if wanted.fullmatch(path.stem) is None or is_dead(ledger, path.stem):
            continue
        opened = unclosed(path)
        if opened is not None and opened.host.partition(".")[0] in short:
            write_dead(ledger, path.stem, by="slurm", why=why)
            dead.append(path.stem)
    return dead
