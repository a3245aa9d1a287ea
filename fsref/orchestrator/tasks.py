"""Which task comes next: sources by weight, tasks of a source in a seeded order, epoch after epoch.

Pure. Refuses to know what a task is.
"""

import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fsref.errors import ConfigError
from fsref.orchestrator.groups import Source

if TYPE_CHECKING:
    from fsref.episodes import Task


def stream(sources: Sequence[Source], *, seed: int, shuffle: bool) -> "Iterator[tuple[Source, Task]]":
    """Endless. Among sources the one furthest behind its weight comes next, so shares hold over any stretch.

    Raises ``ConfigError`` for no source, or one without tasks.
    """
    if not sources:
        raise ConfigError("no [[env]] of this split: add one with split = 'train' (or 'eval')")
    for source in sources:
        if not source.tasks:
            raise ConfigError(f"source {source.name!r}: its taskset has no tasks")
    return _merge(sources, [_epochs(s, seed=seed, shuffle=shuffle) for s in sources])


def _merge(sources: Sequence[Source], tasks: "Sequence[Iterator[Task]]") -> "Iterator[tuple[Source, Task]]":
    given = [0] * len(sources)
    while True:
        n = min(range(len(sources)), key=lambda i: ((given[i] + 1) / sources[i].weight, i))
        given[n] += 1
        yield sources[n], next(tasks[n])


def _epochs(source: Source, *, seed: int, shuffle: bool) -> "Iterator[Task]":
    epoch = 0
    while True:
        order = list(range(len(source.tasks)))
        if shuffle:
            random.Random(f"{seed}/{source.name}/{epoch}").shuffle(order)  # noqa: S311 - an order of tasks, not a secret
        for n in order:
            yield source.tasks[n]
        epoch += 1
