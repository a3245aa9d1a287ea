"""Arrays that are legal and look wrong: what engines leave behind when a kernel, a cache or a pipeline stage was not captured.

Each lint refuses, warns (it is counted, and the payload is stored) or is off, per run. Real rows only; missing ones are never looked at.
Shape letters: T tokens, L layers, K experts per token, N values.
"""

import enum
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fsref.errors import PayloadError
from fsref.refs.names import TokenRange, flags_of
from fsref.refs.payload import Dense, FieldData, Payload, Ragged
from fsref.refs.schema import Alignment, Field, Schema

Level = Literal["refuse", "warn", "off"]
_BLOCK_ROWS: Final = 1 << 14
"""Rows of K ids compared at once: 128 KiB at K = 8, which stays in cache."""
_DUPLICATES_WHOLE: Final = 2048
"""Where a warning is all that comes of it, of more tokens than this one in ``_DUPLICATES_STEP`` is looked at for an expert that is named
twice: looking at all of them took a ninth of the time of a ``put``."""
_DUPLICATES_STEP: Final = 4


class Lint(enum.StrEnum):
    """What is looked for, in the order in which a reference counts it."""

    ZERO_LAYER = "zero_layer"
    """A layer whose expert ids are all 0: it was not captured. Not where one expert is used, whose id may well be 0."""
    REPEATED_ROWS = "repeated_rows"
    """A run of equal full rows: a stale buffer at a chunk's boundary."""
    DUPLICATE_IDS = "duplicate_ids"
    """An expert twice in one layer of one token: zeros where ids were not filled in. A warning looks at one token in four of more than
    2,048, a refusal at all."""
    SAMPLED_OUTSIDE = "sampled_outside"
    """A sampling mask without the token that was sampled from it."""


