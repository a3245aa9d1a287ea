"""The compiled kernels against numcodecs and google_crc32c: the same bytes, on every processor."""

from collections.abc import Iterator
from typing import Any

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numcodecs import blosc
from numpy.typing import NDArray

from fsref.doctor import kernels as doctor_line
from fsref.objects import ChunkJob, Memory, encode_chunk, native, unpack
from fsref.objects.codec import crc32c, shuffle_width
from fsref.refs import Codec
from tests.objects.kernels import LZ4, kernels


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
