"""What the ranks of a parallel layout would read of a step: plans only, no object is opened.

The plans are those of the loader (``fsref.parallel``), so what is shown here is what ranks of that layout read.
"""

from collections.abc import Sequence
from itertools import product

from fsref.inspection.find import Place
from fsref.inspection.records import LayoutReport, SliceReport
from fsref.inspection.step import info_of
from fsref.parallel import Coordinate, Parallel, StepRows
from fsref.plan import SlicePlan, padding_count
from fsref.reader import request_limits
from fsref.steps import read_rank


def layout_report(place: Place, step: int, parallel: Parallel) -> LayoutReport:
    """Every rank of the layout, over all data ranks of the step (``parallel.data`` is not looked at).

    Raises ``ConfigError`` where something does not divide, ``StoreError``.
    """
    with place.open() as store:
        info = info_of(store, step)
        files = [read_rank(store, info, n) for n in range(info.data_ranks)]
        request_bytes_max, gap_bytes_max = request_limits(store)
    parallel.check(info.schema)
    ranks = []
    for file, pipeline, context, tensor in product(files, range(parallel.pipeline), range(parallel.context), range(parallel.tensor)):
        at = Coordinate(file.data_rank, context, tensor, pipeline)
        rows = StepRows(parallel, at, file.micro_batches)
        plans = [
            rows.plan(n, info.schema, request_bytes_max=request_bytes_max, gap_bytes_max=gap_bytes_max)
            for n in range(len(file.micro_batches))
        ]
        ranks.append(_slice(at, parallel.fields(info.schema, at), plans))
    return LayoutReport(
        run=info.run,
        step=step,
        layout=str(parallel.layout or ""),
        context_ranks=parallel.context,
        tensor_ranks=parallel.tensor,
        multiple=parallel.multiple,
        fields=tuple(f.name for f in info.schema.fields),
        objects_bytes=info.bytes,
        ranks=tuple(ranks),
    )


def _slice(at: Coordinate, fields: Sequence[str], plans: Sequence[SlicePlan]) -> SliceReport:
    padding = sum(padding_count(p.rows) for p in plans)
    rows = sum(p.rows.row_count for p in plans)
    layers = dict.fromkeys(layer for p in plans for ids in p.layers.values() for layer in ids)
    return SliceReport(
        data_rank=at.data,
        pipeline_rank=at.pipeline,
        context_rank=at.context,
        tensor_rank=at.tensor,
        micro_batches=len(plans),
        rows=rows,
        tokens=rows - padding,
        padding=padding,
        fields=tuple(n for n in fields if any(n in p.fields for p in plans)),
        layers=tuple(layers),
        bytes=sum(p.read.byte_count for p in plans),
        requests=sum(p.read.request_count for p in plans),
    )
