"""The nouns: what passes between env servers, orchestrator and trainer.

Owns ``Field``, ``Schema``, ``TokenRange``, ``Payload`` (arrays in memory) and ``PayloadRef`` (a name for arrays in a store),
with their checks. Refuses I/O, codecs and anything that knows where a store is: a reference is a name, not an address.

Shape letters: T tokens, L layers, K experts per token, N values of a ragged field.
"""

import enum
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from fsref.errors import BadRef, ConfigError, PayloadError

RUN_PATTERN: Final = r"[a-z0-9][a-z0-9._-]{0,127}"
ROLES: Final = ("env", "orc", "evl", "trn", "rec")
INCARNATION_PATTERN: Final = r"(?:env|orc|evl|trn|rec)\.[a-z0-9-]{1,40}\.[0-9a-f]{16}"
OBJECT_PATTERN: Final = INCARNATION_PATTERN + r"/(?:0|[1-9][0-9]{0,9})"
_RUN: Final = re.compile(RUN_PATTERN, re.ASCII)
_INCARNATION: Final = re.compile(INCARNATION_PATTERN, re.ASCII)
_OBJECT: Final = re.compile(OBJECT_PATTERN, re.ASCII)
_FIELD_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,62}", re.ASCII)

DTYPES: Final = frozenset(
    {"bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64"}
)
"""Fixed-size numeric dtypes that an object may hold; nothing else is ever decoded."""

TOKENS_MAX: Final = 1 << 27
BYTES_REF_MAX: Final = 64 << 10
BYTES_OBJECT_MAX: Final = (1 << 32) - 1
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
    if len(object_id) > 96 or not _OBJECT.fullmatch(object_id):
        raise BadRef(f"object id {object_id[:96]!r} does not match {OBJECT_PATTERN}")
    inc, seq = object_id.split("/")
    return inc, int(seq)


def object_name(object_id: str) -> str:
    """The object's name below the run's root: ``obj/<inc>/<seq:010d>.zip``."""
    inc, seq = split_object_id(object_id)
    return f"obj/{inc}/{seq:010d}.zip"


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


class Alignment(enum.StrEnum):
    """What row t belongs to."""

    INPUT = "input"
    """Row t belongs to token t as it was fed to the model (routing)."""
    TARGET = "target"
    """Row t is of the distribution that sampled token t (masks, heads); tokens that were not sampled have no values."""


