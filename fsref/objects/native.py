"""``kernels.c`` from Python: what it can do here, or why it cannot.

The library is compiled when fsref is installed (tools/build_kernels.py) and is left out where there is no C compiler; processors without
AVX2 do not get it either. Everything then goes through numcodecs and google_crc32c: the same bytes, more slowly. ``fsref doctor`` and
``fsref bench`` say which. Its functions run without the GIL.
"""

import ctypes
import zlib
from array import array
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

SOURCE: Final = Path(__file__).with_name("kernels.c")
LIBRARY: Final = Path(__file__).with_name("_kernels.so")

CRC_BYTES: Final = 4
TABLE_BYTES: Final = 16 << 10
"""Of scratch memory for the encoder's hash table."""
PACKED_EXTRA: Final = 16 + CRC_BYTES
"""A chunk that does not pack takes Blosc's header and the crc more than its values."""
OK: Final = 0
BAD_HEADER: Final = 2
NOT_MINE: Final = 5
SCRATCH: Final = 6
BAD_READ: Final = 7
REASONS: Final = {
    1: "fails its crc32c",
    BAD_HEADER: "has a Blosc header that does not fit it",
    3: "does not decode",
    4: "has another size than its place",
}
CODECS: Final = {"none": 0, "lz4": 1}
WIDTHS: Final = (1, 2, 4)
"""Bytes of a value whose bits the kernels shuffle."""
SLACK: Final = 32
"""Bytes of scratch memory beyond a block, see ``kernels.c``."""
JOB_VALUES: Final = 11
"""int64 of one chunk in a table: address of the stored bytes, their size without the crc, address of the crc (0: unchecked), number of
decoded bytes, first wanted one, number of wanted ones, address of their place (0: only checked), then the four of a ``Cut``, or zeros."""
RANGE_VALUES: Final = 3
"""int64 of one ranged read: offset in the file, size, number of chunks."""


class Memory:
    """A C-contiguous array as ``bytes`` uint8 [n] with its ``address``, which is asked for once. Keeps the array alive.

    Raises ``ValueError`` for an array that is read-only: C would write to it all the same.
    """

    __slots__ = ("address", "bytes")

    def __init__(self, values: NDArray[Any]) -> None:
        assert values.flags.c_contiguous
        if not values.flags.writeable:
            raise ValueError(f"a read-only array of {values.nbytes} bytes cannot be filled")
        self.bytes: NDArray[np.uint8] = values.reshape(-1).view(np.uint8)
        self.address: int = self.bytes.ctypes.data


class Kernels:
    """The loaded library. Thread-safe but for ``use``."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._use: Any = library.fsref_use
        self._crc32c: Any = library.fsref_crc32c
        self._unpack: Any = library.fsref_unpack
        self._fetch: Any = library.fsref_fetch
        self._pack: Any = library.fsref_pack
        self._use.argtypes, self._use.restype = [ctypes.c_int], ctypes.c_int
        self._crc32c.argtypes, self._crc32c.restype = [ctypes.c_uint32, ctypes.c_void_p, ctypes.c_int64], ctypes.c_uint32
        self._unpack.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
        self._unpack.restype = ctypes.c_int
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._fetch.argtypes = [ctypes.c_int, pointer, number, pointer, ctypes.c_int, pointer, pointer, number, pointer]
        self._fetch.restype = ctypes.c_int
        self._pack.argtypes, self._pack.restype = [pointer, number, ctypes.c_int, number, pointer, pointer], number
        self.level: int = 0
        self.use(2)

    def use(self, level: int) -> int:
        """Chooses the kernels, of ``level`` (1: AVX2, 2: AVX-512) at most; for tests and figures. Returns the level in use, 0 for none."""
        self.level = self._use(level)
        return self.level

    def crc32c(self, crc: int, address: int, size: int) -> int:
        """crc32c of ``size`` bytes at ``address`` that follow others whose crc32c is ``crc`` (0: none)."""
        value: int = self._crc32c(crc, address, size)
        return value

    def unpack(self, table: "array[int]", codec: int, *, scratch: Memory) -> tuple[int, int]:
        """Checks and decodes the chunks of a table. (OK, their number), or the code of the first that failed and its index."""
        failed = ctypes.c_int64(0)
        address, length = table.buffer_info()
        code: int = self._unpack(address, length // JOB_VALUES, codec, scratch.address, len(scratch.bytes), ctypes.byref(failed))
        return code, failed.value

    def fetch(self, fd: int, ranges: "array[int]", table: "array[int]", codec: int, *, stored: Memory, scratch: Memory) -> tuple[int, int]:
        """Reads ranges of a file through ``stored`` and checks and decodes their chunks. As ``unpack``, of ranges."""
        done = ctypes.c_int64(0)
        address, length = ranges.buffer_info()
        jobs, size = table.buffer_info()[0], len(scratch.bytes)
        count = length // RANGE_VALUES
        code: int = self._fetch(fd, address, count, jobs, codec, stored.address, scratch.address, size, ctypes.byref(done))
        return code, done.value

    def pack(self, values: NDArray[Any], width: int, block: int, *, scratch: Memory) -> NDArray[np.uint8]:
        """A contiguous array in a Blosc chunk with LZ4 and bitshuffle, its crc32c behind it: uint8 [packed bytes + 4].

        ``width``: 1, 2 or 4 bytes taken as one value; ``block``: bytes of a Blosc block, a multiple of it. ``scratch``: ``block`` bytes and
        ``TABLE_BYTES``.
        """
        assert values.flags.c_contiguous
        assert len(scratch.bytes) >= block + TABLE_BYTES
        out = np.empty(PACKED_EXTRA + values.nbytes, np.uint8)
        made = self._pack(values.ctypes.data, values.nbytes, width, block, out.ctypes.data, scratch.address)
        return out[: made + CRC_BYTES]


def source_number(source: bytes) -> int:
    """What a library says of the source that it was compiled from."""
    return zlib.crc32(source)


def load() -> tuple[Kernels | None, str]:
    """The kernels and which they are, or None and why not."""
    if not LIBRARY.exists():
        return None, "not compiled when fsref was installed: no C compiler, or not x86-64"
    try:
        library = ctypes.CDLL(str(LIBRARY))
        library.fsref_source.restype = ctypes.c_uint32
        if library.fsref_source() != source_number(SOURCE.read_bytes()):
            return None, "compiled from another kernels.c; install fsref again"
        kernels = Kernels(library)
    except (OSError, AttributeError) as e:
        return None, f"{LIBRARY.name} does not load: {e}"
    if not kernels.level:
        return None, "this processor has no AVX2"
    return kernels, {1: "AVX2", 2: "AVX-512, GFNI"}[kernels.level]


KERNELS, ABOUT = load()
"""The kernels, or None; and which they are, or why there are none."""
