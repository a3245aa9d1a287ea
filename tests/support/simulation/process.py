"""One simulated process: its journal, its tasks, its deleter. At every ``yield`` it can die, or another can go first."""

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from fsref.errors import Fenced, JournalPoisoned
from fsref.ledger.ids import pack, pack_parts
from fsref.ledger.records import AnyRecord, Close, Done, Drop

if TYPE_CHECKING:
    from tests.support.simulation.world import World

FREE: Final = 0
"""Yielded where any task of the same process may go on."""
HELD: Final = 1
"""Yielded while the process's lock is held: other processes go on, its other tasks do not."""
IDLE: Final = 2
"""Yielded where nothing was there to do: the turn goes to somebody else."""
Op = Generator[int, None, None]
BATCH_IDS_MAX: Final = 3
ATTEMPTS_MAX: Final = 4
"""A removal is made to fail so many times at most."""


class Message(NamedTuple):
    """What the network carries."""

    kind: str
    """``run``, ``cancel`` or ``reply``."""
    request: str
    ids: tuple[str, ...] = ()
    objects: int = 0


class Process:
    """Base of all roles. ``main`` is its first task."""

    role = ""

    def __init__(self, world: "World", label: str, node: str) -> None:
        self.world, self.choose, self.label, self.node = world, world.choose, label, node
        self.inc = world.mint(self.role, label)
        self.disk = world.open_journal(self.inc, node)
        self.alive = True
        self.paused = False
        self.stopping = False
        self.poisoned = False
        self.queue: list[tuple[str, int]] = []
        """Dropped ids that are to be removed, with the attempts so far."""
        self.busy = 0
        self.dropped = 0
        self.locked: Op | None = None
        self.tasks: list[Op] = [self.main()]

    def main(self) -> Op:
        raise NotImplementedError

    def mutant(self, name: str) -> bool:
        return self.world.mutant == name

    def spawn(self, task: Op) -> None:
        self.tasks.append(task)

    def write(self, record: AnyRecord) -> None:
        """One append, here and now: it is written, or torn by a full disk and the journal is poisoned."""
        if self.poisoned:
            raise JournalPoisoned(self.inc)
        if self.choose.chance(self.world.scenario.full_p) and not self.world.calm:
            self.world.events["record torn by a full disk"] += 1
            self.disk.tear(record)
            self.poisoned = True
            raise JournalPoisoned(self.inc)
        at = self.disk.add(record)
        self.world.reference.wrote(self.disk, at, record, lambda lo, hi: self.world.ids_of_steps(self.disk, lo, hi))

    def append(self, *records: AnyRecord) -> Op:
        """Appends a group; the process can die before it, between its records and after it."""
        for record in records:
            yield HELD
            self.write(record)
        yield FREE

    def durable(self) -> Op:
        """W1 and W2: a sync, or the upload of a segment, which may fail and is then tried again."""
        yield FREE
        self.check()
        self.disk.sync()
        if self.disk.segments and self.role != "env" and not self.mutant("seal_skipped"):
            while self.choose.chance(self.world.scenario.seal_fails_p) and not self.world.calm:
                if self.mutant("segment_gap"):
                    self.disk.skip_segment()
                    break
                self.world.events["segment upload failed"] += 1
                yield FREE
            self.disk.seal()
        yield FREE

    def check(self) -> None:
        """What every call asks first."""
        if self.poisoned:
            raise JournalPoisoned(self.inc)

    def fence(self) -> None:
        """Raises ``Fenced`` once somebody adopted this process."""
        by = self.world.adopted.get(self.inc)
        if by is not None and not self.mutant("no_fence_check"):
            raise Fenced(f"{self.inc} was adopted by {by}")

    def drop(self, ids: Sequence[str], reason: str) -> Op:
        """Records a decision whose right was checked, and hands the ids to the deleter."""
        if not ids:
            return
        if self.mutant("delete_before_drop") and self.choose.chance(0.5):
            for object_id in ids:
                self.world.remove(object_id, by=self.inc)
            yield HELD
        pieces = pack_parts(ids, ids_max=2) if len(ids) > 2 and self.choose.chance(0.3) else [pack(ids)]
        yield from self.append(*(Drop(0, reason, i=p, part=(k, len(pieces)) if len(pieces) > 1 else None) for k, p in enumerate(pieces, 1)))
        self.dropped += len(ids)
        if self.role != "rec":  # a recovery removes by itself
            self.remove_later(ids)

    def remove_later(self, ids: Sequence[str], *, attempt: int = 0) -> None:
        """Hands ids to the deleter; ``attempt`` 1 marks the redo of another's decision."""
        if ids and not self.queue and not self.busy:
            self.spawn(self.deleter())
        self.queue += [(o, attempt) for o in ids]

    def deleter(self) -> Op:
        """Batches: W1, fence, removals, ``done``."""
        while self.queue:
            yield FREE
            batch = [self.queue.pop(0) for _ in range(min(BATCH_IDS_MAX, len(self.queue)))]
            if not batch:
                return  # the end came first
            self.busy += 1
            yield from self.remove(batch)
            self.busy -= 1

    def remove(self, batch: Sequence[tuple[str, int]]) -> Op:
        if not self.mutant("no_w1"):
            yield from self.durable()
        self.check()
        self.fence()
        self.world.reference.begin(self.inc)
        gone: dict[int, list[tuple[str, bool]]] = {}
        if self.mutant("done_before_delete"):
            yield from self.append(*(Done(0, pack([o]), k=attempt + 1) for o, attempt in batch))
        for object_id, attempt in batch:
            yield FREE
            outcome = self.delete(object_id, attempt)
            yield FREE
            if outcome is None:
                self.queue.append((object_id, attempt + 1))
            else:
                gone.setdefault(attempt + 1, []).append((object_id, outcome))
        if not self.mutant("done_before_delete"):
            yield from self.append(*(Done(0, pack(o for o, _ in g), a=pack(o for o, absent in g if absent), k=k) for k, g in gone.items()))

    def delete(self, object_id: str, attempt: int) -> bool | None:
        """One DELETE: whether it found the object absent; None for a failure, after which it may have happened or not."""
        world = self.world
        if attempt < ATTEMPTS_MAX and world.faults and self.choose.chance(world.scenario.delete_fails_p):
            world.events["removal failed"] += 1
            if self.choose.chance(0.5):
                world.remove(object_id, by=self.inc)
            return None
        absent = object_id not in world.objects
        world.remove(object_id, by=self.inc)
        return absent

    def drain(self) -> Op:
        """Waits for the deleter, some of the time."""
        patience = 0 if self.choose.chance(0.2) else 200
        while (self.queue or self.busy) and patience:
            patience -= 1
            yield IDLE

    def finish(self, record: Close) -> Op:
        """The clean end; what is still in the queue is left to an adopter."""
        self.queue.clear()
        while self.busy:
            yield IDLE
            self.queue.clear()  # a removal that failed comes back; the deleter has been told to stop
        self.check()
        yield from self.append(record)
        self.disk.sync()
        if self.disk.segments:
            self.disk.seal()
        self.disk.closed = True
        yield FREE
        self.alive = False