class Column(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One flat array [N] of a ragged field."""

    name: str
    dtype: str

    def __post_init__(self) -> None:
        if not _FIELD_NAME.fullmatch(self.name) or self.name == "counts":
            raise ConfigError(f"column name {self.name!r} must match [a-z][a-z0-9_]* and not be 'counts'")
        if self.dtype not in DTYPES:
            raise ConfigError(f"column {self.name!r}: dtype {self.dtype!r} is not one of {sorted(DTYPES)}")


class Field(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Declares one named per-token array: dense ([T, *row_shape]) or, with columns, ragged (counts [T] and flat [N] columns)."""

    name: str
    """``[a-z][a-z0-9_]*``; also the name of the Zarr array or group."""
    alignment: Alignment
    """Which token a row belongs to."""
    dtype: str = ""
    """Dense: storage dtype. Empty if ragged."""
    row_shape: tuple[int, ...] = ()
    """Dense: the shape of one token's row, e.g. (layers, top_k)."""
    columns: tuple[Column, ...] = ()
    """Ragged: the flat arrays that share one ``counts``; slots keep their order, so paired columns stay paired."""
    logical_dtype: str = ""
    """What the stored bits mean where numpy has no such dtype: ``bfloat16`` is stored as uint16."""
    layer_ids: tuple[int, ...] = ()
    """Global layer ids of the first row axis; empty if the field has no layer axis."""
    layers_per_chunk: int = 0
    """Splits chunks along the layer axis for pipeline-parallel readers; 0 keeps all layers in one chunk."""
    expert_count: int = 0
    """Expert ids are in [0, expert_count); 0 where values are not expert ids. Decides uint8 (up to 256) or uint16."""
    id_space: Literal["", "logical", "physical"] = ""
    """Which expert numbering the ids are in (load balancers renumber)."""

    @property
    def ragged(self) -> bool:
        return bool(self.columns)

    def __post_init__(self) -> None:
        where = f"field {self.name!r}"
        if not _FIELD_NAME.fullmatch(self.name):
            raise ConfigError(f"field name {self.name!r} must match [a-z][a-z0-9_]* with at most 63 characters")
        if self.columns:
            if self.dtype or self.row_shape or self.layer_ids or self.layers_per_chunk:
                raise ConfigError(f"{where} has columns, so it is ragged and takes no dtype, row_shape or layers")
            if len({c.name for c in self.columns}) != len(self.columns):
                raise ConfigError(f"{where} names a column twice")
            return
        if self.dtype not in DTYPES:
            raise ConfigError(f"{where}: dtype {self.dtype!r} is not one of {sorted(DTYPES)}")
        if len(self.row_shape) > 3 or any(not 1 <= n <= 1 << 20 for n in self.row_shape):
            raise ConfigError(f"{where}: row_shape {self.row_shape} must have at most 3 axes of 1 to {1 << 20}")
        if self.logical_dtype and (self.logical_dtype, self.dtype) != ("bfloat16", "uint16"):
            raise ConfigError(f"{where}: logical_dtype {self.logical_dtype!r} on {self.dtype!r} is unknown; bfloat16 on uint16 is")
        if self.layer_ids and (not self.row_shape or len(self.layer_ids) != self.row_shape[0]):
            raise ConfigError(f"{where}: {len(self.layer_ids)} layer ids for row_shape {self.row_shape}")
        if len(set(self.layer_ids)) != len(self.layer_ids):
            raise ConfigError(f"{where}: layer ids repeat")
        if self.layers_per_chunk and not (self.row_shape and 1 <= self.layers_per_chunk <= self.row_shape[0]):
            raise ConfigError(f"{where}: layers_per_chunk {self.layers_per_chunk} does not fit row_shape {self.row_shape}")
        if self.expert_count and self.dtype != expert_dtype(self.expert_count):
            raise ConfigError(f"{where}: {self.expert_count} experts are stored as {expert_dtype(self.expert_count)}, not {self.dtype}")

    @property
    def row_nbytes(self) -> int:
        """Bytes of one dense row."""
        return int(np.prod(self.row_shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


def expert_dtype(expert_count: int) -> str:
    """uint8 up to 256 experts, uint16 above: from the count, never from the values, so that neighbours always agree."""
    if not 1 <= expert_count <= 1 << 16:
        raise ConfigError(f"expert_count {expert_count} is not in 1..65536")
    return "uint8" if expert_count <= 256 else "uint16"


def routed_experts(*, layer_ids: Sequence[int], top_k: int, expert_count: int, layers_per_chunk: int = 0) -> Field:
    """Router-replay rows [T, L, K]: the expert ids that the sampler used, slot order kept."""
    return Field(
        name="routed_experts",
        alignment=Alignment.INPUT,
        dtype=expert_dtype(expert_count),
        row_shape=(len(layer_ids), top_k),
        layer_ids=tuple(layer_ids),
        layers_per_chunk=layers_per_chunk,
        expert_count=expert_count,
        id_space="logical",
    )


def top_logprobs() -> Field:
    """Top-k logprob heads: ragged ids int32 and logprobs float32, bit-exact."""
    return Field(name="top_logprobs", alignment=Alignment.TARGET, columns=(Column("ids", "int32"), Column("logprobs", "float32")))


def sampling_mask(*, logprobs: bool = False) -> Field:
    """Ids int32 kept by top-p, top-k or min-p, in engine order; with ``logprobs`` the sampler's own beside them."""
    columns = (Column("ids", "int32"), Column("logprobs", "float32")) if logprobs else (Column("ids", "int32"),)
    return Field(name="sampling_mask", alignment=Alignment.TARGET, columns=columns)


class Codec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a chunk's bytes are packed. crc32c always follows; it is no setting."""

    name: Literal["lz4", "zstd", "blosclz", "none"] = "lz4"
    """Blosc's inner compressor with bitshuffle; ``none`` stores little-endian C-order bytes."""
    level: Annotated[int, msgspec.Meta(ge=0, le=9)] = 1
    """Blosc level. On routing, lz4 level 1 packs as tightly as level 5 at several times its speed."""


class Schema(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """What is equal for a whole run. Stored in run.json and in every step file; references name it by ``hash``."""

    fields: tuple[Field, ...]
    codec: Codec = Codec()

    def __post_init__(self) -> None:
        names = [f.name for f in self.fields]
        if len(set(names)) != len(names):
            raise ConfigError(f"the schema names a field twice: {names}")
        if not 1 <= len(names) <= 32:
            raise ConfigError(f"a schema has 1 to 32 fields, not {len(names)}")

    @cached_property
    def hash(self) -> bytes:
        """8-byte blake2b over the canonical JSON form."""
        return hashlib.blake2b(msgspec.json.encode(self, order="deterministic"), digest_size=8).digest()

    def field(self, name: str) -> Field:
        """The field of that name; ``KeyError`` names the ones there are."""
        for f in self.fields:
            if f.name == name:
                return f
        raise KeyError(f"the schema has no field {name!r}; it has {[f.name for f in self.fields]}")


@dataclass(frozen=True, eq=False)
class Dense:
    """A dense field's rows [T, *row_shape]; rows inside ``missing`` are fillers, not data."""

    rows: NDArray[Any]
    missing: tuple[TokenRange, ...] = ()


@dataclass(frozen=True, eq=False)
class Ragged:
    """A ragged field: ``counts`` int32 [T] and one flat array [N] per column, N = counts.sum()."""

    counts: NDArray[np.int32]
    columns: Mapping[str, NDArray[Any]]
    missing: tuple[TokenRange, ...] = ()


FieldData = Dense | Ragged


@dataclass(frozen=True, eq=False)
class Payload:
    """One branch's arrays in memory, by field name. Fields may be absent; what a run needs is checked by the roles.

    Every present field covers exactly ``len(token_ids)`` tokens; see ``checked`` for what that implies.
    """

    token_ids: NDArray[np.int32]
    fields: Mapping[str, FieldData]

    @property
    def token_count(self) -> int:
        return len(self.token_ids)

    def checked(self, schema: Schema) -> "Payload":
        """This payload normalised to ``schema``: little-endian, C order, storage dtype, missing dense rows filled.

        A missing dense row becomes a copy of the nearest earlier real row, else of the next one, so that every reader sees
        the same bytes whatever part it reads; coverage, not the value, says that it is missing. A missing ragged row has count 0.
        A dense field without any real row is absent.

        Raises ``PayloadError`` (which names the field) for an unknown field, a wrong shape or dtype, values that narrowing
        would change, expert ids outside [0, expert_count), or counts that do not add up.
        """
        out: dict[str, FieldData] = {}
        for name, data in self.fields.items():
            try:
                field = schema.field(name)
            except KeyError as e:
                raise PayloadError(str(e.args[0])) from None
            if field.ragged != isinstance(data, Ragged):
                raise PayloadError(f"field {name!r} is {'ragged' if field.ragged else 'dense'} in the schema, the arrays are not")
            _check_missing(name, data.missing, self.token_count)
            done = (
                _checked_ragged(field, data, self.token_count)
                if isinstance(data, Ragged)
                else _checked_dense(field, data, self.token_count)
            )
            if done is not None:
                out[name] = done
        return Payload(np.ascontiguousarray(self.token_ids, dtype=np.int32), {f.name: out[f.name] for f in schema.fields if f.name in out})


def _check_missing(name: str, missing: tuple[TokenRange, ...], token_count: int) -> None:
    end = -1
    for r in missing:
        if r.start <= end or len(r) == 0 or r.stop > token_count:
            raise PayloadError(
                f"field {name!r}: missing ranges {missing} must be ascending, apart, not empty and within {token_count} tokens"
            )
        end = r.stop


def narrow(name: str, array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """``array`` as little-endian, C-order ``dtype``; raises ``PayloadError`` where a value would change."""
    want = np.dtype(dtype)
    if array.dtype == want:
        return np.ascontiguousarray(array)
    if array.dtype.kind not in "biuf" or (array.dtype.kind == "f") != (want.kind == "f"):
        raise PayloadError(f"field {name!r}: dtype {array.dtype} cannot be stored as {dtype}")
    if want.kind == "f":
        if array.dtype.itemsize > want.itemsize:
            raise PayloadError(f"field {name!r}: {array.dtype} would lose bits as {dtype}; convert it where the loss is meant")
    elif array.size and want.kind != "b":
        low, high, info = int(array.min()), int(array.max()), np.iinfo(want)
        if low < info.min or high > info.max:
            raise PayloadError(f"field {name!r}: values {low}..{high} do not fit {dtype} ({info.min}..{info.max})")
    elif array.size and bool((array > 1).any()):
        raise PayloadError(f"field {name!r}: values above 1 do not fit bool")
    return np.ascontiguousarray(array, dtype=want)


def _checked_dense(field: Field, data: Dense, token_count: int) -> Dense | None:
    rows = np.asarray(data.rows)
    if rows.shape != (token_count, *field.row_shape):
        raise PayloadError(f"field {field.name!r}: shape {rows.shape} found, {(token_count, *field.row_shape)} needed")
    real = ~flags_of(data.missing, token_count)
    if token_count and not real.any():
        return None
    if data.missing:
        rows = rows[filler_rows(real)]
    if field.expert_count and rows.size:
        low, high = int(rows.min()), int(rows.max())
        if low < 0 or high >= field.expert_count:
            raise PayloadError(f"field {field.name!r}: expert ids {low}..{high} found, 0..{field.expert_count - 1} are legal")
    return Dense(narrow(field.name, rows, field.dtype), data.missing)


def filler_rows(real: NDArray[np.bool_]) -> NDArray[np.intp]:
    """For each row the row to copy: itself if real, else the nearest earlier real row, else the next one."""
    index = np.where(real, np.arange(len(real)), -1)
    index = np.maximum.accumulate(index)
    first = int(np.argmax(real))
    return np.where(index < 0, first, index)


def _checked_ragged(field: Field, data: Ragged, token_count: int) -> Ragged:
    counts = np.asarray(data.counts)
    if counts.shape != (token_count,):
        raise PayloadError(f"field {field.name!r}: counts of shape {counts.shape} found, ({token_count},) needed")
    if counts.size and int(counts.min()) < 0:
        raise PayloadError(f"field {field.name!r}: a count is negative ({int(counts.min())})")
    if set(data.columns) != {c.name for c in field.columns}:
        raise PayloadError(f"field {field.name!r}: columns {sorted(data.columns)} found, {[c.name for c in field.columns]} needed")
    total = int(counts.sum(dtype=np.int64))
    columns = {}
    for c in field.columns:
        values = np.asarray(data.columns[c.name])
        if values.shape != (total,):
            raise PayloadError(f"field {field.name!r}: {total} values by its counts, column {c.name!r} has shape {values.shape}")
        columns[c.name] = narrow(f"{field.name}.{c.name}", values, c.dtype)
    missing = flags_of(data.missing, token_count)
    if bool(counts[missing].any()):
        raise PayloadError(f"field {field.name!r}: a token range is declared missing but has values")
    return Ragged(narrow(f"{field.name}.counts", counts, "int32"), columns, data.missing)


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
