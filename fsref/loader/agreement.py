"""Which micro batches of a step train, agreed by all ranks with one all-reduce.

Owns the rule: a micro batch whose arrays could not be fetched on any rank that trains it is dropped from the loss on
every such rank; a step in which no micro batch's arrays could be fetched anywhere stops the run on all ranks alike. Refuses to retry:
the reader has done so.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fsref.errors import StepLost
from fsref.failpoints import failpoint
from fsref.loader.fetch import FetchFailure
from fsref.loader.ranks import Ranks
from fsref.steps import RankFile, step_name
from fsref.tensors import PackedMicroBatch

Taken = Sequence[PackedMicroBatch | FetchFailure]


@dataclass(frozen=True)
class Agreement:
    """What all ranks know about one step's fetches."""

    dropped: tuple[bool, ...]
    """Per micro batch of this data rank."""
    dropped_count: int
    """Over all data ranks."""
    missed: dict[str, str]
    """Object id to failure class (``missing``, ``corrupt``, ``unavailable``) over all ranks, the same on every rank."""


def agree(ranks: Ranks, rank_file: RankFile, taken: Taken) -> Agreement:
    """One all-reduce of what failed where; a second exchange, of object ids, only if something failed.

    Raises ``StepLost`` on every rank, after the exchange, if all micro batches that need arrays failed.
    """
    mine = torch.zeros(ranks.data_ranks, 2, len(taken), dtype=torch.int64)
    mine[ranks.data_rank, 0] = torch.tensor([isinstance(t, FetchFailure) for t in taken], dtype=torch.int64)
    mine[ranks.data_rank, 1] = torch.tensor([m.needs_arrays for m in rank_file.micro_batches], dtype=torch.int64)
    failpoint("agree.before")
    ranks.sum_in_place(mine)
    failpoint("agree.after")
    failed, needing = mine[:, 0] > 0, mine[:, 1] > 0
    if not bool(failed.any()):
        return Agreement((False,) * len(taken), 0, {})
    missed: dict[str, str] = {}
    for part in ranks.gather({i: t.kind for t in taken if isinstance(t, FetchFailure) for i in t.object_ids}):
        missed.update(part)
    if bool(failed[needing].all()):
        name, some = step_name(rank_file.step), ", ".join(sorted(missed)[:3])
        raise StepLost(
            f"{name}: the arrays of none of its {int(needing.sum())} micro batches could be fetched "
            f"({len(missed)} objects, such as {some}): check the root with `fsref doctor`, then `fsref inspect {name}`"
        )
    return Agreement(tuple(bool(f) for f in failed[ranks.data_rank]), int(failed.sum()), missed)
