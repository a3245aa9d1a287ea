"""Physical removal: ids to names, names to the store, outcomes per id.

Owns retries with exponential back-off and jitter. Takes ids, never paths: it can only ever build ``obj/<inc>/<seq>.zip``.
Refuses to decide what may be removed; that was recorded before it is called.
"""

import random
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

from fsref.errors import StoreError
from fsref.refs import object_name
from fsref.store.base import Deletion, Store

RETRY_MIN_S: Final = 0.1
RETRY_MAX_S: Final = 30.0
SLICE_IDS_MIN: Final = 64
"""Fewer ids than this are not worth a thread."""
PROBE_IDS: Final = 16
"""So many are removed first, to see how fast the store is."""
FAST_S: Final = 100e-6
"""A store that removes an object in less gains nothing from threads: they would wait for each other's turns at the interpreter."""


@dataclass(frozen=True)
class Outcome:
    """What became of a set of ids."""

    done: tuple[str, ...] = ()
    """Gone now: removed by us, or found absent."""
    absent: tuple[str, ...] = ()
    """The ones of ``done`` that were absent at the first attempt: someone else removed them."""
    failed: dict[str, StoreError] = field(default_factory=dict)
    """Still there, or not known; why."""
    retries: int = 0
    """Attempts after the first, over all ids."""


def back_off_s(attempt: int, *, rng: random.Random) -> float:
    """Full-jitter exponential back-off before attempt ``attempt`` + 1: up to 0.1 s doubled per attempt, at most 30 s."""
    ceiling = min(RETRY_MAX_S, RETRY_MIN_S * 2 ** min(attempt, 16))
    return rng.uniform(ceiling / 2, ceiling)


def delete_once(store: Store, object_ids: Sequence[str], *, threads: int = 1) -> Outcome:
    """One attempt for each id; ``absent`` is what this attempt found absent. Raises ``BadRef`` before any I/O, never ``StoreError``."""
    names = {object_name(o): o for o in object_ids}
    outcomes = _delete_names(store, list(names), threads=threads)
    done: list[str] = []
    absent: list[str] = []
    failed: dict[str, StoreError] = {}
    for name, object_id in names.items():
        outcome = outcomes.get(name)
        if isinstance(outcome, Deletion):
            done.append(object_id)
            if outcome is Deletion.ABSENT:
                absent.append(object_id)
        else:
            failed[object_id] = outcome or StoreError(f"{store.url} gave no outcome for {name}")
    return Outcome(tuple(done), tuple(absent), failed)


def _delete_names(store: Store, names: list[str], *, threads: int) -> dict[str, Deletion | StoreError]:
    """The first names tell whether the store is so slow that the others are worth threads."""
    if threads < 2 or len(names) <= max(SLICE_IDS_MIN, store.bulk_delete_max):
        return store.delete(names)
    count = max(PROBE_IDS, store.bulk_delete_max)
    begin = monotonic()
    outcomes = store.delete(names[:count])
    fast = monotonic() - begin < FAST_S * count
    rest = names[count:]
    return outcomes | (store.delete(rest) if fast else _side_by_side(store, rest, threads=threads))


def _side_by_side(store: Store, names: list[str], *, threads: int) -> dict[str, Deletion | StoreError]:
    """Slices of the names at once. Daemon threads, so that one that is stuck in the kernel keeps no process from its end."""
    size = max(SLICE_IDS_MIN, store.bulk_delete_max, -(-len(names) // threads))
    slices = [names[at : at + size] for at in range(0, len(names), size)]
    outcomes: dict[str, Deletion | StoreError] = {}
    bugs: list[Exception] = []

    def work(part: list[str]) -> None:
        try:
            outcomes.update(store.delete(part))
        except Exception as e:  # noqa: BLE001 - carried to the caller's thread and raised there
            bugs.append(e)

    helpers = [threading.Thread(target=work, args=(part,), name="fsref-delete", daemon=True) for part in slices[1:]]
    for helper in helpers:
        helper.start()
    for part in slices[:1]:
        work(part)
    for helper in helpers:
        helper.join()
    if bugs:
        raise bugs[0]
    return outcomes


def delete_objects(
    store: Store, object_ids: Iterable[str], *, deadline_s: float = 30.0, threads: int = 1, stop: threading.Event | None = None
) -> Outcome:
    """Removes objects whose ``drop`` is durable, with bounded retries; what a data rank's leader calls after the barrier.

    Blocks up to about ``deadline_s`` seconds where the store keeps failing. Returns outcomes, raises nothing for a failed
    removal: failed ids stay in ``failed`` and are settled by the run's close. ``stop`` ends the waiting early.
    """
    rng = random.Random()  # noqa: S311 - jitter
    waiter = stop or threading.Event()
    end = monotonic() + deadline_s
    left = list(dict.fromkeys(object_ids))
    done: list[str] = []
    absent: tuple[str, ...] = ()
    attempt = retries = 0
    while True:
        result = delete_once(store, left, threads=threads)
        done += result.done
        if attempt == 0:
            absent = result.absent
        wait_s = back_off_s(attempt, rng=rng)
        if not result.failed or monotonic() + wait_s >= end or waiter.wait(wait_s):
            return Outcome(tuple(done), absent, result.failed, retries)
        left = list(result.failed)
        retries += len(left)
        attempt += 1
