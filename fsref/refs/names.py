"""Names and ranges: run ids, incarnations, object ids, token hashes, token ranges, and the limits that all of them keep to."""

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from fsref.errors import BadRef

RUN_PATTERN: Final = r"[a-z0-9][a-z0-9._-]{0,127}"
ROLES: Final = ("env", "orc", "evl", "trn", "rec")
INCARNATION_PATTERN: Final = r"(?:env|orc|evl|trn|rec)\.[a-z0-9-]{1,40}\.[0-9a-f]{16}"
OBJECT_PATTERN: Final = rf"({INCARNATION_PATTERN})/(0|[1-9][0-9]{{0,9}})"
"""The producer and the number, as groups."""
_RUN: Final = re.compile(RUN_PATTERN, re.ASCII)
_INCARNATION: Final = re.compile(INCARNATION_PATTERN, re.ASCII)
_OBJECT: Final = re.compile(OBJECT_PATTERN, re.ASCII)

TOKENS_MAX: Final = 1 << 27
BYTES_REF_MAX: Final = 64 << 10
BYTES_OBJECT_MAX: Final = (1 << 32) - 1
BYTES_CHUNK_MAX: Final = 1 << 30
"""Decoded bytes of one chunk, which is what a reader allocates at once."""
SEGMENTS_MAX: Final = 4096
SEQ_MAX: Final = 9_999_999_999


def check_run(run: str) -> str:
    """Returns ``run`` if it is a run id of the grammar of ledger.md, else raises ``BadRef``."""
    if not _RUN.fullmatch(run) or ".." in run:
        raise BadRef(f"run id {run[:80]!r} does not match {RUN_PATTERN} (and may not contain '..')")
    return run


def check_incarnation(inc: str) -> str:
    """Returns ``inc`` if it is ``role.label.boot``, else raises ``BadRef``."""
    if not _INCARNATION.fullmatch(inc):
        raise BadRef(f"incarnation {inc[:80]!r} does not match {INCARNATION_PATTERN}")
    return inc


def split_object_id(object_id: str) -> tuple[str, int]:
    """``"inc/seq"`` to its parts; raises ``BadRef`` for anything outside the grammar."""
    match = _OBJECT.fullmatch(object_id)
    if match is None:
        raise _not_an_id(object_id)
    return match[1], int(match[2])


def object_name(object_id: str) -> str:
    """The object's name below the run's root: ``obj/<inc>/<seq:010d>.zip``."""
    match = _OBJECT.fullmatch(object_id)
    if match is None:
        raise _not_an_id(object_id)
    return f"obj/{match[1]}/{match[2].zfill(10)}.zip"


def _not_an_id(object_id: str) -> BadRef:
    return BadRef(f"object id {object_id[:96]!r} does not match {OBJECT_PATTERN}")


def token_hash(token_ids: Sequence[int] | NDArray[np.integer[Any]]) -> bytes:
    """8-byte blake2b over the token ids as little-endian int32: equal ids, equal hash, whatever the input dtype."""
    ids = np.ascontiguousarray(token_ids, dtype="<i4")
    return hashlib.blake2b(ids.data, digest_size=8).digest()


class TokenRange(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Half-open range of token positions, ``0 <= start <= stop``."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop <= TOKENS_MAX:
            raise BadRef(f"token range [{self.start}, {self.stop}) is not within 0 <= start <= stop <= {TOKENS_MAX}")

    def __len__(self) -> int:
        return self.stop - self.start

    def clip(self, other: "TokenRange") -> "TokenRange":
        """The part of this range that lies in ``other``; empty (at ``other``'s near edge) if there is none."""
        start = min(max(self.start, other.start), other.stop)
        return TokenRange(start, max(start, min(self.stop, other.stop)))


def ranges_where(flags: NDArray[np.bool_]) -> tuple[TokenRange, ...]:
    """The maximal runs of True in ``flags`` [T], ascending."""
    if not flags.any():
        return ()
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    return tuple(TokenRange(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True))


def flags_of(ranges: Iterable[TokenRange], token_count: int) -> NDArray[np.bool_]:
    """Inverse of ``ranges_where``: [T] with True inside the ranges."""
    flags = np.zeros(token_count, np.bool_)
    for r in ranges:
        flags[r.start : r.stop] = True
    return flags
