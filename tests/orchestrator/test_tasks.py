"""The order of tasks."""

from itertools import islice
from typing import Any

import pytest

from fsref.errors import ConfigError
from fsref.orchestrator.groups import Source
from fsref.orchestrator.tasks import stream


def source(name: str, count: int, weight: float = 1.0) -> Source:
    tasks: Any = [f"{name}{n}" for n in range(count)]
    return Source(name=name, tasks=tasks, run=None, slots=1, weight=weight)  # type: ignore[arg-type]


def test_tasks_repeat_after_an_epoch_in_their_own_order() -> None:
    assert [str(t) for _, t in islice(stream([source("a", 3)], seed=0, shuffle=False), 5)] == ["a0", "a1", "a2", "a0", "a1"]


def test_a_shuffled_epoch_has_every_task_once_and_the_next_differs() -> None:
    tasks = [str(t) for _, t in islice(stream([source("a", 20)], seed=1, shuffle=True), 40)]
    assert sorted(tasks[:20]) == sorted(tasks[20:]) == sorted(f"a{n}" for n in range(20))
    assert tasks[:20] != tasks[20:]
    assert tasks == [str(t) for _, t in islice(stream([source("a", 20)], seed=1, shuffle=True), 40)]


def test_sources_share_by_weight_over_any_stretch() -> None:
    names = [s.name for s, _ in islice(stream([source("a", 2, 3.0), source("b", 2, 1.0)], seed=0, shuffle=False), 8)]
    assert names == ["a", "a", "a", "b", "a", "a", "a", "b"]


def test_no_source_and_an_empty_taskset_are_refused() -> None:
    with pytest.raises(ConfigError, match="split"):
        stream([], seed=0, shuffle=False)
    with pytest.raises(ConfigError, match="source 'a': its taskset has no tasks"):
        stream([source("a", 0)], seed=0, shuffle=False)
