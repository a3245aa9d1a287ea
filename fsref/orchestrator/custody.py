"""What the orchestrator holds: the one door between its decisions and the ledger.

Owns the counters (objects and bytes taken, removed, shipped) beside the holder's records. Refuses to decide: callers name the reason.
Methods belong to the event loop's thread, but for ``ship``, which blocks until it is durable and belongs in another.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Protocol

from fsref.orchestrator.filters import Dropped, Reason


class Holder(Protocol):
    """What is used of the ledger's consumer side (``fsref.reaper``)."""

    def take(self, request_id: str, sizes: Mapping[str, int]) -> list[str]: ...
    def drop(self, object_ids: Iterable[str], reason: str) -> int: ...
    def ship(self, step: int, sizes: Mapping[str, int]) -> tuple[int, int]: ...


class Custody:
    """Takes, drops and ships, and counts what it did since ``flush``."""

    def __init__(self, holder: Holder) -> None:
        self._holder = holder
        self._objects: Counter[Reason] = Counter()
        self._things: Counter[Reason] = Counter()
        self._bytes_taken = 0
        self._bytes_removed = 0
        self.bytes_held = 0
        """Bytes of objects that were taken and neither dropped nor shipped."""

    def take(self, request_id: str, objects: Mapping[str, int]) -> dict[str, int]:
        """Objects of a reply that are ours now. Fewer than offered: a duplicate, or its producer was declared dead."""
        if not objects:
            return {}
        fresh = {o: objects[o] for o in self._holder.take(request_id, objects)}
        size = sum(fresh.values())
        self._bytes_taken += size
        self.bytes_held += size
        return fresh

    def drop(self, objects: Mapping[str, int], reason: Reason) -> None:
        """Removes objects that are held."""
        if not objects:
            return
        self._holder.drop(list(objects), str(reason))
        size = sum(objects.values())
        self._objects[reason] += len(objects)
        self._bytes_removed += size
        self.bytes_held -= size

    def drop_samples(self, dropped: Iterable[Dropped]) -> None:
        """Removes what goes with samples that do not train; each reason in one record."""
        by_reason: dict[Reason, dict[str, int]] = {}
        for d in dropped:
            self._things[d.reason] += 1
            by_reason.setdefault(d.reason, {}).update(d.objects)
        for reason, objects in by_reason.items():
            self.drop(objects, reason)

    def ship(self, step: int, objects: Mapping[str, int]) -> tuple[int, int]:
        """The right passes to the step; durable on return. The ledger's count and sum. Call ``shipped`` afterwards on the event loop."""
        return self._holder.ship(step, objects)

    def shipped(self, objects: Mapping[str, int]) -> None:
        """Counts what ``ship`` moved."""
        self.bytes_held -= sum(objects.values())

    def flush(self) -> dict[str, float]:
        """Metrics since the last call."""
        out = {
            "payload/bytes_kept": float(self._bytes_taken),
            "payload/bytes_removed": float(self._bytes_removed),
            "payload/bytes_held": float(self.bytes_held),
        }
        for reason in Reason:
            if reason is not Reason.SHUTDOWN:
                out[f"dropped/{reason}"] = float(self._things[reason])
                out[f"dropped_objects/{reason}"] = float(self._objects[reason])
        self._things.clear()
        self._objects.clear()
        self._bytes_taken = self._bytes_removed = 0
        return out
