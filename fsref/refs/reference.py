"""The reference: a name for one sample's arrays in a store."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fsref.errors import BadRef, PayloadError
from fsref.refs.names import BYTES_OBJECT_MAX, BYTES_REF_MAX, SEGMENTS_MAX, TOKENS_MAX, TokenRange, check_run, split_object_id, token_hash

SOURCE_CHARACTERS_MAX: Final = 32
LINTS_MAX: Final = 16


class Segment(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Rows ``[row_start, row_stop)`` of one object stand at token positions from ``token_start`` on."""

    object_id: str
    """``inc/seq``."""
    byte_count: int
    """Size of the whole object file."""
    row_start: int
    row_stop: int
    token_start: int
    index: bytes
    """The object's chunk index, see ``fsref.plan.index``."""
    missing: bytes = b""
    """The object's missing rows per field, varint coded by ``fsref.plan.index``; empty if none."""
    source: str = ""
    """Who computed the rows, where several may have: for example ``prefill`` and ``decode``."""

    def __post_init__(self) -> None:
        split_object_id(self.object_id)
        if not 0 < self.byte_count <= BYTES_OBJECT_MAX:
            raise BadRef(f"{self.object_id}: object size {self.byte_count} is not in 1..{BYTES_OBJECT_MAX}")
        if not 0 <= self.row_start <= self.row_stop <= TOKENS_MAX or not 0 <= self.token_start <= TOKENS_MAX:
            raise BadRef(f"{self.object_id}: rows [{self.row_start}, {self.row_stop}) at token {self.token_start} are out of bounds")
        if len(self.source) > SOURCE_CHARACTERS_MAX or not self.source.isascii() or not (self.source or "x").isprintable():
            raise BadRef(f"{self.object_id}: source {self.source[:80]!r} is not a printable ASCII word of at most {SOURCE_CHARACTERS_MAX}")

    @property
    def tokens(self) -> TokenRange:
        """The token positions that this segment's rows stand at."""
        return TokenRange(self.token_start, self.token_start + self.row_stop - self.row_start)

    @property
    def weight(self) -> int:
        """About its bytes in a message."""
        return len(self.object_id) + len(self.index) + len(self.missing) + len(self.source) + 24

    def within(self, tokens: TokenRange) -> "Segment":
        """The rows of it that stand at ``tokens`` (possibly none). No byte moves."""
        kept = self.tokens.clip(tokens)
        start = self.row_start + kept.start - self.token_start if len(kept) else self.row_start
        return msgspec.structs.replace(self, row_start=start, row_stop=start + len(kept), token_start=kept.start)


