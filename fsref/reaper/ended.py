"""Which env replicas ended and wait for an adopter: what an orchestrator's watch asks every second.

Owns looking cheaply: names and last lines of files in the ledger's folder; on a root that is no folder also its ``.dead`` marks, listed at
most every ``root_poll_s`` seconds, and the fence of each one that ended. Refuses to decide about the dead: ``adopt`` proves each of them.
"""

from collections.abc import Container
from time import monotonic

from fsref.journal.catalogue import MARKS, read_catalogue
from fsref.journal.death import ends_with_close
from fsref.journal.markers import read_adopted
from fsref.journal.place import Ledger


class EndedReplicas:
    """Env incarnations that closed or were declared dead. Not thread-safe."""

    def __init__(self, ledger: Ledger, *, root_poll_s: float) -> None:
        self._ledger, self._root_poll_s = ledger, root_poll_s
        self._root_dead: set[str] = set()
        self._root_due_s = 0.0
        self._others: set[str] = set()  # fenced by somebody whose adoption is not ours to finish

    def find(self, *, by: str, adopted: Container[str], heirs_of: Container[str], settled: Container[str]) -> list[str]:
        """Those that ``by`` should adopt. ``adopted`` are its own; ``heirs_of``: ended orchestrators, whose fences without a record
        it inherited; ``settled``: incarnations whose adoption is recorded. Raises ``OSError`` (``StoreError`` of the root).
        """
        names = {path.name for path in self._ledger.here.iterdir()}
        self._look_at_root()
        known = {name.removesuffix(".jnl") for name in names if name.startswith("env.") and name.endswith(".jnl")} | self._root_dead
        left = [inc for inc in sorted(known) if inc not in adopted and inc not in self._others]
        out = []
        for inc in left:
            if self._has_ended(inc, names):
                owner = self._owner(inc, names)
                if owner is None or owner == by or (owner in heirs_of and inc not in settled):
                    out.append(inc)
                else:
                    self._others.add(inc)
        return out

    def _has_ended(self, inc: str, names: set[str]) -> bool:
        return f"{inc}.dead" in names or inc in self._root_dead or ends_with_close(self._ledger.here, inc)

    def _owner(self, inc: str, names: set[str]) -> str | None:
        """Who put up its fence. No fence, or our own (an earlier attempt stopped behind it): adopt it. One of an orchestrator before us
        died with its attempt, unless its adoption is recorded, which came to us with its rights."""
        if self._ledger.store is None and f"{inc}.adopted" not in names:
            return None
        return read_adopted(self._ledger, inc)

    def _look_at_root(self) -> None:
        now = monotonic()
        if self._ledger.store is None or now < self._root_due_s:
            return
        self._root_dead = {inc for inc in read_catalogue(self._ledger.store, MARKS).dead if inc.startswith("env.")}
        self._root_due_s = now + self._root_poll_s
