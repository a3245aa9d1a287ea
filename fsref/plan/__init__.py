"""Pure planning: where a payload's chunks lie in its object, and which byte ranges a reader needs. No I/O, no clocks, no settings."""

from fsref.plan.coverage import FieldCoverage, Overlap, State, asked_fields, field_coverage, missing_ranges, present_fields, sources, states
from fsref.plan.index import decode_index, encode_index, encode_missing, stored_tokens
from fsref.plan.layout import Array, Chunk, Layout, chunk_tokens
from fsref.plan.reads import ChunkRead, FieldRead, ReadPlan, Request, SegmentRead, plan_read

__all__ = [
    "Array",
    "Chunk",
    "ChunkRead",
    "FieldCoverage",
    "FieldRead",
    "Layout",
    "Overlap",
    "ReadPlan",
    "Request",
    "SegmentRead",
    "State",
    "asked_fields",
    "chunk_tokens",
    "decode_index",
    "encode_index",
    "encode_missing",
    "field_coverage",
    "missing_ranges",
    "plan_read",
    "present_fields",
    "sources",
    "states",
    "stored_tokens",
]
