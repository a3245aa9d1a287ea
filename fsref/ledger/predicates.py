"""The invariants I1 to I11 of ledger.md section 7 as checkable predicates over a merged run and a listing of its store.

Owns the judgement of single facts; every violation names an id, a predicate and its evidence. Refuses to judge by what is not there
while journals are missing or still being written: see ``Evidence.complete`` and ``Evidence.settled``.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from fsref.ledger.fold import JournalFold
from fsref.ledger.ids import sum_of
from fsref.ledger.merge import DropFact, Place, RunFold

_STAGED: Final = re.compile(r"[0-9]{10}\.tmp", re.ASCII)


@dataclass(frozen=True)
class StoreView:
    """What a complete listing of ``obj/`` showed."""

    present: dict[str, set[int]] = field(default_factory=dict)
    """Producer to the seqs that are there."""
    staging: tuple[str, ...] = ()
    """Names of staging files."""
    foreign: tuple[str, ...] = ()
    """Names that no fsref process gives."""

    def staged(self, inc: str) -> list[int]:
        """The numbers of a producer whose write was cut off: their staging files are there."""
        names = (name.removeprefix(f"obj/{inc}/.") for name in self.staging if name.startswith(f"obj/{inc}/."))
        return [int(name[:10]) for name in names if _STAGED.fullmatch(name)]


@dataclass(frozen=True)
class Violation:
    """One broken rule with its evidence."""

    predicate: str
    """``I1`` .. ``I11``."""
    subject: str
    """An object id, an incarnation, a step or a name."""
    detail: str
    places: tuple[Place, ...] = ()


@dataclass(frozen=True)
class Evidence:
    """What the predicates see."""

    run: RunFold
    store: StoreView | None = None
    """None: not listed, so nothing that needs the store is judged."""
    settled: Mapping[str, int] | None = None
    """Journal to the offset up to which it was read before the listing; None: the run stands still, everything is settled."""
    complete: bool = True
    """No journal is missing or damaged: absence of a record proves something."""
    final: bool = False
    """The run's close has finished."""

    def old(self, journal: str, offset: int) -> bool:
        """Whether a fact was there before the listing, so that its causes and effects must be visible by now."""
        return self.settled is None or offset < self.settled.get(journal, 0)


def i1_keeps(e: Evidence) -> Iterator[Violation]:
    """keep(id) at most once, by its own producer; {0..n-1} = keep + extra + void. (Several threads keep, so seqs need not ascend.)"""
    yield from _repeats(e, "I1", "kept twice")
    for inc in e.run.producers:
        fold = e.run.journals[inc]
        found = e.run.adoption_of(inc)
        n = found[1].n if found else fold.close.n if fold.close else None
        if n is None or not e.complete:
            continue
        void = e.run.void.get(inc, set()) if found else fold.void
        named = set(fold.kept) | e.run.extra.get(inc, set()) | void
        if len(named) != n or (named and max(named) != n - 1):
            holes = [s for s in range(min(n, len(named) + 1)) if s not in named]
            odd = (sorted(s for s in named if s >= n) + holes)[:5]
            yield Violation(
                "I1", inc, f"{n} sequence numbers, but keep, extra and void do not make up 0..{n - 1}: {odd}", ((inc, fold.last),)
            )


def i2_one_drop(e: Evidence) -> Iterator[Violation]:
    """At most one drop per id over all journals."""
    yield from _repeats(e, "I2", "dropped twice by one holder")
    for object_id, a, b in e.run.double_drops:
        yield Violation("I2", object_id, f"dropped twice ({a.reason}, {b.reason})", (a.place, b.place))


def i3_holder(e: Evidence) -> Iterator[Violation]:
    """The writer of a drop held the right at that position (rules 1 to 4)."""
    by_steps = {j for j, fold in e.run.journals.items() if fold.role == "trn" and not fold.drops}  # the ranges are judged below
    for inc, drops in e.run.drops.items():
        for seq, drop in drops.items():
            if drop.journal not in by_steps and not _held(e, inc, seq, drop):
                yield Violation("I3", f"{inc}/{seq}", f"dropped ({drop.reason}) by {drop.journal}, which did not hold it", (drop.place,))
    for journal, fold in e.run.journals.items():
        for drop_range in fold.step_drops:
            taken = {key[0] for key in e.run.batches_before(journal, drop_range.lo, drop_range.hi, drop_range.offset)}
            if len(taken) != drop_range.hi - drop_range.lo + 1:
                subject = f"steps {drop_range.lo}..{drop_range.hi}"
                yield Violation("I3", subject, f"dropped by {journal}, which took {len(taken)} of them", ((journal, drop_range.offset),))


