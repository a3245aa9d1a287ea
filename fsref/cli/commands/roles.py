"""The processes of a run, as the launcher or a job's script starts them."""

from typing import Annotated

import typer

from fsref.cli.commands.options import ANY_KEY, ROLES, ConfigFile, Verbose, body
from fsref.cli.overrides import ConfigCommand, overrides_of

roles = typer.Typer()


@roles.command(cls=ConfigCommand, rich_help_panel=ROLES, epilog=ANY_KEY)
def inference(ctx: typer.Context, config: ConfigFile, verbose: Verbose = False) -> None:
    """Serve the policy: the demo server, or vLLM with the run's settings."""
    body("fsref.cli.roles")("inference", config, overrides=overrides_of(ctx), verbose=verbose)


@roles.command("env-server", cls=ConfigCommand, rich_help_panel=ROLES, epilog=ANY_KEY)
def env_server(
    ctx: typer.Context,
    config: ConfigFile,
    env: Annotated[str, typer.Option("--env", help="Name of the [[env]] table.", show_default=False)],
    *,
    replica: Annotated[int, typer.Option("--replica", help="Number of this replica, from 0.", min=0)] = 0,
    node: Annotated[str, typer.Option("--node", help="Name in its address file; else local-<replica>.", show_default=False)] = "",
    verbose: Verbose = False,
) -> None:
    """Run one replica of an environment source: episodes, arrays to the store, references to the orchestrator."""
    body("fsref.cli.roles")("env-server", config, overrides=overrides_of(ctx), verbose=verbose, env=env, replica=replica, node=node)


@roles.command(cls=ConfigCommand, rich_help_panel=ROLES, epilog=ANY_KEY)
def orchestrator(ctx: typer.Context, config: ConfigFile, verbose: Verbose = False) -> None:
    """Dispatch episodes, take references, write step files."""
    body("fsref.cli.roles")("orchestrator", config, overrides=overrides_of(ctx), verbose=verbose)


@roles.command(cls=ConfigCommand, rich_help_panel=ROLES, epilog=ANY_KEY)
def trainer(ctx: typer.Context, config: ConfigFile, verbose: Verbose = False) -> None:
    """Train one rank; RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them."""
    body("fsref.cli.roles")("trainer", config, overrides=overrides_of(ctx), verbose=verbose)


@roles.command("eval", cls=ConfigCommand, rich_help_panel=ROLES, epilog=ANY_KEY)
def evaluate(ctx: typer.Context, config: ConfigFile, verbose: Verbose = False) -> None:
    """Run evaluation episodes against running servers, report, remove every array that they kept, and audit."""
    body("fsref.cli.roles")("eval", config, overrides=overrides_of(ctx), verbose=verbose)


@roles.command(cls=ConfigCommand, hidden=True)
def model(ctx: typer.Context, config: ConfigFile, verbose: Verbose = False) -> None:
    """Make the run's initial model folder (the launcher's first step; a process of its own, so that the launcher needs no torch)."""
    body("fsref.cli.roles")("model", config, overrides=overrides_of(ctx), verbose=verbose)


@roles.command(cls=ConfigCommand, hidden=True)
def job(ctx: typer.Context, config: ConfigFile, verbose: Verbose = False) -> None:
    """Launch a job's run from its batch script (`fsref run` submits that)."""
    raise typer.Exit(body("fsref.cli.jobs", "job_main")(config, overrides=overrides_of(ctx), verbose=verbose))


@roles.command(cls=ConfigCommand, hidden=True)
def node(ctx: typer.Context, config: ConfigFile, verbose: Verbose = False) -> None:
    """Launch what one inference node of a job runs (its step starts this with srun)."""
    raise typer.Exit(body("fsref.cli.jobs", "node_main")(config, overrides=overrides_of(ctx), verbose=verbose))


@roles.command(cls=ConfigCommand, hidden=True)
def rank(ctx: typer.Context, config: ConfigFile, verbose: Verbose = False) -> None:
    """Become a trainer rank of a job (its step starts this with srun)."""
    raise typer.Exit(body("fsref.cli.jobs", "rank_main")(config, overrides=overrides_of(ctx), verbose=verbose))
