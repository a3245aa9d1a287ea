"""Sets of object ids: the packed form ``{"<inc>": "0-4,7,9-12"}``, its hostile-input limits, and the order-free checksum.

Owns packing, unpacking, splitting over records and ``SeqSet``. Refuses anything outside the grammar before it expands a range.
"""

import functools
import hashlib
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from fsref.errors import BadRef, JournalCorrupt
from fsref.refs import SEQ_MAX, check_incarnation

IDS_RECORD_MAX: Final = 65_536
"""Ids that one record may expand to; writers split larger sets over parts."""
IDS_PART_MAX: Final = 8192
"""Ids that a writer puts into one record of several, so that no honest journal names more of them for its size than a reader believes."""
BYTES_SET_MAX: Final = 60_000
"""Bytes of one packed set; with its record it stays below the line limit."""
PRODUCERS_RECORD_MAX: Final = 4096

_SEQ: Final = r"(?:0|[1-9][0-9]{0,9})"
_RANGES: Final = re.compile(rf"{_SEQ}(?:-{_SEQ})?(?:,{_SEQ}(?:-{_SEQ})?)*", re.ASCII)
_known_incarnation = functools.lru_cache(maxsize=8192)(check_incarnation)

Packed = Mapping[str, str]
"""Producer to ascending ranges, both ends included: ``{"env.math.0123456789abcdef": "0-4,7"}``."""


def hash64(object_id: str) -> int:
    """blake2b(id, digest_size=8) as a little-endian integer (ledger.md section 3)."""
    return int.from_bytes(hashlib.blake2b(object_id.encode(), digest_size=8).digest(), "little")


def sum_of(object_ids: Iterable[str]) -> int:
    """Order-free checksum of a set of ids: the sum of ``hash64`` modulo 2**64."""
    return sum(map(hash64, object_ids)) % (1 << 64)


def split(object_id: str) -> tuple[str, int]:
    """``"inc/seq"`` to its parts; raises ``BadRef`` for anything outside the grammar. Remembers incarnations, so it is cheap."""
    inc, _, text = object_id.partition("/")
    if not (text.isdigit() and text.isascii()) or len(text) > 10 or (text[0] == "0" and text != "0") or len(inc) > 80:
        raise BadRef(f"object id {object_id[:96]!r} is not <incarnation>/<seq>")
    return _known_incarnation(inc), int(text)


def split_known(object_id: str) -> tuple[str, int]:
    """``split`` for an id that was checked before."""
    inc, _, text = object_id.partition("/")
    return inc, int(text)


def pack(object_ids: Iterable[str]) -> dict[str, str]:
    """The packed form of a set of ids; duplicates collapse, order does not matter."""
    ids = list(object_ids)
    for object_id in ids:
        split(object_id)
    return pack_known(ids)


def pack_known(object_ids: Sequence[str]) -> dict[str, str]:
    """``pack`` for ids that were checked before."""
    if len(object_ids) == 1:
        inc, _, text = object_ids[0].partition("/")
        return {inc: text}
    return {inc: pack_seqs(seqs) for inc, seqs in by_producer(object_ids).items()}


def by_producer(object_ids: Iterable[str]) -> dict[str, list[int]]:
    """The sequence numbers of ids that were checked before."""
    texts: dict[str, list[str]] = {}
    for object_id in object_ids:
        inc, _, text = object_id.partition("/")
        of_inc = texts.get(inc)
        if of_inc is None:
            of_inc = texts[inc] = []
        of_inc.append(text)
    return {inc: list(map(int, of_inc)) for inc, of_inc in texts.items()}


def pack_seqs(seqs: Sequence[int]) -> str:
    """``[4, 0, 1, 2]`` to ``"0-2,4"``."""
    if len(seqs) == 1:
        return str(seqs[0])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in _runs(seqs))