def _held(e: Evidence, inc: str, seq: int, drop: DropFact) -> bool:
    writer = e.run.journals[drop.journal]
    own = writer.drops.get(inc, {}).get(seq)
    if own is None or own[0] != drop.offset:
        return writer.role == "trn"  # a drop by steps; the range itself is judged by its takes
    before = drop.offset
    if writer.role == "env" and inc == writer.inc:
        kept = writer.kept.get(seq)
        return kept is not None and kept[1] < before and not _consumers(e, inc, seq)
    taken = writer.taken.get(inc, {}).get(seq)
    if taken is not None and taken < before:
        shipped = writer.shipped.get(inc, {}).get(seq)
        if shipped is None or shipped[1] > before:
            return True
    got = e.run.closures.get(writer.inc, {})
    return all(h in got and got[h] < before for h in _holders(e, inc, seq))


def _consumers(e: Evidence, inc: str, seq: int) -> list[str]:
    return [c for c, fold in e.run.journals.items() if inc in fold.taken and seq in fold.taken[inc]]


def _holders(e: Evidence, inc: str, seq: int) -> list[str]:
    """Who holds an id by the furthest hand-over that is recorded: trainers that took its step, else consumers, else its producer."""
    batch = e.run.batch_of.get(inc, {}).get(seq)
    if batch is not None:
        takers = [journal for journal, _ in e.run.step_takers.get(batch, ())]
        if takers:
            return takers
    return _consumers(e, inc, seq) or [inc]


def i4_done(e: Evidence) -> Iterator[Violation]:
    """Every done is preceded, in that journal, by its drop or by the adoption of a journal that contains it."""
    for journal, fold in e.run.journals.items():
        got = e.run.closures.get(journal, {})
        for inc, seqs in fold.done.items():
            own = fold.drops.get(inc, {})
            for seq, (offset, _) in seqs.items():
                if seq in own and own[seq][0] < offset:
                    continue
                drop = e.run.drops.get(inc, {}).get(seq)
                adopted = drop is not None and got.get(drop.journal, offset) < offset
                own_step = drop is not None and drop.journal == journal and fold.role == "trn" and drop.offset < offset
                if not adopted and not own_step:
                    yield Violation("I4", f"{inc}/{seq}", f"done by {journal} without a drop before it", ((journal, offset),))
        for done in fold.step_done:
            if not _covers([(d.lo, d.hi) for d in fold.step_drops if d.offset < done.offset], done.lo, done.hi):
                yield Violation(
                    "I4", f"steps {done.lo}..{done.hi}", f"done by {journal} without a drop before it", ((journal, done.offset),)
                )


def _covers(ranges: list[tuple[int, int]], lo: int, hi: int) -> bool:
    """Whether ``lo..hi`` lies in the union of ranges, all with both ends included; steps are never counted out one by one."""
    reached = lo - 1
    for a, b in sorted(ranges):
        if a <= reached + 1:
            reached = max(reached, b)
    return reached >= hi


def i5_no_take_after_drop(e: Evidence) -> Iterator[Violation]:
    """No step:taken of an id after its drop."""
    for key, takes in e.run.step_takers.items():
        found = e.run.ships.get(key)
        if not found:
            continue
        ids = found[0][1].ids.items()
        drops = {id(d): d for inc, seqs in ids if (of := e.run.drops.get(inc)) for d in map(of.get, seqs) if d}
        for taker, offset in takes:
            for drop in drops.values():
                late = drop.offset < offset if drop.journal == taker else taker not in e.run.closures.get(drop.journal, {})
                if late and e.old(*drop.place):
                    yield Violation(
                        "I5", f"step {key[0]}", f"taken by {taker} after {drop.journal} dropped it", ((taker, offset), drop.place)
                    )


def i6_take_needs_keep(e: Evidence) -> Iterator[Violation]:
    """take(id) implies keep(id), where the producer's journal is known to be whole."""
    for journal, fold in e.run.journals.items():
        for inc, seqs in fold.taken.items():
            producer = e.run.journals.get(inc)
            if producer is None or not e.run.whole(inc):
                continue
            extra = e.run.extra.get(inc, ())
            for seq in sorted(seqs.keys() - producer.kept.keys()):
                if seq not in extra and e.old(journal, seqs[seq]):
                    yield Violation("I6", f"{inc}/{seq}", f"taken by {journal}, but never kept", ((journal, seqs[seq]),))


