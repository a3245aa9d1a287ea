"""The bodies of ``fsref audit``, ``close`` and ``recover``. Their exit code is the verdict's; 2 if there is none (usage or I/O, ledger.md
section 7).
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from fsref.cli.failures import tell
from fsref.errors import FsrefError
from fsref.inspection.find import Place, find_run
from fsref.journal import RunInfo, read_run
from fsref.reaper import Audit, audit, close_run, recover
from fsref.redact import visible
from fsref.store import Store

NO_VERDICT: Final = 2


def audit_main(run: str, *, json: bool) -> int:
    """Prints the audit; returns its exit code."""
    return _judged(run, _audit, json=json)


def close_main(run: str, *, force_dead: Sequence[str], json: bool) -> int:
    """Removes what is left of a stopped run, then audits."""
    return _judged(run, lambda place, store, info: close_run(store, place.ledger_dir, run=info, force_dead=force_dead), json=json)


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
        recover(
            store,
            place.ledger_dir,
            run=info,
            resume_step=resume_step,
            replay="keep" if keep_steps else "drop",
            force_dead=force_dead,
            accept_corrupt=accept_corrupt,
            remove_unexpected=remove_unexpected,
        )
        return _audit(place, store, info)

    return _judged(run, settle, json=json)


def _audit(place: Place, store: Store, info: RunInfo) -> Audit:
    return audit(store, place.ledger_dir, run=info.run, run_uuid=info.run_uuid)


def _judged(run: str, act: Callable[[Place, Store, RunInfo], Audit], *, json: bool) -> int:
    try:
        place = find_run(run, here=Path.cwd())
        with place.open() as store:
            found = act(place, store, read_run(store))
    except FsrefError as e:
        tell(e)  # exit code 1 would read as VIOLATED
        return NO_VERDICT
    text = msgspec.json.format(msgspec.json.encode(found.to_json()), indent=1).decode() if json else "\n".join(map(visible, found.render()))
    sys.stdout.write(text + "\n")
    return found.exit_code
