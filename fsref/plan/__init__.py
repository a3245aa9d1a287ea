"""Pure planning: where a payload's chunks lie in its object, and which byte ranges a reader needs. No I/O, no clocks, no settings."""

from fsref.plan.index import decode_index, encode_index, encode_missing, missing_ranges, present_fields, stored_tokens
from fsref.plan.layout import Array, Chunk, Layout, chunk_tokens
from fsref.plan.reads import ChunkRead, FieldRead, ReadPlan, Request, SegmentRead, plan_read

__all__ = [
    "Array",
    "Chunk",
    "ChunkRead",
    "FieldRead",
    "Layout",
    "ReadPlan",
    "Request",
    "SegmentRead",
    "chunk_tokens",
    "decode_index",
    "encode_index",
    "encode_missing",
    "missing_ranges",
    "plan_read",
    "present_fields",
    "stored_tokens",
]
