"""What commands have in common: options and arguments that several take, the panels of ``fsref --help``, and the late import.

Owns ``body``, by which a command finds the function that does its work; see the docstring of ``fsref.cli`` for why it is found late.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import typer

RUNNING: Final = "Running"
LOOKING: Final = "Looking"
ROLES: Final = "Roles, as the launcher starts them"
POOL: Final = "Storage from the nodes' own disks"

ANY_KEY: Final = (
    "Any setting can be given as an option: --orchestrator.batch_size 64, --env.0.replicas=1, --run.fields '[\"routed_experts\"]'."
)

ConfigFile = Annotated[
    Path, typer.Option("--config", help="config.json of the run folder, or a TOML file with run.id set.", show_default=False)
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Also log at debug level, with tracebacks of known errors.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, for machines.")]


def body(module: str, name: str = "main") -> Callable[..., Any]:
    """The function that does a command's work."""
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found
