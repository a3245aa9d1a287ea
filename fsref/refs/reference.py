"""The reference: a name for one sample's arrays in a store."""

from typing import Any

import msgspec

from fsref.errors import BadRef
from fsref.refs.names import BYTES_OBJECT_MAX, BYTES_REF_MAX, SEGMENTS_MAX, TOKENS_MAX, TokenRange, check_run, split_object_id


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

    def __post_init__(self) -> None:
        split_object_id(self.object_id)
        if not 0 < self.byte_count <= BYTES_OBJECT_MAX:
            raise BadRef(f"{self.object_id}: object size {self.byte_count} is not in 1..{BYTES_OBJECT_MAX}")
        if not 0 <= self.row_start <= self.row_stop <= TOKENS_MAX or not 0 <= self.token_start <= TOKENS_MAX:
            raise BadRef(f"{self.object_id}: rows [{self.row_start}, {self.row_stop}) at token {self.token_start} are out of bounds")

    @property
    def tokens(self) -> TokenRange:
        """The token positions that this segment's rows stand at."""
        return TokenRange(self.token_start, self.token_start + self.row_stop - self.row_start)


class PayloadRef(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Names the arrays of one sample: JSON-able for messages, msgpack in step files, hashable.

    ``msgspec.to_builtins`` gives the JSON form (a list); ``PayloadRef.decode`` is the only way back in and validates.
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
    """Tile the stored tokens in ascending order; where merged payloads overlap, whoever builds the reference cuts the rows."""
    missing: bytes = b""
    """Missing token ranges per field, varint coded by ``fsref.plan.index``; empty if none."""
    stats: tuple[tuple[int, int], ...] = ()
    """Per ragged field in schema order: (rows that have values, values), so that metrics such as the mean kept-set size need no arrays."""

    def __post_init__(self) -> None:
        if len(self.schema_hash) != 8 or len(self.token_hash) != 8:
            raise BadRef("a reference has 8-byte schema and token hashes")
        if not 0 <= self.token_count <= self.hashed_count <= TOKENS_MAX:
            raise BadRef(f"kept tokens {self.token_count} of {self.hashed_count} are out of bounds (0..{TOKENS_MAX})")
        if len(self.segments) > SEGMENTS_MAX:
            raise BadRef(f"{len(self.segments)} segments, at most {SEGMENTS_MAX} are allowed")
        if sum(len(s.index) for s in self.segments) + len(self.missing) > BYTES_REF_MAX:
            raise BadRef(f"the reference is larger than {BYTES_REF_MAX} bytes")
        at = 0
        for s in self.segments:
            if s.token_start != at:
                raise BadRef(f"segment {s.object_id} starts at token {s.token_start}, {at} was due: segments tile the tokens in order")
            at = s.tokens.stop
        if self.segments and at != self.hashed_count:
            raise BadRef(f"the segments cover {at} tokens of {self.hashed_count}")

    @property
    def object_ids(self) -> tuple[str, ...]:
        return tuple(s.object_id for s in self.segments)

    @property
    def byte_count(self) -> int:
        """Bytes of all objects that it names."""
        return sum(s.byte_count for s in self.segments)

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
