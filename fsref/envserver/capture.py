"""The arrays of traces that are still running, as engines sent them, by absolute token position.

One ``TurnArrays`` per engine reply. They are merged per branch when an episode is kept: a turn belongs to a branch where its prompt and
completion are a prefix of the branch's tokens, whatever messages, bridges or forks led there. A row that one turn cannot have (the
last sampled token was never fed to the model) is filled by the next turn whose reply starts early enough; of two real rows
the earlier turn's stays, and a difference is counted. A turn keeps no rows that an earlier one already holds.

Owns that merge. Refuses to know engines, verifiers or stores. Thread-safe: replies are added by decoding threads.

Shape letters: T tokens of a branch, M tokens that a turn remembers, R rows, L layers, K experts per token, N values.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsref.refs import Dense, FieldData, Ragged, TokenRange, ranges_where, token_hash
from fsref.refs.merge import Piece, merge

Rows = tuple[int, NDArray[Any]]
"""Position of the first row, and rows [R, ...] of successive tokens."""


@dataclass(frozen=True, eq=False)
class TurnArrays:
    """What one engine reply says about one sequence."""

    base: int
    """Position of the first remembered token id."""
    base_hash: bytes
    """``token_hash`` of the ids before ``base``."""
    token_ids: NDArray[np.int32]
    """[M], the ids from ``base`` to the end of the completion."""
    prompt_count: int
    dense: Mapping[str, Rows]
    """Rows by position, for fields that are aligned to the input."""
    ragged: Mapping[str, Ragged]
    """One row per completion token, for fields that are aligned to the target."""

    @property
    def stop(self) -> int:
        """Tokens of prompt and completion."""
        return self.base + len(self.token_ids)

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        rows = sum(r.nbytes for _, r in self.dense.values())
        return rows + self.token_ids.nbytes + sum(map(_ragged_nbytes, self.ragged.values()))

    def shared(self, token_ids: NDArray[np.int32]) -> int:
        """How many leading tokens of ``token_ids`` [T] are this turn's; 0 if they differ before ``base``."""
        if len(token_ids) < self.base or token_hash(token_ids[: self.base]) != self.base_hash:
            return 0
        count = min(len(token_ids) - self.base, len(self.token_ids))
        differ = token_ids[self.base : self.base + count] != self.token_ids[:count]
        return self.base + (int(np.argmax(differ)) if differ.any() else count)


def _ragged_nbytes(rows: Ragged) -> int:
    return rows.counts.nbytes + sum(c.nbytes for c in (*rows.columns.values(), *rows.row_columns.values()))


def turn_arrays(
    *, prompt_ids: Sequence[int], completion_ids: Sequence[int], dense: Mapping[str, Rows], ragged: Mapping[str, Ragged]
) -> TurnArrays:
    """The record of one reply; remembers no more token ids than its rows and its completion need."""
    ids = np.concatenate([np.asarray(prompt_ids, dtype=np.int32), np.asarray(completion_ids, dtype=np.int32)])
    base = min([len(prompt_ids), *(start for start, _ in dense.values())])
    return TurnArrays(base, token_hash(ids[:base]), ids[base:].copy(), len(prompt_ids), dense, ragged)


@dataclass
class _TraceArrays:
    turns: list[TurnArrays] = field(default_factory=list)
    failure: Exception | None = None
    conflicts: int = 0