def i7_ship(e: Evidence) -> Iterator[Violation]:
    """ship(id) implies taken by the same orchestrator; one step per id; the counts of ship and of step agree."""
    yield from _repeats(e, "I7", "shipped twice")
    for key, found in e.run.ships.items():
        for journal, ship in found:
            place = (journal, ship.offset)
            ids = [f"{inc}/{seq}" for inc, seqs in ship.ids.items() for seq in seqs]
            if len(ids) != ship.n or sum_of(ids) != ship.checksum:
                yield Violation("I7", f"step {key[0]}", f"ship says n = {ship.n}, its ids are {len(ids)} or of another sum", (place,))
            for inc, seqs in ship.ids.items():
                taken = e.run.journals[journal].taken.get(inc, {})
                for seq in [s for s in seqs if taken.get(s, math.inf) > ship.offset]:
                    yield Violation("I7", f"{inc}/{seq}", f"shipped in step {key[0]} by {journal}, which had not taken it", (place,))
    yield from _shipped_by_two(e)
    yield from _used_not_taken(e)
    for key, takes in e.run.step_takers.items():
        if key not in e.run.ships and e.complete:
            for taker, offset in takes:
                if e.old(taker, offset):
                    detail = f"taken with n, sum = {key[1]}, {key[2]}, which no orchestrator shipped"
                    yield Violation("I7", f"step {key[0]}", detail, ((taker, offset),))


def _shipped_by_two(e: Evidence) -> Iterator[Violation]:
    shippers = {j: fold.shipped for j, fold in e.run.journals.items() if fold.shipped}
    for (a, first), (b, second) in itertools.combinations(shippers.items(), 2):
        for inc in first.keys() & second.keys():
            for seq in sorted(first[inc].keys() & second[inc].keys()):
                places = ((a, int(first[inc][seq][1])), (b, int(second[inc][seq][1])))
                yield Violation("I7", f"{inc}/{seq}", "shipped by two orchestrators", places)


def _used_not_taken(e: Evidence) -> Iterator[Violation]:
    for journal, fold in e.run.journals.items():
        for step, facts in fold.used.items():
            for fact in facts:
                if not any((t.n, t.checksum) == (fact.n, fact.checksum) and t.offset < fact.offset for t in fold.steps.get(step, ())):
                    yield Violation("I7", f"step {step}", f"used by {journal}, which had not taken this batch", ((journal, fact.offset),))


def i8_fence(e: Evidence) -> Iterator[Violation]:
    """Nothing is written by h beyond adopt(h).end."""
    yield from _repeats(e, "I8", "adopted twice")
    for h, by, end, offset in e.run.beyond:
        yield Violation("I8", h, f"written after {by} adopted it at {end} bytes", ((h, offset),))


def i9_balance(e: Evidence) -> Iterator[Violation]:
    """kept = dropped + live, per producer, with the totals that each incarnation counted itself."""
    for inc, drops in e.run.drops.items():
        fold = e.run.journals.get(inc)
        if fold is None:
            continue
        extra, whole = e.run.extra.get(inc, ()), e.run.whole(inc)
        for seq in sorted(drops.keys() - fold.kept.keys() - set(extra)):
            drop = drops[seq]
            if e.old(*drop.place) and (whole or not _consumers(e, inc, seq)):
                yield Violation("I9", f"{inc}/{seq}", f"dropped ({drop.reason}), but never kept and never found", (drop.place,))
    for inc, fold in e.run.journals.items():
        for name, found in _own_totals(fold).items() if fold.close else ():
            said = fold.close.counters.get(name, 0) if fold.close else 0
            if said != found:
                yield Violation("I9", inc, f"its close counts {name} = {said}, its journal has {found}", ((inc, fold.last),))


def _own_totals(fold: JournalFold) -> dict[str, int]:
    dropped = sum(map(len, fold.drops.values()))
    if fold.role == "env":
        return {"kept": len(fold.kept), "kept_bytes": fold.kept_bytes, "dropped": dropped}
    if fold.role in ("orc", "evl"):
        ships = fold.ships.values()
        return {
            "taken": sum(map(len, fold.taken.values())),
            "dropped": dropped,
            "shipped": sum(s.n for s in ships),
            "shipped_bytes": sum(s.byte_count for s in ships),
        }
    if fold.role == "trn":
        return {"steps_taken": len(fold.steps), "steps_dropped": sum(d.hi - d.lo + 1 for d in fold.step_drops)}
    return {"dropped": dropped}


