"""The real pipeline, killed at seeded instants: the small version of ``python -m tools.kills``."""

from pathlib import Path

import pytest

from tests.support import needs
from tools import kills

CASES = [(1, 9), (1, 3), (1, 4)]
"""Everything at once, then a relaunch; the orchestrator, then recover and close; env workers, which the run survives."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    needs.extra("torch", "torch")
    needs.extra("verifiers", "verifiers")
    return kills.make_model(tmp_path_factory.mktemp("kills") / "model")


@pytest.fixture(scope="module")
def lines_whole(tmp_path_factory: pytest.TempPathFactory, model: Path) -> int:
    return kills.calibrate(tmp_path_factory.mktemp("whole") / "run", model)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.fault(12)
@pytest.mark.parametrize(("seed", "number"), CASES)
def test_a_killed_run_is_proved_with_nothing_lost_or_left(tmp_path: Path, model: Path, lines_whole: int, seed: int, number: int) -> None:
    found = kills.play(kills.choose(seed, number), folder=tmp_path, model=model, lines_whole=lines_whole)
    assert found["ok"], found


def test_the_cases_of_a_seed_are_the_same_every_time_and_take_turns_over_the_victims() -> None:
    cases = [kills.choose(7, n) for n in range(2 * len(kills.VICTIMS))]
    assert cases == [kills.choose(7, n) for n in range(2 * len(kills.VICTIMS))]
    assert {c.victim for c in cases[: len(kills.VICTIMS)]} == set(kills.VICTIMS)
    assert {c.then for c in cases} == {"relaunch", "close"}
