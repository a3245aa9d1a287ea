"""The long lists of a reply, heads and masks, out of its JSON text piece by piece.

A JSON parser holds the interpreter from the first byte to the last: 27 MB of heads (4,096 tokens, 128 entries each) stopped every other
thread of an env server, its event loop with them, for half a second. Here the lists are cut at their own borders into pieces of about
64 KiB, each parsed alone, so that other threads run between them; typed parsing makes it faster, too.

Owns the cutting. It knows the spelling that vLLM uses: compact, an entry begins with ``{"token`` and has one ``"top_logprobs":[``. These
bytes hold unescaped quotes, so they cannot be met inside a JSON string. Refuses nothing: where the spelling is another, or a piece does not
parse, nothing is taken out and the whole text is left to the ordinary parser, which is slower and judges it.

Shape letters: T completion tokens, N entries.
"""

import json
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fsref.refs import Ragged
from fsref.wire.logprobs import top_logprobs_of

PIECE_BYTES: Final = 1 << 16
_WINDOW_BYTES: Final = 1 << 20
_CONTENT: Final = b'"logprobs":{"content":['
_ENTRY: Final = b'{"token'
_TOP: Final = b'"top_logprobs":['
_MASK: Final = b'"sampling_mask":['


class _Candidate(msgspec.Struct, gc=False):
    logprob: float
    token: str = ""
    token_id: int = -1


class _Entry(_Candidate, gc=False, kw_only=True):
    top_logprobs: list[_Candidate]


_ENTRIES: Final = msgspec.json.Decoder(list[_Entry])
_LOGPROB, _TOKEN_ID, _LISTS = attrgetter("logprob"), attrgetter("token_id"), attrgetter("top_logprobs")
_ROWS: Final = msgspec.json.Decoder(list[list[int]])


class Heads(NamedTuple):
    """``logprobs.content`` as arrays: what was sampled [T], and the candidates as sent."""

    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float64]
    counts: NDArray[np.int64]
    ids: NDArray[np.int64]
    values: NDArray[np.float32]

    def top_logprobs(self, head: int | None) -> Ragged:
        """As ``decode_top_logprobs`` gives them; raises ``WireError``."""
        return top_logprobs_of(self.counts, self.ids, self.values, head=head)


class Mask(NamedTuple):
    """``sampling_mask`` as arrays: counts [T] and ids [N]."""

    counts: NDArray[np.int64]
    ids: NDArray[np.int64]


def take_heads(raw: bytes) -> tuple[bytes, Heads | None]:
    """``raw`` with its ``content`` list made empty, and that list; ``raw`` and None where it is not to be cut."""
    start = _begin(raw, _CONTENT, first=_ENTRY)
    if start is None:
        return raw, None
    tokens: list[NDArray[np.int64]] = []
    logprobs: list[float] = []
    counts: list[int] = []
    ids: list[NDArray[np.int64]] = []
    values: list[NDArray[np.float32]] = []
    try:
        stop = _content_stop(raw)
        if _find(raw, _CONTENT, stop) >= 0:
            return raw, None  # several choices
        for piece in _content_pieces(raw, start, stop):
            time.sleep(0)  # lets others run: without, one that asked for the interpreter was seen to wait for the whole list, half a second
            entries = _ENTRIES.decode(b"".join((b"[", piece, b"]")))
            tokens.append(_ids(entries))
            logprobs += map(_LOGPROB, entries)
            lists = list(map(_LISTS, entries))
            counts += map(len, lists)
            candidates = list(chain.from_iterable(lists))
            ids.append(_ids(candidates))
            values.append(np.fromiter(map(_LOGPROB, candidates), np.float64, len(candidates)).astype(np.float32))
    except (msgspec.DecodeError, ValueError):
        return raw, None
    heads = Heads(
        np.concatenate(tokens),
        np.asarray(logprobs, np.float64),
        np.asarray(counts, np.int64),
        np.concatenate(ids),
        np.concatenate(values),
    )
    return raw[:start] + raw[stop:], heads


