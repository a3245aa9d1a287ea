"""The commands, their options and help. Bodies are imported by name when a command runs; see the package docstring for why."""

import enum
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from fsref import __version__
from fsref.cli.failures import report
from fsref.cli.overrides import ConfigCommand, overrides_of

app = typer.Typer(
    name="fsref",
    help="Per-token arrays of RL post-training by reference: run the pipeline, look into it, prove that every array was removed.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
RUNNING = "Running"
LOOKING = "Looking"
ROLES = "Roles, as the launcher starts them"

POOL = "Storage from the nodes' own disks"

pool = typer.Typer(
    help="Object storage from the disks of a run's own nodes: SeaweedFS servers, one command on each node (docs/nvme-pool.md).",
    no_args_is_help=True,
)
app.add_typer(pool, name="pool", rich_help_panel=POOL)

AnyKey = "Any setting can be given as an option: --orchestrator.batch_size 64, --env.0.replicas=1, --run.fields '[\"routed_experts\"]'."
ConfigFile = Annotated[
    Path, typer.Option("--config", help="config.json of the run folder, or a TOML file with run.id set.", show_default=False)
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Also log at debug level, with tracebacks of known errors.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, for machines.")]
RunName = Annotated[
    str,
    typer.Option("--run", help="Run folder, URL or id; else run.json in this folder, else the newest under ./runs.", show_default=False),
]


class ContextLayouts(enum.StrEnum):
    """The names of ``fsref.plan.ContextLayout``, which is not imported for help and completion."""

    ZIGZAG = "zigzag"
    CONTIGUOUS = "contiguous"
    ALLGATHER = "allgather"


RunArgument = Annotated[
    str, typer.Argument(help="Run folder, URL or id; else run.json in this folder, else the newest under ./runs.", show_default=False)
]
ForceDead = Annotated[
    list[str] | None, typer.Option("--force-dead", help="An incarnation that you know to be dead; may be repeated.", show_default=False)
]


Folder = Annotated[
    Path, typer.Option("--folder", help="Folder on this node's disk: data, logs and pid file of its servers.", show_default=False)
]
Address = Annotated[
    str, typer.Option("--address", help="This node's address: what its servers bind and the others reach.", show_default=False)
]
FirstPort = Annotated[
    int, typer.Option("--first-port", help="Master, volume, filer and S3 ports from here on, and 10,000 higher; the same on every node.")
]
Rack = Annotated[str, typer.Option("--rack", help="Nodes that fail together have the same.")]
VolumesMax = Annotated[int, typer.Option("--volumes-max", help="Volumes that this node holds; 0: what its disk takes.", min=0)]
WaitS = Annotated[float, typer.Option("--wait-s", help="How long the servers may take to be ready.", min=1)]


def main() -> None:
    """The console script: runs a command and ends the process with its exit code; known errors become one line on stderr."""
    with report(argv=sys.argv[1:]):
        app()


def body(module: str, name: str = "main") -> Callable[..., Any]:
    """The function that does a command's work."""
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fsref {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    del version  # its callback has done the work


@app.command(cls=ConfigCommand, rich_help_panel=RUNNING, epilog=AnyKey)
def run(
    ctx: typer.Context,
    config: Annotated[Path, typer.Argument(help="TOML file; a name such as local.toml that is not there falls back to the packaged one.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved config and the commands, or the job's script; start nothing.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Run the whole pipeline, then audit it; the exit code is the audit's. With a [slurm] table: submit it as a job."""
    raise typer.Exit(body("fsref.cli.launch")(config, overrides=overrides_of(ctx), dry_run=dry_run, verbose=verbose))


@app.command(rich_help_panel=LOOKING)
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


@app.command(rich_help_panel=LOOKING)
def audit(run: RunArgument = "", json: Json = False) -> None:
    """Prove from the ledger and the store that every object was removed exactly once, or say what is missing."""
    raise typer.Exit(body("fsref.cli.ledger", "audit_main")(run, json=json))


@app.command(rich_help_panel=LOOKING)
def close(run: RunArgument = "", force_dead: ForceDead = None, json: Json = False) -> None:
    """End a stopped run for good: remove every object that is left, then audit."""
    raise typer.Exit(body("fsref.cli.ledger", "close_main")(run, force_dead=force_dead or (), json=json))


@app.command(rich_help_panel=LOOKING)
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


@app.command(rich_help_panel=LOOKING)
def purge(
    run: Annotated[str, typer.Argument(help="Run folder, URL or id; it must be named.", show_default=False)],
    run_dir: Annotated[
        bool, typer.Option("--run-dir", help="Also its logs, weights and checkpoints where they are not in the root's folder.")
    ] = False,
    json: Json = False,
) -> None:
    """Remove what is left of a run that is closed and PROVED: steps, ledger, its whole folder. Cannot be undone."""
    raise typer.Exit(body("fsref.cli.ledger", "purge_main")(run, run_dir=run_dir, json=json))


@app.command(rich_help_panel=LOOKING)
def doctor(
    root: Annotated[str, typer.Option("--root", help="Root to try: folder or URL. Else the config's, else runs.", show_default=False)] = "",
    config: Annotated[str, typer.Option("--config", help="Config whose root and [store] settings to try.", show_default=False)] = "",
    nodes: Annotated[
        str,
        typer.Option(
            "--nodes", help="Nodes of a cluster to check the shared folder from, 'gpu[01-04]'; 'all' in a job.", show_default=False
        ),
    ] = "",
    json: Json = False,
) -> None:
    """Check this machine (root, clock, packages, limits), or how each node of a cluster sees what the others write. Exit code 1 if a check
    fails.
    """
    if nodes:
        raise typer.Exit(body("fsref.cli.check", "nodes_main")(root, nodes=nodes, config=config, json=json))
    raise typer.Exit(body("fsref.cli.check")(root, config=config, json=json))


@app.command(rich_help_panel=LOOKING)
def bench(
    what: Annotated[str, typer.Argument(help="fetch, keep, codecs, memory, ledger, scaling, or all.")] = "fetch",
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes and lengths: what README shows, in a few minutes.")] = False,
    least: Annotated[bool, typer.Option("--least", help="As little as possible: whether it works, not how fast.")] = False,
    shape: Annotated[str, typer.Option("--shape", help="qwen3-30b, deepseek-v3 or experts-512.")] = "qwen3-30b",
    heads: Annotated[bool, typer.Option("--heads/--no-heads", help="With top-k heads of 128.")] = True,
    masks: Annotated[bool, typer.Option("--masks/--no-masks", help="With sampling masks.")] = True,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens of a sample.")] = 16_384,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Samples that are fetched at once.")] = 4,
    kept: Annotated[float, typer.Option("--kept", min=0.01, max=1.0, help="Share of each sample's tokens that truncation leaves.")] = 1.0,
    threads: Annotated[int, typer.Option("--threads", min=1, max=64, help="Threads of every method.")] = 2,
    repeats: Annotated[int, typer.Option("--repeats", min=2, help="Rounds, in which every method runs once.")] = 7,
    skew: Annotated[float, typer.Option("--skew", min=0.0, help="Popularity of experts falls as 1 / rank^skew.")] = 0.7,
    root: Annotated[str, typer.Option("--root", help="Where objects go: an fsspec URL; a temporary folder else.", show_default=False)] = "",
    endpoint: Annotated[str, typer.Option("--endpoint", help="Of an S3 root.", show_default=False)] = "",
    region: Annotated[str, typer.Option("--region", help="Of an S3 root.", show_default=False)] = "",
    routing: Annotated[
        str, typer.Option("--routing", help="For codecs: demo (the demo model's router) or an .npy file [tokens, layers, top_k].")
    ] = "",
    json: Json = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="Also draw rates to this PNG.", show_default=False)] = None,
) -> None:
    """Measure fsref on this machine beside the raw limit and beside what one would use instead, all in one run."""
    options = body("fsref.bench.workload", "Options")(
        shape=shape,
        heads=heads,
        masks=masks,
        tokens=tokens,
        samples=samples,
        kept=kept,
        threads=threads,
        repeats=repeats,
        skew=skew,
        root=root,
        endpoint=endpoint,
        region=region,
    )
    size = "least" if least else "quick" if quick else "full"
    body("fsref.cli.bench")(what, options, size=size, routing=routing, json=json, plot_to=plot)


@app.command(cls=ConfigCommand, rich_help_panel=ROLES, epilog=AnyKey)
def inference(ctx: typer.Context, config: ConfigFile, verbose: Verbose = False) -> None:
    """Serve the policy: the demo server, or vLLM with the run's settings."""
    body("fsref.cli.roles")("inference", config, overrides=overrides_of(ctx), verbose=verbose)


@app.command("env-server", cls=ConfigCommand, rich_help_panel=ROLES, epilog=AnyKey)
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


@app.command(cls=ConfigCommand, rich_help_panel=ROLES, epilog=AnyKey)
def orchestrator(ctx: typer.Context, config: ConfigFile, verbose: Verbose = False) -> None:
    """Dispatch episodes, take references, write step files."""
    body("fsref.cli.roles")("orchestrator", config, overrides=overrides_of(ctx), verbose=verbose)


@app.command(cls=ConfigCommand, rich_help_panel=ROLES, epilog=AnyKey)
def trainer(ctx: typer.Context, config: ConfigFile, verbose: Verbose = False) -> None:
    """Train one rank; RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them."""
    body("fsref.cli.roles")("trainer", config, overrides=overrides_of(ctx), verbose=verbose)


@app.command("eval", cls=ConfigCommand, rich_help_panel=ROLES, epilog=AnyKey)
def evaluate(ctx: typer.Context, config: ConfigFile, verbose: Verbose = False) -> None:
    """Run evaluation episodes against running servers, report, remove every array that they kept, and audit."""
    body("fsref.cli.roles")("eval", config, overrides=overrides_of(ctx), verbose=verbose)


@app.command(cls=ConfigCommand, hidden=True)
def model(ctx: typer.Context, config: ConfigFile, verbose: Verbose = False) -> None:
    """Make the run's initial model folder (the launcher's first step; a process of its own, so that the launcher needs no torch)."""
    body("fsref.cli.roles")("model", config, overrides=overrides_of(ctx), verbose=verbose)


@pool.command("start")
def pool_start(
    folder: Folder,
    address: Address,
    *,
    replication: Annotated[
        str,
        typer.Option(
            "--replication",
            help="000: one copy, a lost node's objects are lost; 001: two, on different nodes; 010: two, in different racks.",
            show_default=False,
        ),
    ],
    bucket: Annotated[str, typer.Option("--bucket", help="Bucket that is made if it is not there.")] = "fsref",
    volume_mb: Annotated[int, typer.Option("--volume-mb", help="Size of a volume, the file that objects lie in.", min=1)] = 1024,
    first_port: FirstPort = 9333,
    rack: Rack = "rack",
    volumes_max: VolumesMax = 0,
    wait_s: WaitS = 120.0,
) -> None:
    """Start a pool on its first node: master, filer, the node's own disk and gateway. The keys come from AWS_ACCESS_KEY_ID and
    AWS_SECRET_ACCESS_KEY.
    """
    body("fsref.cli.pool", "start_main")(
        folder,
        address=address,
        replication=replication,
        bucket=bucket,
        first_port=first_port,
        rack=rack,
        volume_mb=volume_mb,
        volumes_max=volumes_max,
        wait_s=wait_s,
    )


@pool.command("join")
def pool_join(
    folder: Folder,
    address: Address,
    *,
    head: Annotated[str, typer.Option("--head", help="Address of the node that started the pool.", show_default=False)],
    first_port: FirstPort = 9333,
    rack: Rack = "rack",
    volumes_max: VolumesMax = 0,
    wait_s: WaitS = 120.0,
) -> None:
    """Add this node's disk to a pool, and start a gateway here. The same two keys in the environment as on the head."""
    body("fsref.cli.pool", "join_main")(
        folder, address=address, head=head, first_port=first_port, rack=rack, volumes_max=volumes_max, wait_s=wait_s
    )


@pool.command("health")
def pool_health(
    *,
    folder: Annotated[Path | None, typer.Option("--folder", help="Of this node's servers.", show_default=False)] = None,
    master: Annotated[str, typer.Option("--master", help="HOST:PORT of the pool's master.", show_default=False)] = "",
    nodes: Annotated[int, typer.Option("--nodes", help="How many there should be; 0: not known.", min=0)] = 0,
    json: Json = False,
) -> None:
    """Show nodes, room and missing copies of a pool; exit code 1 if something is wrong."""
    raise typer.Exit(body("fsref.cli.pool", "health_main")(folder, master=master, nodes=nodes, json=json))


@pool.command("stop")
def pool_stop(
    folder: Folder,
    grace_s: Annotated[float, typer.Option("--grace-s", help="Seconds between SIGTERM and SIGKILL.", min=0)] = 20.0,
) -> None:
    """Stop this node's servers, by their pids. Its data stays."""
    body("fsref.cli.pool", "stop_main")(folder, grace_s=grace_s)


@app.command(cls=ConfigCommand, hidden=True)
def job(ctx: typer.Context, config: ConfigFile, verbose: Verbose = False) -> None:
    """Launch a job's run from its batch script (`fsref run` submits that)."""
    raise typer.Exit(body("fsref.cli.jobs", "job_main")(config, overrides=overrides_of(ctx), verbose=verbose))


@app.command(cls=ConfigCommand, hidden=True)
def node(ctx: typer.Context, config: ConfigFile, verbose: Verbose = False) -> None:
    """Launch what one inference node of a job runs (its step starts this with srun)."""
    raise typer.Exit(body("fsref.cli.jobs", "node_main")(config, overrides=overrides_of(ctx), verbose=verbose))


@app.command(hidden=True)
def view(
    folder: Annotated[Path, typer.Option("--folder", help="The folder that all nodes share.", show_default=False)],
    token: Annotated[str, typer.Option("--token", help="Name of this exchange.", show_default=False)],
) -> None:
    """Take part in `fsref doctor --nodes` on one node."""
    raise typer.Exit(body("fsref.cli.check", "view_main")(folder, token=token))


@app.command(cls=ConfigCommand, hidden=True)
def rank(ctx: typer.Context, config: ConfigFile, verbose: Verbose = False) -> None:
    """Become a trainer rank of a job (its step starts this with srun)."""
    raise typer.Exit(body("fsref.cli.jobs", "rank_main")(config, overrides=overrides_of(ctx), verbose=verbose))
