"""Bytes of a journal to records, incrementally and with bounded memory (hostile-input parsing, faults.md section 4 point 6).

Owns the tail rule: a bad last line (no LF, wrong checksum, zero fill) is the end of the journal; a bad line that a valid one follows is
corruption. Refuses lines above the limit without buffering them.
"""

from collections.abc import Iterator

from fsref.errors import JournalCorrupt
from fsref.ledger.records import LINE_BYTES_MAX, AnyRecord, decode_line, line_ok


class LineReader:
    """Fed with consecutive chunks of one journal; yields ``(offset, record)``. Feed more as the file grows."""

    def __init__(self) -> None:
        self.end = 0
        """Offset behind the last good line: where the journal ends, as far as is known."""
        self.size = 0
        """Bytes seen."""
        self._pending = b""
        self._pending_at = 0
        self._skipping = False
        self._bad_at: int | None = None

    @property
    def torn_bytes(self) -> int:
        """Bytes behind ``end``: a record that was being written, or garbage."""
        return self.size - self.end

    def feed(self, chunk: bytes) -> Iterator[tuple[int, AnyRecord]]:
        """Records of all lines that are complete now. Raises ``JournalCorrupt`` with the offset."""
        self.size += len(chunk)
        if self._skipping:
            cut = chunk.find(b"\n") + 1
            if not cut:
                self._pending_at += len(chunk)
                return
            chunk, self._skipping = chunk[cut:], False
            self._pending_at += cut
        lines = (self._pending + chunk).split(b"\n")
        at = self._pending_at
        self._pending = lines.pop()
        for line in lines:
            end = at + len(line) + 1
            if line_ok(line):
                if self._bad_at is not None:
                    raise JournalCorrupt(f"the line at {self._bad_at} is damaged and valid lines follow (at {at})")
                try:
                    record = decode_line(line)
                except JournalCorrupt as e:
                    raise JournalCorrupt(f"the line at {at} has a right checksum but is refused: {e}") from e
                self.end = end
                yield at, record
            elif self._bad_at is None:
                self._bad_at = at
            at = end
        self._pending_at = at
        if len(self._pending) > LINE_BYTES_MAX:
            self._bad_at = at if self._bad_at is None else self._bad_at
            self._pending_at += len(self._pending)
            self._pending, self._skipping = b"", True
