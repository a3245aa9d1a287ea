"""Markers as tiny objects, for a root that is no folder: ``ledger/marks/<inc>.adopted``, ``<inc>.dead``, ``recover.<n>.lock``.

Owns their creation by the store's create-only put. Nothing here is ever
replaced or removed: a lock is given back by a mark beside it, so that two who find it free cannot both take the next one. Refuses to
believe a put alone: the mark is read back, because a store that ignores the condition lets a second put replace the first. On such a
store two adopters at the same instant are not told apart (the single-recoverer rule, docs/ledger.md).
"""

import re
from typing import Final

import msgspec

from fsref.errors import ObjectExists, ObjectMissing
from fsref.failpoints import failpoint
from fsref.journal.catalogue import MARKS
from fsref.journal.mark import BYTES_MAX, Marker, decode_marker
from fsref.store.base import Store

_LOCK: Final = re.compile(rf"{MARKS}/recover\.([0-9]{{6}})\.(lock|free)", re.ASCII)


def mark_name(inc: str, suffix: str) -> str:
    return f"{MARKS}/{inc}.{suffix}"


def read_mark(store: Store, name: str) -> Marker:
    """Raises ``ObjectMissing``, ``JournalCorrupt``, ``StoreError``."""
    return decode_marker(store.read(name, bytes_max=BYTES_MAX), name=f"{store.url}/{name}")


def has_mark(store: Store, name: str) -> bool:
    """One HEAD. Raises ``StoreError`` if the store does not say."""
    try:
        store.open(name).close()
    except ObjectMissing:
        return False
    return True


def create_mark(store: Store, name: str, marker: Marker) -> None:
    """Creates a mark, once. Raises ``ObjectExists`` if somebody's is there, or came at the same time and won."""
    if has_mark(store, name):
        raise ObjectExists(f"{store.url}/{name} is there already")
    failpoint("marker.create.before")
    store.put(name, [msgspec.json.encode(marker)])
    failpoint("marker.create.after")
    if read_mark(store, name) != marker:
        raise ObjectExists(f"{store.url}/{name} was created by another process at the same time")


def acquire_root_lock(store: Store, marker: Marker) -> str | None:
    """Takes the next lock of recovery if the last one was given back. Returns None, or who has it."""
    last, free = _last_lock(store)
    if last >= 0 and not free:
        return read_mark(store, _lock_name(last, "lock")).by
    try:
        create_mark(store, _lock_name(last + 1, "lock"), marker)
    except ObjectExists:
        return read_mark(store, _lock_name(last + 1, "lock")).by
    return None


def release_root_lock(store: Store, owner: str, marker: Marker) -> None:
    """Gives the lock back if ``owner`` has it; else somebody did so before, and nothing changes."""
    last, free = _last_lock(store)
    if last < 0 or free or read_mark(store, _lock_name(last, "lock")).by != owner:
        return
    try:
        create_mark(store, _lock_name(last, "free"), marker)
    except ObjectExists:
        return


def _last_lock(store: Store) -> tuple[int, bool]:
    """The highest number of a lock (-1: none yet), and whether it was given back."""
    found = {(int(m[1]), m[2]) for entry in store.list(MARKS) if (m := _LOCK.fullmatch(entry.name))}
    last = max((n for n, _ in found), default=-1)
    return last, (last, "free") in found


def _lock_name(n: int, suffix: str) -> str:
    return f"{MARKS}/recover.{n:06d}.{suffix}"
