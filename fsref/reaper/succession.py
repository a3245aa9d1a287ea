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

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from fsref.errors import LedgerError, ObjectMissing, RunBusy
from fsref.failpoints import failpoint
from fsref.journal.death import how_ended
from fsref.journal.file import Journal, now_ms, sync_journal
from fsref.journal.place import Ledger
from fsref.journal.read import LedgerReader
from fsref.ledger.merge import RunFold, StepKey
from fsref.ledger.recovery import adopt_records
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
    reader = LedgerReader(ledger, run_uuid=run_uuid)
    reader.refresh_all()
    before = {i: j for i, j in reader.journals.items() if i != journal.inc and j.fold.role in ROLES}
    hows = {inc: how_ended(ledger, j) for inc, j in before.items()}
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
        sync_journal(ledger, inc)
    for inc in left:
        for record in adopt_records(inc, how=str(hows[inc]), end=ends[inc], settlement=None, ms=now_ms()):
            journal.append(record)
    failpoint("succession.after_append")
    mine = set(left).union(*(merged.closures.get(inc, ()) for inc in left))
    replicas = frozenset(inc for inc in mine if inc.startswith("env."))
    return Inheritance(
        ended=ended,
        adopted=tuple(left),
        replicas=replicas,
        settled=settled,
        redo=tuple(f"{inc}/{seq}" for inc, seq in merged.pending() if merged.drops[inc][seq].journal in mine),
        recovered=tuple(_unshipped(merged, mine, visible)),
        orphans=tuple(_nobodys(merged, replicas, kept=True)),
        unjournaled=tuple(_nobodys(merged, replicas, kept=False)),
    )


def is_published(store: Store, key: StepKey) -> bool:
    """Whether the step file of a batch can be read by its trainer."""
    try:
        info = read_info(store, key[0])
    except ObjectMissing:
        return False
    return (info.step, info.n, info.sum) == key


def _unshipped(merged: RunFold, mine: Collection[str], visible: Callable[[StepKey], bool]) -> Iterator[str]:
    gone: dict[StepKey, bool] = {}
    for inc, seqs in _taken(merged, [h for h in mine if h.startswith("orc.")]):
        drops, batches = merged.drops.get(inc, {}), merged.batch_of.get(inc, {})
        for seq in seqs:
            if seq in drops:
                continue
            key = batches.get(seq)
            if key is not None and key not in gone:
                gone[key] = key not in merged.step_takers and not visible(key)
            if key is None or gone[key]:
                yield f"{inc}/{seq}"


def _nobodys(merged: RunFold, replicas: Collection[str], *, kept: bool) -> Iterator[str]:
    """Of dead replicas whose adopter died before it had dropped them all: what has a keep, or what was found without one."""
    taken: dict[str, set[int]] = {}
    for inc, seqs in _taken(merged, [j for j in merged.journals if j.startswith(("orc.", "evl."))]):
        taken.setdefault(inc, set()).update(seqs)
    for inc in sorted(replicas):
        fold, drops = merged.journals[inc], merged.drops.get(inc, {})
        spoken_for, lost = taken.get(inc, set()), merged.lost.get(inc, set())
        for seq in sorted(fold.kept if kept else merged.extra.get(inc, set()).difference(fold.kept)):
            if seq not in drops and seq not in spoken_for and seq not in lost:
                yield f"{inc}/{seq}"


def _taken(merged: RunFold, consumers: Collection[str]) -> Iterator[tuple[str, list[int]]]:
    for consumer in sorted(consumers):
        for inc, seqs in merged.journals[consumer].taken.items():
            yield inc, sorted(seqs)
