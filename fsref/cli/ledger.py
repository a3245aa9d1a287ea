"""The bodies of ``fsref audit``, ``close``, ``recover`` and ``purge``. Their exit code is the verdict's; 2 if there is none (usage or I/O,
ledger.md section 7).
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from fsref.cli.failures import tell
from fsref.cli.objectserver import at_hand, without_server
from fsref.errors import ConfigError, FsrefError
from fsref.inspection.find import Place, find_run
from fsref.journal import RunInfo, read_for_purge, read_run
from fsref.pipeline.slurm import attempts
from fsref.pipeline.slurm.commands import Slurm, SlurmAbsent
from fsref.reaper import Audit, Purge, Verdict, audit, close_run, purge, recover
from fsref.redact import visible
from fsref.store import Store

NO_VERDICT: Final = 2


def audit_main(run: str, *, json: bool) -> int:
    """Prints the audit; returns its exit code."""
    return _judged(run, _audit, json=json)


def close_main(run: str, *, force_dead: Sequence[str], json: bool) -> int:
    """Removes what is left of a stopped run, then audits."""

    def end(place: Place, store: Store, info: RunInfo) -> Audit:
        ask_slurm(place, store)
        with place.writable_ledger() as folder:
            return close_run(store, folder, run=info, force_dead=force_dead)

    return _judged(run, end, json=json)


def recover_main(
    run: str,
    *,
    resume_step: int,
    keep_steps: bool,
    force_dead: Sequence[str],
    accept_corrupt: bool,
    remove_unexpected: bool,
    json: bool,
) -> int:
    """Settles what dead processes held, then audits."""

    def settle(place: Place, store: Store, info: RunInfo) -> Audit:
        ask_slurm(place, store)
        with place.writable_ledger() as folder:
            recover(
                store,
                folder,
                run=info,
                resume_step=resume_step,
                replay="keep" if keep_steps else "drop",
                force_dead=force_dead,
                accept_corrupt=accept_corrupt,
                remove_unexpected=remove_unexpected,
            )
        return _audit(place, store, info)

    return _judged(run, settle, json=json)


def ask_slurm(place: Place, store: Store) -> None:
    """Of a run that ran in jobs: what they left open is declared dead if Slurm says that all of them are over.

    Raises ``RunBusy`` while one goes on. Where there is no Slurm to ask nothing is declared, and a process on another node counts as alive.
    """
    if place.run_dir is None or not attempts.folder(place.run_dir).is_dir():
        return
    try:
        attempts.declare_ended(store, place.run_dir, Slurm(), say=lambda text: sys.stderr.write(f"{text}\n"))
    except SlurmAbsent:
        sys.stderr.write("this run ran in Slurm jobs, and this machine has no Slurm commands to ask whether they are over\n")


def purge_main(run: str, *, run_dir: bool, json: bool) -> int:
    """Removes a proved run; 0 if it is gone, the verdict's code if it was refused, 2 for an error."""
    try:
        with at_hand(find_run(run, here=Path.cwd())) as place, place.open() as store:
            same = place.run_dir is not None and store.posix_path == str(place.run_dir)
            if run_dir and place.run_dir is None:
                raise ConfigError("the run's folder is not known here: name that folder instead of the root's URL")
            with place.writable_ledger() as folder:
                done = purge(store, folder, run=read_for_purge(store), run_dir=place.run_dir if same or run_dir else None)
        if run_dir and done.refused is None:
            done = without_server(place, done)
    except FsrefError as e:
        tell(e)
        return NO_VERDICT
    if json:
        audited = done.refused.to_json() if done.refused else None
        answer = {"run": done.run, "purged": done.refused is None, "removed": done.removed, "left": list(done.left), "audit": audited}
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(answer), indent=1).decode() + "\n")
    else:
        sys.stdout.write("\n".join(map(visible, _told(done))) + "\n")
    return done.refused.exit_code if done.refused else 0


def _told(done: Purge) -> list[str]:
    if done.refused is not None:
        todo = {
            Verdict.BALANCED: f"stop the run and end it with `fsref close {done.run}`, then purge it",
            Verdict.UNPROVABLE: "bring back what cannot be read; what is not proved is not purged",
            Verdict.VIOLATED: "keep it: its journals show what went wrong",
            Verdict.PROVED: "",
        }
        return [*done.refused.render(), f"not purged, nothing was touched: {todo[done.refused.verdict]}"]
    counts = ", ".join(f"{part} {count:,}" for part, count in done.removed.items()) or "nothing was left"
    left = [f"left in its folder, not fsref's: {', '.join(done.left[:20])}"] if done.left else []
    return [f"run {done.run} is purged; files removed: {counts}", *left]


def _audit(place: Place, store: Store, info: RunInfo) -> Audit:
    return audit(store, place.ledger_dir, run=info.run, run_uuid=info.run_uuid)


def _judged(run: str, act: Callable[[Place, Store, RunInfo], Audit], *, json: bool) -> int:
    try:
        with at_hand(find_run(run, here=Path.cwd())) as place, place.open() as store:
            found = act(place, store, read_run(store))
    except FsrefError as e:
        tell(e)  # exit code 1 would read as VIOLATED
        return NO_VERDICT
    text = msgspec.json.format(msgspec.json.encode(found.to_json()), indent=1).decode() if json else "\n".join(map(visible, found.render()))
    sys.stdout.write(text + "\n")
    return found.exit_code
