"""Sampled logprobs and top-k heads out of ``choice.logprobs.content``.

One entry per completion token: ``{"token_id": N, "logprob": x, "top_logprobs": [...]}`` (vLLM 0.32) or the same with
``"token": "token_id:N"`` (0.27). ``top_logprobs`` asked with k holds **at most k entries, the sampled token first**, then the most
probable others in descending order: when the sampled token is outside the top k, one true top-k entry is missing. So ask k + 2.

What is kept: with ``head=None`` the entries as the engine sent them, in its order. With ``head=k`` the k most probable entries in
descending order, chosen without regard to which token was sampled (a head that always holds the sampled token is biased by the
action); entries tied across the cut are left out together. Entries at vLLM's clamp -9999 stand for minus infinity (tokens that
truncation removed) and are never kept.

Shape letters: T completion tokens, N entries.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fsref.errors import WireError
from fsref.refs import Ragged
from fsref.wire.rows import first_repeat, most_probable

LOGPROB_CLAMP: Final = -9999.0
"""vLLM writes minus infinity, and a logprob that it does not have, as this value."""
_WHAT: Final = "logprobs.content"
_ABOVE_ONE: Final = 1e-5
"""float32 logprobs of probability one may lie this far above zero."""

Token = Sequence[int] | NDArray[np.integer[Any]]


def decode_logprobs(content: object, *, token_ids: Token) -> NDArray[np.float32]:
    """The sampler's logprob of each completion token, float32 [T].

    Raises ``WireError`` if the entries are not those of ``token_ids`` in order, or one has no finite logprob (or the clamp,
    which proves nothing).
    """
    entries = _entries(content, len(token_ids))
    ids = np.asarray([_token_id(e, n) for n, e in enumerate(entries)], dtype=np.int64)
    values = np.asarray([_logprob(e, n) for n, e in enumerate(entries)], dtype=np.float64)
    return check_sampled(ids, values, token_ids=token_ids)


def check_sampled(ids: NDArray[np.int64], logprobs: NDArray[np.float64], *, token_ids: Token) -> NDArray[np.float32]:
    """``decode_logprobs`` from arrays: the sampler's logprobs float32 [T] of tokens ``ids``, which must be ``token_ids``."""
    want = np.asarray(token_ids, dtype=np.int64)
    if len(ids) != len(want):
        raise WireError(f"{_WHAT}: {len(ids)} entries found for {len(want)} completion tokens")
    other = np.flatnonzero(ids != want)
    if len(other):
        n = int(other[0])
        raise WireError(f"{_WHAT}[{n}]: token id {int(ids[n])} found, the completion has {int(want[n])} there")
    wrong = np.flatnonzero(~(np.isfinite(logprobs) & (logprobs <= _ABOVE_ONE)) | (logprobs == LOGPROB_CLAMP))
    if len(wrong):
        n = int(wrong[0])
        none = ", vLLM's word for 'none': the sampler left no evidence" if logprobs[n] == LOGPROB_CLAMP else ""
        raise WireError(f"{_WHAT}[{n}]: logprob {float(logprobs[n])!r} found{none}; a finite number of at most 0 expected")
    return logprobs.astype(np.float32)


def decode_top_logprobs(content: object, *, token_ids: Token, head: int | None = None) -> Ragged:
    """The top-k head of each completion token: counts int32 [T], ``ids`` int32 [N] and ``logprobs`` float32 [N].

    ``head`` chooses what is kept, see the module. Raises ``WireError`` for entries of an unknown form, ids that are negative or
    repeat, logprobs that are not finite or above zero, or a token without candidates.
    """
    entries = _entries(content, len(token_ids))
    lists = [_candidates(e, n) for n, e in enumerate(entries)]
    flat = list(chain.from_iterable(lists))
    ids_N = np.asarray([_token_id(c, n) for n, c in enumerate(flat)], dtype=np.int64)
    logprobs_N = np.asarray([_logprob(c, n) for n, c in enumerate(flat)], dtype=np.float32)
    return top_logprobs_of(np.asarray([len(c) for c in lists], np.int64), ids_N, logprobs_N, head=head)


