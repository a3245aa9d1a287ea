"""crc32c of large arrays without holding the GIL.

``google_crc32c.value`` holds it, which at 25 GB/s is 40 microseconds per MiB in which no other thread reads or decodes. The C function
beneath is a stable public one (``crc32c_extend`` of google/crc32c): large arrays call it directly and without the GIL, from the very
library that google_crc32c has loaded. Where that is not there (its pure Python form), everything goes through google_crc32c.
"""

import ctypes
import importlib
from collections.abc import Callable
from typing import Any, Final

import google_crc32c
import numpy as np
from numpy.typing import NDArray

_LARGE_BYTES: Final = 128 << 10
"""Below it, calling through ctypes (2 microseconds) costs more than it gives others."""
_Extend = Callable[[int, int, int], int]


def _native() -> _Extend | None:
    try:
        extension = importlib.import_module("google_crc32c._crc32c")
        extend: Any = ctypes.CDLL(extension.__file__).crc32c_extend
    except (ImportError, OSError, AttributeError):
        return None
    extend.argtypes, extend.restype = (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_uint32
    probe = np.arange(64, dtype=np.uint8)
    same: bool = extend(0, probe.ctypes.data, len(probe)) == google_crc32c.value(probe)
    found: _Extend = extend
    return found if same else None


_EXTEND: Final = _native()


def crc32c(data: NDArray[np.uint8]) -> int:
    """crc32c (Castagnoli) of uint8 [n]; contiguous."""
    if _EXTEND is None or len(data) < _LARGE_BYTES or not data.flags.c_contiguous:
        value: int = google_crc32c.value(data)
        return value
    return _EXTEND(0, data.ctypes.data, len(data))