class Capture:
    """Arrays of the traces that this worker runs. A trace is opened when it is minted and forgotten when its request ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._traces: dict[str, _TraceArrays] = {}
        self.conflicts = 0
        """Rows that two turns gave differently."""

    def open(self, trace_id: str) -> None:
        """From now on replies for this trace are remembered."""
        with self._lock:
            self._traces.setdefault(trace_id, _TraceArrays())

    def forget(self, trace_ids: Iterable[str]) -> None:
        """Frees everything of these traces; replies that still come for them are ignored."""
        with self._lock:
            for trace_id in trace_ids:
                self._traces.pop(trace_id, None)

    def add(self, trace_id: str, turn: TurnArrays) -> None:
        """Remembers a reply. Rows that earlier turns of the same conversation hold already are let go."""
        with self._lock:
            trace = self._traces.get(trace_id)
            earlier = list(trace.turns) if trace is not None else []
        if trace is None:
            return
        trimmed, conflicts = _trim(turn, earlier)
        with self._lock:
            trace.turns.append(trimmed)
            self.conflicts += conflicts

    def fail(self, trace_id: str, error: Exception) -> None:
        """Remembers why a reply of this trace could not be read; the first failure stays."""
        with self._lock:
            trace = self._traces.get(trace_id)
            if trace is not None and trace.failure is None:
                trace.failure = error

    def failure(self, trace_id: str) -> Exception | None:
        """What ``fail`` remembered."""
        with self._lock:
            trace = self._traces.get(trace_id)
            return trace.failure if trace is not None else None

    @property
    def nbytes(self) -> int:
        """Bytes held for running traces."""
        with self._lock:
            return sum(t.nbytes for trace in self._traces.values() for t in trace.turns)

    def fields(self, trace_id: str, *, token_ids: NDArray[np.int32], sampled: NDArray[np.bool_]) -> dict[str, FieldData]:
        """The fields of a branch with ids [T] of which ``sampled`` [T] came from the model; fields that no turn carries are absent.

        Dense rows that no turn carries are missing. Ragged rows are missing where a token was sampled and no turn carries its row.
        """
        with self._lock:
            trace = self._traces.get(trace_id)
            turns = list(trace.turns) if trace is not None else []
        matched = [(turn, turn.shared(token_ids)) for turn in turns]
        whole = [turn for turn, shared in matched if shared == turn.stop]
        partial = [(turn, shared) for turn, shared in matched if 0 < shared < turn.stop]
        out: dict[str, FieldData] = {}
        for name in dict.fromkeys(n for t in whole for n in t.dense):
            pieces = [t.dense[name] for t in whole if name in t.dense]
            pieces += [(start, rows[: max(0, shared - start)]) for t, shared in partial for start, rows in _of(t.dense, name)]
            out[name] = self._merge_dense(pieces, len(token_ids))
        for name in dict.fromkeys(n for t in whole for n in t.ragged):
            out[name] = _merge_ragged([(t.prompt_count, t.ragged[name]) for t in whole if name in t.ragged], sampled)
        return out

    def _merge_dense(self, pieces: Sequence[Rows], token_count: int) -> Dense:
        tokens = TokenRange(0, token_count)
        merged = merge([Piece(start, Dense(rows)).within(tokens) for start, rows in pieces], token_count=token_count)
        if merged is None:
            rows = pieces[0][1]
            return Dense(np.zeros((token_count, *rows.shape[1:]), rows.dtype), ranges_where(np.ones(token_count, np.bool_)))
        if merged.conflicts:
            with self._lock:
                self.conflicts += merged.conflicts
        assert isinstance(merged.data, Dense)
        return merged.data


def _of(dense: Mapping[str, Rows], name: str) -> list[Rows]:
    return [dense[name]] if name in dense else []


def _differing(a: NDArray[Any], b: NDArray[Any]) -> int:
    """Rows that differ."""
    return int(np.any(a != b, axis=tuple(range(1, a.ndim))).sum()) if a.size else 0


def _merge_ragged(pieces: Sequence[tuple[int, Ragged]], sampled: NDArray[np.bool_]) -> Ragged:
    """One row per token: what the turn that sampled it says. ``pieces`` are (position of the first row, rows)."""
    counts = np.zeros(len(sampled), np.int32)
    known = np.zeros(len(sampled), np.bool_)
    taken: list[tuple[NDArray[np.intp], Ragged, NDArray[np.bool_]]] = []
    for start, rows in pieces:
        stop = start + len(rows.counts)
        take = sampled[start:stop] & ~known[start:stop]
        counts[start:stop][take] = rows.counts[take]
        known[start:stop] |= take
        taken.append((start + np.flatnonzero(take), rows, take))
    offsets = np.cumsum(counts) - counts
    columns = {name: np.zeros(int(counts.sum()), values.dtype) for name, values in pieces[0][1].columns.items()}
    row_columns = {name: np.zeros(len(sampled), values.dtype) for name, values in pieces[0][1].row_columns.items()}
    for positions, rows, take in taken:
        for name, values in row_columns.items():
            values[positions] = rows.row_columns[name][take]
        kept = counts[positions]
        within = np.arange(int(kept.sum())) - np.repeat(np.cumsum(kept) - kept, kept)
        to = np.repeat(offsets[positions], kept) + within
        for name, values in rows.columns.items():
            columns[name][to] = values[np.repeat(take, rows.counts)]
    return Ragged(counts, columns, ranges_where(sampled & ~known), row_columns)


def _trim(turn: TurnArrays, earlier: Sequence[TurnArrays]) -> tuple[TurnArrays, int]:
    """``turn`` without the leading rows that turns which are wholly a prefix of it hold, and how many of those differed."""
    if turn.base:
        return turn, 0  # it was asked for without what came before
    whole = [t for t in earlier if t.shared(turn.token_ids) == t.stop]
    dense: dict[str, Rows] = {}
    conflicts = 0
    for name, (start, rows) in turn.dense.items():
        at = start
        for held_start, held in sorted((t.dense[name] for t in whole if name in t.dense), key=lambda p: p[0]):
            stop = min(held_start + len(held), start + len(rows))
            if held_start <= at < stop:
                conflicts += _differing(held[at - held_start : stop - held_start], rows[at - start : stop - start])
                at = stop
        dense[name] = (at, rows[at - start :].copy() if at > start else rows)
    return replace(turn, dense=dense), conflicts
