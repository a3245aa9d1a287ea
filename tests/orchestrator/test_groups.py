"""From finished episodes to samples."""

from typing import Any

import pytest

from fsref.orchestrator.groups import Group, Taken, rewards_of, samples_of


@pytest.mark.parametrize(
    ("labels", "version"),
    [
        ((), 3),  # the engine does not say
        (("4",), 4),
        (("3", "4"), 3),  # new weights came while it sampled
        (("5", "4"), 4),
        (("2",), 3),  # older than what inference had at dispatch: another count
        (("4", "6"), 3),  # newer than the trainer had made
        (("4", "main"), 3),
        (("\u0664",), 3),
    ],
)
def test_the_version_of_a_branch_is_the_oldest_label_that_can_be(world: Any, labels: tuple[str, ...], version: int) -> None:
    assert Taken(world.episode(0, None), dispatched=3, offered=5).version_of(labels) == version


def test_samples_carry_what_their_branch_says(world: Any) -> None:
    episode = world.episode(1, None, branches=2)
    group = Group(5, world.source(), world.source().tasks[0], [Taken(episode, dispatched=3, offered=3)])
    samples, dropped = samples_of([group], temperature=0.7)
    assert [(s.name, s.group, s.agent, s.trace, s.reward, s.version, s.temperature) for s in samples] == [
        ("t1/0", 5, "solver", "t1", 1.0, 3, 0.7),
        ("t1/1", 5, "solver", "t1", 1.0, 3, 0.7),
    ]
    assert [s.ref for s in samples] == [b.ref for b in episode.samples]
    assert dropped == []


def test_rewards_are_those_of_trainable_traces_that_ended_well(world: Any) -> None:
    taken = [Taken(world.episode(n, None, ok=n != 1), dispatched=0, offered=0) for n in range(4)]
    assert rewards_of([Group(0, world.source(), world.source().tasks[0], taken)]) == [0.0, 0.0, 1.0]
