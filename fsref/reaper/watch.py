"""Adopting dead replicas while the run goes on: looks for ``.dead`` markers and calls the orchestrator's ``adopt``.

Owns its thread and the pause between a marker and the adoption, in which replies that arrived before the death are taken: a reply that
comes later is refused and counted, never read. The pause is a courtesy; what authorises the adoption is the marker. Refuses to give up on
one that failed: it is tried again at the next look.
"""

import threading
from collections.abc import Callable
from time import monotonic

from fsref.errors import FsrefError, JournalPoisoned, StoreError


class DeathWatch:
    """Looks every ``poll_s`` seconds until ``close``; adopts ``drain_s`` seconds after it first saw a marker."""

    def __init__(self, find: Callable[[], list[str]], adopt: Callable[[str], object], *, poll_s: float, drain_s: float) -> None:
        self._find, self._adopt = find, adopt
        self._poll_s, self._drain_s = poll_s, drain_s
        self._stop = threading.Event()
        self._seen: dict[str, float] = {}
        self.adopted = 0
        self.failed = 0
        """Attempts that failed; each is repeated."""
        self.last_error: FsrefError | None = None
        self._thread = threading.Thread(target=self._run, name="fsref-death-watch", daemon=True)
        self._thread.start()

    def close(self, *, deadline_s: float) -> None:
        """Ends the thread; waits for an adoption in progress up to the deadline."""
        self._stop.set()
        self._thread.join(deadline_s)

    def _run(self) -> None:
        while not self._stop.wait(self._poll_s):
            try:
                self._look()
            except JournalPoisoned as e:
                self.last_error = e  # the holder's next call raises it too
                return

    def _look(self) -> None:
        try:
            dead = self._find()
        except OSError as e:
            self.failed += 1
            self.last_error = e if isinstance(e, FsrefError) else StoreError(f"cannot look for dead replicas: {e.strerror}")
            return
        now = monotonic()
        for inc in dead:
            if self._stop.is_set() or now - self._seen.setdefault(inc, now) < self._drain_s:
                continue
            try:
                self._adopt(inc)
                self.adopted += 1
            except JournalPoisoned:
                raise
            except FsrefError as e:
                self.failed += 1
                self.last_error = e
