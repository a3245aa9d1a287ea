"""Chunks: bytes (little endian, C order), Blosc with bitshuffle, crc32c. The hot path of both directions.

Many chunks at once (``unpack``) are checked and decoded by ``native`` in one call without the GIL, where it is there and the codec is lz4
or none; else one by one by numcodecs, to the same bytes. Blosc's own threads are off for the whole process: the pools of writer and reader
are the parallelism, and its global pool is neither fork-safe nor shared fairly. Encoding and decoding release the GIL.
"""

import struct
import threading
from array import array
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import google_crc32c
import numpy as np
from numcodecs import blosc
from numpy.typing import NDArray

from fsref.errors import ObjectCorrupt
from fsref.objects import native
from fsref.objects.native import CRC_BYTES, Memory
from fsref.plan.layout import SHUFFLED_VALUES
from fsref.refs import Codec

blosc.use_threads = False

_BLOSC_HEADER: Final = struct.Struct("<4BIII")
_CNAMES: Final = {"lz4": b"lz4", "zstd": b"zstd", "blosclz": b"blosclz"}
_FORMATS: Final = {"blosclz": 0, "lz4": 1, "zstd": 4}
"""Bits 5 to 7 of a Blosc header's flags: which decoder runs. A header that names another one than the schema never reaches it."""
_BLOSC_VERSION: Final = 2
_WIDTHS: Final = (4, 2)
_LARGE_BYTES: Final = 4 << 10
"""Below it, calling a kernel costs more than it saves."""
_OVERHEAD_BYTES: Final = 64
"""What packing adds at most to data that does not compress: Blosc's header and the crc."""


def encode_chunk(chunk: NDArray[Any], codec: Codec) -> tuple[bytes | NDArray[np.uint8], bytes]:
    """Packs one C-contiguous little-endian chunk: (packed bytes, 4 crc bytes that follow them in the file)."""
    if codec.name == "none":
        packed: bytes | NDArray[np.uint8] = chunk.reshape(-1).view(np.uint8)
        return packed, crc32c(packed).to_bytes(CRC_BYTES, "little")
    width = shuffle_width(chunk.nbytes, chunk.dtype.itemsize)
    if native.KERNELS is not None and codec.name == "lz4" and codec.level and width in native.WIDTHS and chunk.nbytes:
        made = pack_chunk(native.KERNELS, chunk, codec.level)
        return made[:-CRC_BYTES], made[-CRC_BYTES:].tobytes()
    packed = blosc.compress(chunk, _CNAMES[codec.name], codec.level, blosc.BITSHUFFLE, typesize=width)
    return packed, google_crc32c.value(packed).to_bytes(CRC_BYTES, "little")


def pack_chunk(kernels: native.Kernels, chunk: NDArray[Any], level: int) -> NDArray[np.uint8]:
    """A chunk packed by the kernels with LZ4, its crc behind it: uint8 [n]. ``level``: 1 to 9."""
    width = shuffle_width(chunk.nbytes, chunk.dtype.itemsize)
    return kernels.pack(chunk, width, block_bytes(level, chunk.nbytes, width), scratch=_scratch.memory)


def block_bytes(level: int, chunk_nbytes: int, width: int) -> int:
    """Blosc's block for a chunk at a level of 1 to 9: about what c-blosc takes for LZ4, a multiple of ``width``.

    Never a multiple of 128 KiB: the planes of such a block lie whole pages apart, where their lines compete for the same places of the
    first cache. A 128th less, packing is 1.2 and decoding up to 1.6 times as fast.
    """
    block = min((64 << 10) << (0, 1, 2, 3, 3, 4, 4, 4, 4)[level - 1], chunk_nbytes)
    if block % (128 << 10) == 0:
        block -= block >> 7
    return block // width * width


def shuffle_width(chunk_nbytes: int, itemsize: int) -> int:
    """Blosc's ``typesize`` for a chunk: the bytes that bitshuffle takes as one value.

    Narrow values are taken two or four at a time where the chunk divides (Blosc shuffles eight values at once): the same bit planes, side
    by side, pack as tightly, and Blosc transposes bytes one by one in scalar code, wider values with SSE2: one-byte routing decodes 1.6
    times as fast (docs/notes/0005-shuffle-width.md). Readers take the width from the chunk's own header.
    """
    return next((w for w in _WIDTHS if w > itemsize and chunk_nbytes % (SHUFFLED_VALUES * w) == 0), itemsize)


class Cut(NamedTuple):
    """A part of every row of a chunk: some of its layers, or all of them between those of other chunks."""

    pitch: int
    """Bytes of a row in the chunk."""
    left: int
    """First wanted byte of each."""
    width: int
    """Wanted bytes of each."""
    stride: int
    """Bytes from row to row at the place."""


