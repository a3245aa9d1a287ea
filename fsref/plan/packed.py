"""Which token of which sequence stands at each row of a rank's packed axis, however a micro batch is split over ranks.

A ``PackedRows`` is a plan; every function takes one and returns one, so that splits and paddings are composed, left out or put in another
order. ``rank_rows`` is the usual composition. The layout, the sizes and the ranks are the caller's, never derived from each other.

Padding rows are rows too. Each has a **slot**, its number in a micro batch (of a step, where the whole step is packed at once), which
does not depend on how the rows are split; ``fsref.plan.balance`` makes expert ids of it.

Shape letters: R rows of an axis, S sequences.
"""

import enum
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fsref.errors import ConfigError, PayloadError
from fsref.refs import TOKENS_MAX, TokenRange

PADDING: Final = -1
"""Stands for the sequence where rows are padding behind all sequences."""


class ContextLayout(enum.StrEnum):
    """How context parallel ranks share the rows."""

    ZIGZAG = "zigzag"
    """Each sequence in 2C equal parts, of which rank r has parts r and 2C - 1 - r, so that causal attention costs every rank the same."""
    CONTIGUOUS = "contiguous"
    """Each sequence in C equal parts, of which rank r has part r."""
    ALLGATHER = "allgather"
    """The packed axis, all sequences and their padding, in C equal parts: attention gathers keys and values over the ranks."""


class Run(NamedTuple):
    """Successive rows of one sequence, or of padding behind all sequences."""

    sequence: int
    """Its number in the caller's list, or ``PADDING``."""
    start: int
    """Position in the padded sequence; for ``PADDING`` the first slot."""
    stop: int


class Span(NamedTuple):
    """Tokens of one sequence that stand one after the other on the axis."""

    sequence: int
    tokens: TokenRange
    row: int
    """Row of the first of them."""


