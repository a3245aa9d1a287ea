"""A checked view of an object file without its reference: for inspection, recovery and tests. Not on the hot path.

Nothing in the file is believed: sizes are checked against the limits of the format before anything is allocated for them, the entries
must be exactly the chunks and documents of the layout that the attributes imply, and every array's own document must say what that layout
says, so that a Zarr tool and this reader see the same arrays (or neither does). What is allocated is one chunk, and the array asked for.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray
from zlib_ng.zlib_ng import crc32

from fsref.errors import BadRef, ConfigError, ObjectCorrupt
from fsref.objects.codec import decode_chunk, stored_bytes_max
from fsref.objects.metadata import FORMAT, array_document, group_document
from fsref.objects.zipfile import END_BYTES, ZipEntry, read_directory, read_end
from fsref.plan.layout import Chunk, Layout, check_sums, chunk_tokens
from fsref.refs import BYTES_OBJECT_MAX, TOKENS_MAX, Dense, FieldData, Ragged, Schema, TokenRange
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
        if file.byte_count > BYTES_OBJECT_MAX:
            raise ObjectCorrupt(f"{file.name} has {file.byte_count} bytes, at most {BYTES_OBJECT_MAX} are read")
        offset, size, count = read_end(self._bytes(max(0, file.byte_count - END_BYTES), min(END_BYTES, file.byte_count)), file.byte_count)
        entries = read_directory(self._bytes(offset, size), entries=count, offset=offset)
        self._entries = {e.name: e for e in entries}
        attributes = self._attributes()
        self.schema: Schema = attributes.schema
        self.token_count: int = attributes.token_count
        self.token_hash: bytes = _token_hash(attributes.token_hash)
        self.missing: Mapping[str, tuple[TokenRange, ...]] = _missing(attributes.missing)
        self.stats: Mapping[str, Mapping[str, int]] = attributes.stats
        if not 0 <= self.token_count <= TOKENS_MAX:
            raise ObjectCorrupt(f"{file.name} names {self.token_count} tokens, at most {TOKENS_MAX} are allowed")
        self.layout = self._layout(attributes)
        self._check_entries()

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
            out.append(EntryInfo(array.path, array.dtype, array.shape, array.chunk_shape, len(stored), sum(stored), array.nbytes))
        return out

    def read(self, field: str) -> FieldData:
        """All rows of a field. Raises ``ObjectCorrupt``, or ``KeyError`` for a field that the object does not hold."""
        if field not in self.fields:
            raise KeyError(f"{self._file.name} holds {list(self.fields)}, not {field!r}")
        data = {a.column: self._array(n) for n, a in enumerate(self.layout.arrays) if a.field.name == field}
        missing = self.missing.get(field, ())
        if "" in data:
            return Dense(data[""], missing, self.schema.field(field).id_space)
        rows = {c.name: data.pop(c.name) for c in self.schema.field(field).row_columns}
        return Ragged(data.pop("counts"), data, missing, rows)

    def _array(self, number: int) -> NDArray[Any]:
        array = self.layout.arrays[number]
        out = np.empty(array.shape, array.dtype)
        for chunk, values in self._decoded(self.layout, number):
            rows = values[: chunk.stop - chunk.start]
            if out.ndim > 1:
                layers = min(array.chunk_shape[1], array.shape[1] - chunk.layer)
                out[chunk.start : chunk.stop, chunk.layer : chunk.layer + layers] = rows[:, :layers]
            else:
                out[chunk.start : chunk.stop] = rows
        return out

    def _decoded(self, layout: Layout, number: int) -> Iterator[tuple[Chunk, NDArray[Any]]]:
        """Every chunk of an array, one after the other in the same memory."""
        array = layout.arrays[number]
        chunks = [c for c in layout.chunks if c.array == number]
        entries = [self._entry(c.name) for c in chunks]
        if big := [e for e in entries if e.size > stored_bytes_max(array.chunk_nbytes)]:
            raise ObjectCorrupt(f"{self._file.name}: {big[0].name} has {big[0].size} bytes, a chunk decodes to {array.chunk_nbytes}")
        scratch = np.empty(array.chunk_shape, array.dtype)
        for chunk, entry in zip(chunks, entries, strict=True):
            decode_chunk(self._data(entry), scratch, self.schema.codec)
            yield chunk, scratch

    def _data(self, entry: ZipEntry) -> NDArray[np.uint8]:
        """An entry's bytes, with the header before them checked in the same read."""
        lead = len(entry.header)
        out = np.empty(lead + entry.size, np.uint8)
        self._file.read_into(entry.offset - lead, out)
        if out[:lead].tobytes() != entry.header:
            raise ObjectCorrupt(f"{self._file.name}: the header of {entry.name} differs from the directory")
        return out[lead:]

    def _entry(self, name: str) -> ZipEntry:
        found = self._entries.get(name)
        if found is None:
            raise ObjectCorrupt(f"{self._file.name} lacks the entry {name}")
        return found

    def _check_entries(self) -> None:
        """Entries and documents are exactly those of the layout."""
        documents = {f"{a.path}/zarr.json": array_document(a, self.schema) for a in self.layout.arrays}
        documents |= {f"{f.name}/zarr.json": group_document() for f in self.schema.fields if f.ragged and f.name in self.fields}
        names = {c.name for c in self.layout.chunks} | set(documents) | {"zarr.json"}
        if lost := sorted(names - set(self._entries)):
            raise ObjectCorrupt(f"{self._file.name} lacks {len(lost)} entries, the first is {lost[0]}")
        if more := sorted(set(self._entries) - names):
            raise ObjectCorrupt(f"{self._file.name} has {len(more)} entries that its layout does not have, the first is {more[0]}")
        for name, expected in documents.items():
            if self._document(name) != expected:
                raise ObjectCorrupt(f"{self._file.name}: {name} does not describe the array that the root's attributes imply")

    def _bytes(self, offset: int, size: int) -> bytes:
        out = np.empty(size, np.uint8)
        self._file.read_into(offset, out)
        return out.tobytes()

    def _document(self, name: str) -> Any:
        entry = self._entry(name)
        if entry.size > METADATA_BYTES_MAX:
            raise ObjectCorrupt(f"{self._file.name}: {name} has {entry.size} bytes, at most {METADATA_BYTES_MAX} are read")
        data = self._data(entry).tobytes()
        if crc32(data) != entry.crc:
            raise ObjectCorrupt(f"{self._file.name}: {name} fails its crc32")
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as e:
            raise ObjectCorrupt(f"{self._file.name}: {name} is not JSON: {e}") from e

    def _attributes(self) -> _Attributes:
        document = self._document("zarr.json")
        try:
            if (document["zarr_format"], document["node_type"]) != (3, "group"):
                raise ObjectCorrupt(f"{self._file.name}: the root is not a Zarr v3 group")
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
        sums = {f.name: self._value_sums(f.name) for f in self.schema.fields if f.ragged and f.name in present}
        return self._checked(Layout(self.schema, present, self.token_count, sums))

    def _value_sums(self, field: str) -> list[int]:
        """Reads ``counts`` with the layout of a field without values, which places the counts' chunks alike."""
        ranges = -(-self.token_count // chunk_tokens(self.token_count)) if self.token_count else 0
        layout = self._checked(Layout(self.schema, (field,), self.token_count, {field: [0] * ranges}))
        sums, total = [], 0
        for chunk, counts in self._decoded(layout, 0):
            total += int(counts[: chunk.stop - chunk.start].sum(dtype=np.int64))
            sums.append(total)
        if not check_sums(sums):
            raise ObjectCorrupt(f"{self._file.name}: {field}/counts are not counts")
        return sums

    def _checked(self, layout: Layout) -> Layout:
        if excess := layout.excess:
            raise ObjectCorrupt(f"{self._file.name} has {excess}")
        return layout


def _token_hash(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError as e:
        raise ObjectCorrupt(f"the token hash {text[:40]!r} is not hexadecimal") from e


def _missing(found: Mapping[str, Sequence[tuple[int, int]]]) -> dict[str, tuple[TokenRange, ...]]:
    try:
        return {name: tuple(TokenRange(a, b) for a, b in ranges) for name, ranges in found.items()}
    except BadRef as e:
        raise ObjectCorrupt(f"the missing ranges are not ranges: {e}") from e


def view(file: ObjectFile) -> ObjectView:
    """Opens a view of an object. Raises ``ObjectCorrupt`` for anything that is not an intact fsref object."""
    return ObjectView(file)
