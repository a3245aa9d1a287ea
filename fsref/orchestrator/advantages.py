"""Group-relative advantages: what an episode's reward says compared with the other episodes of its task.

Pure. Owns the formula and the shuffle control. Refuses to know what a sample is: it gets rewards and returns advantages in their order.
"""

import random
from collections.abc import Sequence
from typing import Final, TypeVar

SPREAD_MIN: Final = 1e-6
"""Rewards of a group that differ by at most this are equal: such a group says nothing, and dividing by its spread would."""

_T = TypeVar("_T")


def group_advantages(rewards: Sequence[float], *, normalise: bool) -> list[float]:
    """``reward - mean`` of each episode of one group (GRPO, arXiv 2402.03300, without the division by default: Dr. GRPO, arXiv 2503.20783).

    ``normalise`` divides by the group's population standard deviation. Advantages of a group without spread are exactly 0.
    """
    if not has_spread(rewards):
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    centred = [r - mean for r in rewards]
    if not normalise:
        return centred
    std = (sum(c * c for c in centred) / len(centred)) ** 0.5
    return [c / std for c in centred]


def has_spread(rewards: Sequence[float]) -> bool:
    """Whether any two rewards of the group differ by more than ``SPREAD_MIN``."""
    return bool(rewards) and max(rewards) - min(rewards) > SPREAD_MIN


def shuffled(values: Sequence[_T], *, seed: int, step: int) -> list[_T]:
    """A control for experiments: the same values in an order that depends on ``seed`` and ``step`` alone."""
    out = list(values)
    random.Random(f"{seed}/{step}").shuffle(out)  # noqa: S311 - an experiment's permutation, not a secret
    return out
