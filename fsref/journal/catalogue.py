"""What a root that is no folder holds of the ledger, by one listing: segments by journal, and marks.

Owns the names under ``ledger/`` and their grammar: whoever can write there is not trusted. Refuses to go on without a complete listing.
"""

import re
from dataclasses import dataclass, field
from typing import Final

from fsref.errors import StoreError
from fsref.journal.segments import PREFIX
from fsref.refs import INCARNATION_PATTERN
from fsref.store.base import Store

MARKS: Final = f"{PREFIX}/marks"
NAMES_MAX: Final = 4_000_000
"""Names under ``ledger/`` that are looked at; more is no honest ledger."""
ODD_MAX: Final = 100
_SEGMENT: Final = re.compile(rf"{PREFIX}/({INCARNATION_PATTERN})/([0-9]{{6}})\.seg", re.ASCII)
_MARK: Final = re.compile(rf"{MARKS}/({INCARNATION_PATTERN})\.(dead|adopted)", re.ASCII)
_OTHER: Final = re.compile(rf"{MARKS}/(?:recover\.[0-9]{{6}}\.(?:lock|free))", re.ASCII)


@dataclass
class Catalogue:
    """One listing."""

    segments: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """Journal to (number, bytes) of its segments, in no order."""
    dead: set[str] = field(default_factory=set)
    adopted: set[str] = field(default_factory=set)
    odd: list[str] = field(default_factory=list)
    """Names that no fsref process gives; the first of them."""


def read_catalogue(store: Store, prefix: str = PREFIX) -> Catalogue:
    """Lists the ledger of a root (or one journal's, or the marks only). Raises ``StoreError`` if the listing is not complete."""
    found = Catalogue()
    for count, entry in enumerate(store.list(prefix)):
        if count >= NAMES_MAX:
            raise StoreError(f"{store.url}/{prefix} holds more than {NAMES_MAX} names: it is no ledger")
        if match := _SEGMENT.fullmatch(entry.name):
            found.segments.setdefault(match[1], []).append((int(match[2]), entry.byte_count))
        elif match := _MARK.fullmatch(entry.name):
            (found.dead if match[2] == "dead" else found.adopted).add(match[1])
        elif not _OTHER.fullmatch(entry.name) and len(found.odd) < ODD_MAX:
            found.odd.append(entry.name)
    return found