def i10_store(e: Evidence) -> Iterator[Violation]:
    """done and present: violation; kept, not dropped and absent: lost; present and unknown: unexpected."""
    yield from (Violation("I10", f"{inc}/{seq}", "lost: absent when it was adopted") for inc, s in e.run.lost.items() for seq in sorted(s))
    for journal, fold in e.run.journals.items():
        for inc, absent in fold.absent.items():
            for seq, offset in absent.items():
                yield Violation("I10", f"{inc}/{seq}", "lost: absent at the first attempt to remove it", ((journal, offset),))
    if e.store is None:
        return
    yield from _done_but_present(e, e.store)
    if e.complete:
        yield from _lost(e, e.store)
        yield from _unexpected(e, e.store)


def _done_but_present(e: Evidence, store: StoreView) -> Iterator[Violation]:
    for inc, seqs in store.present.items():
        done = e.run.done.get(inc, {})
        for seq in sorted(seqs & done.keys()):
            journal, offset, _ = done[seq]
            if e.old(journal, offset):
                yield Violation("I10", f"{inc}/{seq}", "present although it was removed", ((journal, offset),))


def _lost(e: Evidence, store: StoreView) -> Iterator[Violation]:
    for inc in e.run.producers:
        present, drops, known = store.present.get(inc, set()), e.run.drops.get(inc, {}), e.run.lost.get(inc, ())
        kept = e.run.journals[inc].kept
        for seq in sorted(kept.keys() - drops.keys() - present):
            if seq not in known and e.old(inc, kept[seq][1]):
                yield Violation("I10", f"{inc}/{seq}", "lost: kept, absent and never dropped", ((inc, kept[seq][1]),))


def _unexpected(e: Evidence, store: StoreView) -> Iterator[Violation]:
    yield from (Violation("I10", name, "unexpected: no fsref process gives this name") for name in store.foreign)
    for inc, seqs in store.present.items():
        fold = e.run.journals.get(inc)
        if fold is not None and not e.run.ended(inc) and e.settled is not None:
            continue  # it may be publishing: the file comes before the record
        known = (fold.kept if fold else {}).keys() | e.run.extra.get(inc, set())
        for seq in sorted(seqs - known):
            if fold is not None and e.run.ended(inc) and not e.run.adopted(inc) and not e.final:
                continue  # closed and not yet adopted: its adopter will name it extra
            yield Violation("I10", f"{inc}/{seq}", "unexpected: present without a keep")


def i11_closed(e: Evidence) -> Iterator[Violation]:
    """A run whose close has finished: nothing live, every drop done, every incarnation ended, no staging file."""
    if not e.final:
        return
    lost = e.run.lost
    for inc, seq, _ in e.run.live():
        if seq not in lost.get(inc, ()):
            yield Violation("I11", f"{inc}/{seq}", "still live after the run's close")
    for inc, seq in e.run.pending():
        drop = e.run.drops[inc][seq]
        yield Violation("I11", f"{inc}/{seq}", "dropped and never removed, after the run's close", (drop.place,))
    for inc in e.run.journals:
        if not e.run.ended(inc):
            yield Violation("I11", inc, "neither closed nor adopted, after the run's close")
    for name in e.store.staging if e.store else ():
        yield Violation("I11", name, "a staging file is left after the run's close")


def _repeats(e: Evidence, predicate: str, detail: str) -> Iterator[Violation]:
    for inc, fold in e.run.journals.items():
        for which, subject, first, second in fold.repeats:
            if which == predicate:
                yield Violation(predicate, subject, detail, ((inc, first), (inc, second)))


PREDICATES: Final[dict[str, Callable[[Evidence], Iterator[Violation]]]] = {
    "I1": i1_keeps,
    "I2": i2_one_drop,
    "I3": i3_holder,
    "I4": i4_done,
    "I5": i5_no_take_after_drop,
    "I6": i6_take_needs_keep,
    "I7": i7_ship,
    "I8": i8_fence,
    "I9": i9_balance,
    "I10": i10_store,
    "I11": i11_closed,
}


def violations(e: Evidence, *, count_max: float = math.inf) -> list[Violation]:
    """All violations in order of predicates, up to ``count_max``."""
    out: list[Violation] = []
    for predicate in PREDICATES.values():
        for violation in predicate(e):
            out.append(violation)
            if len(out) >= count_max:
                return out
    return out
