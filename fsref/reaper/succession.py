"""A new orchestrator after one that ended without settling everything: what it inherits, while env servers and trainer live on.

Owns the order: everyone before it proved ended, fences, journals made durable and read to their end, ``adopt`` records, then the
decisions about what is left. Refuses to start beside an orchestrator or a recovery that may be alive (``RunBusy``), and after a recovery
that died half way.

What an orchestrator leaves, and what becomes of it:

- dropped and not removed: removed again (``redo``);
- taken, neither dropped nor shipped: ``recovered``;
- shipped, and the step file never became visible: ``recovered``, because no trainer will ever ask for it;
- shipped, and visible (or taken by a trainer): the step's. It is left alone;
- a dead replica that it had adopted, with orphans not dropped yet: ``orphan``, or ``unjournaled`` where it had no keep.
"""

from collections.abc import Callable
from dataclasses import dataclass

from fsref.errors import LedgerError, ObjectMissing, RunBusy
from fsref.failpoints import failpoint
from fsref.journal.death import how_ended
from fsref.journal.file import Journal, now_ms
from fsref.journal.place import Ledger
from fsref.journal.read import LedgerReader
from fsref.journal.secure import sync_ended, sync_journal
from fsref.ledger.merge import StepKey
from fsref.ledger.recovery import adopt_records, plan_succession
from fsref.reaper.adopt import fence
from fsref.steps import read_info
from fsref.store.base import Store

ROLES = ("orc", "rec")
"""Who may own the run besides an orchestrator that starts. Closed recoveries are left to the trainer, which holds what they parked."""


@dataclass(frozen=True)
class Inheritance:
    """What the orchestrators before this one left."""

    ended: frozenset[str] = frozenset()
    """Orchestrators that have ended, adopted by whomever: a fence that one of them put up is no obstacle."""
    adopted: tuple[str, ...] = ()
    """Those that this one adopted."""
    replicas: frozenset[str] = frozenset()
    """Env incarnations that these had adopted: replies of them are refused."""
    settled: frozenset[str] = frozenset()
    """Env incarnations that anybody adopted."""
    redo: tuple[str, ...] = ()
    recovered: tuple[str, ...] = ()
    orphans: tuple[str, ...] = ()
    unjournaled: tuple[str, ...] = ()


def succeed(ledger: Ledger, journal: Journal, *, run_uuid: str, visible: Callable[[StepKey], bool]) -> Inheritance:
    """Adopts every orchestrator that ended and nobody adopted, by records in ``journal``; drops nothing itself.

    ``visible`` says whether the step file of a shipped batch can be read. Raises ``RunBusy``, ``LedgerError``,
    ``Fenced``, ``StoreError``: nothing was decided then.
    """
    reader = LedgerReader(ledger, run_uuid=run_uuid, compare=False)
    reader.refresh_all()
    before = {i: j for i, j in reader.journals.items() if i != journal.inc and j.fold.role in ROLES}
    hows = {inc: how_ended(ledger, j) for inc, j in before.items()}
    sync_ended(ledger, (j for inc, j in before.items() if hows[inc] is not None))
    ends = reader.refresh_all()  # again: one that was alive at the first look may have written before it ended
    damaged = {inc: j.problem for inc, j in before.items() if j.problem}
    merged = reader.merge()
    left = [inc for inc in before if not merged.adopted(inc)]
    if alive := [inc for inc in left if hows[inc] is None]:
        raise RunBusy(f"{', '.join(alive)} may be alive: one orchestrator at a time owns the run; stop it, or use another run id")
    if halfway := [inc for inc in left if inc.startswith("rec.") and hows[inc] != "closed"]:
        raise LedgerError(f"{', '.join(halfway)} died in the middle of a recovery: run `fsref recover` on this run again first")
    ended = frozenset(inc for inc in before if inc.startswith("orc."))
    left = [inc for inc in left if inc in ended]
    if bad := [damaged[inc] for inc in left if inc in damaged]:
        raise LedgerError(f"the orchestrator before cannot be adopted: {'; '.join(bad)}: see `fsref recover --accept-corrupt`")
    settled = frozenset(inc for inc in merged.producers if merged.adopted(inc))
    if not left:
        return Inheritance(ended=ended, settled=settled)
    for inc in left:  # they have ended: what was read of them above is all that there is
        fence(ledger, inc, by=journal.inc, ended=ended)
        failpoint("succession.after_fence")
        sync_journal(ledger, before[inc])
    for inc in left:
        for record in adopt_records(inc, how=str(hows[inc]), end=ends[inc], settlement=None, ms=now_ms()):
            journal.append(record)
    failpoint("succession.after_append")
    found = plan_succession(merged, left, visible=visible)
    return Inheritance(
        ended=ended,
        adopted=tuple(left),
        replicas=found.replicas,
        settled=settled,
        redo=found.redo,
        recovered=found.recovered,
        orphans=found.orphans,
        unjournaled=found.unjournaled,
    )


def is_published(store: Store, key: StepKey) -> bool:
    """Whether the step file of a batch can be read by its trainer."""
    try:
        info = read_info(store, key[0])
    except ObjectMissing:
        return False
    return (info.step, info.n, info.sum) == key
