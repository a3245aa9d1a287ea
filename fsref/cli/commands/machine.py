"""The machine that runs are on: check it, measure it."""

from pathlib import Path
from typing import Annotated

import typer

from fsref.cli.commands.options import LOOKING, Json, body

machine = typer.Typer()


@machine.command(rich_help_panel=LOOKING)
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


@machine.command(rich_help_panel=LOOKING)
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


@machine.command(hidden=True)
def view(
    folder: Annotated[Path, typer.Option("--folder", help="The folder that all nodes share.", show_default=False)],
    token: Annotated[str, typer.Option("--token", help="Name of this exchange.", show_default=False)],
) -> None:
    """Take part in `fsref doctor --nodes` on one node."""
    raise typer.Exit(body("fsref.cli.check", "view_main")(folder, token=token))
