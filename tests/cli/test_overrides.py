"""Any setting as an option."""

import pytest

from fsref.cli.overrides import split
from fsref.errors import ConfigError


@pytest.mark.parametrize(
    ("args", "rest", "found"),
    [
        (["local.toml"], ["local.toml"], []),
        (["local.toml", "--run.steps", "8"], ["local.toml"], ["run.steps=8"]),
        (["--run.steps=8", "local.toml", "--dry-run"], ["local.toml", "--dry-run"], ["run.steps=8"]),
        (["--sampling.top_k", "-1", "x"], ["x"], ["sampling.top_k=-1"]),
        (["--model.path=a=b"], [], ["model.path=a=b"]),
        (["--run.id", "", "x"], ["x"], ["run.id="]),
        (["--config", "a.b", "x.toml"], ["--config", "a.b", "x.toml"], []),
        (["--", "--run.steps", "8"], ["--", "--run.steps", "8"], []),
    ],
)
def test_options_with_a_dot_are_settings(args: list[str], rest: list[str], found: list[str]) -> None:
    assert split(args) == (rest, found)


@pytest.mark.parametrize("args", [["--run.steps"], ["--run.steps", "--dry-run"]])
def test_a_setting_without_a_value_is_refused(args: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"--run\.steps needs a value, as in"):
        split(args)
    split(args, lenient=True)
