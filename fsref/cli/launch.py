"""The body of ``fsref run``: finds the config, launches, prints what a dry run shows."""

import datetime as dt
import logging
import shlex
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Final

from fsref import config as settings
from fsref.cli.failures import set_up_logging
from fsref.errors import ConfigError
from fsref.pipeline.board import make_board
from fsref.pipeline.layout import SERVER_FOLDER
from fsref.pipeline.run import Plan, launch, make_plan
from fsref.pipeline.slurm.commands import Slurm
from fsref.pipeline.slurm.submit import make_submission, submit

PACKAGED: Final = "configs"
"""Folder of the configs inside the installed package; in a source tree they lie beside it."""


def main(path: Path, *, overrides: Sequence[str], dry_run: bool, verbose: bool) -> int:
    """Runs the pipeline; returns the exit code."""
    set_up_logging(verbose=verbose, level=logging.WARNING)  # the board tells what happens
    found = find_config(path)
    if found != path:
        print(f"{path} is not there; using the packaged {found}", file=sys.stderr)  # noqa: T201  said, not silent
    config = settings.load(found, overrides)
    if config.slurm is not None:
        return _submit(config, dry_run=dry_run)
    plan = make_plan(config, now=dt.datetime.now(dt.UTC), verbose=verbose)
    if dry_run:
        print(describe(plan))  # noqa: T201  the command's answer
        return 0
    board = make_board(title=f"run {plan.config.run.id}", steps=plan.config.run.steps)
    return launch(plan, board)


def _submit(config: settings.Config, *, dry_run: bool) -> int:
    """A config with a ``[slurm]`` table is a job."""
    submission = make_submission(config, now=dt.datetime.now(dt.UTC))
    if dry_run:
        print(submission.script, end="")  # noqa: T201  the command's answer
        return 0
    submit(submission, Slurm(), print)
    return 0


def packaged() -> list[Path]:
    """The config files that ship with fsref."""
    package = Path(str(files("fsref")))
    for folder in (package / PACKAGED, package.parent / PACKAGED):
        if found := sorted(folder.glob("*.toml")):
            return found
    return []


def find_config(path: Path) -> Path:
    """``path`` if it is there, else the packaged config of the same file name; raises ``ConfigError`` that lists those."""
    if path.exists():
        return path
    shipped = packaged()
    for candidate in shipped:
        if candidate.name == path.name and path.parent in {Path(), Path(PACKAGED)}:
            return candidate
    names = ", ".join(c.name for c in shipped) or "none"
    raise ConfigError(f"the config {str(path)!r} does not exist; packaged ones: {names}")


def describe(plan: Plan) -> str:
    """The resolved config and one shell line for each process."""
    lines = [settings.dump(plan.config).decode(), ""]
    if plan.config.store.server != "none":
        lines.append(f"# first an object server at {plan.config.store.endpoint}, in {plan.config.run.run_dir}/{SERVER_FOLDER}")
    for role in plan.roles:
        env = " ".join(f"{k}={shlex.quote(v)}" for k, v in role.command.env.items())
        lines += [f"# {role.command.name}, log {role.command.log}", f"{env} {shlex.join(role.command.argv)}".strip()]
    return "\n".join(lines)
