"""``fsref purge``: removing what is left of a run whose end is proved: steps, ledger, the rest of its folder, ``run.json`` last.

A purge cannot be undone, so it begins only where the audit says PROVED. From then on ``run.json`` says that the run is being purged:
every process that would open it is refused, the folder looks neither like a foreign run nor like a new one, and a purge that was cut off
anywhere is finished by the next one, without the journals that it may have removed already. Owns that order. Refuses to reach beyond the
run's own names: what it does not know stays, and is reported.
"""

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fsref.errors import LedgerError, RunBusy, StoreError
from fsref.journal.file import Journal, as_store_error, make_folder, now_ms
from fsref.journal.identity import mint, this_process
from fsref.journal.markers import acquire_lock, release_lock
from fsref.journal.place import Ledger
from fsref.journal.read import LedgerReader
from fsref.journal.run import NAME, RunInfo, mark_purge
from fsref.ledger import records
from fsref.ledger.report import Audit, Verdict
from fsref.reaper.auditing import audit
from fsref.store.base import Store

STORE_PARTS: Final = ("obj", "steps", "ledger")
"""Below the root; the ledger goes after what it proves."""
RUN_PARTS: Final = ("envs", "logs", "routes", "weights", "checkpoints", "model", "metrics", "wandb", "metrics.jsonl", "launcher.lock")
"""In the run's folder, where it is to be purged too; ``config.json`` goes after them."""
CONFIG: Final = "config.json"


@dataclass(frozen=True)
class Purge:
    """What a purge did."""

    run: str
    refused: Audit | None = None
    """The audit that was not PROVED; then nothing was touched."""
    removed: dict[str, int] = field(default_factory=dict)
    """Part to the files that were removed."""
    left: tuple[str, ...] = ()
    """Names in the run's folder that are none of fsref's; they were not touched."""


def purge(store: Store, ledger_dir: Path, *, run: RunInfo, run_dir: Path | None = None) -> Purge:
    """Removes a closed and PROVED run, or finishes a purge that was cut off.

    ``run`` is what ``read_for_purge`` found. ``run_dir`` is the folder with logs, weights and checkpoints, if that is to go as well.
    Returns the audit where it is not PROVED. Raises ``RunBusy`` if anybody came to the run meanwhile, ``StoreError`` if something could not
    be removed: call it again.
    """
    if not run.purge:
        found = audit(store, ledger_dir, run=run.run, run_uuid=run.run_uuid)
        if found.verdict is not Verdict.PROVED:
            return Purge(run.run, refused=found)
        _begin(store, ledger_dir, run)
    removed = {part: store.remove_all(part) for part in STORE_PARTS[:-1]}
    if run_dir is not None:
        removed |= {part: _clear(run_dir, part) for part in RUN_PARTS}
    removed["ledger"] = store.remove_all("ledger") + _clear(ledger_dir.parent, ledger_dir.name)
    one_folder = run_dir is not None and store.posix_path == str(run_dir)
    if run_dir is not None and one_folder:
        removed[CONFIG] = _clear(run_dir, CONFIG)
    outcome = store.delete([NAME])[NAME]
    if isinstance(outcome, StoreError):
        raise outcome
    if run_dir is not None and not one_folder:
        removed[CONFIG] = _clear(run_dir, CONFIG)  # until here it said where the root is
    left = _leave(run_dir) if run_dir is not None else ()
    return Purge(run.run, removed={part: n for part, n in removed.items() if n}, left=left)


def _begin(store: Store, ledger_dir: Path, run: RunInfo) -> None:
    """Nobody else is at the run, now and from now on: one recoverer's lock, all ended, ``run.json`` marked."""
    make_folder(ledger_dir)
    ledger = Ledger.of(store, ledger_dir)
    with Journal(ledger, mint("rec", "purge"), run_uuid=run.run_uuid, why="purge") as journal:
        owner = acquire_lock(ledger, journal.inc)
        try:
            if owner is not None:
                raise RunBusy(f"{owner} is at work on this run: wait for it, or run `fsref close` and purge again")
            reader = LedgerReader(ledger, run_uuid=run.run_uuid)
            reader.refresh()
            merged = reader.merge()
            if others := [inc for inc in merged.journals if inc != journal.inc and not merged.ended(inc)]:
                raise RunBusy(f"{', '.join(others[:5])} opened the run after its audit: nothing was removed")
            who = this_process()
            mark_purge(store, run, by=f"{journal.inc} by {who.user} on {who.host} pid {who.pid}")
        except (LedgerError, StoreError):
            journal.append(records.Close(now_ms()))
            if owner is None:
                release_lock(ledger, journal.inc)
            raise
        journal.append(records.Close(now_ms()))


def _clear(folder: Path, part: str) -> int:
    """Removes one file or folder of a run's folder; no link is followed, its own name included. Returns how many files went."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    except OSError as e:
        raise as_store_error(e, f"cannot open {folder}") from e
    try:
        path = folder / part
        if path.is_symlink() or not path.is_dir():
            os.unlink(part, dir_fd=fd)
            count = 1
        else:
            count = sum(len(files) for _, _, files in os.walk(path))
            shutil.rmtree(part, dir_fd=fd)
        os.fsync(fd)  # what is gone stays gone, also after a power loss, before the next part goes
    except FileNotFoundError:
        return 0
    except OSError as e:
        raise as_store_error(e, f"cannot remove {folder / part}: run the purge again") from e
    finally:
        os.close(fd)
    return count


def _leave(run_dir: Path) -> tuple[str, ...]:
    """Removes the run's folder if nothing is in it; else says what is."""
    try:
        left = tuple(sorted(path.name for path in run_dir.iterdir()))
        if not left:
            run_dir.rmdir()
    except FileNotFoundError:
        return ()
    except OSError as e:
        raise as_store_error(e, f"cannot remove {run_dir}") from e
    return left
