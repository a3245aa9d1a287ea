"""Work on the rows of a ragged field without sorting all of its values at once.

A sort of two million candidates (16k tokens, heads of 128) takes a second; the rows are short and alike, so they are sorted side by side
as a matrix, a block of rows at a time, in a hundredth of that. Rows of very different length are not padded: their block is sorted flat.

Owns repeats within rows and the choice of heads. Refuses to judge: what is wrong with what it finds is the callers' business.

Shape letters: T rows, N values, R rows of a block, W values of its longest row.
"""

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

_BLOCK_VALUES: Final = 1 << 18
"""Values of a block: a few MiB of scratch, and no call that takes longer than some milliseconds."""
_PADDING_MAX: Final = 4
"""A block is padded to a matrix if that has at most this many times its values."""


class _Block(NamedTuple):
    start: int
    """First row."""
    counts: NDArray[np.int64]
    first: int
    """First value."""

    @property
    def rows(self) -> NDArray[np.intp]:
        """The row in the block of each value."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def matrix(self, values: NDArray[Any], fill: NDArray[Any]) -> NDArray[Any] | None:
        """The block's ``values`` as [R, W], short rows filled up with ``fill`` [W]; None where that would be mostly filling."""
        width = len(fill)
        if width * len(self.counts) > _PADDING_MAX * len(values):
            return None
        if width * len(self.counts) == len(values):
            return values.reshape(-1, width)
        out = np.tile(fill, (len(self.counts), 1))
        out[np.arange(width) < self.counts[:, None]] = values
        return out


def _blocks(counts_T: NDArray[np.integer[Any]]) -> Iterator[_Block]:
    """Successive rows of about ``_BLOCK_VALUES`` values and at most as many rows; at least one row each."""
    counts = counts_T.astype(np.int64)
    ends = np.cumsum(counts)
    start = 0
    while start < len(counts):
        first = int(ends[start] - counts[start])
        stop = max(start + 1, min(int(np.searchsorted(ends, first + _BLOCK_VALUES, side="right")), start + _BLOCK_VALUES))
        yield _Block(start, counts[start:stop], first)
        start = stop


def first_repeat(counts_T: NDArray[np.integer[Any]], ids_N: NDArray[np.integer[Any]]) -> tuple[int, int] | None:
    """The first row that holds an id twice, and the smallest such id of it; None if there is none. Ids are in [0, 2^31)."""
    for block in _blocks(counts_T):
        ids = ids_N[block.first : block.first + int(block.counts.sum())].astype(np.int32)
        if not len(ids):
            continue
        matrix = block.matrix(ids, np.arange(-1, -1 - int(block.counts.max()), -1, dtype=np.int32))
        if matrix is not None:
            ordered = np.sort(matrix, axis=1)
            same = ordered[:, 1:] == ordered[:, :-1]
            if same.any():
                row, column = divmod(int(np.argmax(same)), same.shape[1])
                return block.start + row, int(ordered[row, column])
            continue
        keys = np.sort((block.rows << 31) | ids)
        again = np.flatnonzero(keys[1:] == keys[:-1])
        if len(again):
            key = int(keys[again[0]])
            return block.start + (key >> 31), key & ((1 << 31) - 1)
    return None


def most_probable(
    counts_T: NDArray[np.integer[Any]], ids_N: NDArray[np.integer[Any]], logprobs_N: NDArray[np.float32], *, head: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Per row the ``head`` values of largest logprob in descending order, ties by id; values tied across the cut are left out together.

    Returns how many each row keeps [T], and the indices of what is kept, row after row. No id stands twice in a row, no logprob is NaN.
    """
    kept: list[NDArray[np.int64]] = []
    counts: list[NDArray[np.int64]] = []
    for block in _blocks(counts_T):
        values = slice(block.first, block.first + int(block.counts.sum()))
        keys = (_descending(logprobs_N[values]).astype(np.uint64) << np.uint64(32)) | ids_N[values].astype(np.uint64)
        matrix = block.matrix(keys, np.full(int(block.counts.max(initial=0)), np.iinfo(np.uint64).max)) if len(keys) else None
        count, order = _heads_flat(block, keys, head) if matrix is None else _heads_padded(block, matrix, head)
        counts.append(count)
        kept.append(order + block.first)
    none = np.zeros(0, np.int64)
    return np.concatenate([none, *counts]), np.concatenate([none, *kept])


def _descending(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Whole numbers that ascend where the values descend, equal where they are equal."""
    bits = (np.float32(0.0) - values).view(np.uint32)  # never -0.0
    flipped: NDArray[np.uint32] = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    return flipped


def _heads_padded(block: _Block, keys_RW: NDArray[np.uint64], head: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    order = np.argsort(keys_RW, axis=1)[:, : head + 1]
    values = np.take_along_axis(keys_RW, order, axis=1) >> np.uint64(32)
    keep = np.arange(min(head, values.shape[1])) < block.counts[:, None]
    if values.shape[1] > head:
        cut = (block.counts > head)[:, None] & (values[:, :head] == values[:, head:])
        keep &= ~cut
    offsets = np.cumsum(block.counts) - block.counts
    return keep.sum(axis=1), (order[:, : keep.shape[1]] + offsets[:, None])[keep]


def _heads_flat(block: _Block, keys: NDArray[np.uint64], head: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    rows = block.rows
    order = np.lexsort((keys, rows))
    values = keys[order] >> np.uint64(32)
    first = np.cumsum(block.counts) - block.counts
    keep = np.arange(len(order)) - first[rows] < head
    cut = first + head
    has_cut = np.flatnonzero(block.counts > head)
    limit = np.zeros(len(block.counts), np.uint64)  # no value has this key: no logprob is above 0 by as much
    limit[has_cut] = values[cut[has_cut]]
    keep &= values != limit[rows]
    return np.bincount(rows[keep], minlength=len(block.counts)), order[keep]
