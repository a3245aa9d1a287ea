"""How a role is run by its command."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fsref import config as settings
from fsref.cli import roles
from fsref.cli.failures import report
from fsref.config import Config
from fsref.errors import ConfigError, StoreFull


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    yield
    root.level, root.handlers = before


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "c.toml"
    path.write_text('[[env]]\nname = "demo"\n')
    return path


def test_a_role_gets_the_resolved_config_and_its_options(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[Any] = []
    monkeypatch.setattr(roles, "find", lambda _: lambda config, **options: got.append((config, options)))
    roles.main("env-server", toml, overrides=["run.id=r1"], verbose=False, env="demo", replica=1)
    config, options = got[0]
    assert isinstance(config, Config)
    assert (config.run.id, Path(config.run.run_dir).name, options) == ("r1", "r1", {"env": "demo", "replica": 1})


def test_the_launchers_config_is_taken_as_it_is(toml: Path, tmp_path: Path) -> None:
    resolved = roles.read_config(toml, ["run.id=r1"])
    path = tmp_path / "config.json"
    path.write_bytes(settings.dump(resolved))
    assert roles.read_config(path, []) == resolved


def test_a_role_without_a_run_is_refused(toml: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.id is empty"):
        roles.read_config(toml, [])


def test_a_code_that_a_role_returns_is_the_exit_code(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roles, "find", lambda _: lambda _config: 20)
    with pytest.raises(SystemExit) as ended:
        roles.main("eval", toml, overrides=["run.id=r1"], verbose=False)
    assert ended.value.code == 20
    monkeypatch.setattr(roles, "find", lambda _: lambda _config: 0)
    roles.main("eval", toml, overrides=["run.id=r1"], verbose=False)


def test_a_known_error_is_one_line_and_its_traceback_is_for_the_debug_log(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(SystemExit) as ended, report(argv=["trainer"]):
        raise StoreFull("no space")
    assert ended.value.code == 1
    assert capsys.readouterr().err == "error: no space\n"
    assert [r.levelno for r in caplog.records] == [logging.DEBUG]
    assert caplog.records[0].exc_info is not None


def test_an_unknown_error_passes_with_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError), report(argv=[]):
        raise ZeroDivisionError


@pytest.mark.parametrize(("verbose", "traceback"), [((), False), (("--verbose",), True)])
def test_verbose_adds_the_traceback(tmp_path: Path, verbose: tuple[str, ...], traceback: bool) -> None:
    command = [sys.executable, "-m", "fsref", "trainer", "--config", "none.json", *verbose]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert ("Traceback" in done.stderr) == traceback
    assert done.stderr.splitlines()[-1] == "error: cannot read the config 'none.json': No such file or directory"
