"""One zygote for all, a run per test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.roles import Play, Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


@pytest.fixture
def play(zygote: Zygote, tmp_path: Path) -> Iterator[Play]:
    made = Play(zygote, tmp_path)
    yield made
    made.close()
