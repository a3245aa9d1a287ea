"""What is equal for a whole run: fields, their dtypes and shapes, the codec, and the hash that references name them by."""

import enum
import hashlib
import math
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Final, Literal

import msgspec
import numpy as np

from fsref.errors import ConfigError

_FIELD_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,62}", re.ASCII)

DTYPES: Final = frozenset(
    {"bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64"}
)
"""Fixed-size numeric dtypes that an object may hold; nothing else is ever decoded."""


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
        return math.prod(self.row_shape) * np.dtype(self.dtype).itemsize


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
