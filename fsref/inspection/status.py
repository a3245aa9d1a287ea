"""What became of an object: the store's listing against the ledger's records."""

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from fsref.inspection.find import Place
from fsref.reaper import History, history
from fsref.refs import object_name, split_object_id
from fsref.store import Store

State = Literal["present", "removed", "removing", "lost", "unknown"]


class Status(msgspec.Struct, frozen=True, omit_defaults=True):
    """One object's whereabouts. Times are wall clock in milliseconds, for people only."""

    object_id: str
    state: State
    """``removing``: dropped and still there; ``lost``: gone although nobody dropped it; ``unknown``: no ledger, no object."""
    byte_count: int = 0
    """Size in the store, where it is present."""
    by: str = ""
    """The incarnation that dropped it."""
    reason: str = ""
    dropped_ms: int = 0
    done_ms: int = 0
    kept_ms: int = 0


def statuses(place: Place, store: Store, object_ids: Sequence[str]) -> dict[str, Status]:
    """The status of each object; one listing per producer and one pass over the journals. Raises ``StoreError``."""
    present = _present(store, object_ids)
    known = history(store, place.ledger_dir, list(object_ids))
    return {i: _status(i, present.get(i), known.get(i)) for i in object_ids}


def _present(store: Store, object_ids: Iterable[str]) -> dict[str, int]:
    names = {object_name(i): i for i in object_ids}
    producers = sorted({split_object_id(i)[0] for i in names.values()})
    listed = (e for inc in producers for e in store.list(f"obj/{inc}"))
    return {names[e.name]: e.byte_count for e in listed if e.name in names}


def _status(object_id: str, byte_count: int | None, known: History | None) -> Status:
    there = byte_count is not None
    told = known.state if known is not None else "unknown"
    state: State
    if told in {"dropped", "removed"}:
        state = "removing" if there else "removed"
    elif there:
        state = "present"
    else:
        state = "lost" if told == "live" else "unknown"
    if known is None:
        return Status(object_id, state, byte_count or 0)
    return Status(
        object_id=object_id,
        state=state,
        byte_count=byte_count or 0,
        by=known.by or "",
        reason=known.reason or "",
        dropped_ms=known.dropped_ms or 0,
        done_ms=known.done_ms or 0,
        kept_ms=known.kept_ms or 0,
    )
