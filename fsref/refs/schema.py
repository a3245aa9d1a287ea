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


MASK_FULL: Final = 1
"""Bit of a sampling mask's ``flags``: nothing was truncated for this token, its support is the whole vocabulary (and its row is empty)."""
MASK_TRUNCATED: Final = 2
"""Bit of ``flags``: the engine kept more ids than it reports, so the row is a part of the support."""

ROW_BYTES_MAX: Final = 1 << 26
COLUMNS_MAX: Final = 16
LAYER_ID_MAX: Final = 1 << 16
_LOGICAL: Final = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


class Alignment(enum.StrEnum):
    """What row t belongs to."""

    INPUT = "input"
    """Row t belongs to token t as it was fed to the model (routing)."""
    TARGET = "target"
    """Row t is of the distribution that sampled token t (masks, heads); tokens that were not sampled have no values."""


class Column(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One array of a ragged field: flat [N], or (among ``Field.row_columns``) one value per token [T]."""

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
    row_columns: tuple[Column, ...] = ()
    """Ragged: arrays with one value per token beside ``counts``, for example flags; 0 where a payload does not bring them."""
    logical_dtype: str = ""
    """What the stored bits mean where numpy has no such dtype: ``bfloat16`` is stored as uint16, ``float8_e4m3fn`` and ``float8_e5m2`` as
    uint8."""
    layer_ids: tuple[int, ...] = ()
    """Global layer ids of the first row axis; empty if the field has no layer axis. Prediction layers behind the decoder (MTP) are
    numbered from the decoder's layer count on, so that the first of them is never taken for decoder layer 0."""
    layer_count: int = 0
    """All decoder layers of the model. Where set, a payload may also bring rows of all of them, and is cut to ``layer_ids``."""
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
            self._check_ragged(where)
            return
        if self.row_columns:
            raise ConfigError(f"{where} has row_columns, which stand beside the columns of a ragged field; a dense one has none")
        if self.dtype not in DTYPES:
            raise ConfigError(f"{where}: dtype {self.dtype!r} is not one of {sorted(DTYPES)}")
        if len(self.row_shape) > 3 or any(not 1 <= n <= 1 << 20 for n in self.row_shape):
            raise ConfigError(f"{where}: row_shape {self.row_shape} must have at most 3 axes of 1 to {1 << 20}")
        if self.row_nbytes > ROW_BYTES_MAX:
            raise ConfigError(
                f"{where}: a row of {self.row_shape} {self.dtype} has {self.row_nbytes} bytes, at most {ROW_BYTES_MAX} are allowed"
            )
        if self.logical_dtype and _LOGICAL.get(self.logical_dtype) != self.dtype:
            known = ", ".join(f"{k} on {v}" for k, v in _LOGICAL.items())
            raise ConfigError(f"{where}: logical_dtype {self.logical_dtype!r} on {self.dtype!r} is unknown; known are {known}")
        if self.expert_count and self.dtype != expert_dtype(self.expert_count):
            raise ConfigError(f"{where}: {self.expert_count} experts are stored as {expert_dtype(self.expert_count)}, not {self.dtype}")
        self._check_layers(where)

    def _check_ragged(self, where: str) -> None:
        if self.dtype or self.row_shape or self.layer_ids or self.layers_per_chunk or self.layer_count:
            raise ConfigError(f"{where} has columns, so it is ragged and takes no dtype, row_shape or layers")
        names = [c.name for c in (*self.columns, *self.row_columns)]
        if len(set(names)) != len(names):
            raise ConfigError(f"{where} names a column twice")
        if len(names) > COLUMNS_MAX:
            raise ConfigError(f"{where} has {len(names)} columns, at most {COLUMNS_MAX} are allowed")

    def _check_layers(self, where: str) -> None:
        ids = self.layer_ids
        if ids and (not self.row_shape or len(ids) != self.row_shape[0]):
            raise ConfigError(f"{where}: {len(ids)} layer ids for row_shape {self.row_shape}")
        if len(set(ids)) != len(ids) or any(not 0 <= n <= LAYER_ID_MAX for n in ids):
            raise ConfigError(f"{where}: layer ids {list(ids)} must be distinct and in 0..{LAYER_ID_MAX}")
        if self.layer_count and (not ids or not len(ids) <= self.layer_count <= LAYER_ID_MAX or max(ids) >= self.layer_count):
            raise ConfigError(f"{where}: layer_count {self.layer_count} does not hold the layer ids {list(ids)}")
        if self.layers_per_chunk and not (self.row_shape and 1 <= self.layers_per_chunk <= self.row_shape[0]):
            raise ConfigError(f"{where}: layers_per_chunk {self.layers_per_chunk} does not fit row_shape {self.row_shape}")

    @property
    def row_nbytes(self) -> int:
        """Bytes of one dense row."""
        return math.prod(self.row_shape) * np.dtype(self.dtype).itemsize


def expert_dtype(expert_count: int) -> str:
    """uint8 up to 256 experts, uint16 above: from the count, never from the values, so that neighbours always agree."""
    if not 1 <= expert_count <= 1 << 16:
        raise ConfigError(f"expert_count {expert_count} is not in 1..65536")
    return "uint8" if expert_count <= 256 else "uint16"


def routed_experts(
    *,
    layer_ids: Sequence[int],
    top_k: int,
    expert_count: int,
    layers_per_chunk: int = 0,
    layer_count: int = 0,
    id_space: Literal["logical", "physical"] = "logical",
) -> Field:
    """Router-replay rows [T, L, K]: the expert ids that the sampler used, slot order kept.

    With ``id_space="physical"`` the ids number the replicas of a load balancer, and ``expert_count`` counts these (redundant ones too).
    """
    return Field(
        name="routed_experts",
        alignment=Alignment.INPUT,
        dtype=expert_dtype(expert_count),
        row_shape=(len(layer_ids), top_k),
        layer_ids=tuple(layer_ids),
        layer_count=layer_count,
        layers_per_chunk=layers_per_chunk,
        expert_count=expert_count,
        id_space=id_space,
    )


def top_logprobs() -> Field:
    """Top-k logprob heads: ragged ids int32 and logprobs float32, bit-exact. k may differ from row to row."""
    return Field(name="top_logprobs", alignment=Alignment.TARGET, columns=(Column("ids", "int32"), Column("logprobs", "float32")))


def sampling_mask(*, logprobs: bool = False) -> Field:
    """Ids int32 kept by top-p, top-k or min-p, in engine order; with ``logprobs`` the sampler's own beside them.

    Beside the counts stand ``flags`` per token (``MASK_FULL``, ``MASK_TRUNCATED``): an empty row of a token that was not sampled, or has no
    mask, has flags 0; that of a token sampled from the whole vocabulary has ``MASK_FULL``.
    """
    columns = (Column("ids", "int32"), Column("logprobs", "float32")) if logprobs else (Column("ids", "int32"),)
    return Field(name="sampling_mask", alignment=Alignment.TARGET, columns=columns, row_columns=(Column("flags", "uint8"),))


class Codec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a chunk's bytes are packed. crc32c always follows; it is no setting."""

    name: Literal["lz4", "zstd", "blosclz", "none"] = "lz4"
    """Blosc's inner compressor with bitshuffle; ``none`` stores little-endian C-order bytes."""
    level: Annotated[int, msgspec.Meta(ge=0, le=9)] = 5
    """Blosc level. With lz4, all levels pack and encode alike; at 4 and 5 blocks are of 512 KiB, which decode fastest."""


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
