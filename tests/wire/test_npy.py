"""The strict .npy reader against numpy's writer and against hostile bytes."""

import io
import struct
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fsref.errors import WireError
from fsref.wire.npy import MAGIC, decode_npy, encode_npy

SHAPES = [(), (0,), (5,), (31, 4, 4), (0, 4, 4), (3, 1, 2, 1)]
CODES = ["|u1", "<u2", ">u2", "<i4", ">i4", "<f4", "|b1", "<i8", "|i1"]


def saved(array: NDArray[Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def made(shape: tuple[int, ...], code: str) -> NDArray[Any]:
    return np.arange(int(np.prod(shape)) % 97, int(np.prod(shape)) % 97 + int(np.prod(shape))).reshape(shape).astype(code)


def header(text: str, *, version: int = 1, body: bytes = b"") -> bytes:
    raw = text.encode()
    return MAGIC + bytes((version, 0)) + struct.pack("<H" if version == 1 else "<I", len(raw)) + raw + body


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("shape", SHAPES)
def test_reads_what_numpy_writes(shape: tuple[int, ...], code: str) -> None:
    array = made(shape, code)
    got = decode_npy(saved(array))
    assert got.shape == array.shape
    assert got.dtype == array.dtype.newbyteorder("=")
    np.testing.assert_array_equal(got, array)


def test_reads_fortran_order_as_c_order() -> None:
    array = np.asfortranarray(made((5, 3, 2), "<u2"))
    got = decode_npy(saved(array))
    assert got.flags.c_contiguous
    np.testing.assert_array_equal(got, array)


def test_reads_version_2_headers() -> None:
    text = "{'descr': '<u2', 'fortran_order': False, 'shape': (2,), }\n"
    np.testing.assert_array_equal(decode_npy(header(text, version=2, body=b"\x01\x00\x02\x00")), [1, 2])


@pytest.mark.parametrize("shape", SHAPES)
def test_writes_numpys_bytes(shape: tuple[int, ...]) -> None:
    for code in ("|u1", "<u2", "<i4"):
        array = made(shape, code)
        assert encode_npy(array) == saved(array)


def test_writes_big_endian_and_strided_input_as_little_endian_c_order() -> None:
    array = made((6, 4), ">u2")[::2].T
    assert encode_npy(array) == saved(np.ascontiguousarray(array).astype("<u2"))


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "starts with"),
        (b"not numpy at all", "starts with"),
        (MAGIC, "version 0"),
        (MAGIC + b"\x03\x00\x10\x00", "version 3"),
        (MAGIC + b"\x01\x00\x10", "cut short"),
        (MAGIC + b"\x01\x00\xff\xff", "65535 bytes"),
        (header("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }\n", body=b"x" * 8), "plain"),
        (header("{'descr': '|O8', 'fortran_order': False, 'shape': (1,), }\n", body=b"x" * 8), "plain"),
        (header("{'descr': '<c8', 'fortran_order': False, 'shape': (1,), }\n", body=b"x" * 8), "'c8'"),
        (header("{'descr': [('a', '<i4')], 'fortran_order': False, 'shape': (1,), }\n", body=b"x" * 4), "plain"),
        (header("{'descr': '<i4', 'fortran_order': False, 'shape': (__import__('os'),), }\n"), "plain"),
        (header("{'descr': '<i4', 'fortran_order': False, 'shape': (-1,), }\n"), "plain"),
        (header(f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({1 << 40}, 1, 1), }}\n"), "out of bounds"),
        (header(f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({1 << 30}, {1 << 30}, 4), }}\n", body=b"x"), "needs"),
        (header("{'descr': '|u1', 'fortran_order': False, 'shape': (1, 1, 1, 1, 1, 1, 1, 1, 1), }\n", body=b"x"), "out of bounds"),
        (header("{'descr': '<u2', 'fortran_order': False, 'shape': (3,), }\n", body=b"x" * 5), "needs 6 bytes, 5 found"),
        (header("{'descr': '<u2', 'fortran_order': False, 'shape': (3,), }\n", body=b"x" * 7), "needs 6 bytes, 7 found"),
    ],
)
def test_refuses_hostile_bytes_before_it_allocates(data: bytes, word: str) -> None:
    with pytest.raises(WireError, match=word):
        decode_npy(data, what="routed_experts")


def test_every_truncation_of_a_valid_stream_is_refused() -> None:
    data = saved(made((7, 2, 2), "|u1"))
    for cut in range(len(data)):
        with pytest.raises(WireError):
            decode_npy(data[:cut])


def test_refuses_to_write_objects() -> None:
    with pytest.raises(WireError, match="object"):
        encode_npy(np.array([object()]))
