"""Placement among ranks, and what is refused before a group is joined."""

import pytest

from fsref.errors import ConfigError, StoreFull
from fsref.loader.ranks import Place, Ranks
from fsref.parallel import Parallel

ONE = Parallel(data=1)


def test_torchrun_variables_name_the_place() -> None:
    assert Place.read({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}) == Place(3, 8, 1)


def test_without_variables_there_is_one_rank() -> None:
    assert Place.read({}) == Place(0, 1, 0)


@pytest.mark.parametrize("env", [{"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "-1"}, {"WORLD_SIZE": "many"}])
def test_variables_that_make_no_sense_are_refused(env: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="RANK"):
        Place.read(env)


def test_a_world_that_does_not_fit_the_config_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.parallel has 1 ranks \(data 1, .*\), but 2 ranks were started"):
        Ranks(ONE, Place(0, 2, 0))


def test_one_rank_agrees_with_itself() -> None:
    with Ranks(ONE, Place()) as ranks:
        assert ranks.maximum([3, 0]) == [3, 0]
        assert ranks.gather("x") == ["x"]
        assert ranks.together("writing", lambda: 5) == 5


def test_an_error_in_a_common_action_is_raised_as_it_is() -> None:
    def fail() -> None:
        raise StoreFull("no space")

    with Ranks(ONE, Place()) as ranks, pytest.raises(StoreFull, match="no space"):
        ranks.together("writing", fail)
