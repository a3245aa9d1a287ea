"""Objects that were damaged where they lie: an error of the right class, never zeros, never other rows."""

import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fsref.errors import ObjectCorrupt
from fsref.objects.view import view
from fsref.reader import Reader, failure_kind
from fsref.refs import Dense, FieldData, Payload, PayloadRef, Ragged, Schema, object_name
from fsref.store.posix import PosixFile, PosixStore
from fsref.writer import Writer
from tests.support.payloads import Numbers, payload, schema

SCHEMA = schema(layers=2)


class Lying:
    """One object in a store, and its file."""

    def __init__(self, folder: Path, *, tokens: int = 40) -> None:
        self.store = PosixStore(folder, create=True)
        self.arrays: Payload = payload(np.random.default_rng(tokens), SCHEMA, tokens)
        self.ref: PayloadRef = Writer(self.store, SCHEMA, Numbers(), durability="process").put(self.arrays)
        self.path = folder / object_name(self.ref.object_ids[0])
        self.data = self.path.read_bytes()

    def read(self) -> dict[str, FieldData]:
        with Reader(self.store, SCHEMA, retries_max=0) as reader:
            return reader.read(self.ref)

    def seen(self) -> tuple[Schema, int, bytes, dict[str, FieldData]]:
        """All that inspection shows of it."""
        with self.store.open(object_name(self.ref.object_ids[0])) as file:
            found = view(file)
            return found.schema, found.token_count, found.token_hash, {name: found.read(name) for name in found.fields}


@pytest.fixture
def lying(tmp_path: Path) -> Lying:
    return Lying(tmp_path)


def same(a: dict[str, FieldData], b: dict[str, FieldData]) -> bool:
    return {n: _bytes(d) for n, d in a.items()} == {n: _bytes(d) for n, d in b.items()}


def _bytes(data: FieldData) -> tuple[bytes, ...]:
    if isinstance(data, Dense):
        return (data.rows.tobytes(),)
    assert isinstance(data, Ragged)
    return (data.counts.tobytes(), *(data.columns[n].tobytes() for n in sorted(data.columns)))


@pytest.mark.fault(42)
def test_an_object_cut_off_anywhere_is_refused_before_its_bytes_are_used(lying: Lying) -> None:
    size = len(lying.data)
    for length in [*range(0, size, 97), size - 1]:
        lying.path.write_bytes(lying.data[:length])
        with pytest.raises(ObjectCorrupt, match="truncated") as caught:
            lying.read()
        assert failure_kind(caught.value) == "corrupt"
        with pytest.raises(ObjectCorrupt):
            lying.seen()
    lying.path.write_bytes(lying.data + b"\0")
    with pytest.raises(ObjectCorrupt, match="truncated or replaced"):
        lying.read()


@pytest.mark.fault(42)
def test_an_object_that_shrinks_after_it_was_opened_is_refused(lying: Lying, monkeypatch: pytest.MonkeyPatch) -> None:
    read_into = PosixFile.read_into

    def shrink_first(self: PosixFile, offset: int, out: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        lying.path.write_bytes(lying.data[: offset + len(out) // 2])
        read_into(self, offset, out)

    monkeypatch.setattr(PosixFile, "read_into", shrink_first)
    with pytest.raises(ObjectCorrupt, match="truncated"):
        lying.read()


@pytest.mark.fault(43)
def test_no_flipped_byte_anywhere_in_an_object_changes_what_is_read(lying: Lying) -> None:
    """In a chunk, in the metadata, in the directory: an error, or (a byte that this reader does not use) the same arrays."""
    good, seen = lying.read(), lying.seen()
    refused = refused_by_view = 0
    for at in range(0, len(lying.data), 17):
        damaged = bytearray(lying.data)
        damaged[at] ^= 1 << at % 8
        lying.path.write_bytes(damaged)
        try:
            assert same(lying.read(), good), at
        except ObjectCorrupt:
            refused += 1
        try:
            again = lying.seen()
        except ObjectCorrupt:
            refused_by_view += 1
        else:
            assert again[:3] == seen[:3], at
            assert same(again[3], seen[3]), at
    assert refused > 20
    assert refused_by_view > refused


@pytest.mark.fault(43)
def test_a_byte_that_was_wrong_once_is_read_again(lying: Lying, monkeypatch: pytest.MonkeyPatch) -> None:
    read_into, wrong = PosixFile.read_into, [True]

    def flip_once(self: PosixFile, offset: int, out: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        read_into(self, offset, out)
        if wrong:
            wrong.clear()
            out[len(out) // 2] ^= 1

    good = lying.read()
    monkeypatch.setattr(PosixFile, "read_into", flip_once)
    with Reader(lying.store, SCHEMA) as reader:
        assert same(reader.read(lying.ref), good)
        assert reader.counters.retries == 1


def without_entry(path: Path, name: str) -> None:
    with zipfile.ZipFile(path) as archive:
        kept = {i.filename: archive.read(i) for i in archive.infolist() if i.filename != name}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for entry, data in kept.items():
            archive.writestr(zipfile.ZipInfo(entry), data)


def chunks(path: Path) -> list[zipfile.ZipInfo]:
    with zipfile.ZipFile(path) as archive:
        return [i for i in archive.infolist() if "/c/" in i.filename]


@pytest.mark.fault(44)
def test_a_missing_chunk_is_an_error_and_never_a_fill_value(lying: Lying) -> None:
    for entry in chunks(lying.path):
        lying.path.write_bytes(lying.data)
        without_entry(lying.path, entry.filename)
        with pytest.raises(ObjectCorrupt, match="truncated or replaced"):
            lying.read()
        with pytest.raises(ObjectCorrupt):
            lying.seen()


@pytest.mark.fault(44)
@pytest.mark.parametrize("fill", [lambda size: b"\0" * size, lambda size: b"\xff" * size], ids=["zeros", "ones"])
def test_a_hole_in_the_place_of_a_chunk_is_an_error(lying: Lying, fill: Callable[[int], bytes]) -> None:
    """What a lost block of a filesystem looks like: the size is right, the bytes are zeros."""
    for entry in chunks(lying.path):
        at = lying.data.index(entry.filename.encode(), entry.header_offset) + len(entry.filename)
        lying.path.write_bytes(lying.data[:at] + fill(entry.compress_size) + lying.data[at + entry.compress_size :])
        with pytest.raises(ObjectCorrupt):
            lying.read()
        with pytest.raises(ObjectCorrupt):
            lying.seen()
