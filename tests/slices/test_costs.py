"""What objects cost beside their bytes: one per branch, no memory or descriptor for those that were read, no network for a folder."""

import os
import socket
from pathlib import Path

import numpy as np
import pytest

from fsref.plan import Source, packed
from fsref.reader import Reader
from fsref.refs import PayloadRef
from fsref.slices import read_slice
from fsref.store import Store, open_root
from fsref.writer import Writer
from tests.support.payloads import Numbers, payload, schema

SCHEMA = schema()


def put(store: Store, tokens: int, count: int) -> list[PayloadRef]:
    writer, rng = Writer(store, SCHEMA, Numbers(), durability="process"), np.random.default_rng(0)
    return [writer.put(payload(rng, SCHEMA, tokens)) for _ in range(count)]


def read(reader: Reader, ref: PayloadRef) -> int:
    """Bytes that were fetched."""
    before = reader.counters.bytes_fetched
    count = ref.token_count
    rows = packed([0, count], [0, count])
    names = [f.name for f in SCHEMA.fields]
    read_slice(reader, [Source(ref, tuple(names))], SCHEMA, rows=rows, fields=names, layers=None, step=0, expert_shards=1)
    return reader.counters.bytes_fetched - before


@pytest.mark.payload("G6")
def test_a_short_branch_with_five_fields_is_one_file_and_one_read(tmp_path: Path) -> None:
    with open_root(str(tmp_path), run="run", create=True) as store, Reader(store, SCHEMA) as reader:
        (ref,) = put(store, 64, 1)
        assert len(SCHEMA.fields) == 5
        files = [p for p in (tmp_path / "run" / "obj").rglob("*") if p.is_file()]
        assert len(files) == 1
        assert read(reader, ref) <= files[0].stat().st_size
        assert reader.counters.requests == 1


def _descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.payload("G5")
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc, in which descriptors are counted: run it on Linux")
def test_neither_objects_nor_stores_that_were_opened_leave_memory_or_descriptors(tmp_path: Path) -> None:
    """2,000 objects of 20 kB through one reader, and 200 stores of one object each: 40 MB if each kept what it decoded."""
    with open_root(str(tmp_path), run="run", create=True) as store:
        refs = put(store, 500, 20)

        def objects(count: int) -> None:
            with Reader(store, SCHEMA) as reader:
                for n in range(count):
                    assert read(reader, refs[n % len(refs)]) > 10_000

        def stores(count: int) -> None:
            for n in range(count):
                with open_root(str(tmp_path), run="run") as other, Reader(other, SCHEMA, threads=1) as reader:
                    read(reader, refs[n % len(refs)])

        objects(200)
        stores(20)
        memory, descriptors = _resident(), _descriptors()
        objects(2000)
        stores(200)
        assert _descriptors() == descriptors
        assert _resident() - memory < 16 << 20


@pytest.mark.payload("G7")
def test_a_folder_is_read_and_written_without_any_socket_whatever_proxy_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> socket.socket:
        raise AssertionError("a socket was made")

    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://192.0.2.1:9")
    monkeypatch.setattr(socket, "socket", refused)
    with open_root(str(tmp_path), run="run", create=True) as store, Reader(store, SCHEMA) as reader:
        (ref,) = put(store, 64, 1)
        assert read(reader, ref) > 0
        store.delete([f"obj/{p.relative_to(tmp_path / 'run' / 'obj')}" for p in (tmp_path / "run" / "obj").rglob("*.zip")])
    assert not list(tmp_path.rglob("*.zip"))