def _runs(seqs: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Maximal runs of consecutive numbers, both ends included, ascending."""
    ordered = sorted(set(seqs))
    if not ordered:
        return
    start = end = ordered[0]
    for seq in ordered[1:]:
        if seq != end + 1:
            yield start, end
            start = seq
        end = seq
    yield start, end


def pack_parts(object_ids: Iterable[str], *, ids_max: int = IDS_RECORD_MAX, bytes_max: int = BYTES_SET_MAX) -> list[dict[str, str]]:
    """The packed form of checked ids, split so that each piece has at most ``ids_max`` ids and ``bytes_max`` bytes; at least one piece."""
    seqs = by_producer(object_ids)
    parts: list[dict[str, str]] = [{}]
    count = size = 0
    for inc in sorted(seqs):
        texts: list[str] = []
        for a, b in _pieces(seqs[inc], ids_max):
            text = str(a) if a == b else f"{a}-{b}"
            need = len(text) + 1 + (0 if texts else len(inc) + 6)
            if count and (count + b - a + 1 > ids_max or size + need > bytes_max or len(parts[-1]) >= PRODUCERS_RECORD_MAX):
                if texts:
                    parts[-1][inc] = ",".join(texts)
                    texts = []
                parts.append({})
                count, size, need = 0, 0, len(text) + len(inc) + 7
            texts.append(text)
            count, size = count + b - a + 1, size + need
        if texts:
            parts[-1][inc] = ",".join(texts)
    return parts


def _pieces(seqs: Iterable[int], ids_max: int) -> Iterator[tuple[int, int]]:
    for a, b in _runs(seqs):
        for start in range(a, b + 1, ids_max):
            yield start, min(b, start + ids_max - 1)


def unpack_seqs(text: str, *, ids_max: int = IDS_RECORD_MAX) -> list[int]:
    """``"0-2,4"`` to ``[0, 1, 2, 4]``. Raises ``JournalCorrupt`` outside the grammar or above ``ids_max`` ids, before expanding."""
    if ids_max > 0 and text.isdigit() and len(text) <= 10 and text.isascii() and (text[0] != "0" or text == "0"):
        return [int(text)]
    if len(text) > BYTES_SET_MAX + 64 or not _RANGES.fullmatch(text):
        raise JournalCorrupt(f"id ranges {text[:60]!r} are outside the grammar (ascending n or a-b, comma separated)")
    out: list[int] = []
    last = -1
    for piece in text.split(","):
        first, _, second = piece.partition("-")
        a = int(first)
        b = int(second) if second else a
        if a <= last or b < a or b > SEQ_MAX or (second and a == b):
            raise JournalCorrupt(f"id ranges {text[:60]!r} are not ascending below {SEQ_MAX}")
        if len(out) + b - a + 1 > ids_max:
            raise JournalCorrupt(f"id ranges {text[:60]!r} expand to more than {ids_max} ids")
        out.extend(range(a, b + 1))
        last = b
    return out


def unpack(packed: Packed, *, ids_max: int = IDS_RECORD_MAX) -> dict[str, list[int]]:
    """Producer to ascending seqs. Raises ``JournalCorrupt`` for ids outside the grammar or more than ``ids_max`` of them."""
    if len(packed) > PRODUCERS_RECORD_MAX:
        raise JournalCorrupt(f"{len(packed)} producers in one record, at most {PRODUCERS_RECORD_MAX} are read")
    out: dict[str, list[int]] = {}
    left = ids_max
    for inc, text in packed.items():
        try:
            _known_incarnation(inc)
        except BadRef as e:
            raise JournalCorrupt(str(e)) from e
        out[inc] = seqs = unpack_seqs(text, ids_max=left)
        left -= len(seqs)
    return out


def ids_of(packed: Packed) -> Iterator[str]:
    """The ids of a packed set as strings."""
    for inc, seqs in unpack(packed).items():
        for seq in seqs:
            yield f"{inc}/{seq}"


class SeqSet:
    """A set of sequence numbers that costs memory per gap, not per number: producers hand out nearly dense numbers."""

    __slots__ = ("_starts", "_stops", "count")

    def __init__(self, seqs: Iterable[int] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []  # half-open
        self.count = 0
        self.update(seqs)

    def __contains__(self, seq: int) -> bool:
        at = bisect_right(self._starts, seq) - 1
        return at >= 0 and seq < self._stops[at]

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        for start, stop in zip(self._starts, self._stops, strict=True):
            yield from range(start, stop)

    @property
    def gaps(self) -> int:
        """Number of separate runs, which is what the set costs."""
        return len(self._starts)

    def update(self, seqs: Iterable[int]) -> None:
        """Adds numbers."""
        for seq in seqs:
            self.add(seq)

    def add(self, seq: int) -> bool:
        """Adds a number; False if it was there."""
        starts, stops = self._starts, self._stops
        if stops and stops[-1] == seq:  # the usual case: the next number
            stops[-1] = seq + 1
            self.count += 1
            return True
        at = bisect_right(starts, seq) - 1
        if at >= 0 and seq < stops[at]:
            return False
        self.count += 1
        joins_left = at >= 0 and stops[at] == seq
        joins_right = at + 1 < len(starts) and starts[at + 1] == seq + 1
        if joins_left and joins_right:
            stops[at] = stops[at + 1]
            del starts[at + 1], stops[at + 1]
        elif joins_left:
            stops[at] = seq + 1
        elif joins_right:
            starts[at + 1] = seq
        else:
            starts.insert(at + 1, seq)
            stops.insert(at + 1, seq + 1)
        return True
