"""The order of chunks in an object: token range first, then field, so that the prefix that survives truncation is one byte range.

Shape letters: T tokens, R token ranges, N values of a ragged field, C values per flat chunk.

Every offset follows from the sizes alone: chunks are written back to back from byte 0, each behind a ZIP local header of
``30 + len(name)`` bytes, metadata comes last. That is why a reference needs sizes and value sums, and no offsets.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from fsref.refs import BYTES_CHUNK_MAX, BYTES_OBJECT_MAX, Field, Schema, TokenRange

ZIP_HEADER_BYTES: Final = 30
CHUNK_TOKENS_MIN: Final = 2048
SHUFFLED_VALUES: Final = 8
"""Blosc leaves a block whose number of values is no multiple of this as it is: nothing is shuffled, so nothing packs."""
RANGES_TARGET: Final = 16
ENTRIES_MAX: Final = 4096
"""Entries of an object: chunks and metadata documents."""


def chunk_tokens(token_count: int) -> int:
    """Tokens per range: max(2,048, T / 16 rounded up to a power of two), and never more than T itself (at least 1)."""
    wanted = -(-token_count // RANGES_TARGET)
    power = 1 << max(0, (wanted - 1).bit_length())
    return max(1, min(token_count, max(CHUNK_TOKENS_MIN, power)))


class Array(NamedTuple):
    """One Zarr array of an object."""

    path: str
    """Below the group's root, for example ``top_logprobs/ids``."""
    dtype: str
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    field: Field
    column: str
    """``""`` for a dense field, ``counts``, or the column's name."""
    flat: bool
    """Whether it holds a ragged field's values [N]; else one row per token."""
    chunk_nbytes: int
    """Decoded bytes of every chunk; edge chunks are padded to the full shape, as Zarr has it."""

    @property
    def nbytes(self) -> int:
        """Decoded bytes of all rows."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def chunk_count(self) -> int:
        return math.prod(-(-length // step) for length, step in zip(self.shape, self.chunk_shape, strict=True))


def _array(
    path: str, dtype: str, shape: tuple[int, ...], chunk_shape: tuple[int, ...], *, field: Field, column: str = "", flat: bool = False
) -> Array:
    return Array(path, dtype, shape, chunk_shape, field, column, flat, math.prod(chunk_shape) * np.dtype(dtype).itemsize)


class Chunk(NamedTuple):
    """One chunk in file order."""

    array: int
    """Index into ``Layout.arrays``."""
    range_index: int
    """The token range that it is stored with."""
    name: str
    """ZIP entry name."""
    start: int
    """First row (or flat value) that it holds."""
    stop: int
    """End of its real rows (values); the rest of its decoded bytes is padding."""
    layer: int
    """First position on the layer axis; 0 where that axis is not split."""


@dataclass(frozen=True)
class Layout:
    """Arrays and chunks of one object, in file order; a pure function of its arguments."""

    schema: Schema
    present: tuple[str, ...]
    """Names of the fields that the object holds, in schema order."""
    token_count: int
    value_sums: Mapping[str, Sequence[int]]
    """Per present ragged field: values up to the end of each token range (ascending, length R)."""

    @cached_property
    def range_tokens(self) -> int:
        return chunk_tokens(self.token_count)

    @cached_property
    def range_count(self) -> int:
        return -(-self.token_count // self.range_tokens) if self.token_count else 0

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        out: list[Array] = []
        tokens, step = self.token_count, self.range_tokens
        for field in self._fields:
            if not field.ragged:
                layers = field.layers_per_chunk or (field.row_shape[0] if field.row_shape else 0)
                inner = (layers, *field.row_shape[1:]) if field.row_shape else ()
                out.append(_array(field.name, field.dtype, (tokens, *field.row_shape), (step, *inner), field=field))
                continue
            per_token = [("counts", "int32"), *((c.name, c.dtype) for c in field.row_columns)]
            out += [_array(f"{field.name}/{name}", dtype, (tokens,), (step,), field=field, column=name) for name, dtype in per_token]
            values = self._values(field)
            per_chunk = max(1, -(-values // max(1, self.range_count)))
            per_chunk += -per_chunk % SHUFFLED_VALUES
            out += [
                _array(f"{field.name}/{c.name}", c.dtype, (values,), (per_chunk,), field=field, column=c.name, flat=True)
                for c in field.columns
            ]
        return tuple(out)

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        by_range: list[list[Chunk]] = [[] for _ in range(self.range_count)]
        for number, array in enumerate(self.arrays):
            place = self._flat_chunks if array.flat else self._token_chunks
            for chunk in place(number, array):
                by_range[chunk.range_index].append(chunk)
        return tuple(c for chunks in by_range for c in chunks)

    @property
    def entry_count(self) -> int:
        """Chunks and metadata documents, counted without naming them."""
        return 1 + sum(f.ragged for f in self._fields) + sum(1 + a.chunk_count for a in self.arrays)

    @property
    def excess(self) -> str:
        """Which limit of the format the layout breaks; empty if none. Ask before ``chunks``: a hostile layout may have billions."""
        if self.entry_count > ENTRIES_MAX:
            return f"{self.entry_count} entries, at most {ENTRIES_MAX} are allowed"
        for a in self.arrays:
            if a.chunk_nbytes > BYTES_CHUNK_MAX or a.nbytes > BYTES_OBJECT_MAX:
                return (
                    f"array {a.path} of {a.nbytes} bytes in chunks of {a.chunk_nbytes}; "
                    f"{BYTES_OBJECT_MAX} in chunks of {BYTES_CHUNK_MAX} are allowed"
                )
        return ""

    def tokens_of(self, range_index: int) -> TokenRange:
        """The tokens of one range."""
        start = range_index * self.range_tokens
        return TokenRange(start, min(start + self.range_tokens, self.token_count))

    def value_start(self, field: str, range_index: int) -> int:
        """Values of a ragged field before the given range."""
        return self.value_sums[field][range_index - 1] if range_index else 0

    @cached_property
    def _fields(self) -> tuple[Field, ...]:
        return tuple(f for f in self.schema.fields if f.name in self.present)

    def _values(self, field: Field) -> int:
        sums = self.value_sums[field.name]
        return sums[-1] if sums else 0

    def _token_chunks(self, number: int, array: Array) -> list[Chunk]:
        out = []
        step = self.range_tokens
        tail = "/0" * max(0, len(array.shape) - 2)
        per_layer = array.chunk_shape[1] if len(array.shape) > 1 else 0
        layer_chunks = -(-array.shape[1] // per_layer) if per_layer else 1
        for r in range(self.range_count):
            start = r * step
            stop = min(start + step, self.token_count)
            for layer in range(layer_chunks):
                key = f"{array.path}/c/{r}/{layer}{tail}" if per_layer else f"{array.path}/c/{r}"
                out.append(Chunk(number, r, key, start, stop, layer * per_layer))
        return out

    def _flat_chunks(self, number: int, array: Array) -> list[Chunk]:
        out = []
        values, per_chunk = array.shape[0], array.chunk_shape[0]
        sums = self.value_sums[array.field.name]
        at = 0
        for n in range(-(-values // per_chunk)):
            start = n * per_chunk
            while sums[at] <= start:
                at += 1
            out.append(Chunk(number, at, f"{array.path}/c/{n}", start, min(start + per_chunk, values), 0))
        return out


def check_sums(sums: Sequence[int]) -> bool:
    """Whether value sums ascend from 0 on."""
    return all(a <= b for a, b in pairwise((0, *sums)))
