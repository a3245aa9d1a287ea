"""Ways to wait for asyncio work without losing a result, a task or an error's type."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from fsref.errors import FsrefError


async def settle(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    """Cancels what still runs and waits for all of it; results and errors stay in the tasks."""
    waited = list(tasks)
    for task in waited:
        task.cancel()
    await asyncio.gather(*waited, return_exceptions=True)


async def to_its_end(work: Callable[[], None]) -> None:
    """Runs blocking work in a thread. A cancellation takes effect when the work is done, never in its middle."""
    task = asyncio.create_task(asyncio.to_thread(work))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        task.result()
        raise


@contextlib.asynccontextmanager
async def together() -> AsyncIterator[asyncio.TaskGroup]:
    """A ``TaskGroup`` whose first error of this package is raised alone; a group with a bug in it stays whole."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        error = _first(group)
        if error is None:
            raise
        raise error from None


def _first(group: BaseExceptionGroup[BaseException]) -> FsrefError | None:
    if group.split(FsrefError)[1] is not None:
        return None
    for error in group.exceptions:
        found = _first(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(found, FsrefError):
            return found
    return None
