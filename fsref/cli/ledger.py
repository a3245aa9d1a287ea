"""The bodies of ``fsref audit``, ``close`` and ``recover``."""

import sys
from pathlib import Path

import msgspec

from fsref.inspection.find import find_run
from fsref.journal.run import read_run
from fsref.reaper import Audit, audit, close_run, recover


def audit_main(run: str, *, json: bool) -> int:
    """Prints the audit; returns its exit code."""
    place = find_run(run, here=Path.cwd())
    with place.open() as store:
        found = audit(store, place.ledger_dir, run=read_run(store).run)
    return _out(found, json=json)


def close_main(run: str, *, json: bool) -> int:
    """Removes what is left of a stopped run, then audits."""
    place = find_run(run, here=Path.cwd())
    with place.open() as store:
        found = close_run(store, place.ledger_dir, run=read_run(store))
    return _out(found, json=json)


def recover_main(run: str, *, resume_step: int | None, keep_steps: bool, json: bool) -> int:
    """Settles what dead processes held, then audits."""
    place = find_run(run, here=Path.cwd())
    with place.open() as store:
        info = read_run(store)
        recover(store, place.ledger_dir, run=info, resume_step=resume_step, replay="keep" if keep_steps else "drop")
        found = audit(store, place.ledger_dir, run=info.run)
    return _out(found, json=json)


def _out(found: Audit, *, json: bool) -> int:
    text = msgspec.json.format(msgspec.json.encode(found.to_json()), indent=1).decode() if json else "\n".join(found.render())
    sys.stdout.write(text + "\n")
    return found.exit_code
