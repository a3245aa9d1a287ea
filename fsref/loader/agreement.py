"""Which micro batches of a step train, agreed by all ranks with one all-reduce.

Owns the rule: a micro batch whose arrays could not be fetched on any rank that trains it is dropped from the loss on
every such rank; a step in which no micro batch's arrays could be fetched anywhere stops the run on all ranks alike. Refuses to retry:
the reader has done so.

The all-reduce is over all ranks of the run (``ranks`` says why) and carries a table with one part per data rank: the context, tensor and
pipeline ranks of a data rank add into the same part, so a failure on one of them is a failure of all, and data ranks see each other's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from fsref.errors import FsrefError, StepLost
from fsref.failpoints import failpoint
from fsref.loader.fetch import Fetched, FetchFailure
from fsref.loader.ranks import Ranks
from fsref.steps import RankFile, step_name

Taken = Sequence[Fetched]
KINDS: Final = ("corrupt", "missing", "unavailable")
"""Of a failed fetch, the most telling first: where ranks differ about an object, the first that one of them found counts."""


@dataclass(frozen=True)
class Agreement:
    """What all ranks know about one step's fetches; equal on every rank, but for ``dropped``."""

    dropped: tuple[bool, ...]
    """Per micro batch of this data rank."""
    dropped_count: int
    """Over all data ranks."""
    kinds: Mapping[str, int]
    """By kind, the micro batches of all data ranks that some rank failed to fetch for it; one that failed in two ways counts in both."""
    missed: Mapping[str, str]
    """Object id to kind, over all ranks: every object of a micro batch that failed."""


def agree(ranks: Ranks, rank_file: RankFile, taken: Taken | FsrefError) -> Agreement:
    """One all-reduce of what failed where; a second exchange, of object ids, only if something failed.

    ``taken``: what the fetcher handed out, or the error that kept it from doing so. That is raised here, after the all-reduce, so that no
    other rank waits for this one; they raise ``RoleFailed``. Raises ``StepLost`` on every rank, after the exchange, if all micro batches
    that need arrays failed.
    """
    count = len(rank_file.micro_batches)
    table = torch.zeros(ranks.data_ranks, len(KINDS) + 1, count, dtype=torch.int64)
    error = taken if isinstance(taken, FsrefError) else None
    mine: Taken = () if isinstance(taken, FsrefError) else taken
    for number, fetched in enumerate(mine):
        if isinstance(fetched, FetchFailure):
            table[ranks.data_rank, KINDS.index(fetched.kind), number] = 1
    table[ranks.data_rank, -1] = torch.tensor([m.needs_arrays for m in rank_file.micro_batches], dtype=torch.int64)
    flat = torch.cat([torch.tensor([error is not None], dtype=torch.int64), table.flatten()])
    failpoint("agree.before")
    ranks.sum_in_place(flat)
    failpoint("agree.after")
    if error is not None:
        raise error
    if int(flat[0]):
        raise ranks.failed_elsewhere(f"taking the arrays of {step_name(rank_file.step)}")
    table = flat[1:].view_as(table) > 0
    by_kind, needing = table[:, :-1], table[:, -1]
    failed = by_kind.any(1)
    if not bool(failed.any()):
        return Agreement((False,) * count, 0, dict.fromkeys(KINDS, 0), {})
    missed = _missed(ranks.gather({i: t.kind for t in mine if isinstance(t, FetchFailure) for i in t.object_ids}))
    kinds = {kind: int(by_kind[:, n].sum()) for n, kind in enumerate(KINDS)}
    if bool(failed[needing].all()):
        raise _lost(rank_file.step, int(needing.sum()), kinds, missed)
    return Agreement(tuple(bool(f) for f in failed[ranks.data_rank]), int(failed.sum()), kinds, missed)


def _missed(parts: Sequence[Mapping[str, str]]) -> dict[str, str]:
    out: dict[str, str] = {}
    for part in parts:
        for object_id, kind in part.items():
            out[object_id] = min(out.get(object_id, kind), kind, key=KINDS.index)
    return out


def _lost(step: int, needing: int, kinds: Mapping[str, int], missed: Mapping[str, str]) -> StepLost:
    name = step_name(step)
    found = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
    some = ", ".join(f"{i} {missed[i]}" for i in sorted(missed)[:3])
    return StepLost(
        f"{name}: the arrays of none of its {needing} micro batches could be fetched ({found}; {len(missed)} objects, such as {some}): "
        f"check the root with `fsref doctor`, then `fsref inspect {name}`"
    )
