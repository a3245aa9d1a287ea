"""A stage per test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reaper.stage import Stage


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.store.close()