@dataclass(frozen=True)
class PackedRows:
    """The rows of one packed axis, in order."""

    runs: tuple[Run, ...]
    """None is empty, and none continues the one before it."""
    lengths: tuple[int, ...]
    """Tokens of every sequence, by its number, without padding."""
    slots: tuple[int, ...]
    """Slot of the first padding row of every sequence, by its number."""
    sequences: tuple[int, ...]
    """Numbers of the sequences of the micro batch in packing order, whether this rank has rows of them or not."""

    @cached_property
    def row_count(self) -> int:
        return sum(r.stop - r.start for r in self.runs)

    def spans(self, *, ahead: int = 0) -> Iterator[Span]:
        """The real tokens, in the order of rows; with ``ahead`` the tokens so many further on in the sequences of the rows.

        ``ahead=1`` gives the tokens that the rows predict: every row of a token but a sequence's last has one, wherever the split cut.
        """
        row = 0
        for sequence, start, stop in self.runs:
            if sequence != PADDING and start + ahead < self.lengths[sequence]:
                yield Span(sequence, TokenRange(start + ahead, min(stop + ahead, self.lengths[sequence])), row)
            row += stop - start

    def sequence_ids(self) -> NDArray[np.int32]:
        """[R]: whose row it is, also where it pads that sequence; ``PADDING`` behind all sequences."""
        return self._axis([np.full(stop - start, sequence, np.int64) for sequence, start, stop in self.runs]).astype(np.int32)

    def positions(self) -> NDArray[np.int64]:
        """[R]: position in the (padded) sequence, for a model's position ids; from 0 on in padding behind all sequences."""
        return self._axis([np.arange(0, b - a) if n == PADDING else np.arange(a, b) for n, a, b in self.runs])

    def padding(self) -> NDArray[np.bool_]:
        """[R]: True where no token stands. What must not count in a loss, an expert bias or a balance loss."""
        return self.row_slots() >= 0

    def row_slots(self) -> NDArray[np.int64]:
        """[R]: the slot of a padding row, -1 where a token stands."""
        return self._axis([self._slots_of(run) for run in self.runs])

    def index(self, *, ahead: int = 0) -> NDArray[np.int64]:
        """[R]: which row of all sequences, packed by number without padding, stands here; -1 in padding (``fsref.plan.padding.take``).

        ``ahead``: as in ``spans``; -1 also where a sequence has no token so far on.
        """
        offsets = [0, *accumulate(self.lengths)]
        out = np.full(self.row_count, -1, np.int64)
        for sequence, tokens, row in self.spans(ahead=ahead):
            out[row : row + len(tokens)] = np.arange(tokens.start, tokens.stop) + offsets[sequence]
        return out

    def cu_seqlens(self) -> NDArray[np.int32]:
        """[n + 1]: where each sequence's rows on this axis begin, its padding included; padding behind all sequences counts as one more.

        A sequence without a row here does not count.
        """
        bounds = [0]
        before = Run(PADDING - 1, 0, 0)
        for run in self.runs:
            size = run.stop - run.start
            if run.sequence == before.sequence and run.start >= before.stop:
                bounds[-1] += size
            else:
                bounds.append(bounds[-1] + size)
            before = run
        return np.asarray(bounds, np.int32)

    def _slots_of(self, run: Run) -> NDArray[np.int64]:
        if run.sequence == PADDING:
            return np.arange(run.start, run.stop)
        length = self.lengths[run.sequence]
        at = np.arange(run.start, run.stop)
        return np.where(at < length, -1, at - length + self.slots[run.sequence])

    @staticmethod
    def _axis(parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
        return np.concatenate([np.zeros(0, np.int64), *parts])


def packed(cu_seqlens: Sequence[int], cu_seqlens_padded: Sequence[int]) -> PackedRows:
    """All sequences one after the other, each with its own padding behind it.

    ``cu_seqlens`` and ``cu_seqlens_padded`` [S + 1] are the bounds of the sequences without and with padding; give the same twice for none.
    Raises ``PayloadError`` for bounds that do not start with 0, descend, or leave less room than tokens.
    """
    lengths, rooms = _lengths(cu_seqlens, "cu_seqlens"), _lengths(cu_seqlens_padded, "cu_seqlens_padded")
    if len(lengths) != len(rooms):
        raise PayloadError(f"cu_seqlens has {len(lengths)} sequences, cu_seqlens_padded {len(rooms)}")
    for n, (length, room) in enumerate(zip(lengths, rooms, strict=True)):
        if room < length:
            raise PayloadError(f"sequence {n} has {length} tokens, cu_seqlens_padded leaves {room} rows for it")
    slots = [0, *accumulate(room - length for length, room in zip(lengths, rooms, strict=True))][:-1]
    runs = [Run(n, 0, room) for n, room in enumerate(rooms)]
    return PackedRows(_joined(runs), tuple(lengths), tuple(slots), tuple(range(len(lengths))))


def padded_bounds(cu_seqlens: Sequence[int], *, multiple: int) -> list[int]:
    """``cu_seqlens_padded`` with every sequence padded to ``multiple`` rows: 2C for zigzag over C ranks, C for contiguous."""
    if multiple < 1:
        raise ConfigError(f"sequences cannot be padded to a multiple of {multiple}")
    return [0, *accumulate(-(-length // multiple) * multiple for length in _lengths(cu_seqlens, "cu_seqlens"))]


def placed(rows: PackedRows, placement: Sequence[int]) -> PackedRows:
    """The sequences of ``placement``, in its order: one micro batch of those that were packed. A number may repeat (a dummy's does).

    Raises ``ConfigError`` for a number that is not among the sequences.
    """
    runs: dict[int, list[Run]] = {}
    for run in rows.runs:
        runs.setdefault(run.sequence, []).append(run)
    known = set(rows.sequences)
    if foreign := [n for n in placement if n not in known]:
        raise ConfigError(f"sequences {foreign} placed, there are {sorted(known)}")
    return replace(rows, runs=_joined([r for n in placement for r in runs.get(n, ())]), sequences=tuple(placement))


def check_placements(placements: Sequence[Sequence[int]], *, sequence_count: int) -> None:
    """Every sequence must stand in exactly one of the micro batches. Raises ``ConfigError`` that names those that do not."""
    found = Counter(n for placement in placements for n in placement)
    missing = [n for n in range(sequence_count) if not found[n]]
    twice = [n for n, count in found.items() if count > 1]
    foreign = [n for n in found if not 0 <= n < sequence_count]
    if missing or twice or foreign:
        raise ConfigError(
            f"{len(placements)} micro batches over {sequence_count} sequences: {missing} placed nowhere, {twice} more than once, "
            f"{foreign} unknown"
        )


def split_context(rows: PackedRows, layout: ContextLayout, *, rank: int, ranks: int) -> PackedRows:
    """One context parallel rank's rows. Raises ``ConfigError`` with the numbers if a sequence, or the axis, does not divide."""
    _check_rank(rank, ranks, "context parallel")
    match layout:
        case ContextLayout.ALLGATHER:
            return _part(rows, rank, ranks, "context parallel")
        case ContextLayout.CONTIGUOUS:
            parts, mine = ranks, [rank]
        case ContextLayout.ZIGZAG:
            parts, mine = 2 * ranks, [rank, 2 * ranks - 1 - rank]
    out = []
    for sequence, start, stop in rows.runs:
        size, rest = divmod(stop - start, parts)
        if rest:
            whose = "the padding" if sequence == PADDING else f"sequence {sequence}"
            raise ConfigError(
                f"{whose} has {stop - start} rows, which {layout} over {ranks} context parallel ranks cuts into {parts} equal parts: "
                f"pad it to {(size + 1) * parts} (cu_seqlens_padded)"
            )
        out += [Run(sequence, start + n * size, start + (n + 1) * size) for n in mine]
    return replace(rows, runs=_joined(out))


def split_tensor(rows: PackedRows, *, rank: int, ranks: int) -> PackedRows:
    """One rank's rows where sequence parallelism splits the axis over the tensor parallel ranks, in equal parts, by rank.

    Raises ``ConfigError`` with the numbers if the axis does not divide.
    """
    _check_rank(rank, ranks, "tensor parallel")
    return _part(rows, rank, ranks, "tensor parallel")


def padded_to(rows: PackedRows, *, multiple: int, first_slot: int) -> PackedRows:
    """The same rows with padding behind them, up to a multiple. ``first_slot``: the slot of the first row that is added."""
    if multiple < 1:
        raise ConfigError(f"rows cannot be padded to a multiple of {multiple}")
    missing = -rows.row_count % multiple
    return replace(rows, runs=_joined([*rows.runs, Run(PADDING, first_slot, first_slot + missing)]))


def rank_rows(
    rows: PackedRows,
    layout: ContextLayout,
    *,
    context_rank: int,
    context_ranks: int,
    tensor_rank: int,
    tensor_ranks: int,
    multiple: int,
    first_slot: int,
) -> PackedRows:
    """A rank's rows of a micro batch: sequences padded before, split over context ranks, batch padding, split over tensor ranks.

    ``multiple``: each context rank's rows are padded to a multiple of it: behind the split for zigzag and contiguous, and for all-gather
    before it, where the whole axis is padded to ``multiple * context_ranks``. ``tensor_ranks``: 1 where the tensor parallel ranks all see
    the same rows. ``first_slot``: the micro batch's first slot for batch padding, at least ``padding_count`` of all that was packed; the
    ranks' slots go on from each other. Raises ``ConfigError`` where something does not divide.
    """
    if layout is ContextLayout.ALLGATHER:
        whole = padded_to(rows, multiple=multiple * context_ranks, first_slot=first_slot)
        mine = split_context(whole, layout, rank=context_rank, ranks=context_ranks)
    else:
        mine = split_context(rows, layout, rank=context_rank, ranks=context_ranks)
        # All context ranks have equally many rows, so they pad equally, and rank r's padding follows that of rank r - 1.
        each = -mine.row_count % multiple if multiple > 0 else 0
        mine = padded_to(mine, multiple=multiple, first_slot=first_slot + context_rank * each)
    return split_tensor(mine, rank=tensor_rank, ranks=tensor_ranks)


def padding_count(rows: PackedRows) -> int:
    """Padding rows on the axis; of the whole packed step, the first slot that no sequence uses."""
    return rows.row_count - sum(len(s.tokens) for s in rows.spans())


def _part(rows: PackedRows, rank: int, ranks: int, what: str) -> PackedRows:
    size, rest = divmod(rows.row_count, ranks)
    if rest:
        raise ConfigError(
            f"{rows.row_count} rows do not split evenly over {ranks} {what} ranks ({rest} are left over): "
            f"pad them to {(size + 1) * ranks}, a multiple of {ranks}"
        )
    return replace(rows, runs=_joined(_cut(rows.runs, rank * size, (rank + 1) * size)))


def _cut(runs: Sequence[Run], start: int, stop: int) -> Iterator[Run]:
    """The rows [start, stop) of an axis."""
    row = 0
    for sequence, first, last in runs:
        begin, end = max(start - row, 0), min(stop - row, last - first)
        if begin < end:
            yield Run(sequence, first + begin, first + end)
        row += last - first


def _joined(runs: Iterator[Run] | Sequence[Run]) -> tuple[Run, ...]:
    """Without empty runs, and with those together that go on where the one before ends."""
    out: list[Run] = []
    for run in runs:
        if run.start == run.stop:
            continue
        if out and (out[-1].sequence, out[-1].stop) == (run.sequence, run.start):
            out[-1] = out[-1]._replace(stop=run.stop)
        else:
            out.append(run)
    return tuple(out)


def _lengths(bounds: Sequence[int], name: str) -> list[int]:
    ends = [int(b) for b in bounds]
    if not ends or ends[0] != 0 or ends[-1] > TOKENS_MAX:
        raise PayloadError(f"{name} starts with 0 and ends at {TOKENS_MAX} at most; {ends[:1]}..{ends[-1:]} found")
    lengths = [b - a for a, b in pairwise(ends)]
    if lengths and min(lengths) < 0:
        raise PayloadError(f"{name} descends at sequence {next(n for n, length in enumerate(lengths) if length < 0)}")
    return lengths


def _check_rank(rank: int, ranks: int, what: str) -> None:
    if not 0 <= rank < ranks:
        raise ConfigError(f"{what} rank {rank} of {ranks}: ranks count from 0")
