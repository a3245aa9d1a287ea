"""The union of all journals of a run: who adopted whom, what every step held, every drop and done by id.

Owns the merge, which is free of order (sets only) and of clocks. Refuses to judge; ``fsref.ledger.predicates`` does.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import NamedTuple, TypeVar

from fsref.ledger.fold import Adoption, JournalFold, SeqMap, ShipFact

StepKey = tuple[int, int, int]
"""(step, n, sum): one batch. A step number alone may return after a resume."""
_Fact = TypeVar("_Fact")
Place = tuple[str, int]
"""(journal, offset): evidence."""


class DropFact(NamedTuple):
    """The decision to remove one id."""

    journal: str
    offset: int
    reason: str

    @property
    def place(self) -> Place:
        return self.journal, self.offset


class RunFold:
    """Journals of one run, merged. The folds are cut where their journal was adopted; build it from fresh ones.

    ``problems`` are reasons why the journals may not tell everything (unreadable, missing); each names its journal.
    """

    def __init__(self, journals: Mapping[str, JournalFold], problems: Iterable[str] = ()) -> None:
        self.journals = {inc: journals[inc] for inc in sorted(journals)}
        self.problems = list(problems)
        self.beyond: list[tuple[str, str, int, int]] = []
        """(h, adopter, end, offset beyond it): what was written after an adoption."""
        self._adopters = self._valid_adoptions()
        for h, adoptions in self._adopters.items():
            fold = self.journals.get(h)
            by, adoption = min(adoptions, key=lambda a: (a[1].end, a[0]))
            cut_at = fold.cut(adoption.end) if fold else None
            if cut_at is not None:
                self.beyond.append((h, by, adoption.end, cut_at))

    def _valid_adoptions(self) -> dict[str, list[tuple[str, Adoption]]]:
        """Adoptions that lie before the end of their own journal; a journal whose adopter was adopted earlier is decided first."""
        claims: dict[str, list[tuple[str, Adoption]]] = {}
        for by, fold in self.journals.items():
            for h, adoption in fold.adopts.items():
                claims.setdefault(h, []).append((by, adoption))
        valid: dict[str, list[tuple[str, Adoption]]] = {}
        seen: set[str] = set()
        decided: set[str] = set()
        stack = list(claims)
        while stack:
            h = stack[-1]
            waiting = [by for by, _ in claims[h] if by in claims and by not in seen]
            seen.add(h)
            if h not in decided and waiting:
                stack += waiting  # whether an adoption counts depends on where its own journal ends
                continue
            stack.pop()
            kept = [(by, a) for by, a in claims[h] if by != h and a.offset < _end_of(valid.get(by, ()))]
            if h not in decided and kept:
                valid[h] = kept
            decided.add(h)
        return valid

    def adoption_of(self, inc: str) -> tuple[str, Adoption] | None:
        """Who adopted an incarnation."""
        found = self._adopters.get(inc)
        return found[0] if found else None

    def adopted(self, inc: str) -> bool:
        return inc in self._adopters

    def ended(self, inc: str) -> bool:
        """Closed or adopted: nothing new can come from it."""
        fold = self.journals.get(inc)
        return self.adopted(inc) or (fold is not None and fold.sealed)

    def whole(self, inc: str) -> bool:
        """Whether every keep of a producer is in its journal: it closed, or was adopted on the boot on which it wrote, with its count.

        A worker syncs its journal before it removes, not at each keep; so after a power loss an object may have been taken, and even
        removed, whose keep is gone. What happened to it is still settled by the others' journals and the listing.
        """
        fold = self.journals.get(inc)
        if fold is None or fold.open is None or fold.sealed:
            return fold is not None and fold.sealed
        found = self.adoption_of(inc)
        heir = self.journals[found[0]].open if found and found[1].n is not None else None
        return heir is not None and (heir.host, heir.boot_id) == (fold.open.host, fold.open.boot_id)

    @cached_property
    def closures(self) -> dict[str, dict[str, int]]:
        """Adopter to every incarnation whose rights it got, to the offset (in the adopter's journal) at which it got them."""
        out: dict[str, dict[str, int]] = {}
        for inc, fold in self.journals.items():
            if not fold.adopts:
                continue
            got: dict[str, int] = {}
            for h, adoption in sorted(fold.adopts.items(), key=lambda item: item[1].offset):
                self._inherit(h, adoption.offset, got)
            got.pop(inc, None)
            out[inc] = got
        return out

    def _inherit(self, h: str, offset: int, got: dict[str, int]) -> None:
        stack = [h]
        while stack:
            at = stack.pop()
            if at in got:
                continue
            got[at] = offset
            fold = self.journals.get(at)
            if fold is not None:
                stack += fold.adopts

    @cached_property
    def ships(self) -> dict[StepKey, list[tuple[str, ShipFact]]]:
        """Every shipped batch with the orchestrators that shipped it (one, in a correct run)."""
        out: dict[StepKey, list[tuple[str, ShipFact]]] = {}
        for inc, fold in self.journals.items():
            for ship in fold.ships.values():
                out.setdefault((ship.step, ship.n, ship.checksum), []).append((inc, ship))
        return out

    @cached_property
    def step_takers(self) -> dict[StepKey, list[Place]]:
        """Every batch that a trainer took, with all takes of it."""
        out: dict[StepKey, list[Place]] = {}
        for inc, fold in self.journals.items():
            for step, facts in fold.steps.items():
                for fact in facts:
                    out.setdefault((step, fact.n, fact.checksum), []).append((inc, fact.offset))
        return out

    @cached_property
    def batch_of(self) -> dict[str, dict[int, StepKey]]:
        """Producer to seq to the batch in which it was shipped."""
        out: dict[str, dict[int, StepKey]] = {}
        for key, found in self.ships.items():
            for inc, seqs in found[0][1].ids.items():
                out.setdefault(inc, {}).update(dict.fromkeys(seqs, key))
        return out

    def batches_before(self, journal: str, lo: int, hi: int, offset: int) -> list[StepKey]:
        """The batches of steps ``lo..hi`` that a trainer itself took before ``offset``: what its drop or done of the range covers."""
        steps = self.journals[journal].steps
        inside = range(lo, hi + 1) if hi - lo < len(steps) else [s for s in steps if lo <= s <= hi]
        found = {(s, f.n, f.checksum): None for s in inside for f in steps.get(s, ()) if f.offset < offset}
        return list(found)

    @cached_property
    def _drops(self) -> tuple[dict[str, dict[int, DropFact]], list[tuple[str, DropFact, DropFact]]]:
        first: dict[str, dict[int, DropFact]] = {}
        double: list[tuple[str, DropFact, DropFact]] = []
        for journal, fold in self.journals.items():
            facts: dict[tuple[int, str], DropFact] = {}  # one for all ids of a record
            for inc, drops in fold.drops.items():
                for fact in drops.values():
                    if fact not in facts:
                        facts[fact] = DropFact(journal, *fact)
                _put(first, double, inc, {seq: facts[fact] for seq, fact in drops.items()})
            for inc, by_seq in self._expand_step_drops(journal, fold):
                _put(first, double, inc, by_seq)
        return first, double

    def _expand_step_drops(self, journal: str, fold: JournalFold) -> Iterator[tuple[str, dict[int, DropFact]]]:
        for drop in fold.step_drops:
            trained = DropFact(journal, drop.offset, drop.reason)
            failed = trained._replace(reason="fetch_failed")
            for key in self.batches_before(journal, drop.lo, drop.hi, drop.offset):
                missed = self.missed.get(key[0], {})
                for inc, seqs in self._ids_of(key):
                    by_seq = dict.fromkeys(seqs, trained)
                    by_seq.update((seq, failed) for seq in missed.get(inc, ()) if seq in by_seq)
                    yield inc, by_seq

    @cached_property
    def missed(self) -> dict[int, SeqMap]:
        """Step to the ids that no rank could fetch, to their class."""
        out: dict[int, SeqMap] = {}
        for fold in self.journals.values():
            for step, by_producer in fold.missed.items():
                for inc, seqs in by_producer.items():
                    out.setdefault(step, {}).setdefault(inc, {}).update(seqs)
        return out

    def _ids_of(self, key: StepKey) -> Iterable[tuple[str, list[int]]]:
        found = self.ships.get(key)
        return found[0][1].ids.items() if found else ()

    @property
    def drops(self) -> dict[str, dict[int, DropFact]]:
        """Producer to seq to the first drop of it (in order of journal names)."""
        return self._drops[0]

    def released(self) -> dict[StepKey, str]:
        """Batches of which something was dropped, with who did it: they cannot be trained again."""
        out: dict[StepKey, str] = {}
        for journal, fold in self.journals.items():
            for drop in fold.step_drops:
                for key in self.batches_before(journal, drop.lo, drop.hi, drop.offset):
                    out[key] = committed(drop.lo, drop.hi, by=journal)
        for inc, seqs in self.batch_of.items():
            drops = self.drops.get(inc, {})
            for seq, key in seqs.items():
                if key not in out and (drop_fact := drops.get(seq)) is not None:
                    out[key] = f"{drop_fact.journal} ({drop_fact.reason})"
        return out

    @property
    def double_drops(self) -> list[tuple[str, DropFact, DropFact]]:
        """(id, one drop, another drop): a correct run has none."""
        return self._drops[1]

    @cached_property
    def done(self) -> dict[str, dict[int, tuple[str, int, int]]]:
        """Producer to seq to (journal, offset, attempt) of its removal."""
        out: dict[str, dict[int, tuple[str, int, int]]] = {}
        for journal, fold in self.journals.items():
            facts: dict[tuple[int, int], tuple[str, int, int]] = {}
            for inc, seqs in fold.done.items():
                for fact in seqs.values():
                    if fact not in facts:
                        facts[fact] = (journal, *fact)
                _add_new(out.setdefault(inc, {}), {seq: facts[fact] for seq, fact in seqs.items()})
            for done in fold.step_done:
                place = (journal, done.offset, done.attempt)
                for key in self.batches_before(journal, done.lo, done.hi, done.offset):
                    for inc, numbers in self._ids_of(key):
                        _add_new(out.setdefault(inc, {}), dict.fromkeys(numbers, place))
        return out

    @cached_property
    def producers(self) -> list[str]:
        return [inc for inc, fold in self.journals.items() if fold.role == "env"]

    @cached_property
    def extra(self) -> dict[str, set[int]]:
        """Objects without a keep that an adopter found, by producer."""
        return self._from_adopts("extra")

    @cached_property
    def void(self) -> dict[str, set[int]]:
        """Sequence numbers that never held an object, as far as adopters say."""
        return self._from_adopts("void")

    @cached_property
    def lost(self) -> dict[str, set[int]]:
        """Kept, absent and never dropped, as an adopter found."""
        return self._from_adopts("lost")

    def _from_adopts(self, name: str) -> dict[str, set[int]]:
        out: dict[str, set[int]] = {}
        for h, adoptions in self._adopters.items():
            for _, adoption in adoptions:
                seqs: set[int] = getattr(adoption, name)
                if seqs:
                    out.setdefault(h, set()).update(seqs)
        return out

    def live(self) -> Iterator[tuple[str, int, int]]:
        """(producer, seq, bytes) of everything kept (or found extra) and not dropped."""
        for inc in self.producers:
            drops = self.drops.get(inc, {})
            kept = self.journals[inc].kept
            if kept.keys() <= drops.keys() and inc not in self.extra:
                continue
            yield from ((inc, seq, size) for seq, (size, _) in kept.items() if seq not in drops)
            yield from ((inc, seq, 0) for seq in self.extra.get(inc, ()) if seq not in drops and seq not in kept)

    def pending(self) -> Iterator[tuple[str, int]]:
        """(producer, seq) of everything dropped and not known to be gone."""
        for inc, drops in self.drops.items():
            done = self.done.get(inc, {})
            if not drops.keys() <= done.keys():
                yield from ((inc, seq) for seq in drops if seq not in done)

    def missing_journals(self) -> list[str]:
        """Incarnations that the journals name but that have no journal."""
        named: set[str] = set()
        for fold in self.journals.values():
            for facts in (fold.taken, fold.shipped, fold.drops, fold.done, fold.adopts):
                named.update(facts)
        return sorted(named - set(self.journals))


def committed(lo: int, hi: int, *, by: str) -> str:
    """Who removed the arrays of a step, and the checkpoint from which it is not needed."""
    return f"the commit of steps {lo}..{hi} by {by}; checkpoint step_{hi + 1:06d} covers them"


def _end_of(adoptions: Iterable[tuple[str, Adoption]]) -> float:
    return min((a.end for _, a in adoptions), default=math.inf)


def _put(first: dict[str, dict[int, DropFact]], double: list[tuple[str, DropFact, DropFact]], inc: str, facts: dict[int, DropFact]) -> None:
    into = first.setdefault(inc, {})
    known = into.keys() & facts.keys()
    double += [(f"{inc}/{seq}", into[seq], facts[seq]) for seq in sorted(known) if into[seq].place != facts[seq].place]
    _add_new(into, facts)


def _add_new(into: dict[int, _Fact], facts: dict[int, _Fact]) -> None:
    """The facts of numbers that have none yet."""
    if into.keys().isdisjoint(facts):
        into.update(facts)
    else:
        into.update((seq, fact) for seq, fact in facts.items() if seq not in into)
