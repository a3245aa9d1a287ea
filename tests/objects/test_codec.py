"""One chunk, forged and damaged."""

import subprocess
import sys
from typing import Any

import google_crc32c
import numpy as np
import pytest
from numpy.typing import NDArray

from fsref.errors import ObjectCorrupt
from fsref.objects import decode_chunk, encode_chunk
from fsref.objects.codec import shuffle_width
from fsref.refs import Codec


def stored(values: NDArray[Any], codec: Codec) -> NDArray[np.uint8]:
    packed, crc = encode_chunk(values, codec)
    return np.frombuffer(bytes(packed) + crc, np.uint8).copy()


@pytest.mark.parametrize("name", ["lz4", "zstd", "blosclz", "none"])
def test_floats_keep_every_bit(name: str) -> None:
    bits = np.asarray([0x7FC00001, 0xFF800000, 0x80000000, 0xC61C3C00, 0x7F800001], np.uint32)
    values, out = bits.view(np.float32), np.empty(5, np.float32)
    codec = Codec(name=name)  # type: ignore[arg-type]
    decode_chunk(stored(values, codec), out, codec)
    assert out.view(np.uint32).tolist() == bits.tolist()


def test_a_wrong_size_is_refused_before_decoding() -> None:
    values, codec = np.arange(1000, dtype=np.int32), Codec()
    for length in (999, 1001, 0):
        with pytest.raises(ObjectCorrupt, match="header names 4000"):
            decode_chunk(stored(values, codec), np.empty(length, np.int32), codec)
    with pytest.raises(ObjectCorrupt, match="less than its checksum"):
        decode_chunk(np.zeros(3, np.uint8), np.empty(1, np.int32), codec)


@pytest.mark.parametrize(
    ("dtype", "count", "width"),
    [("uint8", 64, 4), ("uint8", 48, 2), ("uint8", 40, 1), ("uint16", 64, 4), ("uint16", 8, 2), ("float64", 8, 8)],
)
def test_narrow_values_are_shuffled_several_at_a_time_where_the_chunk_divides(dtype: str, count: int, width: int) -> None:
    values = np.arange(count * 16, dtype=np.int64)[: count * 16 : 16].astype(dtype)
    assert shuffle_width(values.nbytes, values.itemsize) == width
    assert stored(values, Codec())[3] == width  # the header's own typesize


def test_wide_shuffling_packs_routing_as_tightly() -> None:
    ids = np.random.default_rng(0).integers(0, 128, 384 * 2048, np.uint8)
    assert len(stored(ids, Codec())) / ids.nbytes < 0.885  # seven of eight bits


FORGE = """
import sys
import google_crc32c
import numpy as np
from fsref.errors import ObjectCorrupt
from fsref.objects import decode_chunk, encode_chunk
from fsref.refs import Codec

rng, codec = np.random.default_rng(3), Codec(name=sys.argv[1])
values = rng.integers(0, 128, 4096).astype(np.uint8)
packed = np.frombuffer(bytes(encode_chunk(values, codec)[0]), np.uint8)
out = np.empty(4096, np.uint8)
refused = 0
for n in range(4000):
    bad = packed.copy()
    for _ in range(int(rng.integers(1, 4))):
        bad[int(rng.integers(0, 32 if n % 2 else len(bad)))] = int(rng.integers(256))
    crc = google_crc32c.value(bad).to_bytes(4, "little")
    try:
        decode_chunk(np.concatenate([bad, np.frombuffer(crc, np.uint8)]), out, codec)
    except ObjectCorrupt:
        refused += 1
print(refused)
"""


@pytest.mark.fault(57)
@pytest.mark.parametrize("name", ["lz4", "zstd", "blosclz"])
def test_forged_chunks_with_a_valid_checksum_do_not_crash_the_process(name: str) -> None:
    done = subprocess.run([sys.executable, "-c", FORGE, name], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 1000


def test_the_checksum_is_the_castagnoli_crc_behind_the_packed_bytes() -> None:
    values = np.arange(10, dtype=np.uint8)
    data = stored(values, Codec(name="none"))
    assert data[:10].tolist() == list(range(10))
    assert int.from_bytes(data[10:].tobytes(), "little") == google_crc32c.value(bytes(range(10)))
