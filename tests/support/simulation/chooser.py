"""Where a simulation's freedom comes from: a seeded stream, or every path through a small tree of choices."""

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Chooser:
    """Random choices of one seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def below(self, n: int) -> int:
        """A number below ``n``."""
        return int(self._random() * n)

    def chance(self, p: float) -> bool:
        """True with probability ``p``."""
        return p > 0 and self._random() < p

    def share(self) -> float:
        """A fraction below 1."""
        return self._random()

    def pick(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]

    def some(self, items: Sequence[T], count: int) -> list[T]:
        """``count`` of the items, or all of them."""
        left = list(items)
        return [left.pop(self.below(len(left))) for _ in range(min(count, len(left)))]


class Tree(Chooser):
    """One path at a time through all choices, depth first: play, then ``advance`` until it says False."""

    def __init__(self) -> None:
        super().__init__(0)
        self._path: list[tuple[int, int]] = []  # choice, out of
        self._at = 0

    def below(self, n: int) -> int:
        if n <= 1:
            return 0
        if self._at == len(self._path):
            self._path.append((0, n))
        choice, known = self._path[self._at]
        assert known == n, "the same choices must lead to the same next choice"
        self._at += 1
        return choice

    def chance(self, p: float) -> bool:
        return p > 0 and self.below(2) == 1

    def share(self) -> float:
        return 0.0

    @property
    def fresh(self) -> bool:
        """Whether this path has left what the one before it played."""
        return self._at == len(self._path)

    def advance(self) -> bool:
        """Goes to the next path; False after the last."""
        del self._path[self._at :]
        self._at = 0
        while self._path:
            choice, n = self._path.pop()
            if choice + 1 < n:
                self._path.append((choice + 1, n))
                return True
        return False
