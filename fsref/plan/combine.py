"""Rewrites of read plans that give read plans: moved to other rows, one row repeated, many plans in one.

Pure. A combined plan fetches a chunk once, however many of its parts want rows of it, and its requests are put together anew.
"""

from collections.abc import Sequence

from fsref.errors import PayloadError
from fsref.plan.reads import FieldRead, ReadPlan, SegmentRead, WantedChunk, coalesce, with_bases
from fsref.refs import TokenRange


def shifted(plan: ReadPlan, rows: int) -> ReadPlan:
    """The same reads, ``rows`` rows further down in the caller's buffers."""
    return plan._replace(
        segments=tuple(s._replace(fields=tuple(r._replace(out_start=r.out_start + rows) for r in s.fields)) for s in plan.segments)
    )


def repeated(plan: ReadPlan, count: int) -> ReadPlan:
    """A plan of one token's dense rows, with that row ``count`` times in the buffers. Raises ``PayloadError`` for any other plan."""
    if len(plan.tokens) != 1 or any(r.field.ragged for s in plan.segments for r in s.fields):
        raise PayloadError(f"tokens [{plan.tokens.start}, {plan.tokens.stop}) cannot be repeated: only one token's dense rows can")
    return plan._replace(segments=tuple(s._replace(fields=tuple(r._replace(copies=count) for r in s.fields)) for s in plan.segments))


def combined(plans: Sequence[ReadPlan], *, row_count: int, request_bytes_max: int, gap_bytes_max: int) -> ReadPlan:
    """One plan that fills the same buffers, of ``row_count`` rows; its ``tokens`` are these rows.

    Of each object every chunk is fetched once; segments are in the order of their first use. Overlaps are left to the single plans, as they
    count in each sequence's own tokens. Limits as in ``plan_read``.
    """
    fields: dict[str, list[FieldRead]] = {}
    chunks: dict[str, list[WantedChunk]] = {}
    sizes: dict[str, int] = {}
    for segment in (s for p in plans for s in p.segments):
        mine = fields.setdefault(segment.object_id, [])
        wanted = chunks.setdefault(segment.object_id, [])
        sizes[segment.object_id] = segment.byte_count
        base = len(mine)
        mine += segment.fields
        wanted += [(r.offset + c[0], c[1], c[2], base + c.field, *c[4:]) for r in segment.requests for c in r.chunks]
    segments = [
        SegmentRead(name, sizes[name], tuple(mine), coalesce(sorted(chunks[name]), request_bytes_max, gap_bytes_max))
        for name, mine in fields.items()
    ]
    return ReadPlan(TokenRange(0, row_count), tuple(with_bases(segments)))
