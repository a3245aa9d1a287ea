"""Hostile object files: an honest one taken apart, changed, and put together again with every checksum right."""

import json
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numcodecs import blosc, zstd

from fsref.objects.encode import encode
from fsref.objects.zipfile import ZipWriter
from fsref.refs import Codec
from tests.support.payloads import payload, schema

Entries = dict[str, bytes]
TOKENS = 300
CODEC = Codec(name="zstd")
CHUNK = "routed_experts/c/0/0/0"


def honest() -> bytes:
    """An object of every field."""
    run_schema = schema(codec=CODEC)
    arrays = payload(np.random.default_rng(1), run_schema, TOKENS).checked(run_schema)
    return b"".join(bytes(memoryview(b).cast("B")) for b in encode(arrays, run_schema).buffers)


def entries_of(data: bytes) -> Entries:
    with zipfile.ZipFile(BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(entries: list[tuple[str, bytes]]) -> bytes:
    """A plain archive of these entries; names may repeat."""
    writer = ZipWriter()
    for name, data in entries:
        writer.add(name, (data,), len(data))
    writer.finish()
    return b"".join(bytes(memoryview(b).cast("B")) for b in writer.buffers)


def with_json(name: str, change: Callable[[Any], None]) -> bytes:
    entries = entries_of(honest())
    document = json.loads(entries[name])
    change(document)
    entries[name] = json.dumps(document).encode()
    return packed(list(entries.items()))


def with_chunk(stored: bytes) -> bytes:
    """The chunk of routing replaced; its checksum is made right."""
    entries = entries_of(honest())
    entries[CHUNK] = stored + google_crc32c.value(stored).to_bytes(4, "little")
    return packed(list(entries.items()))


def blosc_header(*, nbytes: int, packed_size: int, flags: int = 0x94, blocksize: int = 1024, version: int = 2) -> bytes:
    return struct.pack("<4BIII", version, 1, flags, 1, nbytes, blocksize, packed_size)


def _directory_change(change: Callable[[bytearray, int], None]) -> bytes:
    """The first entry of the central directory changed in place."""
    data = bytearray(honest())
    change(data, struct.unpack_from("<I", data, len(data) - 6)[0])
    return bytes(data)


def _end_change(**changes: tuple[str, int]) -> bytes:
    data = bytearray(honest())
    at = len(data) - 22
    places = {"here": 8, "total": 10, "size": 12, "offset": 16, "comment": 20}
    for name, (form, value) in changes.items():
        struct.pack_into(form, data, at + places[name], value)
    return bytes(data)


def _set(form: str, offset: int, value: int) -> Callable[[bytearray, int], None]:
    return lambda data, at: struct.pack_into(form, data, at + offset, value)


def _overlapping() -> bytes:
    """A thousand names for the same stored bytes, as in the better zip bomb."""
    body = b"x" * 4096
    local = struct.pack("<I5H3I2H", 0x04034B50, 20, 0, 0, 0, 0x21, zlib.crc32(body), len(body), len(body), 1, 0) + b"a"
    directory = b"".join(
        struct.pack("<I6H3I5H2I", 0x02014B50, 20, 20, 0, 0, 0, 0x21, zlib.crc32(body), len(body), len(body), 4, 0, 0, 0, 0, 0, 0)
        + b"a%03d" % n
        for n in range(1000)
    )
    end = struct.pack("<I4H2IH", 0x06054B50, 0, 0, 1000, 1000, len(directory), len(local) + len(body), 0)
    return local + body + directory + end


def _deflated() -> bytes:
    """Honest entries, and one of 256 MiB of zeros that deflates to 256 KiB."""
    out = BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, data in entries_of(honest()).items():
            archive.writestr(name, data)
        archive.writestr(zipfile.ZipInfo("bomb/c/0"), bytes(256 << 20), zipfile.ZIP_DEFLATED)
    return out.getvalue()


def _zip64() -> bytes:
    """A zip64 end record and locator in front of a plain end record that defers to them."""
    data = honest()
    count, size, offset = struct.unpack_from("<HII", data, len(data) - 12)
    record = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, 1 << 60, 1 << 60, 1 << 60, 1 << 62)
    locator = struct.pack("<IIQI", 0x07064B50, 0, offset + size, 1)
    end = struct.pack("<I4H2IH", 0x06054B50, 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    assert count
    return data[:-22] + record + locator + end


def zips() -> Iterator[tuple[str, bytes]]:
    """Containers that lie."""
    whole = honest()
    entries = list(entries_of(whole).items())
    yield "deflate entry", _deflated()
    yield "overlapping entries", _overlapping()
    yield "size above the file", _directory_change(lambda d, at: struct.pack_into("<II", d, at + 20, 0xFFFFFFF0, 0xFFFFFFF0))
    yield "forged compressed size", _directory_change(_set("<I", 20, 0x7FFFFFFF))
    yield "forged size", _directory_change(_set("<I", 24, 0x7FFFFFFF))
    yield "encrypted entry", _directory_change(_set("<H", 8, 1))
    yield "data descriptor", _directory_change(_set("<H", 8, 8))
    yield "local offset elsewhere", _directory_change(_set("<I", 42, 1000))
    yield "extra field", _directory_change(_set("<H", 30, 20))
    yield "local header of another size", whole[:18] + struct.pack("<I", 1) + whole[22:]
    yield "local header of another name", whole[:30] + b"Z" + whole[31:]
    yield "local header with an extra field", whole[:28] + struct.pack("<H", 7) + whole[30:]
    yield "a name twice", packed([*entries, entries[0]])
    yield "5,000 entries", packed([(f"a{n}", b"") for n in range(5000)])
    yield "an entry more", packed([*entries, ("routed_experts/c/9/0/0", b"x")])
    yield "an entry less", packed(entries[1:])
    yield "a name out of the tree", packed([*entries, ("../../etc/passwd", b"x")])
    yield "an absolute name", packed([*entries, ("/etc/passwd", b"x")])
    yield "a name with NUL", packed([*entries, ("zarr.json\x00x", b"x")])
    yield "a name of 60 kB", packed([*entries, ("a" * 60_000, b"x")])
    yield "zip64 lies", _zip64()
    yield "zip64 markers", _end_change(total=("<H", 0xFFFF), here=("<H", 0xFFFF), size=("<I", 0xFFFFFFFF), offset=("<I", 0xFFFFFFFF))
    yield "comment bomb", whole[:-2] + struct.pack("<H", 65535) + b"c" * 65535
    yield "directory of 4 GiB", _end_change(size=("<I", 0xFFFFFFFF))
    yield "no bytes", b""
    yield "an end record only", whole[-22:]


def _doc(name: str, **values: Any) -> bytes:
    return with_json(f"{name}/zarr.json", lambda d: d.update(values))


def _attribute(**values: Any) -> bytes:
    return with_json("zarr.json", lambda d: d["attributes"]["fsref"].update(values))


def _field(number: int, **values: Any) -> bytes:
    return with_json("zarr.json", lambda d: d["attributes"]["fsref"]["schema"]["fields"][number].update(values))


def _grid(*shape: int) -> dict[str, Any]:
    return {"name": "regular", "configuration": {"chunk_shape": list(shape)}}


def zarrs() -> Iterator[tuple[str, bytes]]:
    """Metadata and chunks that lie."""
    entries = entries_of(honest())
    yield "shape 2^50", _doc("routed_experts", shape=[1 << 50, 4, 2])
    yield "shape 2^50 in the attributes", _attribute(token_count=1 << 50)
    yield "as many tokens as are allowed", _attribute(token_count=1 << 27)
    yield "negative token count", _attribute(token_count=-1)
    yield "chunk 2^40", _doc("routed_experts", chunk_grid=_grid(1 << 40, 4, 2))
    yield "rows of 2^60 bytes", _field(0, row_shape=[1 << 20] * 3, layer_ids=[], expert_count=0)
    yield "2^20 chunks", _field(3, row_shape=[1 << 20], layers_per_chunk=1)
    yield "itemsize mismatch", _doc("routed_experts", data_type="int64")
    yield "itemsize mismatch in the attributes", _field(3, dtype="float64")
    yield "object dtype", _field(3, dtype="object")
    yield "string dtype", _doc("routed_experts", data_type="string")
    yield "unknown codec", _doc("routed_experts", codecs=[{"name": "evil"}])
    yield "a codec that runs code", _doc("routed_experts", codecs=[{"name": "numcodecs.pickle"}, {"name": "bytes"}])
    yield (
        "unknown codec in the attributes",
        with_json("zarr.json", lambda d: d["attributes"]["fsref"]["schema"]["codec"].update(name="gzip")),
    )
    yield (
        "another codec in the attributes",
        with_json("zarr.json", lambda d: d["attributes"]["fsref"]["schema"]["codec"].update(name="lz4")),
    )
    yield "another format", _attribute(format=2)
    yield "zarr format 2", with_json("zarr.json", lambda d: d.update(zarr_format=2))
    v2 = {"zarr_format": 2, "shape": [1], "chunks": [1], "dtype": "|O", "compressor": None, "fill_value": 0, "order": "C"}
    yield (
        "v2 metadata with a pickle filter",
        packed([*entries.items(), ("routed_experts/.zarray", json.dumps({**v2, "filters": [{"id": "pickle"}]}).encode())]),
    )
    yield "a field twice", _attribute(fields=["routed_experts", "routed_experts"])
    yield "token hash that is none", _attribute(token_hash="xyz")
    yield "missing ranges backwards", _attribute(missing={"routed_experts": [[5, 1]]})
    yield "deep nesting", packed([(n, b"[" * 100_000 if n == "zarr.json" else d) for n, d in entries.items()])
    yield "an integer of 100,000 digits", packed([(n, b"1" * 100_000 if n == "zarr.json" else d) for n, d in entries.items()])
    yield "metadata of 2 MiB", packed([(n, b" " * (2 << 20) if n == "zarr.json" else d) for n, d in entries.items()])
    yield "no JSON", packed([(n, b"\xff\xfe" if n == "zarr.json" else d) for n, d in entries.items()])
    bomb = blosc.compress(np.zeros(256 << 20, np.uint8), b"zstd", 1, blosc.BITSHUFFLE, typesize=1)
    yield "zstd that inflates to 256 MiB", with_chunk(bomb)
    yield "a Blosc header of 4 GiB", with_chunk(blosc_header(nbytes=0xFFFFFFFF, packed_size=100) + bytes(84))
    size = TOKENS * 8
    yield "a Blosc header of another length", with_chunk(blosc_header(nbytes=size, packed_size=1 << 30) + bytes(84))
    yield (
        "a Blosc header with blocks above the chunk",
        with_chunk(blosc_header(nbytes=size, packed_size=100, blocksize=1 << 31) + bytes(84)),
    )
    yield "a Blosc header of another compressor", with_chunk(blosc_header(nbytes=size, packed_size=100, flags=0x60) + bytes(84))
    yield "a Blosc header of another version", with_chunk(blosc_header(nbytes=size, packed_size=100, version=9) + bytes(84))
    yield "a Blosc body of garbage", with_chunk(blosc_header(nbytes=size, packed_size=100) + b"\xff" * 84)
    frame = zstd.compress(np.zeros(48 << 20, np.uint8), 19)
    body = struct.pack("<II", 20, len(frame)) + frame
    yield "2 kB of zstd that inflate to 48 MiB", with_chunk(blosc_header(nbytes=size, packed_size=16 + len(body), blocksize=size) + body)
    yield "a chunk shorter than a checksum", packed([(n, b"ab" if n == CHUNK else d) for n, d in entries.items()])
    yield "a chunk of 64 MiB", with_chunk(bytes(64 << 20))


def write(folder: Path) -> list[str]:
    """All of them as files ``<n>.zip``, and the honest one as ``honest.zip``; returns their descriptions in order."""
    names: list[str] = []
    (folder / "honest.zip").write_bytes(honest())
    for kind, made in (("zip", zips()), ("zarr", zarrs())):
        for name, data in made:
            (folder / f"{len(names)}.zip").write_bytes(data)
            names.append(f"{kind}: {name}")
    return names
