"""``fsref audit``: journals, listing, journals again, verdict.

Owns the order that makes a live run judgeable: J1 := journals, L := listing, J2 := the journals' new tails. Changes nothing.
"""

from pathlib import Path

from fsref.errors import StoreError
from fsref.journal.place import Ledger
from fsref.journal.read import LedgerReader
from fsref.ledger.fold import JournalFold
from fsref.ledger.merge import RunFold
from fsref.ledger.predicates import Evidence, StoreView
from fsref.ledger.report import Audit, conclude
from fsref.reaper.listing import list_objects
from fsref.store.base import Store


def audit(store: Store, ledger_dir: Path | None, *, run: str, run_uuid: str | None = None) -> Audit:
    """Judges a run, live or stopped; safe at any time.

    ``run_uuid`` (from ``run.json``) refuses journals of another run with ``RunMismatch``. Everything that cannot be read makes the
    verdict UNPROVABLE, with the reason; it is never ok.
    """
    reader = LedgerReader(Ledger.of(store, ledger_dir), run_uuid=run_uuid)
    settled = reader.refresh()
    problems: list[str] = []
    view: StoreView | None = None
    try:
        view = list_objects(store)
    except StoreError as e:
        problems.append(f"obj/ cannot be listed: {e}")
    reader.refresh()
    merged = reader.merge()
    merged.problems += problems
    if not merged.journals:
        merged.problems.append(f"there is no journal in {reader.ledger.text}")
    return conclude(run, evidence_of(merged, view, settled))


def evidence_of(merged: RunFold, view: StoreView | None, settled: dict[str, int] | None) -> Evidence:
    """What the predicates see; adds the problems that only journals and listing together show."""
    if view is not None:
        unknown = sorted(set(view.present) - set(merged.journals))
        merged.problems += [f"obj/{inc} has objects, but the journal of {inc} is missing" for inc in unknown]
    merged.problems += _without_consumer(merged, view)
    ended = all(merged.ended(inc) and _was_read(fold, settled) for inc, fold in merged.journals.items())
    return Evidence(
        run=merged,
        store=view,
        settled=None if ended else settled,
        complete=not merged.problems,
        final=ended and _is_final(merged),
    )


def _was_read(fold: JournalFold, settled: dict[str, int] | None) -> bool:
    """Whether the listing is younger than the journal's last record. A run that ended while it was listed is still judged as a live one."""
    return settled is None or fold.last < settled.get(fold.inc, 0)


def _is_final(merged: RunFold) -> bool:
    """A recovery with resume_step = infinity closed and saw every incarnation that there is."""
    count = len(merged.journals)
    closes = [fold.close for fold in merged.journals.values() if fold.role == "rec" and fold.close is not None]
    return any(c.counters.get("final") == 1 and c.counters.get("incarnations") == count for c in closes)


def _without_consumer(merged: RunFold, view: StoreView | None) -> list[str]:
    """Arrays of a shipped step that are gone although no trainer took the step: a trainer's journal must be missing."""
    if view is None:
        return []
    out = []
    for key, found in merged.ships.items():
        if key in merged.step_takers:
            continue
        for inc, seqs in found[0][1].ids.items():
            drops, present = merged.drops.get(inc, {}), view.present.get(inc, set())
            if any(seq not in drops and seq not in present for seq in seqs):
                out.append(f"step {key[0]} was shipped and its arrays are gone, but no trainer took it: is a trainer's journal missing?")
                break
    return out
