"""The ZIP container: stored entries only, sizes known in front, no ZIP64 (objects stay below 4 GiB).

Owns writing (headers for given buffers) and a reader of the central directory that trusts nothing: entry count, names, sizes, overlaps
and methods are checked against the file before anything is believed.
"""

import re
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from zlib_ng.zlib_ng import crc32

from fsref.errors import ObjectCorrupt
from fsref.plan.layout import ENTRIES_MAX
from fsref.store import Buffer

DIRECTORY_BYTES_MAX: Final = 1 << 20
_LOCAL: Final = struct.Struct("<I5H3I2H")
_CENTRAL: Final = struct.Struct("<I6H3I5H2I")
_END: Final = struct.Struct("<I4H2IH")
_LOCAL_MAGIC, _CENTRAL_MAGIC, _END_MAGIC = 0x04034B50, 0x02014B50, 0x06054B50
_VERSION: Final = 20
_DATE: Final = 0x21  # 1980-01-01: objects with equal content have equal bytes
_NAME: Final = re.compile(r"[a-z][a-z0-9_]*(?:/[a-z0-9_]+)*(?:/zarr\.json)|zarr\.json|[a-z][a-z0-9_]*(?:/[a-z0-9_]+)*", re.ASCII)


class ZipEntry(NamedTuple):
    """One entry of the central directory."""

    name: str
    offset: int
    """Of its data, behind the local header."""
    size: int
    crc: int
    header: bytes
    """The local header that must stand right before the data: a tool that believes it instead of the directory sees the same bytes."""


class ZipWriter:
    """Collects the buffers of an archive; nothing is copied."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.byte_count = 0
        self._directory: list[bytes] = []

    def add(self, name: str, parts: Sequence[Buffer], size: int) -> None:
        """Appends one stored entry made of ``parts``, ``size`` bytes in all."""
        crc = 0
        for part in parts:
            crc = crc32(part, crc)
        raw = name.encode("ascii")
        common = (0, 0, 0, _DATE, crc, size, size, len(raw), 0)
        header = _LOCAL.pack(_LOCAL_MAGIC, _VERSION, *common) + raw
        self._directory.append(_CENTRAL.pack(_CENTRAL_MAGIC, _VERSION, _VERSION, *common, 0, 0, 0, 0, self.byte_count) + raw)
        self.buffers += [header, *parts]
        self.byte_count += len(header) + size

    def finish(self) -> None:
        """Appends the central directory."""
        directory = b"".join(self._directory)
        count = len(self._directory)
        end = _END.pack(_END_MAGIC, 0, 0, count, count, len(directory), self.byte_count, 0)
        self.buffers += [directory, end]
        self.byte_count += len(directory) + len(end)


END_BYTES: Final = _END.size


def read_end(tail: bytes, byte_count: int) -> tuple[int, int, int]:
    """(offset, size, entries) of the central directory from the last ``END_BYTES`` bytes of a file of ``byte_count`` bytes."""
    if len(tail) != END_BYTES or byte_count < END_BYTES:
        raise ObjectCorrupt(f"an object of {byte_count} bytes is shorter than a ZIP end record: truncated")
    magic, disk, start_disk, here, total, size, offset, comment = _END.unpack(tail)
    if magic != _END_MAGIC or disk or start_disk or here != total or comment:
        raise ObjectCorrupt("the object does not end in a plain ZIP end record: truncated, or not an fsref object")
    if total > ENTRIES_MAX or size > DIRECTORY_BYTES_MAX or offset + size + END_BYTES != byte_count:
        raise ObjectCorrupt(f"the ZIP directory names {total} entries in {size} bytes at {offset}; the object has {byte_count} bytes")
    return offset, size, total


def read_directory(directory: bytes, *, entries: int, offset: int) -> list[ZipEntry]:
    """The entries in file order, checked: stored, plain names, unique, back to back from byte 0 on. Raises ``ObjectCorrupt``."""
    out: list[ZipEntry] = []
    at = expected = 0
    for _ in range(entries):
        if at + _CENTRAL.size > len(directory):
            raise ObjectCorrupt("the ZIP directory is cut off")
        fields = _CENTRAL.unpack_from(directory, at)
        magic, _, version, flags, method, clock, date, crc, packed, size, name_size, extra, comment, disk, _, _, local = fields
        at += _CENTRAL.size
        raw = directory[at : at + name_size]
        name = raw.decode("ascii", "replace")
        at += name_size
        if magic != _CENTRAL_MAGIC or flags or method or extra or comment or disk or packed != size:
            raise ObjectCorrupt(f"ZIP entry {name[:80]!r} is not a plain stored entry")
        if not _NAME.fullmatch(name):
            raise ObjectCorrupt(f"ZIP entry {name[:80]!r} is not a name that this format has")
        if local != expected:
            raise ObjectCorrupt(f"ZIP entry {name!r} starts at {local}, {expected} expected: entries overlap or leave holes")
        data = local + _LOCAL.size + name_size
        expected = data + size
        header = _LOCAL.pack(_LOCAL_MAGIC, version, 0, 0, clock, date, crc, size, size, name_size, 0) + raw
        out.append(ZipEntry(name, data, size, crc, header))
    if at != len(directory) or expected != offset or len({e.name for e in out}) != len(out):
        raise ObjectCorrupt("the ZIP directory does not describe the file: trailing bytes, holes or a name twice")
    return out
