"""What the ranks of a parallel layout would read of a step: plans only, no object is opened.

The layout and its sizes are the caller's. Sequences are padded to the least that the layout divides, the batch to ``multiple`` rows.
"""

from collections.abc import Sequence
from itertools import accumulate, product
from typing import NamedTuple

from fsref.errors import ConfigError
from fsref.inspection.find import Place
from fsref.inspection.records import LayoutReport, SliceReport
from fsref.inspection.step import info_of
from fsref.plan import (
    ContextLayout,
    PackedRows,
    SlicePlan,
    Stages,
    check_stages,
    packed,
    padded_bounds,
    padding_count,
    placed,
    plan_slice,
    rank_layers,
    rank_rows,
)
from fsref.reader import request_limits
from fsref.refs import Schema
from fsref.refs.schema import LAYER_ID_MAX
from fsref.slices import sources_of
from fsref.steps import RankFile, read_rank
from fsref.store import Store


class Layout(NamedTuple):
    """A parallel layout as the command line names it."""

    context: ContextLayout
    context_ranks: int
    tensor_ranks: int
    multiple: int
    stages: Stages
    """Empty: one pipeline rank with all layers."""


def parse_stages(text: str) -> Stages:
    """``0-2,7;3-6`` are two pipeline ranks; ``|`` separates a rank's virtual stages. Raises ``ConfigError``."""
    return [[_layers(chunk) for chunk in rank.split("|")] for rank in text.split(";")] if text else []


def _layers(text: str) -> list[int]:
    out: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or max(int(first), int(last or 0)) > LAYER_ID_MAX:
            raise ConfigError(f"layers {part!r}: ids and ranges of them are meant, for example 0-2,7;3-6")
        out += range(int(first), int(last or first) + 1)
    return out


def layout_report(place: Place, step: int, layout: Layout) -> LayoutReport:
    """Every rank of the layout, over all data ranks of the step. Raises ``ConfigError`` where something does not divide, ``StoreError``."""
    with place.open() as store:
        info = info_of(store, step)
        files = [read_rank(store, info, n) for n in range(info.data_ranks)]
        for field in info.schema.fields:
            if layout.stages and field.layer_ids:
                check_stages(field, layout.stages)
        ranks = [report for file in files for report in _ranks(store, file, info.schema, layout)]
    return LayoutReport(
        run=info.run,
        step=step,
        layout=str(layout.context),
        context_ranks=layout.context_ranks,
        tensor_ranks=layout.tensor_ranks,
        multiple=layout.multiple,
        fields=tuple(f.name for f in info.schema.fields),
        objects_bytes=info.bytes,
        ranks=tuple(ranks),
    )


def _ranks(store: Store, file: RankFile, schema: Schema, layout: Layout) -> list[SliceReport]:
    sequences = [s for m in file.micro_batches for s in m.sequences]
    starts = [0, *accumulate(len(m.sequences) for m in file.micro_batches)]
    whole = _packed([s.token_count for s in sequences], layout)
    sources = sources_of(sequences, schema)
    request_bytes_max, gap_bytes_max = request_limits(store)
    out = []
    for pipeline_rank, context_rank, tensor_rank in product(
        range(max(1, len(layout.stages))), range(layout.context_ranks), range(layout.tensor_ranks)
    ):
        plans = [
            plan_slice(
                sources,
                schema,
                rows=rank_rows(
                    placed(whole, range(starts[n], starts[n + 1])),
                    layout.context,
                    context_rank=context_rank,
                    context_ranks=layout.context_ranks,
                    tensor_rank=tensor_rank,
                    tensor_ranks=layout.tensor_ranks,
                    multiple=layout.multiple,
                    first_slot=padding_count(whole),
                ),
                fields=[f.name for f in schema.fields],
                layers=rank_layers(layout.stages, pipeline_rank) if layout.stages else None,
                request_bytes_max=request_bytes_max,
                gap_bytes_max=gap_bytes_max,
            )
            for n in range(len(file.micro_batches))
        ]
        out.append(_slice(file.data_rank, pipeline_rank, context_rank, tensor_rank, plans))
    return out


def _packed(lengths: Sequence[int], layout: Layout) -> PackedRows:
    bounds = [0, *accumulate(lengths)]
    multiple = {ContextLayout.ZIGZAG: 2 * layout.context_ranks, ContextLayout.CONTIGUOUS: layout.context_ranks}.get(layout.context, 1)
    return packed(bounds, padded_bounds(bounds, multiple=multiple))


def _slice(data_rank: int, pipeline_rank: int, context_rank: int, tensor_rank: int, plans: Sequence[SlicePlan]) -> SliceReport:
    padding = sum(padding_count(p.rows) for p in plans)
    rows = sum(p.rows.row_count for p in plans)
    layers = dict.fromkeys(layer for p in plans for ids in p.layers.values() for layer in ids)
    return SliceReport(
        data_rank=data_rank,
        pipeline_rank=pipeline_rank,
        context_rank=context_rank,
        tensor_rank=tensor_rank,
        micro_batches=len(plans),
        rows=rows,
        tokens=rows - padding,
        padding=padding,
        layers=tuple(layers),
        bytes=sum(p.read.byte_count for p in plans),
        requests=sum(p.read.request_count for p in plans),
    )
