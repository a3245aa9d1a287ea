"""Dispatch: complete groups, dropped groups, late episodes, deaths of replicas, cancellation."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from fsref.errors import MissingArrays, ReplicaDown, RoleFailed, StoreUnavailable
from fsref.orchestrator.attempts import Attempts
from fsref.orchestrator.dispatcher import Dispatcher
from fsref.orchestrator.tasks import stream
from fsref.orchestrator.weights import Version

_T = TypeVar("_T")


def ran(work: Coroutine[Any, Any, _T]) -> _T:
    async def bounded() -> _T:
        async with asyncio.timeout(60):
            return await work

    return asyncio.run(bounded())


def dispatcher(
    world: Any, *, group_size: int = 2, failures_max: int = 4, deadline_s: float = 60, version: int = 0, **source: Any
) -> Dispatcher:
    return Dispatcher(
        stream([world.source(**source)], seed=0, shuffle=False),
        world.custody,
        Attempts(deadline_s=deadline_s, retries_max=2, seed=0),
        Version(version),
        group_size=group_size,
        failures_max=failures_max,
    )


def test_groups_come_complete_in_order_with_their_version(world: Any) -> None:
    groups = ran(dispatcher(world, group_size=3, version=7).collect(2))
    assert [(g.number, g.task.key, len(g.taken)) for g in groups] == [(0, "task-0", 3), (1, "task-1", 3)]
    assert {(t.dispatched, t.offered) for g in groups for t in g.taken} == {(7, 7)}
    assert all(moves == ["take"] for moves in world.story().values())


def test_a_run_that_failed_because_its_replica_died_is_tried_again(world: Any) -> None:
    died: list[int] = []

    async def script(number: int, task: Any) -> Any:
        if len(died) < 2:
            died.append(number)
            raise ReplicaDown("replica math-0 is gone")
        return world.episode(number, task)

    world.script = script
    (group,) = ran(dispatcher(world).collect(1))
    assert (len(group.taken), world.runs, group.number) == (2, 4, 0)


def test_a_group_whose_replica_dies_every_time_is_dropped_and_another_takes_its_place(world: Any) -> None:
    async def script(number: int, task: Any) -> Any:
        if task.key == "task-0" and number != 1:
            raise ReplicaDown("replica math-0 is gone")
        return world.episode(number, task)

    world.script = script
    (group,) = ran(dispatcher(world).collect(1))
    assert (group.number, group.task.key, len(group.taken)) == (1, "task-1", 2)
    world.holder.close()
    assert world.ends() == {"drop:group_dropped": 1, "drop:shutdown": 2}


@pytest.mark.payload("F19")
def test_an_episode_over_its_deadline_drops_its_group(world: Any) -> None:
    cancelled: list[int] = []

    async def script(number: int, task: Any) -> Any:
        if number == 0:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(number)
                raise
        return world.episode(number, task)

    world.script = script
    (group,) = ran(dispatcher(world, deadline_s=0.5).collect(1))
    assert (group.number, cancelled) == (1, [0])
    world.holder.close()
    assert world.ends() == {"drop:group_dropped": 1, "drop:shutdown": 2}


def test_a_timeout_of_a_store_is_not_taken_for_the_deadline(world: Any) -> None:
    async def script(_number: int, _task: Any) -> Any:
        raise StoreUnavailable("the store is overloaded")

    world.script = script
    with pytest.raises(StoreUnavailable):
        ran(dispatcher(world).collect(1))


def test_members_of_a_dropped_group_are_cancelled(world: Any) -> None:
    cancelled: list[int] = []

    async def script(number: int, task: Any) -> Any:
        if task.key == "task-0":
            if number == 3:
                raise ReplicaDown("gone")
            if number < 3:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    cancelled.append(number)
                    raise
            raise ReplicaDown("gone")
        return world.episode(number, task)

    world.script = script
    (group,) = ran(dispatcher(world, group_size=4).collect(1))
    assert group.number == 1
    assert sorted(cancelled) == [0, 1, 2]


@pytest.mark.payload("F9")
def test_an_episode_that_comes_back_after_its_group_was_dropped_is_late(world: Any) -> None:
    async def script(number: int, task: Any) -> Any:
        if number == 0:  # its reply was on the way when it was cancelled
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return world.episode(number, task)
        if task.key == "task-0":
            raise ReplicaDown("gone")
        return world.episode(number, task)

    world.script = script
    (group,) = ran(dispatcher(world).collect(1))
    assert group.number == 1
    world.holder.close()
    assert world.ends() == {"drop:late": 1, "drop:shutdown": 2}


def test_a_failed_episode_stays_in_its_group_and_a_group_of_failed_ones_is_replaced(world: Any) -> None:
    async def script(number: int, task: Any) -> Any:
        return world.episode(number, task, ok=not (task.key == "task-0" or number == 3))

    world.script = script
    (group,) = ran(dispatcher(world).collect(1))
    assert [(t.episode.request_id, t.episode.ok) for t in group.taken] == [("q2", True), ("q3", False)]
    world.holder.close()
    assert world.ends() == {"drop:group_dropped": 2, "drop:shutdown": 2}


def test_too_many_dropped_groups_in_a_row_end_the_run_with_the_last_reason(world: Any) -> None:
    async def script(number: int, task: Any) -> Any:
        return world.episode(number, task, ok=False)

    world.script = script
    with pytest.raises(RoleFailed, match=r"3 groups in a row.*groups_failed_max = 2.*all 2 episodes failed: HarnessError: broken"):
        ran(dispatcher(world, failures_max=2).collect(1))
    world.holder.close()
    assert world.ends() == {"drop:group_dropped": 6}


def test_an_error_that_ends_the_run_cancels_everything_and_keeps_its_type(world: Any) -> None:
    async def script(number: int, task: Any) -> Any:
        if number == 1:
            raise MissingArrays("sample t1/0 lacks 'sampling_mask'")
        if number == 0:
            return world.episode(number, task)
        await asyncio.Event().wait()
        return None

    world.script = script
    target = dispatcher(world, group_size=2)
    with pytest.raises(MissingArrays, match="t1/0"):
        ran(target.collect(3))
    assert target.in_flight == 0
    world.holder.close()
    assert world.ends() == {"drop:shutdown": 1}


@pytest.mark.fault(17)
def test_a_duplicate_reply_drops_its_group_and_is_taken_once(world: Any) -> None:
    episodes: list[Any] = []

    async def script(number: int, task: Any) -> Any:
        if task.key == "task-0":
            episodes.append(episodes[0] if episodes else world.episode(number, task))
            return episodes[0]
        return world.episode(number, task)

    world.script = script
    (group,) = ran(dispatcher(world).collect(1))
    assert group.number == 1
    world.holder.close()
    assert world.ends() == {"drop:group_dropped": 1, "drop:shutdown": 2}


def test_no_more_episodes_run_at_once_than_there_are_slots(world: Any) -> None:
    peak = running = 0

    async def script(number: int, task: Any) -> Any:
        nonlocal peak, running
        running += 1
        peak = max(peak, running)
        for _ in range(5):
            await asyncio.sleep(0)
        running -= 1
        return world.episode(number, task)

    world.script = script
    ran(dispatcher(world, slots=3).collect(4))
    assert peak == 3


def test_cancelling_a_collect_settles_every_episode(world: Any) -> None:
    async def work() -> tuple[int, int]:
        started = asyncio.Event()

        async def script(number: int, task: Any) -> Any:
            if number < 3:
                return world.episode(number, task)
            if number == 7:
                started.set()
            await asyncio.Event().wait()
            return None

        world.script = script
        target = dispatcher(world)
        collect = asyncio.create_task(target.collect(4))
        await started.wait()
        collect.cancel()
        with pytest.raises(asyncio.CancelledError):
            await collect
        return target.in_flight, len(asyncio.all_tasks())

    assert ran(work()) == (0, 1)
    world.holder.close()
    assert world.ends() == {"drop:shutdown": 3}
