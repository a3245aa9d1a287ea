"""One episode, with its deadline and its retries.

Owns the rule for whom to try again: a run that failed because its replica died, and no other. Refuses to keep an episode: it is handed
over before anything else can happen, so that a cancellation never loses one that was taken.
"""

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsref.errors import ReplicaDown
from fsref.orchestrator.groups import Source

if TYPE_CHECKING:
    from fsref.episodes import Episode, Task


class EpisodeFailed(Exception):
    """The episode cannot finish; the message says why. Inside this package only."""


@dataclass(frozen=True, kw_only=True)
class Attempts:
    """How episodes are run."""

    deadline_s: float
    retries_max: int
    seed: int

    async def run(self, source: Source, task: "Task", key: str, accept: "Callable[[Episode], None]") -> None:
        """Runs the task and calls ``accept`` in the same turn of the event loop in which the episode arrives.

        ``key`` seeds the sampling together with the run's seed. Raises ``EpisodeFailed`` after the deadline, or when the replica died
        under each attempt; other errors of the run and of ``accept`` pass through.
        """
        for attempt in range(self.retries_max + 1):
            try:
                async with asyncio.timeout(self.deadline_s) as limit:
                    accept(await source.run(task, self._seed(f"{key}/{attempt}")))
            except ReplicaDown as e:
                down = e
            except TimeoutError as e:
                if not limit.expired():
                    raise  # of a store or a server: not ours
                raise EpisodeFailed(f"it took longer than orchestrator.run_deadline_s = {self.deadline_s:g} s") from e
            else:
                return
        raise EpisodeFailed(f"its replica died under each of {self.retries_max + 1} attempts; the last: {down}") from down

    def _seed(self, key: str) -> int:
        digest = hashlib.blake2b(f"{self.seed}/{key}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "little") >> 1
