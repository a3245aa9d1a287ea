"""Pure planning: where a payload's chunks lie in its object, which byte ranges a reader needs, and what a rank of a parallel layout reads.

No I/O, no clocks, no settings.
"""

from fsref.plan.balance import balanced_rows, with_balanced_padding
from fsref.plan.combine import combined, repeated, shifted
from fsref.plan.coverage import FieldCoverage, Overlap, State, asked_fields, field_coverage, missing_ranges, present_fields, sources, states
from fsref.plan.index import decode_index, encode_index, encode_missing, stored_tokens
from fsref.plan.layout import Array, Chunk, Layout, chunk_tokens
from fsref.plan.packed import (
    PADDING,
    ContextLayout,
    PackedRows,
    Run,
    Span,
    check_placements,
    packed,
    padded_bounds,
    padded_to,
    padding_count,
    placed,
    rank_rows,
    split_context,
    split_tensor,
)
from fsref.plan.reads import ChunkRead, FieldRead, ReadPlan, Request, SegmentRead, plan_read
from fsref.plan.slices import SlicePlan, Source, plan_slice
from fsref.plan.stages import Stages, check_stages, held_layers, rank_layers, virtual_slices

__all__ = [
    "Array",
    "Chunk",
    "ChunkRead",
    "ContextLayout",
    "FieldCoverage",
    "FieldRead",
    "Layout",
    "Overlap",
    "PADDING",
    "PackedRows",
    "ReadPlan",
    "Request",
    "Run",
    "SegmentRead",
    "SlicePlan",
    "Source",
    "Span",
    "Stages",
    "State",
    "asked_fields",
    "balanced_rows",
    "check_placements",
    "check_stages",
    "chunk_tokens",
    "combined",
    "decode_index",
    "encode_index",
    "encode_missing",
    "field_coverage",
    "held_layers",
    "missing_ranges",
    "packed",
    "padded_bounds",
    "padded_to",
    "padding_count",
    "placed",
    "plan_read",
    "plan_slice",
    "present_fields",
    "rank_layers",
    "rank_rows",
    "repeated",
    "shifted",
    "sources",
    "split_context",
    "split_tensor",
    "states",
    "stored_tokens",
    "virtual_slices",
    "with_balanced_padding",
]