class PayloadRef(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Names the arrays of one sample: JSON-able for messages, msgpack in step files, hashable.

    ``to_json`` gives the JSON form (a list); ``PayloadRef.decode`` is the only way back in and validates.
    """

    schema_hash: bytes
    """8 bytes, ``Schema.hash``."""
    token_count: int
    """Tokens that are kept; truncation lowers it, the object stays."""
    token_hash: bytes
    """8 bytes, ``token_hash`` of the first ``hashed_count`` token ids."""
    hashed_count: int
    """Tokens of the branch when it was stored."""
    segments: tuple[Segment, ...]
    """In order of precedence: of two real rows for one token the earlier segment's counts, a real row replaces a missing one, and what none
    has is missing (``fsref.plan.coverage``)."""
    stats: tuple[tuple[int, int], ...] = ()
    """Per ragged field in schema order: (rows that have values, values), so that metrics such as the mean kept-set size need no arrays."""
    lints: tuple[int, ...] = ()
    """What the lints of the writer counted, in the order of ``fsref.refs.Lint``; empty if nothing."""

    def __post_init__(self) -> None:
        if len(self.schema_hash) != 8 or len(self.token_hash) != 8:
            raise BadRef("a reference has 8-byte schema and token hashes")
        if not 0 <= self.token_count <= self.hashed_count <= TOKENS_MAX:
            raise BadRef(f"kept tokens {self.token_count} of {self.hashed_count} are out of bounds (0..{TOKENS_MAX})")
        if len(self.segments) > SEGMENTS_MAX:
            raise BadRef(f"{len(self.segments)} segments, at most {SEGMENTS_MAX} are allowed")
        if sum(s.weight for s in self.segments) > BYTES_REF_MAX:
            raise BadRef(f"the reference is larger than {BYTES_REF_MAX} bytes")
        if len(self.lints) > LINTS_MAX or any(n < 0 for n in self.lints):
            raise BadRef(f"lint counts {self.lints[:LINTS_MAX]} are out of bounds")
        for s in self.segments:
            if s.tokens.stop > self.hashed_count:
                raise BadRef(f"segment {s.object_id} has rows up to token {s.tokens.stop} of {self.hashed_count}")

    @property
    def object_ids(self) -> tuple[str, ...]:
        """Every object once, in order."""
        return tuple(dict.fromkeys(s.object_id for s in self.segments))

    @property
    def byte_count(self) -> int:
        """Bytes of all objects that it names."""
        return sum({s.object_id: s.byte_count for s in self.segments}.values())

    def truncated(self, token_count: int) -> "PayloadRef":
        """The same arrays with fewer kept tokens; no byte moves. Raises ``BadRef`` if that would be more tokens."""
        if token_count > self.token_count:
            raise BadRef(f"cannot keep {token_count} tokens of a reference that keeps {self.token_count}")
        return msgspec.structs.replace(self, token_count=token_count)

    def text(self, run: str) -> str:
        """The form for people: ``fsref:<run>/<inc>/<seq>``, comma separated where there are several objects."""
        return ",".join(f"fsref:{check_run(run)}/{o}" for o in self.object_ids)

    def to_json(self) -> list[Any]:
        """Plain lists, strings and numbers, for ``trace.info``."""
        out = msgspec.to_builtins(self)
        assert isinstance(out, list)
        return out

    @classmethod
    def decode(cls, obj: Any) -> "PayloadRef":
        """From the JSON form; raises ``BadRef`` for anything malformed, before any I/O."""
        try:
            return msgspec.convert(obj, cls)
        except BadRef:
            raise
        except (msgspec.ValidationError, ValueError, RecursionError) as e:
            raise BadRef(f"not a payload reference: {e}") from e


class Part(NamedTuple):
    """A reference to rows of a longer sequence: a turn's, a node's, one engine's of several."""

    ref: PayloadRef
    start: int = 0
    """Position of its first token in the whole sequence."""
    tokens: TokenRange | None = None
    """Positions of the whole sequence that are taken from it; ``None``: all that it keeps."""
    source: str = ""
    """Who computed it; empty keeps what its segments say."""


def join(parts: Sequence[Part], *, token_ids: Sequence[int] | NDArray[np.integer[Any]]) -> PayloadRef:
    """One reference over the sequence ``token_ids`` [T] from parts that were written one by one; no byte moves.

    Parts are in order of precedence and may overlap or leave gaps, see ``PayloadRef.segments``. Statistics are the sums of the parts'
    (overlapping ragged rows count twice). Raises ``BadRef`` for parts of different schemas or beyond the sequence, ``PayloadError``
    if a part was stored for other token ids than the sequence has there.
    """
    if not parts:
        raise BadRef("nothing to join: a reference needs at least one part")
    ids = np.ascontiguousarray(token_ids, dtype=np.int32)
    first = parts[0].ref
    segments: list[Segment] = []
    for part in parts:
        ref, stop = part.ref, part.start + part.ref.hashed_count
        if ref.schema_hash != first.schema_hash:
            raise BadRef(f"parts of schemas {first.schema_hash.hex()} and {ref.schema_hash.hex()} cannot be joined")
        if part.start < 0 or stop > len(ids):
            raise BadRef(f"a part of tokens [{part.start}, {stop}) does not fit a sequence of {len(ids)} tokens")
        if token_hash(ids[part.start : stop]) != ref.token_hash:
            raise PayloadError(
                f"a part was stored for other token ids than those at [{part.start}, {stop}): they were re-tokenised, or its start is wrong"
            )
        kept = TokenRange(part.start, part.start + ref.token_count)
        wanted = kept if part.tokens is None else part.tokens.clip(kept)
        segments += [s for s in (_moved(s, part).within(wanted) for s in ref.segments) if len(s.tokens)]
    return PayloadRef(
        schema_hash=first.schema_hash,
        token_count=len(ids),
        token_hash=token_hash(ids),
        hashed_count=len(ids),
        segments=tuple(segments),
        stats=tuple((sum(r for r, _ in pairs), sum(v for _, v in pairs)) for pairs in zip(*(p.ref.stats for p in parts), strict=True)),
        lints=tuple(sum(n) for n in zip_longest(*(p.ref.lints for p in parts), fillvalue=0)),
    )


def _moved(segment: Segment, part: Part) -> Segment:
    return msgspec.structs.replace(segment, token_start=segment.token_start + part.start, source=part.source or segment.source)
