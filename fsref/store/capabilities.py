"""What a store really does, found by trying it: atomic create-only publishing, listing after a write, bulk removal, versions.

Owns the check and its record. Refuses to decide what follows: roles that fence, and ``fsref doctor``, ask the record.
"""

import secrets
from dataclasses import dataclass
from typing import Final

from fsref.errors import ObjectExists, StoreError
from fsref.store.base import Entry, Store, Versioning

PREFIX: Final = "probe"


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What one root does. Built by ``probe``."""

    create_only: bool
    """``put`` under a taken name is refused, also between processes: markers may be raced for. False: the server ignores
    If-None-Match, or the filesystem has no such thing; then only one process at a time may recover or adopt."""
    list_after_write: bool
    """A listing shows what was published just before, and no longer what was removed."""
    bulk_delete_max: int
    """Names that one removal request takes; 1: each name costs a request."""
    delete_works: bool
    """What was removed, one by one and in bulk, was gone."""
    versioning: Versioning

    @property
    def usable(self) -> bool:
        """Whether a run can live here: what is removed is gone, and listings tell the truth."""
        return self.delete_works and self.list_after_write and self.versioning not in {"on", "suspended"}

    def shortcomings(self) -> tuple[str, ...]:
        """What is missing, and what follows from it; empty if nothing is."""
        checks = (
            (self.create_only, "create-only put is not honoured: a second recoverer is not fenced off, run one recovery at a time"),
            (self.list_after_write, "a listing does not show the newest writes: audits may report objects too early"),
            (self.delete_works, "removed objects stay: the run would leak"),
            (self.versioning not in {"on", "suspended"}, f"the bucket keeps versions ({self.versioning}): removals leave the bytes behind"),
            (self.versioning != "unknown", "whether the bucket keeps versions is not known: allow s3:GetBucketVersioning, or check it"),
        )
        return tuple(text for good, text in checks if not good)


def probe(store: Store) -> Capabilities:
    """Tries a store with three small objects under ``probe/``, which are removed again. About ten requests on S3.

    Raises ``StoreError`` if the store cannot be used at all; what works differently than hoped is in the record.
    """
    folder = f"{PREFIX}/{secrets.token_hex(8)}"
    names = [f"{folder}/{n}" for n in range(3)]
    try:
        for name in names:
            store.put(name, [b"first"])
        create_only = store.create_only and _refuses_second_put(store, names[0])
        seen = set(store.list(folder)) >= {Entry(n, 5) for n in names[1:]}
    finally:
        outcomes = store.delete(names[:1]) | store.delete(names[1:])
    left = [e.name for e in store.list(folder)]
    failed = [o for o in outcomes.values() if isinstance(o, StoreError)]
    return Capabilities(
        create_only=create_only,
        list_after_write=seen and not left,
        bulk_delete_max=store.bulk_delete_max,
        delete_works=not failed and not any(_is_there(store, n) for n in names),
        versioning=store.versioning,
    )


def _refuses_second_put(store: Store, name: str) -> bool:
    try:
        store.put(name, [b"second"])
    except ObjectExists:
        return store.read(name, bytes_max=64) == b"first"
    return False


def _is_there(store: Store, name: str) -> bool:
    try:
        store.read(name, bytes_max=64)
    except FileNotFoundError:
        return False
    return True
