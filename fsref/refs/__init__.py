"""The nouns: what passes between env servers, orchestrator and trainer.

Modules: ``names`` (ids, token ranges, limits), ``schema`` (``Field``, ``Schema``, ``Codec``), ``payload`` (arrays in memory),
``reference`` (``PayloadRef``, a name for arrays in a store), ``merge`` (rows of several replies, by position), ``export`` (other
forms of the same arrays: sentinels, rectangles), ``lints`` (arrays that are legal and look wrong). Refuses I/O, codecs and anything that
knows where a store is: a reference is a name, not an address.

Shape letters: T tokens, L layers, K experts per token, N values of a ragged field.
"""

from fsref.refs.lints import Finding, Lint, Lints, find
from fsref.refs.merge import Merged, Piece, merge
from fsref.refs.names import (
    BYTES_CHUNK_MAX,
    BYTES_OBJECT_MAX,
    BYTES_REF_MAX,
    INCARNATION_PATTERN,
    OBJECT_PATTERN,
    ROLES,
    RUN_PATTERN,
    SEGMENTS_MAX,
    SEQ_MAX,
    TOKENS_MAX,
    TokenRange,
    check_incarnation,
    check_run,
    flags_of,
    object_name,
    ranges_where,
    split_object_id,
    token_hash,
)
from fsref.refs.payload import Dense, FieldData, Payload, Ragged, filler_rows, narrow
from fsref.refs.reference import Part, PayloadRef, Segment, join
from fsref.refs.schema import (
    DTYPES,
    MASK_FULL,
    MASK_TRUNCATED,
    Alignment,
    Codec,
    Column,
    Field,
    Schema,
    expert_dtype,
    routed_experts,
    sampling_mask,
    top_logprobs,
)

__all__ = [
    "Alignment",
    "BYTES_CHUNK_MAX",
    "BYTES_OBJECT_MAX",
    "BYTES_REF_MAX",
    "Codec",
    "Column",
    "DTYPES",
    "Dense",
    "Field",
    "FieldData",
    "Finding",
    "INCARNATION_PATTERN",
    "Lint",
    "Lints",
    "MASK_FULL",
    "MASK_TRUNCATED",
    "Merged",
    "OBJECT_PATTERN",
    "Part",
    "Payload",
    "PayloadRef",
    "Piece",
    "ROLES",
    "RUN_PATTERN",
    "Ragged",
    "SEGMENTS_MAX",
    "SEQ_MAX",
    "Schema",
    "Segment",
    "TOKENS_MAX",
    "TokenRange",
    "check_incarnation",
    "check_run",
    "expert_dtype",
    "filler_rows",
    "find",
    "join",
    "flags_of",
    "merge",
    "narrow",
    "object_name",
    "ranges_where",
    "routed_experts",
    "sampling_mask",
    "split_object_id",
    "token_hash",
    "top_logprobs",
]
