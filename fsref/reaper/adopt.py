"""Adoption by a live orchestrator: the rest of an env incarnation that died or closed (ledger.md section 7, adopt).

Owns the order: proof of death, fence, journal, complete listing, record, drops. Refuses an incarnation that may be alive.
"""

from collections.abc import Container
from dataclasses import dataclass

from fsref.errors import Fenced, LedgerError
from fsref.failpoints import failpoint
from fsref.journal.death import How, how_ended
from fsref.journal.markers import read_adopted, write_adopted
from fsref.journal.place import Ledger
from fsref.journal.read import LedgerReader, OpenJournal
from fsref.journal.secure import sync_journal
from fsref.ledger.predicates import StoreView
from fsref.reaper.listing import list_objects
from fsref.refs import check_incarnation
from fsref.store.base import Store


@dataclass(frozen=True)
class Remains:
    """What was found of an incarnation behind its fence."""

    journal: OpenJournal
    how: How
    view: StoreView
    partial: bool = False
    """Its node took the end of its journal along: the listing settles what its records would have said."""


@dataclass(frozen=True)
class Adopted:
    """What an adoption settled."""

    inc: str
    how: How
    orphans: int
    """Objects that were kept and nobody took, now dropped."""
    unjournaled: int
    """Objects without a keep, now dropped."""
    redone: int
    """Objects that it had dropped and not yet removed."""
    lost: int
    """Objects that are gone without a drop: the audit will say so."""
    staging: int
    """Staging files that were removed."""


def fence(ledger: Ledger, h: str, *, by: str, ended: Container[str]) -> None:
    """Fences ``h`` for ``by``. A fence that one of ``ended`` put up before it died, without its record, comes with the rights of that one.

    Raises ``Fenced`` if the fence belongs to anybody else.
    """
    owner = read_adopted(ledger, h)
    if owner is None:
        write_adopted(ledger, h, by=by)
    elif owner != by and owner not in ended:
        raise Fenced(f"{h} was adopted by {owner}, which is not known to have ended")


def fence_and_read(
    store: Store, ledger: Ledger, inc: str, *, by: str, run_uuid: str, ended: Container[str] = (), force: bool = False
) -> Remains:
    """Proves the end of an env incarnation, fences it, reads its journal and lists its objects completely.

    ``ended``: orchestrators before this one, whose fences without a record are its own now. Raises ``LedgerError`` if it may be alive,
    ``Fenced`` if another adopted it, ``JournalCorrupt``, ``StoreError`` if the listing is not complete (then nothing is decided; call
    again).
    """
    check_incarnation(inc)
    if not inc.startswith("env."):
        raise LedgerError(f"{inc} is no env incarnation: only `fsref recover`, with the run stopped, adopts the others")
    reader = LedgerReader(ledger, run_uuid=run_uuid, compare=False)
    journal = reader.read_one(inc)
    if journal is None or reader.problems:
        raise LedgerError(f"{inc} cannot be adopted: {'; '.join(reader.problems) or f'it has no journal in {ledger.text}'}")
    how = how_ended(ledger, journal, forced=(inc,) if force else ())
    if how is None:
        raise LedgerError(f"{inc} cannot be adopted: it may be alive (no close, no .dead marker, its lock is held); reap its process first")
    fence(ledger, inc, by=by, ended=ended)
    failpoint("adopt.after_fence")
    reader.read_one(inc)
    sync_journal(ledger, journal)
    reader.read_one(inc)
    if journal.problem:
        raise LedgerError(f"{inc} cannot be adopted: {journal.problem}")
    view = list_objects(store, f"obj/{inc}")
    failpoint("adopt.after_list")
    return Remains(journal, how, view, partial=journal.partial(ledger))
