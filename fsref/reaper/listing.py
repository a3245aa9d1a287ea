"""Listing ``obj/`` into what the ledger knows: present ids, staging files, foreign names. Raises unless the listing is complete."""

import re
from typing import Final

from fsref.ledger.predicates import StoreView
from fsref.redact import visible
from fsref.refs import INCARNATION_PATTERN
from fsref.store.base import Store

_OBJECT: Final = re.compile(rf"obj/({INCARNATION_PATTERN})/([0-9]{{10}})\.zip", re.ASCII)
_STAGING: Final = re.compile(rf"obj/{INCARNATION_PATTERN}/\.[A-Za-z0-9._=-]+\.tmp", re.ASCII)


def list_objects(store: Store, prefix: str = "obj") -> StoreView:
    """Everything under ``prefix``. Raises ``StoreError`` if the listing is not complete; then nothing may be concluded from it."""
    present: dict[str, set[int]] = {}
    staging: list[str] = []
    foreign: list[str] = []
    for entry in store.list(prefix):
        if match := _OBJECT.fullmatch(entry.name):
            present.setdefault(match[1], set()).add(int(match[2]))
        else:
            (staging if _STAGING.fullmatch(entry.name) else foreign).append(visible(entry.name))
    return StoreView(present, tuple(staging), tuple(foreign))
