"""The compiled kernels against numcodecs and google_crc32c: the same bytes, on every processor, and no byte beyond them."""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numcodecs import blosc
from numpy.typing import NDArray

from fsref.doctor import kernels as doctor_line
from fsref.objects import ChunkJob, Cut, Fetch, Memory, encode_chunk, fetch, native, unpack
from fsref.objects.codec import crc32c, shuffle_width
from fsref.reader import Reader
from fsref.refs import Codec, Dense, Ragged, TokenRange
from fsref.store import open_root
from fsref.writer import Receipts, Writer
from tests.support import needs
from tests.support.payloads import payload, schema
from tools.build_kernels import FLAGS, SOURCE, compile_kernels

LZ4, NONE = Codec(), Codec(name="none")
ROOT = Path(__file__).resolve().parents[2]


def kernels() -> native.Kernels:
    needs.program("cc")
    assert native.KERNELS is not None, native.ABOUT
    return native.KERNELS


@pytest.fixture(params=[1, 2])
def level(request: pytest.FixtureRequest) -> Iterator[int]:
    loaded, wanted = kernels(), int(request.param)
    best = loaded.level
    if wanted > best:
        pytest.skip("this processor has no AVX-512 with GFNI")
    loaded.use(wanted)
    yield wanted
    loaded.use(best)


def test_the_kernels_are_compiled_where_there_is_a_compiler() -> None:
    assert kernels().level in (1, 2)
    assert doctor_line().status == "ok"


def test_the_checksum_is_crc32c_at_every_length(level: int) -> None:
    data = np.random.default_rng(level).integers(0, 256, 70_000, np.uint8)
    for size in (*range(600), 3071, 3072, 3073, 4096, 6143, 65_536, 70_000):
        expected = google_crc32c.value(data[:size].tobytes())
        assert kernels().crc32c(0, data.ctypes.data, size) == crc32c(data[:size]) == expected, size
    for cut in (0, 1, 255, 512, 5000, 69_999):
        assert crc32c(data[cut:], crc32c(data[:cut])) == google_crc32c.value(data.tobytes())
        head = kernels().crc32c(0, data.ctypes.data, cut)
        assert kernels().crc32c(head, data.ctypes.data + cut, len(data) - cut) == google_crc32c.value(data.tobytes())


def arrays(rng: np.random.Generator) -> dict[str, NDArray[Any]]:
    return {
        "routing of 128": rng.integers(0, 128, 384 * 2048).astype(np.uint8),
        "routing of 512": rng.integers(0, 512, 480 * 2048).astype(np.uint16),
        "ids": np.sort(rng.integers(0, 151_000, (2048, 64)), axis=1).astype(np.int32).reshape(-1),
        "logprobs": -np.sort(rng.exponential(3, (2048, 64)).astype(np.float32), axis=1).reshape(-1),
        "zeros": np.zeros(500_000, np.uint8),
        "a pattern": np.tile(np.arange(17, dtype=np.uint16), 9000),
        "noise": rng.integers(0, 256, 300_001, np.uint8),
        "doubles": rng.normal(size=4096),
        "few": np.arange(5, dtype=np.int32),
        "none": np.zeros(0, np.uint8),
    }


@pytest.mark.parametrize("blosc_level", [1, 5, 9])
def test_lz4_chunks_decode_to_the_bytes_that_were_packed(level: int, blosc_level: int) -> None:
    for name, values in arrays(np.random.default_rng(level)).items():
        for width in {1, 2, 4, values.itemsize}:
            for shuffle in (blosc.BITSHUFFLE, blosc.SHUFFLE, blosc.NOSHUFFLE):  # the last two are numcodecs' to decode
                packed = blosc.compress(values, b"lz4", blosc_level, shuffle, typesize=width)
                assert_decodes(np.frombuffer(packed, np.uint8), values, f"{name}, width {width}, shuffle {shuffle}")


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 3000),
    st.sampled_from(["uint8", "uint16", "int32"]),
    st.integers(1, 9),
    st.integers(1, 64),
    st.integers(0, 2**32 - 1),
)
def test_any_chunk_decodes_to_the_bytes_that_were_packed(count: int, dtype: str, blosc_level: int, values_max: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, values_max, count).astype(dtype)
    kernels()
    packed = blosc.compress(values, b"lz4", blosc_level, blosc.BITSHUFFLE, typesize=values.itemsize)
    assert_decodes(np.frombuffer(packed, np.uint8), values, "")


