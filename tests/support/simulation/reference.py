"""What must have happened, told by somebody who saw everything: objects, decisions, reads. Knows no fold and no predicate.

It is asked at each physical removal (was the decision durable? does anybody still need the object?), at each read, and at the end.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from fsref.ledger.records import Adopt, AnyRecord, Drop, StepRecord
from tests.support.simulation.disk import Disk


@dataclass
class Batch:
    """A step as its published files show it."""

    step: int
    ranks: tuple[tuple[str, ...], ...]
    """By data rank, the ids that it reads; one id may be read by several (padding dummies)."""
    n: int
    checksum: int
    by: str
    used: bool = False
    """Every rank of some trainer has fetched it."""
    doomed: bool = False
    """An operator decided that it will not be trained again."""

    @property
    def ids(self) -> list[str]:
        return list(dict.fromkeys(i for rank in self.ranks for i in rank))

    def owned(self, rank: int) -> list[str]:
        """The ids that this rank's leader removes: each id has one owner."""
        earlier = {i for r in self.ranks[:rank] for i in r}
        return [i for i in dict.fromkeys(self.ranks[rank]) if i not in earlier]


def numbers(text: str) -> Iterator[int]:
    """``0-2,4``: its own parser, so that a mistake in the product's cannot hide itself."""
    for piece in text.split(","):
        a, _, b = piece.partition("-")
        yield from range(int(a), int(b or a) + 1)


def named(ids: Mapping[str, str]) -> Iterator[str]:
    for inc, text in ids.items():
        yield from (f"{inc}/{s}" for s in numbers(text))


@dataclass
class Reference:
    """The reference model of one run."""

    needed: Callable[[str], str]
    """Who needs an object now; empty if nobody does."""
    created: dict[str, str] = field(default_factory=dict)
    """Object to its producer."""
    removed: dict[str, str] = field(default_factory=dict)
    """Object to who removed it first."""
    decisions: dict[str, list[tuple[Disk, int]]] = field(default_factory=dict)
    """Object to every drop that was ever appended for it."""
    strangers: dict[str, bool] = field(default_factory=dict)
    """Objects that somebody outside removed; whether the audit has no excuse not to tell."""
    zombies: set[str] = field(default_factory=set)
    """Incarnations that lived on after they were declared dead."""
    adopted: set[str] = field(default_factory=set)
    """Incarnations that an ``adopt`` record names."""
    complaints: list[str] = field(default_factory=list)
    _groups: dict[str, list[str]] = field(default_factory=dict)

    def say(self, text: str) -> None:
        if len(self.complaints) < 20:
            self.complaints.append(text)

    def wrote(self, disk: Disk, offset: int, record: AnyRecord, batches: Callable[[int, int], list[str]]) -> None:
        """A record was appended; ``batches`` gives the ids of a range of steps as its writer sees them."""
        if isinstance(record, Adopt):
            self.adopted.add(record.h)
        if not isinstance(record, Drop):
            return
        ids = list(named(record.i)) if record.steps is None else batches(*record.steps)
        k, m = record.part or (1, 1)
        group = self._groups.setdefault(disk.inc, [])
        group += ids
        if k == m:  # a group takes effect with its last part
            for object_id in group:
                self.decisions.setdefault(object_id, []).append((disk, offset))
            group.clear()

    def begin(self, by: str) -> None:
        """A process has looked at its fence and begins to remove a batch: its successor's fence came before the record of the adoption."""
        if by in self.adopted:
            self.say(f"{by} begins to remove although it was adopted")

    def remove(self, object_id: str, by: str) -> None:
        """A removal takes effect."""
        if by in self.zombies:
            return
        if not any(offset < disk.durable for disk, offset in self.decisions.get(object_id, ())):
            self.say(f"{by} removes {object_id} without a durable decision")
        if who := self.needed(object_id):
            self.say(f"{by} removes {object_id}, which {who} needs")
        self.removed.setdefault(object_id, by)

    def read(self, object_id: str, batch: Batch, *, by: str, present: bool) -> None:
        """A rank reads an object of a step that it took."""
        if not present and object_id not in self.strangers and not self.zombies.intersection((batch.by, by)):
            self.say(f"step {batch.step}: {object_id} is not there (removed by {self.removed.get(object_id, 'nobody')})")

    def finish(self, disks: Mapping[str, Disk], objects: set[str], adopted: Mapping[str, int]) -> None:
        """The run has been closed: every object is gone, by one decision that is in the journals. ``adopted``: where each of them ends."""
        if self.zombies:
            return
        for object_id in self.created:
            if object_id in objects:
                self.say(f"{object_id} was never removed")
            if object_id in self.strangers:
                continue
            left = [d for d, at in self.decisions.get(object_id, ()) if at < adopted.get(d.inc, d.end) and at < d.end and d.inc in disks]
            if len(left) > 1 or (not left and not self._forgotten(object_id, disks)):
                self.say(f"{object_id}: {len(left)} decisions are in the journals: {[d.inc for d in left]}")

    def _forgotten(self, object_id: str, disks: Mapping[str, Disk]) -> bool:
        """Its producer dropped it and took keep, drop and object along when its node was lost (segments only)."""
        disk = disks[self.created[object_id]]
        return disk.segments and any(d is disk for d, _ in self.decisions.get(object_id, ()))


def used_steps(disk: Disk) -> set[int]:
    """Steps that a trainer's journal calls used."""
    return {r.step for _, r in disk.records if isinstance(r, StepRecord) and r.st == "used"}
