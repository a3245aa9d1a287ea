"""The eval sink: numbers stay, arrays go."""

import asyncio
import math
from typing import Any

import pytest

from fsref.errors import LedgerError, ReplicaDown
from fsref.orchestrator.attempts import Attempts
from fsref.orchestrator.evaluation import Tally, evaluate, report, tally_metrics
from fsref.orchestrator.tasks import stream


def evaluated(world: Any, *, episodes: int, deadline_s: float = 60) -> dict[str, Tally]:
    async def work() -> dict[str, Tally]:
        async with asyncio.timeout(60):
            attempts = Attempts(deadline_s=deadline_s, retries_max=1, seed=0)
            return await evaluate(stream([world.source()], seed=0, shuffle=False), world.custody, attempts, episodes=episodes, key="eval")

    return asyncio.run(work())


@pytest.mark.payload("F18")
def test_every_eval_episode_is_taken_and_dropped(world: Any) -> None:
    tally = evaluated(world, episodes=4)["math"]
    assert (tally.rewards.count(1.0), tally.rewards.count(0.0), tally.episodes, tally.failed) == (2, 2, 4, 0)
    assert (tally.objects, tally.bytes, tally.mean) == (4, 400, 0.5)
    assert tally.standard_error == pytest.approx(math.sqrt(1 / 3) / 2)
    assert world.custody.bytes_held == 0
    world.holder.close()
    assert world.ends() == {"drop:eval": 4}
    assert world.present() == set()


def test_failed_episodes_are_counted_and_their_arrays_go_too(world: Any) -> None:
    async def script(number: int, task: Any) -> Any:
        if number in {1, 2, 3}:
            raise ReplicaDown("gone")
        return world.episode(number, task, ok=number != 0)

    world.script = script
    tally = evaluated(world, episodes=3)["math"]
    # Runs 1 and 2 die and are tried again as 3 and 4; of those 3 dies for good.
    assert (tally.episodes, tally.failed, len(tally.rewards)) == (3, 2, 1)
    world.holder.close()
    assert world.ends() == {"drop:eval": 2}


def test_an_error_of_the_run_ends_the_evaluation_and_settles_the_rest(world: Any) -> None:
    async def script(number: int, task: Any) -> Any:
        if number == 2:
            raise LedgerError("the journal is poisoned")
        if number == 0:
            return world.episode(number, task)
        await asyncio.Event().wait()
        return None

    world.script = script
    with pytest.raises(LedgerError, match="poisoned"):
        evaluated(world, episodes=4)
    world.holder.close()
    assert world.ends() == {"drop:eval": 1}


def test_reports_and_metrics_hold_the_numbers() -> None:
    tallies = {"math": Tally([1.0, 0.0], 3, 1, 2, 200, "HarnessError: broken"), "code": Tally([], 1, 1)}
    assert report(tallies)[1] == (
        "math: reward 0.5000 +- 0.5000 over 2 traces, 3 episodes, 1 failed, 2 objects (200 bytes) removed;"
        " the last error: HarnessError: broken"
    )
    assert report(tallies)[0].startswith("code: reward nan over 0 traces, 1 episodes, 1 failed")
    assert tally_metrics(tallies) == {
        "eval/math/episodes": 3,
        "eval/math/failed": 1,
        "eval/math/reward_mean": 0.5,
        "eval/code/episodes": 1,
        "eval/code/failed": 1,
    }