class ChunkJob(NamedTuple):
    """One chunk, or a run of its decoded bytes, to its place."""

    offset: int
    """Of its stored bytes in those of the request."""
    size: int
    """Stored bytes, crc included."""
    nbytes: int
    """Decoded bytes."""
    skip: int
    """First decoded byte that is wanted."""
    take: int
    """Wanted bytes."""
    out: Memory
    at: int
    """First byte of ``out`` that they go to."""
    cut: Cut | None = None
    """With it ``skip`` and ``take`` are whole rows, of which it says what is wanted."""

    @property
    def whole(self) -> bool:
        """Whether the chunk goes to its place just as it is."""
        return self.take == self.nbytes and self.cut is None


def unpack(
    stored: NDArray[np.uint8], jobs: Sequence[ChunkJob], codec: Codec, *, placed: bool = False, check: bool = True
) -> tuple[int, str] | None:
    """Checks and decodes chunks of a request's bytes ``stored`` [n] to their places, in order.

    ``placed``: the decoded bytes of whole ones are in their places already, and only their crcs, in ``stored``, are checked. Returns the
    index of the first chunk that is damaged and what is wrong with it; None if all is well. The crc finds damage, not forgery: every size
    that a chunk names is checked before it is followed.
    """
    assert stored.flags.c_contiguous
    kernels, number = native.KERNELS, native.CODECS.get(codec.name)
    if kernels is None or number is None:
        return _unpack_by_one(stored, jobs, codec, placed=placed, check=check)
    table = array("q")
    _add(table, stored.ctypes.data, len(stored), jobs, placed=placed, check=check)
    done = 0
    while True:
        code, index = kernels.unpack(table[native.JOB_VALUES * done :] if done else table, number, scratch=_scratch.memory)
        done += index
        if code == native.OK:
            return None
        if code in (native.NOT_MINE, native.SCRATCH):
            if failed := _unpack_by_one(stored, jobs[done : done + 1], codec, placed=placed, check=check):
                return done, failed[1]
            done += 1
        else:
            return done, _reason(code, stored, jobs[done], codec)


def _reason(code: int, stored: NDArray[np.uint8], job: ChunkJob, codec: Codec) -> str:
    size = job.size - CRC_BYTES
    if code == native.BAD_HEADER:
        try:
            check_blosc_header(stored[job.offset : job.offset + size], job.nbytes, codec)
        except ObjectCorrupt as e:
            return str(e)
    return f"a chunk of {size} bytes for {job.nbytes} {native.REASONS[code]}"


def _add(table: "array[int]", base: int, room: int, jobs: Sequence[ChunkJob], *, placed: bool = False, check: bool = True) -> None:
    """Adds jobs on ``room`` stored bytes at address ``base`` to a table."""
    for job in jobs:
        offset, size, nbytes, skip, take, out, at, cut = job
        fits = 0 <= offset <= room - size and size >= CRC_BYTES and 0 <= skip <= nbytes - take and take >= 0
        if not fits or at < 0 or at + (take if cut is None else _span(job, cut)) > len(out.bytes):
            where = f"[{skip}, +{take}) of {nbytes} in [{offset}, +{size}) of {room}"
            raise IndexError(f"bytes {where} to {at} of {len(out.bytes)}, cut {cut}")
        packed = base + offset
        crc = packed + size - CRC_BYTES if check else 0
        if placed and job.whole:
            table.extend((out.address + at, nbytes, crc, nbytes, 0, nbytes, 0, 0, 0, 0, 0))
        else:
            table.extend((packed, size - CRC_BYTES, crc, nbytes, skip, take, out.address + at, *(cut or _NO_CUT)))