class Lints(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[payload.lints]``: what is done about arrays that are legal and look wrong. ``warn`` counts them in metrics, ``refuse`` ends the
    episode with an error that names branch, field and rows."""

    zero_layer: Level = "refuse"
    """A layer whose expert ids are all 0, although a token uses several experts: the engine did not capture it."""
    repeated_rows: Level = "warn"
    """At least ``repeated_rows_min`` equal routing rows in a row: a stale buffer."""
    repeated_rows_min: Annotated[int, msgspec.Meta(ge=2)] = 32
    """Length of a run of equal rows that ``repeated_rows`` reports."""
    duplicate_ids: Level = "warn"
    """The same expert twice in one layer of one token. ``warn`` looks at one token in four of more than 2,048, ``refuse`` at all."""
    sampled_outside: Level = "refuse"
    """A sampling mask that lacks the sampled token."""

    def level(self, lint: Lint) -> Level:
        """What is done about it."""
        found: Level = getattr(self, lint.value)
        return found

    @classmethod
    def warning(cls) -> "Lints":
        """Every lint counts, none refuses."""
        return cls(zero_layer="warn", sampled_outside="warn")


class Finding(NamedTuple):
    """One lint's result on one field of one payload."""

    lint: Lint
    field: str
    total: int
    """Layers, rows or (token, layer) pairs, as the lint counts."""
    where: TokenRange
    """The first place."""
    text: str
    """For people."""


def find(payload: Payload, schema: Schema, lints: Lints) -> tuple[Finding, ...]:
    """What the lints that are not off see in a payload that ``Payload.checked`` has normalised.

    Raises ``PayloadError`` for the first finding of a lint that refuses.
    """
    out = []
    for name, data in payload.fields.items():
        for finding in _of_field(schema.field(name), data, payload.token_ids, lints):
            if lints.level(finding.lint) == "refuse":
                raise PayloadError(f"field {name!r}: {finding.text} (payload.lints.{finding.lint})")
            out.append(finding)
    return tuple(out)


def counts(findings: tuple[Finding, ...]) -> tuple[int, ...]:
    """Counts in the order of ``Lint``; empty if there is none. What a reference carries."""
    if not findings:
        return ()
    totals = dict.fromkeys(Lint, 0)
    for f in findings:
        totals[f.lint] += f.total
    return tuple(totals.values())


def _of_field(spec: Field, data: FieldData, token_ids: NDArray[np.int32], lints: Lints) -> Iterator[Finding]:
    if isinstance(data, Dense) and spec.expert_count and len(data.rows):
        rows = data.rows.reshape(len(data.rows), -1, spec.row_shape[-1]) if spec.row_shape else data.rows.reshape(-1, 1, 1)
        real = ~flags_of(data.missing, len(rows))
        checks: list[tuple[Lint, Callable[[], Finding | None]]] = [
            (Lint.ZERO_LAYER, lambda: _zero_layer(spec, rows, real)),
            (Lint.REPEATED_ROWS, lambda: _repeated_rows(spec, rows, real, lints.repeated_rows_min)),
            (Lint.DUPLICATE_IDS, lambda: _duplicate_ids(spec, rows, real, sample=lints.duplicate_ids == "warn")),
        ]
    elif isinstance(data, Ragged) and spec.name == "sampling_mask" and spec.alignment is Alignment.TARGET:
        checks = [(Lint.SAMPLED_OUTSIDE, lambda: _sampled_outside(spec, data, token_ids))]
    else:
        return
    for lint, check in checks:
        if lints.level(lint) != "off" and (finding := check()) is not None:
            yield finding


def zero_layers(rows_TLK: NDArray[Any], real: NDArray[np.bool_] | None = None) -> list[int]:
    """Positions of layers whose ids are 0 in every real row; none where K = 1."""
    rows = rows_TLK if real is None or real.all() else rows_TLK[real]
    if not len(rows) or rows.shape[2] == 1:
        return []
    candidates = np.flatnonzero(~rows[0].any(axis=-1))  # only a layer whose first row is zero can be zero throughout
    return [int(n) for n in candidates if not rows[:, n].any()]


def _zero_layer(spec: Field, rows: NDArray[Any], real: NDArray[np.bool_]) -> Finding | None:
    layers = zero_layers(rows, real)
    if not layers:
        return None
    first = spec.layer_ids[layers[0]] if spec.layer_ids else layers[0]
    where = TokenRange(0, len(rows))
    more = f" (and {len(layers) - 1} more)" if len(layers) > 1 else ""
    return Finding(Lint.ZERO_LAYER, spec.name, len(layers), where, f"all ids of layer {first}{more} are 0: the engine did not capture it")


def _repeated_rows(spec: Field, rows: NDArray[Any], real: NDArray[np.bool_], run_min: int) -> Finding | None:
    if len(rows) < run_min:
        return None
    flat = rows.reshape(len(rows), -1)
    pair = (flat[1:, 0] == flat[:-1, 0]) & (flat[1:, -1] == flat[:-1, -1]) & real[1:] & real[:-1]
    for at in np.array_split(np.flatnonzero(pair), max(1, int(pair.sum()) * flat.shape[1] // (1 << 20))):
        pair[at] = (flat[at + 1] == flat[at]).all(axis=1)
    edges = np.flatnonzero(np.diff(np.concatenate(([0], pair.view(np.int8), [0]))))
    starts, sizes = edges[::2], edges[1::2] - edges[::2] + 1
    long = sizes >= run_min
    if not long.any():
        return None
    first = TokenRange(int(starts[long][0]), int(starts[long][0] + sizes[long][0]))
    text = f"rows of tokens [{first.start}, {first.stop}) are all equal: a stale buffer"
    return Finding(Lint.REPEATED_ROWS, spec.name, int(sizes[long].sum()), first, text)


def _duplicate_ids(spec: Field, rows: NDArray[Any], real: NDArray[np.bool_], *, sample: bool) -> Finding | None:
    layers, top_k = rows.shape[1:]
    if top_k == 1:
        return None
    step = 1 if not sample or len(rows) <= _DUPLICATES_WHOLE else _DUPLICATES_STEP
    flat = rows[::step].reshape(-1, top_k)
    twice = np.zeros(len(flat), np.bool_)
    for start in range(0, len(flat), _BLOCK_ROWS):
        slots = np.ascontiguousarray(flat[start : start + _BLOCK_ROWS].T)
        found = twice[start : start + _BLOCK_ROWS]
        for k in range(top_k - 1):
            found |= (slots[k + 1 :] == slots[k]).any(axis=0)
    twice &= np.repeat(real[::step], layers)
    count = int(np.count_nonzero(twice))
    if not count:
        return None
    token, layer = divmod(int(np.argmax(twice)), layers)
    token *= step
    layer = spec.layer_ids[layer] if spec.layer_ids else layer
    text = f"{count} of {len(flat)} rows of ids name an expert twice, first token {token} in layer {layer}"
    return Finding(Lint.DUPLICATE_IDS, spec.name, count, TokenRange(token, token + 1), text)


def _sampled_outside(spec: Field, data: Ragged, token_ids: NDArray[np.int32]) -> Finding | None:
    ids = data.columns.get("ids")
    if ids is None or not len(ids):
        return None
    lacking = rows_without(data.counts, ids, token_ids)
    if not len(lacking):
        return None
    first = int(lacking[0])
    text = f"the sampled token {int(token_ids[first])} of row {first} is not among the {int(data.counts[first])} ids that were kept"
    return Finding(Lint.SAMPLED_OUTSIDE, spec.name, len(lacking), TokenRange(first, first + 1), text)


def rows_without(counts_T: NDArray[Any], ids_N: NDArray[Any], token_ids_T: NDArray[Any]) -> NDArray[np.intp]:
    """Rows that have ids and not their own token's among them."""
    filled = np.flatnonzero(counts_T)
    if not len(filled):
        return filled
    hits = ids_N == np.repeat(token_ids_T, counts_T)
    starts = (np.cumsum(counts_T, dtype=np.int64) - counts_T)[filled]
    lacking: NDArray[np.intp] = filled[~np.logical_or.reduceat(hits, starts)]
    return lacking
