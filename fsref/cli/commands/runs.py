"""A run from outside: start it, look into it, settle it, end it."""

import enum
from pathlib import Path
from typing import Annotated

import typer

from fsref.cli.commands.options import ANY_KEY, LOOKING, RUNNING, Json, Verbose, body
from fsref.cli.overrides import ConfigCommand, overrides_of

runs = typer.Typer()

RunName = Annotated[
    str,
    typer.Option("--run", help="Run folder, URL or id; else run.json in this folder, else the newest under ./runs.", show_default=False),
]
RunArgument = Annotated[
    str, typer.Argument(help="Run folder, URL or id; else run.json in this folder, else the newest under ./runs.", show_default=False)
]
ForceDead = Annotated[
    list[str] | None, typer.Option("--force-dead", help="An incarnation that you know to be dead; may be repeated.", show_default=False)
]


class ContextLayouts(enum.StrEnum):
    """The names of ``fsref.plan.ContextLayout``, which is not imported for help and completion."""

    ZIGZAG = "zigzag"
    CONTIGUOUS = "contiguous"
    ALLGATHER = "allgather"


@runs.command(cls=ConfigCommand, rich_help_panel=RUNNING, epilog=ANY_KEY)
def run(
    ctx: typer.Context,
    config: Annotated[Path, typer.Argument(help="TOML file; a name such as local.toml that is not there falls back to the packaged one.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved config and the commands, or the job's script; start nothing.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Run the whole pipeline, then audit it; the exit code is the audit's. With a slurm table: submit it as a job."""
    raise typer.Exit(body("fsref.cli.launch")(config, overrides=overrides_of(ctx), dry_run=dry_run, verbose=verbose))


@runs.command(rich_help_panel=LOOKING)
def inspect(
    what: Annotated[
        str, typer.Argument(help="step_000012, an object (id, name, path, or fsref: text), or nothing for the run.", show_default=False)
    ] = "",
    *,
    run: RunName = "",
    json: Json = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Also draw expert load or the run's metrics to this PNG.", show_default=False)
    ] = None,
    layout: Annotated[
        ContextLayouts | None,
        typer.Option("--layout", help="Of a step: what each rank of this context parallel layout would read.", show_default=False),
    ] = None,
    context: Annotated[int, typer.Option("--context", min=1, help="With --layout: context parallel ranks.")] = 1,
    tensor: Annotated[int, typer.Option("--tensor", min=1, help="With --layout: ranks that sequence parallelism splits rows over.")] = 1,
    stages: Annotated[
        str,
        typer.Option("--stages", help="With --layout: layer ids of the pipeline ranks, '0-2,7;3-6'; '|' between virtual stages."),
    ] = "",
    multiple: Annotated[int, typer.Option("--multiple", min=1, help="With --layout: rows that a batch is padded to a multiple of.")] = 1,
) -> None:
    """Show what a step, an object or a run holds, what became of its objects, and what ranks of a parallel layout would read of a step."""
    if layout is None:
        body("fsref.cli.show")(what, run=run, json=json, plot=plot)
        return
    body("fsref.cli.layout")(
        what, run=run, json=json, layout=layout.value, context_ranks=context, tensor_ranks=tensor, stages=stages, multiple=multiple
    )


@runs.command(rich_help_panel=LOOKING)
def audit(run: RunArgument = "", json: Json = False) -> None:
    """Prove from the ledger and the store that every object was removed exactly once, or say what is missing."""
    raise typer.Exit(body("fsref.cli.ledger", "audit_main")(run, json=json))


@runs.command(rich_help_panel=LOOKING)
def close(run: RunArgument = "", force_dead: ForceDead = None, json: Json = False) -> None:
    """End a stopped run for good: remove every object that is left, then audit."""
    raise typer.Exit(body("fsref.cli.ledger", "close_main")(run, force_dead=force_dead or (), json=json))


@runs.command(rich_help_panel=LOOKING)
def recover(
    run: RunArgument = "",
    *,
    resume_step: Annotated[int, typer.Option("--resume-step", help="Last step that a durable checkpoint covers; -1: none.", min=-1)] = -1,
    keep_steps: Annotated[bool, typer.Option("--keep-steps", help="Leave shipped steps above it for a trainer that replays them.")] = False,
    force_dead: ForceDead = None,
    accept_corrupt: Annotated[bool, typer.Option("--accept-corrupt", help="Count damaged journals up to their damage.")] = False,
    remove_unexpected: Annotated[
        bool, typer.Option("--remove-unexpected", help="Also remove files under obj/ that no process explains.")
    ] = False,
    json: Json = False,
) -> None:
    """Settle a run whose processes died, so that it can go on: adopt what they held and remove what nobody needs."""
    settled = body("fsref.cli.ledger", "recover_main")
    code = settled(
        run,
        resume_step=resume_step,
        keep_steps=keep_steps,
        force_dead=force_dead or (),
        accept_corrupt=accept_corrupt,
        remove_unexpected=remove_unexpected,
        json=json,
    )
    raise typer.Exit(code)


@runs.command(rich_help_panel=LOOKING)
def purge(
    run: Annotated[str, typer.Argument(help="Run folder, URL or id; it must be named.", show_default=False)],
    run_dir: Annotated[
        bool, typer.Option("--run-dir", help="Also its logs, weights and checkpoints where they are not in the root's folder.")
    ] = False,
    json: Json = False,
) -> None:
    """Remove what is left of a run that is closed and PROVED: steps, ledger, its whole folder. Cannot be undone."""
    raise typer.Exit(body("fsref.cli.ledger", "purge_main")(run, run_dir=run_dir, json=json))
