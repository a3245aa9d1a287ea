"""What lies in the shared memory: which chunk is where, who fetches which, and which steps may still need them.

Owns the layout and every change of it. Refuses locks and I/O: whoever calls holds the lock of ``shared``, and copies the bytes. A change
that its process did not live to end leaves the mark ``dirty``; the next one to come then empties the table, as a cache may.

    page 0     header: geometry, counters, ends of the ring and of the queue
    members    16 bytes each: the first step that the rank may still need, the generation at which it joined
    slots      64 bytes each, in buckets of 8: key (object digest, offset, size), state, owner, generation, step, place
    queue      24 bytes each: slots in the order in which they got their bytes, with the generation that they had
    data       a ring: bytes are given out in order, the oldest make room

Every claim and every set of bytes has a generation of its own, never used again: whoever copied bytes and finds the generation unchanged
afterwards copied these bytes.
"""

import enum
import mmap
import struct
from collections.abc import Iterable
from typing import Final, NamedTuple

MAGIC: Final = b"fsrefNC1"
PAGE: Final = 4096
MEMBERS_MAX: Final = 1024
WAYS: Final = 8
SLOT_BYTES: Final = 64
QUEUE_BYTES: Final = 24
CHUNK_BYTES_MEAN: Final = 16 << 10
"""Slots are made for chunks of this size; smaller ones find the slots full before the data."""
SLOTS_MIN: Final = 1024
SLOTS_MAX: Final = 1 << 17
NOTHING_RELEASED: Final = -(1 << 63)
MEMBER_BYTES: Final = 16

_GEOMETRY: Final = struct.Struct("<8sIIQQ")
_U64: Final = struct.Struct("<Q")
_MEMBER: Final = struct.Struct("<qQ")
_SLOT: Final = struct.Struct("<28sHHQqQ")
_QUEUED: Final = struct.Struct("<QQQ")
_EMPTY: Final = bytes(SLOT_BYTES)
_MIX: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1


class _At(enum.IntEnum):
    """Places in the header."""

    DIRTY = 64
    CHANGES = 128
    GENERATION = 192
    HEAD = 200
    TAIL = 208
    QUEUE_HEAD = 216
    QUEUE_TAIL = 224
    BYTES_HELD = 232
    EVICTIONS = 240
    RESETS = 248


class State(enum.IntEnum):
    """Of a slot."""

    EMPTY = 0
    FETCHING = 1
    READY = 2


class Slot(NamedTuple):
    """One entry as it was when it was looked up."""

    number: int
    state: int
    owner: int
    generation: int
    step: int
    place: int
    """Ring position of its bytes."""


