"""The body of ``fsref inspect STEP --layout``: what each rank of a parallel layout would read."""

import sys
from pathlib import Path

import msgspec

from fsref.cli.objectserver import at_hand
from fsref.cli.show import make_console, make_table, show_head
from fsref.errors import ConfigError
from fsref.inspection.find import find_run, parse_step
from fsref.inspection.layout import layout_report
from fsref.inspection.records import LayoutReport
from fsref.parallel import Parallel, parse_stages
from fsref.pipeline.metrics import show_bytes
from fsref.plan import ContextLayout


def main(what: str, *, run: str, json: bool, layout: str, context_ranks: int, tensor_ranks: int, stages: str, multiple: int) -> None:
    """Prints the report on stdout."""
    step = parse_step(what)
    if step is None:
        raise ConfigError(f"--layout shows what ranks read of a step (step_000012), {what or 'nothing'!r} was named")
    lists = parse_stages(stages)
    wanted = Parallel(
        context=context_ranks,
        tensor=tensor_ranks,
        sequence=tensor_ranks > 1,
        pipeline=max(1, len(lists)),
        layout=ContextLayout(layout),
        stages=lists,
        multiple=multiple,
    )
    with at_hand(find_run(run, here=Path.cwd())) as place:
        report = layout_report(place, step, wanted)
    if json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=1).decode() + "\n")
        return
    _show(report)


def _show(r: LayoutReport) -> None:
    console = make_console()
    show_head(
        console,
        f"step {r.step} of run {r.run} over {r.context_ranks} context ranks, {r.layout}",
        {
            "fields": ", ".join(r.fields),
            "objects": show_bytes(r.objects_bytes),
            "batch": f"padded to a multiple of {r.multiple} rows, split over {r.tensor_ranks} tensor ranks",
        },
    )
    table = make_table(
        "ranks",
        "data>",
        "pipeline>",
        "context>",
        "tensor>",
        "micro batches>",
        "rows>",
        "tokens>",
        "padding>",
        "layers",
        "bytes>",
        "requests>",
    )
    for n in r.ranks:
        counts = (n.data_rank, n.pipeline_rank, n.context_rank, n.tensor_rank, n.micro_batches, n.rows, n.tokens, n.padding)
        table.add_row(*map(str, counts), _ranges(n.layers), show_bytes(n.bytes), str(n.requests))
    console.print(table)


def _ranges(layers: tuple[int, ...]) -> str:
    """``0-2 7``, in the order of the axis."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] + 1 == layer:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return " ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "-"
