"""The .npy format, read strictly: no pickle, no object or structured dtypes, no allocation that the bytes do not back.

numpy's own reader evaluates the header as a Python literal and trusts its shape. Here the header must match one expression,
the dtype one list, and ``prod(shape) * itemsize`` the bytes that are there, before an array is made.
"""

import math
import re
import struct
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fsref.errors import WireError

MAGIC: Final = b"\x93NUMPY"
HEADER_BYTES_MAX: Final = 4096
DIMS_MAX: Final = 8
SIZE_MAX: Final = 1 << 31
"""Largest extent of one dimension."""

DTYPES: Final = frozenset({"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"})
_HEADER: Final = re.compile(
    rb"\{\s*'descr':\s*'([<>|=])([a-z][0-9]+)',\s*'fortran_order':\s*(True|False),\s*'shape':\s*\(((?:\s*[0-9]{1,19}\s*,?)*)\),?\s*\}\s*"
)


def decode_npy(data: bytes | bytearray | memoryview, *, what: str = ".npy array") -> NDArray[Any]:
    """The array in ``data``, a .npy stream of version 1 or 2; raises ``WireError`` naming ``what``.

    Returns a native-endian, C-order array; it shares ``data``'s memory (read-only) where no conversion is needed.
    """
    view = memoryview(data).cast("B")
    if bytes(view[:6]) != MAGIC:
        raise WireError(f"{what}: bytes start with {bytes(view[:6])!r}, .npy starts with {MAGIC!r}")
    major = view[6] if len(view) > 6 else 0
    if major not in (1, 2):
        raise WireError(f"{what}: .npy version {major} found, 1 and 2 are read")
    body = 10 if major == 1 else 12
    if len(view) < body:
        raise WireError(f"{what}: .npy header is cut short at {len(view)} bytes")
    (header_count,) = struct.unpack("<H" if major == 1 else "<I", view[8:body])
    if header_count > HEADER_BYTES_MAX or body + header_count > len(view):
        raise WireError(
            f"{what}: .npy header of {header_count} bytes found, {len(view) - body} bytes follow and {HEADER_BYTES_MAX} are allowed"
        )
    dtype, fortran, shape = _parse_header(bytes(view[body : body + header_count]), what)
    body += header_count
    return _array(view[body:], dtype, shape, fortran=fortran, what=what)


def _parse_header(header: bytes, what: str) -> tuple[np.dtype[Any], bool, tuple[int, ...]]:
    match = _HEADER.fullmatch(header)
    if match is None:
        raise WireError(f"{what}: .npy header {header[:120]!r} is not a plain array's")
    order, code, fortran, extents = match.groups()
    if code.decode() not in DTYPES:
        raise WireError(f"{what}: .npy dtype {code.decode()!r} is not one of {sorted(DTYPES)}")
    shape = tuple(int(n) for n in extents.replace(b",", b" ").split())
    return np.dtype((order + code).decode()), fortran == b"True", shape


def _array(data: memoryview, dtype: np.dtype[Any], shape: tuple[int, ...], *, fortran: bool, what: str) -> NDArray[Any]:
    check_shape(shape, byte_count=len(data), itemsize=dtype.itemsize, what=what)
    flat = np.frombuffer(data, dtype)
    array = flat.reshape(shape, order="F" if fortran else "C")
    return np.asarray(array, dtype=dtype.newbyteorder("="), order="C")


def check_shape(shape: tuple[int, ...], *, byte_count: int, itemsize: int, what: str) -> None:
    """Raises ``WireError`` unless ``shape`` is within the caps and ``byte_count`` is exactly its size. Allocates nothing."""
    if len(shape) > DIMS_MAX or any(n > SIZE_MAX or n < 0 for n in shape):
        raise WireError(f"{what}: shape {shape} is out of bounds ({DIMS_MAX} dimensions of at most {SIZE_MAX})")
    need = math.prod(shape) * itemsize
    if need != byte_count:
        raise WireError(f"{what}: shape {shape} of {itemsize}-byte values needs {need} bytes, {byte_count} found")


def encode_npy(array: NDArray[Any]) -> bytes:
    """``array`` as .npy version 1 bytes, little-endian and C order, byte for byte as ``numpy.save`` writes it."""
    array = np.asarray(array, order="C")
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    if array.dtype.str[1:] not in DTYPES:
        raise WireError(f"dtype {array.dtype} has no .npy form here; {sorted(DTYPES)} have")
    header = f"{{'descr': '{array.dtype.str}', 'fortran_order': False, 'shape': {array.shape}, }}".encode()
    # numpy reserves room for the first extent to grow in place to 20 digits, then pads to 64 bytes.
    room = 21 - len(str(array.shape[0])) if array.shape else 0
    header += b" " * max(0, room)
    header += b" " * (-(10 + len(header) + 1) % 64) + b"\n"
    return MAGIC + b"\x01\x00" + struct.pack("<H", len(header)) + header + array.tobytes()
