"""Expert ids for rows that are padding: distinct in a row, balanced over experts and over expert parallel shards, the same every time.

Padding goes through the experts like any row. With one expert for all of it, that expert's shard gets all of its work and the balance
loss sees a router that nobody has. The ids here walk over the experts shard by shard: entry n goes to shard n mod P and there to the next
expert, so that any run of successive entries differs by at most one between two shards, and between two experts.

Shape letters: R rows, L layers, K experts per row, E experts, P shards.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsref.errors import ConfigError

_MIX = 0x9E3779B97F4A7C15


def balanced_rows(
    slots: Sequence[int] | NDArray[np.integer[Any]], *, step: int, layer_ids: Sequence[int], top_k: int, expert_count: int, shards: int
) -> NDArray[np.int32]:
    """int32 [R, L, K]: the expert ids of the padding rows with these slots.

    A row depends on its slot, the step and the layer's global id, so that any split of rows or layers over ranks gives the same rows.
    ``step`` decides where the walk begins. Data ranks whose rows meet in the same experts pass different numbers (``step * data_ranks +
    data_rank``), so that a row or two on each of many ranks do not all go to the same experts.

    ``shards``: expert parallel ranks, of which each holds E / P successive experts; 1 without expert parallelism. Over successive slots,
    experts are used equally often up to one, and so are shards. Raises ``ConfigError`` if a row cannot hold ``top_k`` distinct experts or
    the experts do not divide by the shards.
    """
    if not 1 <= top_k <= expert_count:
        raise ConfigError(f"{top_k} distinct experts in a row of {expert_count}: not possible")
    if shards < 1 or expert_count % shards:
        raise ConfigError(f"{expert_count} experts do not divide by {shards} expert parallel shards")
    first_R = np.asarray(slots, np.int64) * top_k
    turn_L = np.asarray(layer_ids, np.int64) * top_k + (step * _MIX >> 17) % expert_count
    entry_RLK = first_R[:, None, None] + turn_L[:, None] + np.arange(top_k)
    shard, place = entry_RLK % shards, entry_RLK % expert_count // shards
    out: NDArray[np.int32] = (shard * (expert_count // shards) + place).astype(np.int32)
    return out


def with_balanced_padding(
    rows: NDArray[Any],
    *,
    slots: NDArray[np.int64],
    step: int,
    layer_ids: Sequence[int],
    expert_count: int,
    shards: int,
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """``rows`` [R, L, K] with balanced ids where ``slots`` [R] is not -1, and bool [R]: True where they are padding.

    Rows whose dtype does not hold ``expert_count - 1`` are widened first, into a copy; others are filled in place.
    """
    padding = slots >= 0
    if not np.can_cast(np.min_scalar_type(expert_count - 1), rows.dtype, "safe"):
        rows = rows.astype(np.result_type(rows.dtype, np.min_scalar_type(expert_count - 1)))
    if padding.any():
        rows[padding] = balanced_rows(
            slots[padding], step=step, layer_ids=layer_ids, top_k=rows.shape[2], expert_count=expert_count, shards=shards
        )
    return rows, padding