def take_mask(raw: bytes) -> tuple[bytes, Mask | None]:
    """``raw`` with its ``sampling_mask`` list of lists made empty, and that list; ``raw`` and None where it is not to be cut."""
    start = _begin(raw, _MASK, first=b"[")
    if start is None:
        return raw, None
    stop = raw.find(b"]]", start) + 1
    if not stop or _find(raw, _MASK, stop) >= 0:
        return raw, None
    counts: list[int] = []
    ids: list[NDArray[np.int64]] = []
    try:
        for piece in _mask_pieces(raw, start, stop):
            time.sleep(0)
            rows = _ROWS.decode(b"".join((b"[", piece, b"]")))
            counts += map(len, rows)
            ids.append(np.fromiter(chain.from_iterable(rows), np.int64))
    except (msgspec.DecodeError, ValueError, OverflowError):
        return raw, None
    return raw[:start] + raw[stop:], Mask(np.asarray(counts, np.int64), np.concatenate(ids))


def _ids(entries: Sequence[_Candidate]) -> NDArray[np.int64]:
    """Their token ids [N]; ``ValueError`` where one has none."""
    ids = np.fromiter(map(_TOKEN_ID, entries), np.int64, len(entries))
    return np.fromiter(map(_token, entries), np.int64, len(entries)) if (ids < 0).any() else ids


def _token(entry: _Candidate) -> int:
    """The id of either form: ``"token_id": 5``, or ``"token": "token_id:5"``. ``ValueError`` for neither."""
    if entry.token_id >= 0:
        return entry.token_id
    name, _, digits = entry.token.partition(":")
    if name != "token_id" or not (digits.isascii() and digits.isdigit() and len(digits) <= 10):
        raise ValueError(entry.token[:40])
    return int(digits)


def _begin(raw: bytes, key: bytes, *, first: bytes) -> int | None:
    """Where the list under ``key`` begins, behind its bracket; None unless it is there and begins with ``first``."""
    at = _find(raw, key)
    start = at + len(key)
    return start if at >= 0 and raw.startswith(first, start) else None


def _find(raw: bytes, key: bytes, start: int = 0) -> int:
    """``raw.find`` a window at a time: in 12 MB of base64 it needs 16 ms, in which no other thread runs."""
    for at in range(start, len(raw), _WINDOW_BYTES):
        found = raw.find(key, at, at + _WINDOW_BYTES + len(key) - 1)
        if found >= 0:
            return found
    return -1


def _content_stop(raw: bytes) -> int:
    """Where the list of entries ends, before its bracket: the last entry is parsed alone. ``ValueError`` if it does not end there."""
    last = raw.rfind(_ENTRY, 0, raw.rfind(_TOP))
    text = raw[last : raw.find(b"]", raw.find(b"}]", last) + 2) + PIECE_BYTES].decode(errors="replace")
    _, count = json.JSONDecoder().raw_decode(text)
    stop = last + len(text[:count].encode())
    if raw[stop : stop + 1] != b"]":
        raise ValueError(stop)
    return stop


def _content_pieces(raw: bytes, start: int, stop: int) -> Iterator[memoryview]:
    """Pieces of whole entries: a border is before the entry whose ``top_logprobs`` is the first behind the wanted size."""
    view = memoryview(raw)
    while start < stop:
        top = raw.find(_TOP, min(start + PIECE_BYTES, stop), stop)
        comma = raw.rfind(_ENTRY, start + 1, top) - 1 if top >= 0 else stop
        end = comma if comma > start else stop
        yield view[start:end]
        start = end + 1


def _mask_pieces(raw: bytes, start: int, stop: int) -> Iterator[memoryview]:
    """Pieces of whole rows."""
    view = memoryview(raw)
    while start < stop:
        border = raw.find(b"],[", min(start + PIECE_BYTES, stop), stop)
        end = stop if border < 0 else border + 1
        yield view[start:end]
        start = end + 1
