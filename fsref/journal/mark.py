"""The content of a marker, whatever it is kept in. Owns its form and its bound; refuses what no fsref process writes."""

from typing import Final

import msgspec

from fsref.errors import JournalCorrupt

BYTES_MAX: Final = 4096


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """Who wrote it, and when (for people)."""

    by: str
    ms: int = 0
    why: str = ""


def decode_marker(data: bytes, *, name: str) -> Marker:
    """The content of the marker ``name``. Raises ``JournalCorrupt``."""
    try:
        return msgspec.json.decode(data, type=Marker)
    except msgspec.DecodeError as e:
        raise JournalCorrupt(f"{name} is not a marker: {e}") from e
