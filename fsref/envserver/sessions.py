"""One incarnation of a worker serves one orchestrator: when the next one connects, what the one before left behind is closed.

Owns which session is the current one and the rotation: every run of the old session ended, no write under way, what was never sent dropped,
the journal closed, a new incarnation opened. Objects of replies that nobody acknowledged stay in the closed incarnation, which the new
orchestrator adopts. Refuses an orchestrator that another one followed or adopted (it lives, or its requests came late): ``Fenced``.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from fsref.episodes.session import Hello
from fsref.errors import Fenced

logger = logging.getLogger(__name__)


PAST_MAX: Final = 256
"""Sessions that are remembered as over; of older ones the fence is asked."""


class Rotates(Protocol):
    """What is used of the worker's resources."""

    def rotate(self) -> str: ...
    def is_adopted(self, inc: str) -> bool: ...


class Sessions:
    """One event loop."""

    def __init__(self, resources: Rotates, end_all: Callable[[], Awaitable[None]]) -> None:
        """``end_all`` ends every run that was admitted and returns when none of them can keep any more."""
        self._resources, self._end_all = resources, end_all
        self._turn = asyncio.Lock()
        self._past: dict[str, None] = {}
        self.current = ""
        """The orchestrator that is served; empty before the first."""

    async def enter(self, hello: Hello) -> None:
        """Returns when runs of this session may be served; with the first word of a new one the incarnation is rotated.

        Raises ``Fenced`` for one that was adopted, and what closing and opening an incarnation raises: the worker must stop then.
        """
        async with self._turn:  # nothing is served in the middle of a rotation
            if not hello.owns_workers or hello.session == self.current:
                return
            if hello.session in self._past or await asyncio.to_thread(self._resources.is_adopted, hello.session):
                raise Fenced(f"the orchestrator {hello.session} was followed by another one: it must stop")
            if self.current:
                await self._end_all()
                inc = await asyncio.to_thread(self._resources.rotate)
                logger.info("session %s follows %s: the incarnation is %s now", hello.session, self.current, inc)
                self._past[self.current] = None
                while len(self._past) > PAST_MAX:
                    del self._past[next(iter(self._past))]
            self.current = hello.session
