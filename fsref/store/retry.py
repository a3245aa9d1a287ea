"""Retries of one store: bounded in number and time, with exponential back-off and jitter, counted.

Owns when a failed operation is tried again. Refuses to decide what failed: callers raise ``StoreUnavailable`` for what may heal.
"""

import random
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

from fsref.errors import StoreError, StoreUnavailable

WAIT_MIN_S: Final = 0.1
WAIT_MAX_S: Final = 10.0
T = TypeVar("T")


class Retries:
    """How often and how long operations of one store are tried. Thread-safe; ``stop`` ends every wait."""

    def __init__(self, *, retries_max: int, retry_s: float, wait_min_s: float = WAIT_MIN_S) -> None:
        self._retries_max, self._retry_s, self._wait_min_s = retries_max, retry_s, wait_min_s
        self._rng = random.Random()  # noqa: S311 - jitter, not a secret
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self.count = 0
        """Attempts after the first, over all operations so far."""

    def run(self, work: Callable[[], T], asked: str) -> T:
        """``work``'s result, tried again after ``StoreUnavailable`` up to ``retries_max`` times, none begun after ``retry_s`` seconds.

        Raises what ``work`` raised last; for ``StoreUnavailable`` with the number of attempts.
        """
        end = time.monotonic() + self._retry_s
        attempt = 0
        while True:
            try:
                return work()
            except StoreUnavailable as e:
                failure: StoreError = e
            wait_s = self.wait_s(attempt)
            attempt += 1
            if attempt > self._retries_max or time.monotonic() + wait_s > end or self._stopped.wait(wait_s):
                raise StoreUnavailable(f"{asked}, given up after {attempt} attempt{'s' * (attempt > 1)}: {failure}")
            with self._lock:
                self.count += 1

    def wait_s(self, attempt: int) -> float:
        """Before attempt ``attempt`` + 1: a random half to the whole of ``wait_min_s`` doubled per attempt, at most ``WAIT_MAX_S``."""
        ceiling = min(WAIT_MAX_S, self._wait_min_s * 2 ** min(attempt, 16))
        with self._lock:
            return self._rng.uniform(ceiling / 2, ceiling)

    def stop(self) -> None:
        """Operations give up instead of waiting, from now on."""
        self._stopped.set()