class Geometry(NamedTuple):
    """Sizes that all ranks of a node must agree on."""

    slots: int
    data_bytes: int

    @classmethod
    def of(cls, bytes_max: int) -> "Geometry":
        """For ``bytes_max`` bytes of chunks."""
        data = max(PAGE, bytes_max // PAGE * PAGE)
        return cls(min(SLOTS_MAX, max(SLOTS_MIN, 1 << (data // CHUNK_BYTES_MEAN).bit_length())), data)

    @property
    def slots_at(self) -> int:
        return PAGE + MEMBERS_MAX * MEMBER_BYTES

    @property
    def queue_at(self) -> int:
        return self.slots_at + self.slots * SLOT_BYTES

    @property
    def data_at(self) -> int:
        return -(-(self.queue_at + self.slots * QUEUE_BYTES) // PAGE) * PAGE

    @property
    def file_bytes(self) -> int:
        return self.data_at + self.data_bytes

    def header(self) -> bytes:
        """The first bytes of a file of this geometry."""
        return _GEOMETRY.pack(MAGIC, self.slots, MEMBERS_MAX, self.data_bytes, 0)


def key_of(digest: bytes, offset: int, size: int) -> bytes:
    """28 bytes that name a chunk: 16 of its object, where it lies there and how long it is."""
    return digest + offset.to_bytes(8, "little") + size.to_bytes(4, "little")


class Table:
    """The shared state, seen through a map of the file. Every method but ``changes`` needs the lock."""

    def __init__(self, memory: mmap.mmap, geometry: Geometry) -> None:
        self._memory, self._geometry = memory, geometry
        self._buckets = geometry.slots // WAYS

    @property
    def changes(self) -> int:
        """Grows with every entry that gets its bytes or is given up; may be looked at without the lock."""
        return self._get(_At.CHANGES)

    @property
    def bytes_held(self) -> int:
        """Of entries that have their bytes."""
        return self._get(_At.BYTES_HELD)

    @property
    def evictions(self) -> int:
        """Entries that made room before their step was released."""
        return self._get(_At.EVICTIONS)

    @property
    def resets(self) -> int:
        """Times that the table was emptied because a change had not ended."""
        return self._get(_At.RESETS)

    def begin(self) -> None:
        """Before the first change under a lock."""
        if self._get(_At.DIRTY):
            self.reset()
        self._set(_At.DIRTY, 1)

    def end(self) -> None:
        """After the last change under a lock."""
        self._set(_At.DIRTY, 0)

    def reset(self) -> None:
        """Forgets every entry. Generations and ring positions go on, so that nothing old can be taken for new."""
        g = self._geometry
        self._memory[g.slots_at : g.queue_at] = bytes(g.queue_at - g.slots_at)
        head = -(-max(self._get(_At.HEAD), self._get(_At.TAIL)) // g.data_bytes) * g.data_bytes
        for at, value in ((_At.HEAD, head), (_At.TAIL, head), (_At.QUEUE_HEAD, 0), (_At.QUEUE_TAIL, 0), (_At.BYTES_HELD, 0)):
            self._set(at, value)
        self._add(_At.RESETS, 1)
        self._add(_At.GENERATION, 1)
        self._add(_At.CHANGES, 1)

    def find(self, key: bytes) -> Slot | None:
        """The entry of a chunk."""
        at = self._bucket(key)
        raw = self._memory[at : at + WAYS * SLOT_BYTES]
        for way in range(0, WAYS * SLOT_BYTES, SLOT_BYTES):
            if raw.startswith(key, way):
                _, state, owner, generation, step, place = _SLOT.unpack_from(raw, way)
                return Slot((at + way - self._geometry.slots_at) // SLOT_BYTES, state, owner, generation, step, place)
        return None

    def claim(self, key: bytes, *, owner: int, step: int) -> int:
        """Marks a chunk as being fetched by ``owner``, also where another one was; returns the claim's generation.

        0: every slot that it could have is being fetched; nothing was changed.
        """
        slot = self.find(key)
        number = slot.number if slot is not None else self._free_way(key)
        if number < 0:
            return 0
        if slot is not None and slot.state == State.READY:
            self._forget(slot.number)
        generation = self._next_generation()
        self._put(key, Slot(number, State.FETCHING, owner, generation, step, 0))
        return generation

    def clear(self, key: bytes, generation: int) -> None:
        """Forgets the entry of a chunk if it still is of this generation."""
        slot = self.find(key)
        if slot is not None and slot.generation == generation:
            self._forget(slot.number)
            self._add(_At.CHANGES, 1)

    def place(self, size: int) -> int:
        """Where in the file ``size`` bytes may be written, at most a quarter of the data; the oldest entries make room."""
        cap = self._geometry.data_bytes
        assert 0 < size <= cap // 4
        head = self._get(_At.HEAD)
        left = cap - head % cap
        start = head if left >= size else head + left
        self._make_room(start + size - cap)
        self._set(_At.HEAD, start + size)
        return start

    def file_offset(self, place: int) -> int:
        """Where a ring position lies in the file."""
        return self._geometry.data_at + place % self._geometry.data_bytes

    def ready(self, key: bytes, *, claimed: Slot, size: int, place: int) -> None:
        """The bytes of a claimed chunk stand at ``place``."""
        generation = self._next_generation()
        self._put(key, Slot(claimed.number, State.READY, claimed.owner, generation, claimed.step, place))
        if self._get(_At.QUEUE_HEAD) - self._get(_At.QUEUE_TAIL) >= self._geometry.slots:
            self._pop()
        at = self._get(_At.QUEUE_HEAD)
        _QUEUED.pack_into(self._memory, self._queue_offset(at), claimed.number, generation, place)
        self._set(_At.QUEUE_HEAD, at + 1)
        self._add(_At.BYTES_HELD, size)
        self._add(_At.CHANGES, 1)

    def join(self, member: int) -> None:
        """A new rank, which may need every step, and has claimed nothing: what its number claimed before was a dead rank's."""
        _MEMBER.pack_into(self._memory, self._member_at(member), NOTHING_RELEASED, self._next_generation())

    def claimed_by(self, slot: Slot) -> int | None:
        """The member that claimed a chunk, if it is still the same rank."""
        _, joined = _MEMBER.unpack_from(self._memory, self._member_at(slot.owner))
        return slot.owner if slot.generation > joined else None

    def needed_from(self, member: int) -> int:
        """The first step that a rank may still need."""
        return int(_MEMBER.unpack_from(self._memory, self._member_at(member))[0])

    def release(self, member: int, step: int) -> None:
        """A rank is through with ``step`` and all before it."""
        floor, joined = _MEMBER.unpack_from(self._memory, self._member_at(member))
        _MEMBER.pack_into(self._memory, self._member_at(member), max(step + 1, floor), joined)

    def drop_below(self, members: Iterable[int]) -> list[tuple[int, int]]:
        """Forgets entries of steps that none of ``members`` needs, as far as they are the oldest; returns the (offset, size) of the file
        that nobody uses any more.
        """
        floor = min((self.needed_from(m) for m in members), default=NOTHING_RELEASED)
        before = self._get(_At.TAIL)
        while (oldest := self._oldest()) is not None:
            number, generation, _ = oldest
            slot = self._slot(number)
            if slot.generation == generation and slot.step >= floor:
                break
            self._pop(released=True)
        return self._freed(before, self._get(_At.TAIL))

    def _freed(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Whole pages of ring positions [start, stop), as pieces of the file. What lies before ``start`` was freed earlier, or is in use
        again as the newest bytes.
        """
        cap, out = self._geometry.data_bytes, []
        first = start // PAGE * PAGE
        start, stop = first if self._get(_At.HEAD) <= first + cap else first + PAGE, stop // PAGE * PAGE
        while start < stop:
            size = min(stop - start, cap - start % cap)
            out.append((self.file_offset(start), size))
            start += size
        return out

    def _make_room(self, below: int) -> None:
        while (oldest := self._oldest()) is not None and oldest[2] < below:
            self._pop()
        self._set(_At.TAIL, max(self._get(_At.TAIL), below))

    def _oldest(self) -> tuple[int, int, int] | None:
        tail = self._get(_At.QUEUE_TAIL)
        if tail == self._get(_At.QUEUE_HEAD):
            return None
        number, generation, place = _QUEUED.unpack_from(self._memory, self._queue_offset(tail))
        return int(number), int(generation), int(place)

    def _pop(self, *, released: bool = False) -> None:
        """Forgets the oldest entry, if it is what stands in the queue, and moves the end of the ring up to the next one."""
        oldest = self._oldest()
        assert oldest is not None
        number, generation, _ = oldest
        if self._slot(number).generation == generation:
            self._forget(number)
            if not released:
                self._add(_At.EVICTIONS, 1)
        self._set(_At.QUEUE_TAIL, self._get(_At.QUEUE_TAIL) + 1)
        following = self._oldest()
        self._set(_At.TAIL, self._get(_At.HEAD) if following is None else following[2])

    def _forget(self, number: int) -> None:
        at = self._geometry.slots_at + number * SLOT_BYTES
        if self._slot(number).state == State.READY:
            self._add(_At.BYTES_HELD, -int.from_bytes(self._memory[at + 24 : at + 28], "little"))
        self._memory[at : at + SLOT_BYTES] = _EMPTY

    def _free_way(self, key: bytes) -> int:
        """An empty slot of the key's bucket, else that of the bucket's oldest bytes; -1 where all are being fetched."""
        first = (self._bucket(key) - self._geometry.slots_at) // SLOT_BYTES
        slots = [self._slot(n) for n in range(first, first + WAYS)]
        for slot in slots:
            if slot.state == State.EMPTY:
                return slot.number
        ready = [s for s in slots if s.state == State.READY]
        if not ready:
            return -1
        oldest = min(ready, key=lambda s: s.generation)
        self._forget(oldest.number)
        self._add(_At.EVICTIONS, 1)
        return oldest.number

    def _bucket(self, key: bytes) -> int:
        mixed = (int.from_bytes(key[:8], "little") ^ int.from_bytes(key[16:24], "little")) * _MIX & _MASK
        return self._geometry.slots_at + (mixed >> 32) % self._buckets * WAYS * SLOT_BYTES

    def _slot(self, number: int) -> Slot:
        _, state, owner, generation, step, place = _SLOT.unpack_from(self._memory, self._geometry.slots_at + number * SLOT_BYTES)
        return Slot(number, state, owner, generation, step, place)

    def _put(self, key: bytes, slot: Slot) -> None:
        _SLOT.pack_into(self._memory, self._geometry.slots_at + slot.number * SLOT_BYTES, key, *slot[1:])

    def _queue_offset(self, at: int) -> int:
        return self._geometry.queue_at + at % self._geometry.slots * QUEUE_BYTES

    def _next_generation(self) -> int:
        self._add(_At.GENERATION, 1)
        return self._get(_At.GENERATION)

    def _member_at(self, member: int) -> int:
        return PAGE + member * MEMBER_BYTES

    def _get(self, at: _At) -> int:
        return int(_U64.unpack_from(self._memory, at)[0])

    def _set(self, at: _At, value: int) -> None:
        _U64.pack_into(self._memory, at, value)

    def _add(self, at: _At, value: int) -> None:
        self._set(at, self._get(at) + value)
