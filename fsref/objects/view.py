"""A checked view of an object file without its reference: for inspection, recovery and tests. Not on the hot path.

Everything is bounded by the file and by the layout that the attributes imply; the chunk entries must be exactly the layout's.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from fsref.errors import BadRef, ConfigError, ObjectCorrupt
from fsref.objects.codec import decode_chunk
from fsref.objects.metadata import FORMAT
from fsref.objects.zipfile import END_BYTES, ZipEntry, read_directory, read_end
from fsref.plan.layout import Layout, check_sums, chunk_tokens
from fsref.refs import TOKENS_MAX, Dense, FieldData, Ragged, Schema, TokenRange
from fsref.store import ObjectFile

METADATA_BYTES_MAX: Final = 1 << 20


@dataclass(frozen=True)
class EntryInfo:
    """One array of an object, for people."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    chunks: int
    bytes_stored: int
    bytes_raw: int


class _Attributes(msgspec.Struct, frozen=True):
    format: int
    schema: Schema
    fields: tuple[str, ...]
    token_count: int
    token_hash: str
    missing: dict[str, list[tuple[int, int]]]
    stats: dict[str, dict[str, int]]


class ObjectView:
    """An object's schema, coverage and arrays. Holds the open file; close it by closing the file."""

    def __init__(self, file: ObjectFile) -> None:
        self._file = file
        offset, size, count = read_end(self._bytes(max(0, file.byte_count - END_BYTES), min(END_BYTES, file.byte_count)), file.byte_count)
        entries = read_directory(self._bytes(offset, size), entries=count, offset=offset)
        self._entries = {e.name: e for e in entries}
        attributes = self._attributes()
        self.schema: Schema = attributes.schema
        self.token_count: int = attributes.token_count
        self.token_hash: bytes = bytes.fromhex(attributes.token_hash)
        self.missing: Mapping[str, tuple[TokenRange, ...]] = {
            name: tuple(TokenRange(a, b) for a, b in ranges) for name, ranges in attributes.missing.items()
        }
        self.stats: Mapping[str, Mapping[str, int]] = attributes.stats
        if not 0 <= self.token_count <= TOKENS_MAX:
            raise ObjectCorrupt(f"{file.name} names {self.token_count} tokens, at most {TOKENS_MAX} are allowed")
        self.layout = self._layout(attributes)
        lost = [c.name for c in self.layout.chunks if c.name not in self._entries]
        if lost:
            raise ObjectCorrupt(f"{file.name} lacks {len(lost)} chunks, the first is {lost[0]}")

    @property
    def fields(self) -> tuple[str, ...]:
        return self.layout.present

    @property
    def byte_count(self) -> int:
        return self._file.byte_count

    def arrays(self) -> list[EntryInfo]:
        """Every array in file order, with stored and raw sizes."""
        out = []
        for number, array in enumerate(self.layout.arrays):
            stored = [self._entries[c.name].size for c in self.layout.chunks if c.array == number]
            raw = int(np.prod(array.shape, dtype=np.int64)) * np.dtype(array.dtype).itemsize
            out.append(EntryInfo(array.path, array.dtype, array.shape, array.chunk_shape, len(stored), sum(stored), raw))
        return out

    def read(self, field: str) -> FieldData:
        """All rows of a field. Raises ``ObjectCorrupt``, or ``KeyError`` for a field that the object does not hold."""
        if field not in self.fields:
            raise KeyError(f"{self._file.name} holds {list(self.fields)}, not {field!r}")
        data = {a.column: self._array(n) for n, a in enumerate(self.layout.arrays) if a.field.name == field}
        missing = self.missing.get(field, ())
        if "" in data:
            return Dense(data[""], missing)
        return Ragged(data.pop("counts"), data, missing)

    def _array(self, number: int) -> NDArray[Any]:
        array = self.layout.arrays[number]
        out = np.empty(array.shape, array.dtype)
        scratch = np.empty(array.chunk_shape, array.dtype)
        for chunk in self.layout.chunks:
            if chunk.array != number:
                continue
            entry = self._entries[chunk.name]
            stored = np.empty(entry.size, np.uint8)
            self._file.read_into(entry.offset, stored)
            decode_chunk(stored, scratch, self.schema.codec)
            rows = scratch[: chunk.stop - chunk.start]
            if out.ndim > 1:
                layers = min(array.chunk_shape[1], array.shape[1] - chunk.layer)
                out[chunk.start : chunk.stop, chunk.layer : chunk.layer + layers] = rows[:, :layers]
            else:
                out[chunk.start : chunk.stop] = rows
        return out

    def _bytes(self, offset: int, size: int) -> bytes:
        out = np.empty(size, np.uint8)
        self._file.read_into(offset, out)
        return out.tobytes()

    def _document(self, name: str) -> Any:
        entry: ZipEntry | None = self._entries.get(name)
        if entry is None or entry.size > METADATA_BYTES_MAX:
            raise ObjectCorrupt(f"{self._file.name} has no {name} of a sane size")
        try:
            return json.loads(self._bytes(entry.offset, entry.size))
        except ValueError as e:
            raise ObjectCorrupt(f"{self._file.name}: {name} is not JSON: {e}") from e

    def _attributes(self) -> _Attributes:
        document = self._document("zarr.json")
        try:
            raw = document["attributes"]["fsref"]
            if raw["format"] != FORMAT:
                raise ObjectCorrupt(f"{self._file.name} has object format {raw['format']}, this version reads {FORMAT}")
            return msgspec.convert(raw, _Attributes)
        except (KeyError, TypeError, msgspec.ValidationError, BadRef, ConfigError) as e:
            raise ObjectCorrupt(f"{self._file.name}: the root attributes are not fsref's: {e}") from e

    def _layout(self, attributes: _Attributes) -> Layout:
        """The layout needs value sums per token range, which the counts give."""
        present = attributes.fields
        if [f.name for f in self.schema.fields if f.name in present] != list(present):
            raise ObjectCorrupt(f"{self._file.name} names fields {present} that its schema does not have in that order")
        sums: dict[str, list[int]] = {}
        for field in self.schema.fields:
            if field.ragged and field.name in present:
                sums[field.name] = self._value_sums(field.name)
        return Layout(self.schema, present, self.token_count, sums)

    def _value_sums(self, field: str) -> list[int]:
        """Reads ``counts`` with the layout of a field without values, which places the counts' chunks alike."""
        step = chunk_tokens(self.token_count)
        ranges = -(-self.token_count // step) if self.token_count else 0
        self.layout = Layout(self.schema, (field,), self.token_count, {field: [0] * ranges})
        counts = self._array(0).astype(np.int64) if all(c.name in self._entries for c in self.layout.chunks) else None
        if counts is None:
            raise ObjectCorrupt(f"{self._file.name} lacks a chunk of {field}/counts")
        sums = [int(n) for n in np.cumsum(np.add.reduceat(counts, np.arange(0, self.token_count, step)))] if ranges else []
        if not check_sums(sums):
            raise ObjectCorrupt(f"{self._file.name}: {field}/counts are not counts")
        return sums


def view(file: ObjectFile) -> ObjectView:
    """Opens a view of an object. Raises ``ObjectCorrupt`` for anything that is not an intact fsref object."""
    return ObjectView(file)
