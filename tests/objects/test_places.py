"""Decoded bytes to their places: all of a chunk, a run of it, a part of every row, many chunks and many reads at once."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsref.objects import ChunkJob, Cut, Fetch, Memory, encode_chunk, fetch, native, unpack
from fsref.reader import Reader
from fsref.refs import Codec, Dense, Ragged, TokenRange
from fsref.store import open_root
from fsref.writer import Receipts, Writer
from tests.objects.kernels import LZ4, NONE, kernels
from tests.support.payloads import payload, schema


def test_places_off_every_alignment_are_filled() -> None:
    kernels()
    values = np.random.default_rng(0).integers(0, 128, 4096).astype(np.uint8)
    packed, crc = encode_chunk(values, LZ4)
    stored = np.frombuffer(bytes(packed) + crc, np.uint8)
    for at in range(40):
        out = np.zeros(4096 + 64, np.uint8)
        assert unpack(stored, [ChunkJob(0, len(stored), 4096, 0, 4096, Memory(out), at)], LZ4) is None
        assert out[at : at + 4096].tobytes() == values.tobytes()
        assert not out[:at].any()
        assert not out[at + 4096 :].any()


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 40_000), st.sampled_from([1, 5, 9]), st.floats(0, 1), st.floats(0, 1), st.sampled_from(["lz4", "none", "zstd"]))
def test_any_run_of_a_chunks_bytes_comes_alone(count: int, codec_level: int, begin: float, end: float, name: str) -> None:
    kernels()
    values = (np.arange(count) * 7919 % 251 % 128).astype(np.uint8)
    codec = Codec(name=name, level=codec_level)  # type: ignore[arg-type]
    packed, crc = encode_chunk(values, codec)
    stored = np.frombuffer(bytes(packed) + crc, np.uint8)
    skip = int(begin * count)
    take = int(end * (count - skip))
    guarded = np.full(take + 64, 0xA5, np.uint8)
    for placed in (False, True):
        guarded[32 : 32 + take] = values if placed and take == count else 0
        job = ChunkJob(0, len(stored), count, skip, take, Memory(guarded), 32)
        assert unpack(stored, [job], codec, placed=placed and name == "none") is None
        assert guarded[32:-32].tobytes() == values[skip : skip + take].tobytes() or (placed and name != "none")
        assert set(guarded[:32]) | set(guarded[-32:]) == {0xA5}


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from(["lz4", "none", "zstd"]), st.sampled_from([1, 5]), st.booleans())
def test_a_part_of_every_row_comes_alone(data: st.DataObject, name: str, codec_level: int, with_kernels: bool) -> None:
    loaded = kernels()
    pitch, rows = data.draw(st.integers(1, 700)), data.draw(st.integers(1, 300))
    left = data.draw(st.integers(0, pitch - 1))
    width = data.draw(st.integers(1, pitch - left))
    stride = width + data.draw(st.integers(0, 40))
    first = data.draw(st.integers(0, rows))
    count = data.draw(st.integers(0, rows - first))
    padding = data.draw(st.integers(0, 50))
    values = (np.arange(rows * pitch + padding) * 7919 % 251 % 128).astype(np.uint8)
    codec = Codec(name=name, level=codec_level)  # type: ignore[arg-type]
    packed, crc = encode_chunk(values, codec)
    stored = np.frombuffer(bytes(packed) + crc, np.uint8)
    guarded = np.full(count * stride + 100, 0xA5, np.uint8)
    job = ChunkJob(0, len(stored), len(values), first * pitch, count * pitch, Memory(guarded), 32, Cut(pitch, left, width, stride))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "KERNELS", loaded if with_kernels else None)
        assert unpack(stored, [job], codec) is None
    expected = np.full_like(guarded, 0xA5)
    for row in range(count):
        at = (first + row) * pitch + left
        expected[32 + row * stride : 32 + row * stride + width] = values[at : at + width]
    assert np.array_equal(guarded, expected)


def test_a_cut_that_is_none_or_does_not_fit_is_refused() -> None:
    kernels()
    stored, out = np.zeros(104, np.uint8), Memory(np.zeros(50, np.uint8))
    good = ChunkJob(0, 104, 100, 0, 100, out, 0, Cut(10, 2, 5, 5))
    assert unpack(stored, [good], NONE, check=False) is None
    cuts = [Cut(10, 6, 5, 5), Cut(10, -1, 5, 5), Cut(10, 0, 5, 4), Cut(10, 0, 0, 5), Cut(10, 0, 5, 6), Cut(7, 0, 5, 5), Cut(0, 0, 0, 0)]
    for job in [*(good._replace(cut=c) for c in cuts), good._replace(skip=5, take=50), good._replace(at=1)]:
        with pytest.raises(IndexError):
            unpack(stored, [job], NONE)


def test_the_first_damaged_chunk_is_named_and_those_before_it_are_there() -> None:
    kernels()
    chunks = [np.full(1000, n, np.uint8) for n in range(4)]
    packed = [bytes(p) + c for p, c in (encode_chunk(c, LZ4) for c in chunks)]
    stored = np.frombuffer(b"".join(packed), np.uint8).copy()
    starts = np.cumsum([0, *map(len, packed)])
    stored[starts[2] + 20] ^= 1
    out = np.zeros((4, 1000), np.uint8)
    jobs = [ChunkJob(int(starts[n]), len(packed[n]), 1000, 0, 1000, Memory(out[n]), 0) for n in range(4)]
    failed = unpack(stored, jobs, LZ4)
    assert failed is not None
    assert failed[0] == 2
    assert "crc32c" in failed[1]
    assert np.array_equal(out[:2], chunks[:2])


def test_a_chunk_outside_the_stored_bytes_or_its_place_is_refused() -> None:
    stored, out = np.zeros(100, np.uint8), Memory(np.zeros(50, np.uint8))
    kernels()
    good = ChunkJob(0, 54, 50, 0, 50, out, 0)
    assert unpack(stored, [good], NONE, check=False) is None
    wrong: list[dict[str, int]] = [
        {"offset": 47},
        {"offset": -1},
        {"size": 101},
        {"size": 3},
        {"at": 1},
        {"at": -1},
        {"skip": 1},
        {"skip": -1},
    ]
    for change in [*wrong, {"take": 51}, {"take": -1}, {"nbytes": 49}, {"take": 10, "at": 41}]:
        with pytest.raises(IndexError):
            unpack(stored, [good._replace(**change)], NONE)  # type: ignore[arg-type]


def test_a_place_that_is_read_only_is_refused() -> None:
    with pytest.raises(ValueError, match="read-only"):
        Memory(np.frombuffer(bytes(8), np.uint8))


@pytest.mark.parametrize("codec", [LZ4, NONE], ids=["lz4", "none"])
@pytest.mark.parametrize("chunk_count", [1, 3, 400])
def test_ranges_of_a_file_are_read_and_decoded_up_to_the_first_that_fails(tmp_path: Path, codec: Codec, chunk_count: int) -> None:
    kernels()
    rng = np.random.default_rng(1)
    ranges = [[rng.integers(0, 100, 800).astype(np.uint8) for _ in range(chunk_count)] for _ in range(4)]
    data, reads, outs = bytearray(b"lead"), [], []
    for chunks in ranges:
        begin, jobs = len(data), []
        for chunk in chunks:
            packed, crc = encode_chunk(chunk, codec)
            data += b"gap"
            outs.append((chunk, Memory(np.zeros(800, np.uint8))))
            jobs.append(ChunkJob(len(data) - begin, len(packed) + 4, 800, 0, 800, outs[-1][1], 0))
            data += bytes(packed) + crc
        reads.append(Fetch(begin, len(data) - begin, jobs))
    path = tmp_path / "file"
    scratch = Memory(np.zeros(max(r.size for r in reads), np.uint8))
    fits = codec.name != "none" or chunk_count < 100  # so many pieces of one read are left to the reader's other way
    for damage, expected in ((None, 4), (reads[2].offset + reads[2].jobs[-1].offset + 9, 2)):
        broken = bytearray(data)
        if damage is not None:
            broken[damage] ^= 0x10
        path.write_bytes(broken)
        for _, out in outs:
            out.bytes[:] = 0
        fd = os.open(path, os.O_RDONLY)
        try:
            found = fetch(fd, reads, scratch, codec)
        finally:
            os.close(fd)
        damaged = damage is not None
        assert found == ((expected, expected + damaged, damaged) if fits else (0, 0, False))
        for chunk, out in outs[: found.done * chunk_count]:
            assert np.array_equal(chunk, out.bytes)
    path.write_bytes(data[:-1])
    with path.open("rb") as file:
        assert fetch(file.fileno(), reads, scratch, codec) == ((3, 3, True) if fits else (0, 0, False))
    assert fetch(-1, reads, scratch, codec) == (0, 0, fits)


def test_chunks_of_codec_none_out_of_order_are_left_to_the_other_way(tmp_path: Path) -> None:
    kernels()
    out = Memory(np.zeros(8, np.uint8))
    (tmp_path / "file").write_bytes(bytes(64))
    with (tmp_path / "file").open("rb") as file:
        jobs = [ChunkJob(20, 8, 4, 0, 4, out, 0), ChunkJob(0, 8, 4, 0, 4, out, 4)]
        assert fetch(file.fileno(), [Fetch(0, 40, jobs)], Memory(np.zeros(40, np.uint8)), NONE) == (0, 0, False)
    assert not out.bytes.any()


def test_parts_of_chunks_in_blocks_of_every_level_are_read_at_once(tmp_path: Path) -> None:
    kernels()
    values = np.random.default_rng(2).integers(0, 60, 4 << 20).astype(np.uint8)
    out = Memory(np.zeros(100, np.uint8))
    for codec_level in range(1, 10):
        codec = Codec(level=codec_level)
        packed, crc = encode_chunk(values, codec)
        (tmp_path / "file").write_bytes(bytes(packed) + crc)
        size = len(packed) + 4
        with (tmp_path / "file").open("rb") as file, ThreadPoolExecutor(1) as thread:  # whose memory has grown for nobody yet
            read = Fetch(0, size, [ChunkJob(0, size, values.nbytes, 2 << 20, 100, out, 0)])
            found = thread.submit(fetch, file.fileno(), [read], Memory(np.zeros(size, np.uint8)), codec).result()
        assert found == (1, 1, False), codec_level
        assert np.array_equal(out.bytes, values[2 << 20 :][:100])


@pytest.mark.parametrize("name", ["lz4", "none", "zstd"])
def test_samples_are_the_same_with_and_without_the_kernels(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels()
    run_schema = schema(codec=Codec(name=name))  # type: ignore[arg-type]
    with open_root(str(tmp_path), run="run", create=True) as store:
        ref = Writer(store, run_schema, Receipts("d")).put(payload(np.random.default_rng(3), run_schema, 5000).checked(run_schema))
        for tokens in (TokenRange(0, 5000), TokenRange(17, 4100), TokenRange(2048, 4096)):
            found = []
            for loaded in (native.KERNELS, None):
                with monkeypatch.context() as patch:
                    patch.setattr(native, "KERNELS", loaded)
                    with Reader(store, run_schema) as reader:
                        found.append(reader.read(ref, tokens=tokens))
            for field, ours in found[0].items():
                assert_same(ours, found[1][field])


def assert_same(ours: Dense | Ragged, theirs: Dense | Ragged) -> None:
    if isinstance(ours, Dense):
        assert isinstance(theirs, Dense)
        assert ours.rows.tobytes() == theirs.rows.tobytes()
        return
    assert isinstance(theirs, Ragged)
    assert ours.counts.tobytes() == theirs.counts.tobytes()
    assert {n: c.tobytes() for n, c in ours.columns.items()} == {n: c.tobytes() for n, c in theirs.columns.items()}
