"""What a read plan is cut into: requests of sizes that suit the store, and parts of a plan that threads take one at a time.

Owns the sizes and the counters. Refuses I/O and threads.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from fsref.plan import ReadPlan, Request
from fsref.reader.buffers import Out
from fsref.reader.chunks import Destination
from fsref.store import Store

REQUEST_BYTES_LOCAL: Final = 2 << 20
"""Ranged reads of 1-2 MiB are fastest on local files: the decoder finds the bytes in cache."""
REQUEST_BYTES_REMOTE: Final = 256 << 20
"""On networks one request per object where ranges touch."""
TASK_BYTES: Final = 8 << 20
GAP_BYTES_LOCAL: Final = 4 << 10
GAP_BYTES_REMOTE: Final = 64 << 10


def request_limits(store: Store) -> tuple[int, int]:
    """``request_bytes_max`` and ``gap_bytes_max`` of plans against this store."""
    if store.posix_path is not None:
        return REQUEST_BYTES_LOCAL, GAP_BYTES_LOCAL
    return REQUEST_BYTES_REMOTE, GAP_BYTES_REMOTE


@dataclass
class ReadCounters:
    """What a reader did; plain numbers that a metrics hook may copy."""

    requests: int = 0
    """Ranged reads from the store."""
    bytes_fetched: int = 0
    """From the store; what another rank of the node had fetched is not in it."""
    retries: int = 0
    abandoned: int = 0
    """Threads that were stuck in a read and given up."""
    conflicts: int = 0
    """Rows for which a later segment of a reference says otherwise than the one that counts."""


class Task(NamedTuple):
    """A part of one segment's requests."""

    to: Destination
    requests: tuple[Request, ...]
    step: int
    tally: ReadCounters


def cut(plan: ReadPlan, out: Out, step: int, tally: ReadCounters) -> Iterator[Task]:
    """Parts of about ``TASK_BYTES`` each, as even as requests allow: a small last one leaves a thread idle and opens a file for little."""
    for number, segment in enumerate(plan.segments):
        to = Destination.of(segment, number, out)
        total = sum(r.size for r in segment.requests)
        part_bytes = total / max(1, round(total / TASK_BYTES))
        group: list[Request] = []
        done, bound = 0, part_bytes
        for request in segment.requests:
            group.append(request)
            done += request.size
            if done >= bound:
                yield Task(to, tuple(group), step, tally)
                group, bound = [], bound + part_bytes
        if group:
            yield Task(to, tuple(group), step, tally)
