"""Groups of episodes over the replicas.

Owns what is in flight: every group ends complete, or dropped as a whole. When a member cannot finish, the others are cancelled, what they
delivered is removed as ``group_dropped``, and what still comes back as ``late``; another group takes its place. Refuses to look into
samples.
"""

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fsref.errors import RoleFailed
from fsref.orchestrator.attempts import Attempts, EpisodeFailed
from fsref.orchestrator.custody import Custody
from fsref.orchestrator.filters import Reason
from fsref.orchestrator.groups import Group, Source, Taken
from fsref.orchestrator.waiting import settle
from fsref.orchestrator.weights import Version

if TYPE_CHECKING:
    from fsref.episodes import Episode, Task


class Dispatcher:
    """Runs groups; one batch at a time."""

    def __init__(
        self,
        tasks: "Iterator[tuple[Source, Task]]",
        custody: Custody,
        attempts: Attempts,
        version: Version,
        *,
        group_size: int,
        failures_max: int,
        first: int = 0,
    ) -> None:
        """``first``: groups that the run dispatched before; ``tasks`` goes on behind them."""
        self._tasks = tasks
        self._custody = custody
        self._attempts = attempts
        self._version = version
        self._group_size = group_size
        self._failures_max = failures_max
        self._failures = 0
        self.dispatched = first
        """Groups that the run has dispatched, before this process too."""
        self._slots: dict[str, asyncio.Semaphore] = {}
        self.in_flight = 0
        """Episodes that run now."""
        self.failed = 0
        """Episodes that could not finish, since the start."""

    async def collect(self, group_count: int) -> list[Group]:
        """That many complete groups, in order of dispatch.

        Raises ``RoleFailed`` after too many dropped groups in a row, and whatever ends an episode for good. On any way out but the
        normal one every episode is cancelled and settled; what was taken stays held until the ledger closes.
        """
        running = {asyncio.create_task(self._run(self._next())) for _ in range(group_count)}
        complete: list[Group] = []
        try:
            while running:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                running |= done  # until each was looked at: an error of one must not lose another
                for task in done:
                    group = task.result()
                    running.discard(task)
                    if group.failure:
                        self._count(group)
                        running.add(asyncio.create_task(self._run(self._next())))
                    else:
                        self._failures = 0
                        complete.append(group)
        finally:
            await settle(running)
        return sorted(complete, key=lambda g: g.number)

    def _next(self) -> Group:
        source, task = next(self._tasks)
        number, self.dispatched = self.dispatched, self.dispatched + 1
        return Group(number, source, task)

    def _count(self, group: Group) -> None:
        self._failures += 1
        if self._failures > self._failures_max:
            raise RoleFailed(
                f"{_served(group)}{self._failures} groups in a row could not finish"
                f" (orchestrator.groups_failed_max = {self._failures_max});"
                f" the last was {group.what}: {group.failure}"
            )

    async def _run(self, group: Group) -> Group:
        members = {asyncio.create_task(self._member(group, n)) for n in range(self._group_size)}
        try:
            await asyncio.wait(members, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            await settle(members)
        for member in members:
            error = None if member.cancelled() else member.exception()
            if error is not None and not isinstance(error, EpisodeFailed):
                raise error
        if not group.failure and not any(t.episode.ok for t in group.taken):
            errors = next((t.episode.errors for t in group.taken if t.episode.errors), ())
            self._drop(group, f"all {self._group_size} episodes failed: {'; '.join(errors) or 'no reason given'}")
        return group

    async def _member(self, group: Group, number: int) -> None:
        async with self._slots.setdefault(group.source.name, asyncio.Semaphore(group.source.slots)):
            version = self._version.current
            self.in_flight += 1
            try:
                await self._attempts.run(
                    group.source, group.task, f"train/{group.number}/{number}", lambda e: self._accept(group, e, version)
                )
            except EpisodeFailed as e:
                self.failed += 1
                self._drop(group, str(e))
                raise
            finally:
                self.in_flight -= 1

    def _accept(self, group: Group, episode: "Episode", version: int) -> None:
        fresh = self._custody.take(episode.request_id, episode.objects)
        if group.failure:
            self._custody.drop(fresh, Reason.LATE)
            return
        if len(fresh) < len(episode.objects):
            # A duplicate, or a reply of a producer that was adopted: its arrays are gone or belong to another episode.
            self._custody.drop(fresh, Reason.LATE)
            raise EpisodeFailed(f"{len(episode.objects) - len(fresh)} of its {len(episode.objects)} objects may not be taken any more")
        group.taken.append(Taken(episode, version, self._version.offered))

    def _drop(self, group: Group, why: str) -> None:
        """The group will not train; returns at once, its members are cancelled by ``_run``."""
        if group.failure:
            return
        group.failure = why
        for taken in group.taken:
            self._custody.drop(taken.episode.objects, Reason.GROUP_DROPPED)
        group.taken.clear()


def _served(group: Group) -> str:
    """First of all, what a source that someone else serves may be: a plain server's renderer may refuse replies with masks and heads."""
    source = group.source
    if not source.serve_address:
        return ""
    return f"source {source.name!r} at {source.serve_address}: is it a plain verifiers server? Use `fsref env-server`, which keeps arrays; "