def top_logprobs_of(
    counts_T: NDArray[np.int64], ids_N: NDArray[np.int64], logprobs_N: NDArray[np.float32], *, head: int | None = None
) -> Ragged:
    """The same from arrays: candidates per token, their ids and logprobs. Minus infinity is left out like its clamp.

    Raises ``WireError`` for ids that are negative, too large or repeat within a token, and logprobs that are NaN or above zero.
    """
    if ids_N.size and not 0 <= int(ids_N.min()) <= int(ids_N.max()) <= np.iinfo(np.int32).max:
        raise WireError(f"{_WHAT}: token ids {int(ids_N.min())}..{int(ids_N.max())} do not fit int32")
    wrong = np.flatnonzero(~(logprobs_N <= _ABOVE_ONE))  # NaN compares false
    if len(wrong):
        raise WireError(f"{_WHAT}: logprob {float(logprobs_N[wrong[0]])!r} found; a number of at most 0 expected")
    if (repeat := first_repeat(counts_T, ids_N)) is not None:
        raise WireError(f"{_WHAT}[{repeat[0]}]: token id {repeat[1]} stands twice among the candidates")
    real = (logprobs_N != LOGPROB_CLAMP) & ~np.isneginf(logprobs_N)
    if not real.all():
        counts_T = np.bincount(np.repeat(np.arange(len(counts_T)), counts_T)[real], minlength=len(counts_T))
        ids_N, logprobs_N = ids_N[real], logprobs_N[real]
    if head is not None:
        counts_T, keep = most_probable(counts_T, ids_N, logprobs_N, head=head)
        ids_N, logprobs_N = ids_N[keep], logprobs_N[keep]
    return Ragged(counts_T.astype(np.int32), {"ids": ids_N.astype(np.int32), "logprobs": logprobs_N})


def _entries(content: object, token_count: int) -> list[Any]:
    if isinstance(content, Mapping):
        content = content.get("content")
    if not isinstance(content, list):
        raise WireError(f"{_WHAT}: a list expected, {type(content).__name__} found")
    if len(content) != token_count:
        raise WireError(f"{_WHAT}: {len(content)} entries found for {token_count} completion tokens")
    return content


def _candidates(entry: object, n: int) -> list[Any]:
    candidates = entry.get("top_logprobs") if isinstance(entry, Mapping) else None
    if not isinstance(candidates, list) or not candidates:
        raise WireError(f"{_WHAT}[{n}].top_logprobs: a list of candidates expected, {candidates!r:.80} found; was logprobs asked for?")
    return candidates


def _token_id(entry: object, n: int) -> int:
    if isinstance(entry, Mapping):
        token_id = entry.get("token_id")
        if type(token_id) is int and token_id >= 0:
            return token_id
        text = entry.get("token")
        if token_id is None and isinstance(text, str) and text.startswith("token_id:"):
            digits = text[9:]
            if digits.isascii() and digits.isdigit() and len(digits) <= 10:
                return int(digits)
        raise WireError(f"{_WHAT}: entry {n} has token_id {token_id!r} and token {text!r:.40}; one must name a token id")
    raise WireError(f"{_WHAT}: entry {n} is {type(entry).__name__}, an object expected")


def _logprob(entry: Mapping[str, Any], n: int) -> float:
    value = entry.get("logprob")
    if type(value) is int and LOGPROB_CLAMP <= value <= 0:
        value = float(value)
    if type(value) is not float or not math.isfinite(value) or value > _ABOVE_ONE:
        raise WireError(f"{_WHAT}: entry {n} has logprob {value!r}; a finite number of at most 0 expected")
    return value


def encode_content(
    *, token_ids: Token, logprobs: NDArray[np.float32], heads: Ragged | None, ranks: Token | None = None
) -> list[dict[str, Any]]:
    """vLLM 0.32's ``logprobs.content``: integer token ids. ``heads`` rows come as they shall be sent, the sampled token first.

    Minus infinity becomes vLLM's clamp. ``ranks`` [T] is the sampled token's vocabulary rank, 1 for the most probable.
    """
    out: list[dict[str, Any]] = []
    at = 0
    ids = heads.columns["ids"].tolist() if heads is not None else []
    values = np.maximum(heads.columns["logprobs"], LOGPROB_CLAMP).tolist() if heads is not None else []
    for n, (token_id, logprob) in enumerate(zip(token_ids, np.maximum(logprobs, LOGPROB_CLAMP).tolist(), strict=True)):
        stop = at + (int(heads.counts[n]) if heads is not None else 0)
        top = [{"token_id": i, "logprob": v} for i, v in zip(ids[at:stop], values[at:stop], strict=True)]
        at = stop
        entry: dict[str, Any] = {"token_id": int(token_id), "logprob": logprob, "top_logprobs": top}
        if ranks is not None:
            entry["rank"] = int(ranks[n])
        out.append(entry)
    return out