@pytest.mark.parametrize("codec_level", [1, 5, 9])
def test_what_the_kernels_pack_is_as_small_as_c_blosc_makes_it_and_numcodecs_decodes_it(level: int, codec_level: int) -> None:
    codec = Codec(level=codec_level)
    for name, values in arrays(np.random.default_rng(level)).items():
        packed, crc = encode_chunk(values, codec)
        assert int.from_bytes(bytes(crc), "little") == google_crc32c.value(bytes(packed)), name
        width = shuffle_width(values.nbytes, values.itemsize)
        theirs = blosc.compress(values, b"lz4", codec_level, blosc.BITSHUFFLE, typesize=width)
        assert len(packed) <= 1.04 * len(theirs) + 64, name
        assert bytes(packed)[:2] + bytes(packed)[3:8] == theirs[:2] + theirs[3:8], name  # versions, typesize, nbytes
        out = np.empty(values.nbytes, np.uint8)
        if values.nbytes:  # numcodecs takes nothing for a failure
            blosc.decompress(bytes(packed), out)
        assert out.tobytes() == values.tobytes(), name


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 6000),
    st.sampled_from(["uint8", "uint16", "int32"]),
    st.integers(1, 300),
    st.integers(1, 200),
    st.integers(0, 2**32 - 1),
)
def test_any_packed_chunk_is_decoded_by_numcodecs_and_by_the_kernels(count: int, dtype: str, values_max: int, run: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = np.repeat(rng.integers(0, values_max, count // run + 1), run)[:count].astype(dtype)
    width = values.itemsize
    scratch = Memory(np.empty(values.nbytes + native.TABLE_BYTES, np.uint8))
    block = max(width, values.nbytes // (1 + seed % 3) // width * width)
    packed = kernels().pack(values, width, block, scratch=scratch)[:-4]
    out = np.empty_like(values)
    blosc.decompress(packed, out)
    assert out.tobytes() == values.tobytes()
    assert_decodes(packed, values, "")


def assert_decodes(packed: NDArray[np.uint8], values: NDArray[Any], what: str) -> None:
    stored = np.concatenate([packed, np.frombuffer(google_crc32c.value(packed.tobytes()).to_bytes(4, "little"), np.uint8)])
    guarded = np.full(values.nbytes + 64, 0xA5, np.uint8)
    job = ChunkJob(0, len(stored), values.nbytes, 0, values.nbytes, Memory(guarded), 32)
    assert unpack(stored, [job], LZ4) is None, what
    assert guarded[32:-32].tobytes() == values.tobytes(), what
    assert set(guarded[:32]) | set(guarded[-32:]) == {0xA5}, what


def test_blocks_larger_than_the_kernels_memory_are_left_to_numcodecs() -> None:
    values = np.random.default_rng(0).integers(0, 128, 5 << 20).astype(np.uint8)
    packed = kernels().pack(values, 4, 3 << 20, scratch=Memory(np.empty((3 << 20) + native.TABLE_BYTES, np.uint8)))[:-4]
    assert packed[8:12].tobytes() == (3 << 20).to_bytes(4, "little")
    assert_decodes(packed, values, "blocks of 3 MiB")


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


# --- reads ---


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


# --- forged input, under the sanitizers ---

FUZZ = """
import ctypes, sys
from array import array
import numpy as np
from numcodecs import blosc
from fsref.objects import native

kernels = native.Kernels(ctypes.CDLL(sys.argv[1]))
rng = np.random.default_rng(int(sys.argv[2]))
kernels.use(1 + int(sys.argv[2]) % 2)


def damaged(n):  # what a compressor made, with some bytes changed
    width = pick(1, 2, 4)
    size = int(rng.integers(1, 6000)) * width
    values = rng.integers(0, (2, 40, 256)[n % 3], size).astype(np.uint8)
    options = dict(typesize=width, blocksize=(0, 2048)[n % 2])
    bad = np.frombuffer(blosc.compress(values, b"lz4", 1 + n % 9, blosc.BITSHUFFLE, **options), np.uint8).copy()
    for _ in range(int(rng.integers(0, 4))):
        bad[int(rng.integers(0, min(len(bad), 64) if n % 4 else len(bad)))] = int(rng.integers(256))
    if n % 5 == 0:  # lengths that belong together, so that more is reached
        bad = bad[: int(rng.integers(16, len(bad) + 1))].copy()
        bad[12:16] = np.frombuffer(len(bad).to_bytes(4, "little"), np.uint8)
    return bad, size


def pick(*choices):
    return choices[int(rng.integers(len(choices)))]


def length(value):  # what of it goes to the token, and the bytes that follow
    rest = value - 15
    return min(value, 15), b"" if rest < 0 else b"\\xff" * (rest // 255) + bytes([rest % 255])


def written(n):  # sequences at the edges of what is allowed, in a stream that is cut somewhere
    stream, size = b"", 0
    for _ in range(int(rng.integers(1, 6))):
        literals, match = pick(0, 1, 14, 15, 16, 64, 65, 300), pick(4, 18, 19, 40, 64, 65, 300, 5000)
        (high, more), (low, further) = length(literals), length(match - 4)
        stream += bytes([high << 4 | low]) + more + rng.bytes(literals) + pick(1, 1, 2, 15, 16, 17, 0, 400).to_bytes(2, "little") + further
        size += literals + match
    tail = pick(0, 1, 5, 15, 20)
    stream += bytes([length(tail)[0] << 4]) + length(tail)[1] + rng.bytes(tail)
    size = max(1, size + tail + pick(0, 0, 0, -1, 1, -40, -200, 100, -5000))
    cut = stream[: pick(len(stream), len(stream), int(rng.integers(len(stream))), len(stream) - 1)]
    stated = max(0, len(cut) + pick(0, 0, 0, 0, 1, 16, -1))
    body = (20).to_bytes(4, "little") + stated.to_bytes(4, "little") + cut
    head = bytes([2, 1, 4 | 16 | 1 << 5, 1]) + size.to_bytes(4, "little") + size.to_bytes(4, "little")
    return np.frombuffer(head + (16 + len(body)).to_bytes(4, "little") + body, np.uint8).copy(), size


counts = {}
for n in range(6000):
    bad, size = (damaged if n % 2 else written)(n // 2)
    skip = pick(0, 0, int(rng.integers(size)), size)
    take = pick(size - skip, size - skip, int(rng.integers(size - skip + 1)), 0)
    cut, needed = (0, 0, 0, 0), take
    if n % 3 == 2:  # a part of every row
        pitch = int(rng.integers(1, 300))
        first, count = int(rng.integers(size // pitch + 1)), int(rng.integers(size // pitch + 1))
        count = min(count, size // pitch - first)
        left = int(rng.integers(pitch))
        width = int(rng.integers(1, pitch - left + 1))
        cut = (pitch, left, width, width + int(rng.integers(50)))
        skip, take, needed = first * pitch, count * pitch, (count - 1) * cut[3] + width if count else 0
    out = np.zeros(needed, np.uint8)
    table = array("q", (bad.ctypes.data, len(bad), 0, size, skip, take, out.ctypes.data, *cut))
    room = min(int.from_bytes(bad[8:12].tobytes(), "little"), size) + native.SLACK
    scratch = native.Memory(np.empty(max(0, (1 + (take < size or cut[0] > 0)) * room - pick(0, 0, 0, 1, 40)), np.uint8))
    code, _ = kernels.unpack(table, 1, scratch=scratch)
    counts[n % 2, code] = counts.get((n % 2, code), 0) + 1
    kernels.crc32c(0, bad.ctypes.data, len(bad))
    if not needed:
        continue
    again = np.empty(needed, np.uint8)
    block = pick(needed, max(1, needed // 3))
    made = kernels.pack(out, 1, block, scratch=native.Memory(np.empty(block + native.TABLE_BYTES, np.uint8)))[:-4].copy()
    blosc.decompress(made, again)
    assert np.array_equal(out, again)
print(min(counts.get((which, code), 0) for which in (0, 1) for code in (0, 3)), counts.get((1, 2), 0))
"""
"""Prints how many chunks of either kind were decoded, or found damaged, at least; and how many headers were refused."""


@pytest.mark.fault(57)
def test_forged_chunks_touch_no_byte_beyond_their_buffers(tmp_path: Path) -> None:
    compiler = needs.program("gcc")
    library = tmp_path / "_kernels.so"
    assert compile_kernels(ROOT / SOURCE, library, flags=("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"))
    runtime = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout.strip()
    settings = {"LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc", "OPENBLAS_NUM_THREADS": "1"}
    for seed in range(2):
        command = [sys.executable, "-c", FUZZ, str(library), str(seed)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, **settings}, cwd=ROOT)
        assert done.returncode == 0, done.stderr[-3000:]
        decoded_or_damaged, refused = map(int, done.stdout.split())
        assert decoded_or_damaged > 50, "the fuzzing does not reach the decoder"
        assert refused > 500


# --- where they come from ---


def test_a_library_that_is_absent_broken_or_of_another_source_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs.program("cc")
    library = tmp_path / "_kernels.so"
    monkeypatch.setattr(native, "LIBRARY", library)
    assert native.load() == (None, "not compiled when fsref was installed: no C compiler, or not x86-64")
    library.write_bytes(b"\x7fELF, not quite")
    assert "does not load" in native.load()[1]
    changed = tmp_path / "kernels.c"
    changed.write_text((ROOT / SOURCE).read_text() + "\n")
    assert compile_kernels(changed, library)
    assert native.load() == (None, "compiled from another kernels.c; install fsref again")


def test_what_cannot_be_compiled_is_said_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, library = tmp_path / "kernels.c", tmp_path / "_kernels.so"
    source.write_text("this is not C")
    for compiler in (shutil.which("cc") or "cc", "false", "true", "/no/such/compiler"):
        monkeypatch.setenv("CC", compiler)
        assert not compile_kernels(source, library)
        assert "decoded by numcodecs" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kernels.c"]
    assert not compile_kernels(source, tmp_path / "nobody can write here" / "_kernels.so")
    assert "decoded by numcodecs" in capsys.readouterr().err


def test_the_kernels_compile_without_a_warning(tmp_path: Path) -> None:
    assert {"-Wall", "-Wextra"} <= set(FLAGS)
    needs.program("cc")
    assert compile_kernels(ROOT / SOURCE, tmp_path / "_kernels.so", flags=("-Werror",))
    assert ctypes.CDLL(str(tmp_path / "_kernels.so")).fsref_use(0) == 0
