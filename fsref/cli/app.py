"""The one command with all others below it, and the console script. Bodies are imported by name when a command runs; see the package
docstring for why.
"""

import sys
from typing import Annotated

import typer

from fsref import __version__
from fsref.cli.commands.machine import machine
from fsref.cli.commands.options import POOL
from fsref.cli.commands.pool import pool
from fsref.cli.commands.roles import roles
from fsref.cli.commands.runs import runs
from fsref.cli.failures import report

app = typer.Typer(
    name="fsref",
    help="Per-token arrays of RL post-training by reference: run the pipeline, look into it, prove that every array was removed.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
# One without a name adds its commands to these; the order is the one of the help.
app.add_typer(runs)
app.add_typer(machine)
app.add_typer(roles)
app.add_typer(pool, name="pool", rich_help_panel=POOL)


def main() -> None:
    """The console script: runs a command and ends the process with its exit code; known errors become one line on stderr."""
    with report(argv=sys.argv[1:]):
        app()


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fsref {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    del version  # its callback has done the work
