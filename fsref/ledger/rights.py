"""Who may remove what: the state of one live holder (ledger.md section 4), without files, threads or clocks.

Owns the legal moves. Each method checks a move, makes it, and returns what the journal has to record; the caller appends that before
anyone acts on it. Refuses to remove what the holder does not hold: ``NotHolder``.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Final

from fsref.errors import DoubleDrop, NotHolder, StepError, StepReleased
from fsref.ledger.ids import SeqSet, by_producer, split
from fsref.ledger.merge import committed

_DROPPED: Final = "dropped it"
REQUESTS_MAX: Final = 65_536
"""Requests whose ids an env worker remembers after the reply; older ones are settled by adoption."""


class EnvRights:
    """An env incarnation: what it minted, what it may still remove, and which replies are out."""

    def __init__(self, inc: str, *, strict: bool = False, requests_max: int = REQUESTS_MAX) -> None:
        self.inc = inc
        self.minted = 0
        self.kept = SeqSet()
        self.unsent: dict[int, int] = {}
        """Kept, not handed to the transport: seq to bytes."""
        self.dropped = SeqSet()
        self._replies: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._strict = strict
        self._requests_max = requests_max
        self.suppressed = 0
        self.nack_unknown = 0
        self.evicted = 0

    @property
    def unclaimed(self) -> int:
        """Objects of replies that were sent and neither delivered nor nacked."""
        return sum(map(len, self._replies.values()))

    def mint(self) -> int:
        """The next sequence number."""
        seq = self.minted
        self.minted += 1
        return seq

    def keep(self, seq: int, *, byte_count: int) -> None:
        """The object ``seq`` is published. Raises ``NotHolder`` for a number that was not minted or is kept already."""
        if not 0 <= seq < self.minted or not self.kept.add(seq):
            raise NotHolder(f"{self.inc}/{seq} cannot be kept: {self.minted} numbers were minted here, and each is kept once")
        self.unsent[seq] = byte_count

    def sent(self, request_id: str, object_ids: Iterable[str]) -> None:
        """The reply with these ids goes to the transport now: from here on only a nack gives the right back. All or nothing."""
        seqs = tuple([self._own(o) for o in object_ids])
        for seq in seqs:
            if seq not in self.unsent:
                raise NotHolder(f"{self.inc}/{seq} cannot be sent: it is not kept here, was dropped, or was sent before")
        for seq in seqs:
            del self.unsent[seq]
        if seqs:
            self._replies[request_id] = self._replies.pop(request_id, ()) + seqs
        while len(self._replies) > self._requests_max:
            self._replies.popitem(last=False)
            self.evicted += 1

    def delivered(self, request_id: str) -> None:
        """The client has taken the reply; its ids are no longer ours."""
        self._replies.pop(request_id, None)

    def nack(self, request_id: str) -> list[str]:
        """The client will never surface this reply: returns the ids to drop, none if the request is not known here."""
        seqs = self._replies.pop(request_id, None)
        if seqs is None:
            self.nack_unknown += 1
            return []
        for seq in seqs:
            self.dropped.add(seq)
        return [f"{self.inc}/{seq}" for seq in seqs]

    def discard(self, object_ids: Iterable[str]) -> list[str]:
        """Ids that were never handed to the transport: returns the ones to drop. Raises ``NotHolder`` or, if strict, ``DoubleDrop``."""
        seqs = list(dict.fromkeys(map(self._own, object_ids)))
        for seq in seqs:
            if seq not in self.unsent and seq not in self.dropped:
                raise NotHolder(f"{self.inc}/{seq} cannot be discarded: it is not kept here, or its reply was sent and not nacked")
        fresh = [seq for seq in seqs if seq in self.unsent]
        again = [seq for seq in seqs if seq not in self.unsent]
        if again and self._strict:
            raise DoubleDrop(f"{self.inc}/{again[0]} was dropped before by this holder")
        self.suppressed += len(again)
        for seq in fresh:
            del self.unsent[seq]
            self.dropped.add(seq)
        return [f"{self.inc}/{seq}" for seq in fresh]

    def void(self) -> list[int]:
        """Minted numbers that never held an object."""
        return [seq for seq in range(self.minted) if seq not in self.kept]

    def _own(self, object_id: str) -> int:
        inc, seq = split(object_id)
        if inc != self.inc:
            raise NotHolder(f"{object_id} was produced by another incarnation than {self.inc}")
        return seq


class ConsumerRights:
    """An orchestrator or eval incarnation: what it took, and may drop or ship."""

    def __init__(self, inc: str, *, strict: bool = False) -> None:
        self.inc = inc
        self.held: dict[str, int] = {}
        """Id to bytes."""
        self._taken: dict[str, SeqSet] = {}
        self._shipped: dict[str, SeqSet] = {}  # what was taken and is neither held nor shipped was dropped
        self._adopted: set[str] = set()
        self._steps: set[int] = set()
        self._strict = strict
        self.taken_count = 0
        self.dropped_count = 0
        self.taken_bytes = 0
        self.suppressed = 0
        self.dup_reply = 0
        self.late_refused = 0

    @property
    def held_bytes(self) -> int:
        return sum(self.held.values())

    def take(self, sizes: Mapping[str, int]) -> list[str]:
        """Ids that are new here. Known ones are counted as ``dup_reply``, those of an adopted producer as ``late_refused``."""
        fresh: list[str] = []
        for object_id, byte_count in sizes.items():
            inc, seq = split(object_id)
            taken = self._taken.get(inc)
            if taken is None:
                taken = self._taken[inc] = SeqSet()
            if inc in self._adopted and seq not in taken:
                self.late_refused += 1
            elif taken.add(seq):
                self.held[object_id] = byte_count
                self.taken_bytes += byte_count
                fresh.append(object_id)
            else:
                self.dup_reply += 1
        self.taken_count += len(fresh)
        return fresh

    def took(self, inc: str) -> SeqSet:
        """The seqs of a producer that were ever taken here."""
        return self._taken.get(inc, SeqSet())

    def refuse(self, inc: str) -> None:
        """From now on replies of this (adopted) producer are refused."""
        self._adopted.add(inc)

    def inherit(self, object_ids: Iterable[str]) -> None:
        """Rights that an adoption brought; bytes are not known any more."""
        for object_id in object_ids:
            inc, seq = split(object_id)
            self._taken.setdefault(inc, SeqSet()).add(seq)
            self.held[object_id] = 0

    def drop(self, object_ids: Iterable[str]) -> list[str]:
        """Ids to drop now. A second drop is suppressed and counted, or ``DoubleDrop`` if strict; ``NotHolder`` for anything else."""
        ids, held = dict.fromkeys(object_ids), self.held
        fresh = list(ids)
        if not ids.keys() <= held.keys():
            self._settle_repeats([o for o in ids if o not in held])
            fresh = [o for o in ids if o in held]
        for object_id in fresh:
            del held[object_id]
        self.dropped_count += len(fresh)
        return fresh

    def ship(self, step: int, object_ids: Iterable[str]) -> list[str]:
        """The ids of a step, each once. Raises ``NotHolder``, also for a step that was shipped before; then nothing moved."""
        ids = list(dict.fromkeys(object_ids))
        if step in self._steps:
            raise NotHolder(f"step {step} was shipped before by {self.inc}")
        for object_id in ids:
            if object_id not in self.held:
                raise NotHolder(f"{object_id} cannot be shipped in step {step}: {self.inc} {self._why_not(object_id)}")
        for object_id in ids:
            del self.held[object_id]
        for inc, seqs in by_producer(ids).items():
            self._shipped.setdefault(inc, SeqSet()).update(seqs)
        self._steps.add(step)
        return ids

    def _settle_repeats(self, ids: list[str]) -> None:
        for object_id in ids:
            if (why := self._why_not(object_id)) != _DROPPED:
                raise NotHolder(f"{object_id} cannot be dropped: {self.inc} {why}")
        if self._strict:
            raise DoubleDrop(f"{ids[0]} was dropped before by {self.inc}")
        self.suppressed += len(ids)

    def _why_not(self, object_id: str) -> str:
        """Of an id that is not held."""
        inc, seq = split(object_id)
        if seq not in self._taken.get(inc, ()):
            return "never took it"
        return "shipped it" if seq in self._shipped.get(inc, ()) else _DROPPED


class StepRights:
    """Trainer rank 0: which steps it has, and which were released."""

    def __init__(self, inc: str, *, strict: bool = False, released: Mapping[tuple[int, int, int], str] | None = None) -> None:
        self.inc = inc
        self.taken: dict[int, tuple[int, int]] = {}
        """Step to (n, sum), until it is released."""
        self.released: dict[int, str] = {}
        """Steps that this incarnation released, to what released them."""
        self._before: dict[tuple[int, int, int], str] = dict(released or {})
        """Batches (step, n, sum) that were released before it; the number alone may return with another batch."""
        self._strict = strict
        self.suppressed = 0

    def check(self, step: int, *, n: int, checksum: int) -> None:
        """Raises ``StepReleased`` if the batch's arrays were removed."""
        by = self.released.get(step) or self._before.get((step, n, checksum))
        if by:
            raise StepReleased(f"the arrays of step {step} were removed by {by}: resume from a checkpoint that covers it")

    def take(self, step: int, *, n: int, checksum: int) -> bool:
        """True if this is new; False for the same batch again. ``StepReleased`` after removal, ``StepError`` for another batch."""
        self.check(step, n=n, checksum=checksum)
        known = self.taken.get(step)
        if known is not None and known != (n, checksum):
            raise StepError(f"step {step} was taken with n, sum = {known}, now it has {(n, checksum)}: another batch under the same number")
        self.taken[step] = (n, checksum)
        return known is None

    def drop(self, lo: int, hi: int) -> list[tuple[int, int]]:
        """Sub-ranges (both ends included) of ``lo..hi`` to drop now. ``NotHolder`` for a step that was not taken here."""
        fresh: list[int] = []
        repeated = 0
        for step in range(lo, hi + 1):
            if step in self.taken:
                fresh.append(step)
            elif step in self.released:
                repeated += 1
            else:
                raise NotHolder(f"steps {lo}..{hi} cannot be dropped: {self.inc} never took step {step}")
        if repeated and self._strict:
            raise DoubleDrop(f"a step of {lo}..{hi} was dropped before")
        self.suppressed += repeated
        for step in fresh:
            del self.taken[step]
            self.released[step] = committed(lo, hi, by=self.inc)
        return step_ranges(fresh)


def step_ranges(steps: list[int]) -> list[tuple[int, int]]:
    """Steps in rising order as ranges, both ends included."""
    out: list[tuple[int, int]] = []
    for step in steps:
        if out and out[-1][1] == step - 1:
            out[-1] = (out[-1][0], step)
        else:
            out.append((step, step))
    return out
