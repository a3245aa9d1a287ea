"""One chunk: bytes (little endian, C order), Blosc with bitshuffle, crc32c. The hot path of both directions.

Blosc's own threads are off for the whole process: the pools of writer and reader are the parallelism, and its global pool is neither
fork-safe nor shared fairly. Encoding and decoding release the GIL, and so does checking a large chunk.
"""

import struct
from typing import Any, Final

import google_crc32c
import numpy as np
from numcodecs import blosc
from numpy.typing import NDArray

from fsref.errors import ObjectCorrupt
from fsref.objects.crc import crc32c
from fsref.plan.layout import SHUFFLED_VALUES
from fsref.refs import Codec

blosc.use_threads = False

CRC_BYTES: Final = 4
_BLOSC_HEADER: Final = struct.Struct("<4BIII")
_CNAMES: Final = {"lz4": b"lz4", "zstd": b"zstd", "blosclz": b"blosclz"}
_FORMATS: Final = {"blosclz": 0, "lz4": 1, "zstd": 4}
"""Bits 5 to 7 of a Blosc header's flags: which decoder runs. A header that names another one than the schema never reaches it."""
_BLOSC_VERSION: Final = 2
_WIDTHS: Final = (4, 2)
_OVERHEAD_BYTES: Final = 64
"""What packing adds at most to data that does not compress: Blosc's header and the crc."""


def encode_chunk(chunk: NDArray[Any], codec: Codec) -> tuple[bytes | NDArray[np.uint8], bytes]:
    """Packs one C-contiguous little-endian chunk: (packed bytes, 4 crc bytes that follow them in the file)."""
    if codec.name == "none":
        packed: bytes | NDArray[np.uint8] = chunk.reshape(-1).view(np.uint8)
    else:
        width = shuffle_width(chunk.nbytes, chunk.dtype.itemsize)
        packed = blosc.compress(chunk, _CNAMES[codec.name], codec.level, blosc.BITSHUFFLE, typesize=width)
    return packed, google_crc32c.value(packed).to_bytes(CRC_BYTES, "little")


def shuffle_width(chunk_nbytes: int, itemsize: int) -> int:
    """Blosc's ``typesize`` for a chunk: the bytes that bitshuffle takes as one value.

    Narrow values are taken two or four at a time where the chunk divides (Blosc shuffles eight values at once): the same bit planes, side
    by side, pack as tightly, and Blosc transposes bytes one by one in scalar code, wider values with SSE2: one-byte routing decodes 1.6
    times as fast (docs/notes/0005-shuffle-width.md). Readers take the width from the chunk's own header.
    """
    return next((w for w in _WIDTHS if w > itemsize and chunk_nbytes % (SHUFFLED_VALUES * w) == 0), itemsize)


def decode_chunk(stored: NDArray[np.uint8], out: NDArray[Any], codec: Codec, *, check: bool = True) -> None:
    """Unpacks one stored chunk (uint8, crc at the end) into ``out``, a C-contiguous array of exactly the chunk's decoded bytes.

    The crc finds damage, not forgery; so Blosc's header must also name exactly ``out.nbytes`` and the packed length before its
    decoder runs, which a forged header would otherwise crash. Raises ``ObjectCorrupt``.
    """
    size = len(stored) - CRC_BYTES
    if size < 0:
        raise ObjectCorrupt(f"a chunk has {len(stored)} bytes, less than its checksum")
    packed = stored[:size]
    if check:
        check_chunk(packed, stored[size:])
    if codec.name == "none":
        if size != out.nbytes:
            raise ObjectCorrupt(f"a chunk has {size} bytes, {out.nbytes} expected")
        out.reshape(-1).view(np.uint8)[:] = packed
        return
    check_blosc_header(packed, out.nbytes, codec)
    try:
        blosc.decompress(packed, out)
    except (RuntimeError, ValueError) as e:
        raise ObjectCorrupt(f"a chunk of {size} bytes does not decode: {e}") from e


def check_chunk(packed: NDArray[np.uint8], crc: NDArray[np.uint8]) -> None:
    """Raises ``ObjectCorrupt`` unless the 4 bytes ``crc`` are those of ``packed``, contiguous bytes."""
    if crc32c(packed) != int.from_bytes(crc.tobytes(), "little"):
        raise ObjectCorrupt(f"a chunk of {len(packed)} bytes fails its crc32c")


def stored_bytes_max(nbytes: int) -> int:
    """How many bytes a chunk of ``nbytes`` decoded bytes can take in a file; more is no chunk of this format."""
    return nbytes + _OVERHEAD_BYTES


def check_blosc_header(packed: NDArray[np.uint8], nbytes: int, codec: Codec) -> None:
    """Raises ``ObjectCorrupt`` unless the header names exactly ``nbytes`` decoded bytes and the packed length, with sane block size, and
    the schema's own compressor.
    """
    if len(packed) < _BLOSC_HEADER.size:
        raise ObjectCorrupt(f"a Blosc chunk has {len(packed)} bytes, less than its header")
    version, _, flags, typesize, found, blocksize, packed_size = _BLOSC_HEADER.unpack_from(packed)
    if version != _BLOSC_VERSION or flags >> 5 != _FORMATS[codec.name]:
        raise ObjectCorrupt(
            f"a Blosc header of version {version} names compressor {flags >> 5}; {_FORMATS[codec.name]} ({codec.name}) expected"
        )
    if found != nbytes or packed_size != len(packed) or typesize == 0 or not 0 < blocksize <= max(nbytes, 1):
        raise ObjectCorrupt(
            f"a Blosc header names {found} bytes in {packed_size} (blocks of {blocksize}, items of {typesize}); "
            f"{nbytes} in {len(packed)} expected"
        )