def _span(job: ChunkJob, cut: Cut) -> int:
    """Bytes from the first to the last of a cut at its place. Raises ``IndexError`` for a cut that is not one."""
    pitch, left, width, stride = cut
    if pitch <= 0 or not 0 <= left <= pitch - width or not 0 < width <= stride or job.skip % pitch or job.take % pitch:
        raise IndexError(f"{cut} of rows [{job.skip}, +{job.take})")
    return (job.take // pitch - 1) * stride + width if job.take else 0


_NO_CUT: Final = (0, 0, 0, 0)


class Fetch(NamedTuple):
    """One ranged read of a file and its chunks, in ascending order, none of them twice."""

    offset: int
    size: int
    jobs: Sequence[ChunkJob]


class Fetched(NamedTuple):
    """How far ``fetch`` came."""

    done: int
    """Ranges whose chunks are in their places."""
    read: int
    """Ranges that were read: those, and one more where its bytes came and its chunks were not decoded."""
    failed: bool
    """Whether the first that is not done could not be read or is damaged; else it is only for another decoder."""


def can_fetch(codec: Codec, value_bytes: int = 1) -> bool:
    """Whether ``fetch`` does anything here, with chunks of values of so many bytes."""
    return native.KERNELS is not None and codec.name in native.CODECS and (codec.name == "none" or value_bytes in native.WIDTHS)


def fetch(fd: int, reads: Sequence[Fetch], stored: Memory, codec: Codec, *, check: bool = True) -> Fetched:
    """Reads ranges of an open file one after the other and checks and decodes their chunks to their places, all without the GIL.

    ``stored``: memory for the largest of them. With codec none chunks are read straight to their places. It stops at the first that could
    not be read, is damaged or needs another decoder, and does not say what is wrong. Whoever calls it reads that one again through its
    store, which knows the errors. This is the one place below the store that reads; it exists because threads that come
    back to the GIL after every read wait for each other (docs/notes/0006-native-kernels.md).
    """
    kernels, number = native.KERNELS, native.CODECS.get(codec.name)
    if kernels is None or number is None:
        return Fetched(0, 0, False)
    ranges, table = array("q"), array("q")
    for offset, size, jobs in reads:
        if size > len(stored.bytes):
            raise IndexError(f"a read of {size} bytes to memory of {len(stored.bytes)}")
        ranges.extend((offset, size, len(jobs)))
        _add(table, stored.address, size, jobs, check=check)
    code, done = kernels.fetch(fd, ranges, table, number, stored=stored, scratch=_scratch.memory)
    unread = code in (native.OK, native.BAD_READ) or (code == native.NOT_MINE and codec.name == "none")  # such are refused before the read
    return Fetched(done, done + (not unread), code not in (native.OK, native.NOT_MINE, native.SCRATCH))


class _Scratch(threading.local):
    """One thread's memory for a block whose bits are taken apart or put together."""

    def __init__(self) -> None:
        # Two blocks of the largest that ``block_bytes`` names. What another writer made of larger ones is numcodecs' to decode.
        self.memory = Memory(np.empty((2 << 20) + native.TABLE_BYTES, np.uint8))


_scratch: Final = _Scratch()


def _unpack_by_one(
    stored: NDArray[np.uint8], jobs: Sequence[ChunkJob], codec: Codec, *, placed: bool, check: bool
) -> tuple[int, str] | None:
    for n, job in enumerate(jobs):
        chunk, out = stored[job.offset : job.offset + job.size], job.out.bytes[job.at :]
        try:
            if not job.whole:
                decoded = np.empty(job.nbytes, np.uint8)
                _decode(chunk, decoded, codec, check=check)
                _place(decoded[job.skip : job.skip + job.take], out, job.cut)
            elif not placed:
                _decode(chunk, out[: job.nbytes], codec, check=check)
            elif check:
                check_chunk(out[: job.nbytes], chunk[-CRC_BYTES:])
        except ObjectCorrupt as e:
            return n, str(e)
    return None


def _place(wanted: NDArray[np.uint8], out: NDArray[np.uint8], cut: Cut | None) -> None:
    if cut is None:
        out[: len(wanted)] = wanted
        return
    rows = wanted.reshape(-1, cut.pitch)[:, cut.left : cut.left + cut.width]
    np.lib.stride_tricks.as_strided(out, rows.shape, (cut.stride, 1))[...] = rows


def decode_chunk(stored: NDArray[np.uint8], out: NDArray[Any], codec: Codec) -> None:
    """Unpacks one stored chunk (uint8, crc at the end) into ``out``, a C-contiguous array of exactly the chunk's decoded bytes.

    Raises ``ObjectCorrupt``.
    """
    if len(stored) < CRC_BYTES:
        raise ObjectCorrupt(f"a chunk has {len(stored)} bytes, less than its checksum")
    failed = unpack(stored, (ChunkJob(0, len(stored), out.nbytes, 0, out.nbytes, Memory(out), 0),), codec)
    if failed is not None:
        raise ObjectCorrupt(failed[1])


def _decode(stored: NDArray[np.uint8], out: NDArray[np.uint8], codec: Codec, *, check: bool) -> None:
    """As ``decode_chunk``, by numcodecs: its decoder crashes on a forged header, which is therefore checked first."""
    size = len(stored) - CRC_BYTES
    packed = stored[:size]
    if check:
        check_chunk(packed, stored[size:])
    if codec.name == "none":
        if size != out.nbytes:
            raise ObjectCorrupt(f"a chunk has {size} bytes, {out.nbytes} expected")
        out[:] = packed
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


def crc32c(data: bytes | NDArray[np.uint8], before: int = 0) -> int:
    """crc32c (Castagnoli) of ``data``, contiguous, that follows bytes whose crc32c is ``before``."""
    if native.KERNELS is None or len(data) < _LARGE_BYTES or isinstance(data, bytes):
        value: int = google_crc32c.extend(before, data)
        return value
    assert data.flags.c_contiguous
    return native.KERNELS.crc32c(before, data.ctypes.data, len(data))


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
