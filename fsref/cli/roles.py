"""The bodies of the role commands: read the config, import the role's ``main`` by name, run it.

Owns the table of roles. A package that a role needs and that is not installed becomes ``MissingExtra`` here, whatever module asked for it.
"""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from fsref import config as settings
from fsref.cli.failures import set_up_logging
from fsref.errors import ConfigError, MissingExtra
from fsref.pipeline.layout import resolve

PORT: Final = 8000
"""Of an inference server that was started alone from a TOML file without ``inference.address``."""


class Role(NamedTuple):
    """Where a role's ``main`` is, and the extra that has its packages."""

    module: str
    function: str
    extra: str


ROLES: Final[Mapping[str, Role]] = MappingProxyType(
    {
        "inference": Role("fsref.inference.main", "main", "demo"),
        "env-server": Role("fsref.envserver.main", "main", "verifiers"),
        "orchestrator": Role("fsref.orchestrator.main", "main", "verifiers"),
        "trainer": Role("fsref.trainer.main", "main", "demo"),
        "eval": Role("fsref.orchestrator.eval", "main", "verifiers"),
        "model": Role("fsref.inference.model", "main", "demo"),
    }
)


def main(role: str, config: Path, *, overrides: list[str], verbose: bool, **options: Any) -> None:
    """Runs a role in this process until it ends; its errors pass to the caller."""
    set_up_logging(verbose=verbose)
    resolved = read_config(config, overrides)
    code = find(ROLES[role])(resolved, **options)
    if isinstance(code, int) and code:
        raise SystemExit(code)


def find(role: Role) -> Callable[..., Any]:
    """The role's ``main``; raises ``MissingExtra`` if a package outside fsref is not there."""
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(role.module), role.function)
    except ModuleNotFoundError as e:
        if isinstance(e, MissingExtra) or (e.name or "").partition(".")[0] == "fsref":
            raise
        raise MissingExtra.of(role.extra, e.name or "?") from e
    return found


def read_config(path: Path, overrides: list[str]) -> settings.Config:
    """A run's ``config.json``, or a TOML file whose run.id is set, completed as the launcher does it; raises ``ConfigError``."""
    config = settings.load(path, overrides)
    if not config.run.id:
        raise ConfigError(f"{path}: run.id is empty: a role needs the id of its run, as in --run.id NAME")
    return resolve(config, run_id=config.run.id, ports=[PORT])
