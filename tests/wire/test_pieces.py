"""Lists cut out of a reply's text: the same arrays as the ordinary parser gives, or nothing at all."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsref.wire import pieces
from fsref.wire.logprobs import check_sampled, decode_logprobs, decode_top_logprobs
from fsref.wire.masks import check_mask, decode_sampling_mask
from fsref.wire.pieces import take_heads, take_mask
from tests.wire.recorded import NAMES, load


def compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def check_same(reply: Any) -> None:
    """Heads and mask by pieces equal those of the whole reply, and the rest is the reply without them."""
    (choice,) = reply["choices"]
    rest, heads = take_heads(compact(reply))
    rest, mask = take_mask(rest)
    assert heads is not None
    ids, content = choice["token_ids"], choice["logprobs"]["content"]
    np.testing.assert_array_equal(check_sampled(heads.token_ids, heads.logprobs, token_ids=ids), decode_logprobs(content, token_ids=ids))
    for head in (None, 2):
        got, want = heads.top_logprobs(head), decode_top_logprobs(content, token_ids=ids, head=head)
        np.testing.assert_array_equal(got.counts, want.counts)
        np.testing.assert_array_equal(got.columns["ids"], want.columns["ids"])
        np.testing.assert_array_equal(got.columns["logprobs"].view(np.int32), want.columns["logprobs"].view(np.int32))
    if choice.get("sampling_mask"):
        assert mask is not None
        kept, whole = check_mask(mask.counts, mask.ids, token_ids=ids), decode_sampling_mask(choice["sampling_mask"], token_ids=ids)
        assert whole is not None
        np.testing.assert_array_equal(kept.counts, whole.counts)
        np.testing.assert_array_equal(kept.columns["ids"], whole.columns["ids"])
    empty = {**choice, "logprobs": {"content": []}, **({"sampling_mask": []} if "sampling_mask" in choice else {})}
    assert json.loads(rest) == {**reply, "choices": [empty]}


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("two_choices", "without_logprobs")])
@pytest.mark.parametrize("size", [1, 300, 1 << 16])
def test_recorded_heads_by_pieces_of_any_size(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", size)
    check_same(load(name)["response"])


LOGPROBS = st.floats(min_value=-50, max_value=0, width=32).filter(lambda v: str(v) != "0.0")
CANDIDATES = st.dictionaries(st.integers(0, 99), LOGPROBS, min_size=1, max_size=5)


@st.composite
def replies(draw: st.DrawFn) -> Any:
    """Either form, ``rank`` before or behind the candidates, masks or none."""
    old, late, masks = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    rows = draw(st.lists(CANDIDATES, min_size=1, max_size=6))

    def named(token: int, value: float) -> dict[str, Any]:
        name: dict[str, Any] = {"token": f"token_id:{token}"} if old else {"token_id": token}
        return {**name, "logprob": value, **({"bytes": [93, 125, 44]} if old else {})}

    content, ids = [], []
    for row in rows:
        token, value = next(iter(row.items()))
        ids.append(token)
        top = {"top_logprobs": [named(i, v) for i, v in row.items()]}
        content.append({**named(token, value), **({**top, "rank": 1} if late else {"rank": 1, **top})})
    choice: dict[str, Any] = {"index": 0, "token_ids": ids, "logprobs": {"content": content}}
    if masks:
        choice["sampling_mask"] = [draw(st.sampled_from([[], [i], [i, 100], [101, i, 102]])) for i in ids]
    choice["text"] = draw(st.sampled_from(["", '"logprobs":{"content":[{"token', '"sampling_mask":[[1]]', "}]}]"]))
    return {"request_id": "r", "choices": [choice]}


@given(replies(), st.integers(1, 200))
@pytest.mark.payload("G2")
def test_any_reply_in_vllms_spelling(reply: Any, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE_BYTES", size)
        check_same(reply)


ENTRY = {"token_id": 5, "logprob": -1.0, "top_logprobs": [{"token_id": 5, "logprob": -1.0}]}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"<html>",
        json.dumps({"choices": [{"logprobs": {"content": [ENTRY]}}]}).encode(),  # spelled with blanks
        compact({"choices": [{"logprobs": {"content": [ENTRY]}}] * 2}),  # whose would they be
        compact({"choices": [{"logprobs": {"content": [{**ENTRY, "logprob": "x"}]}}]}),
        compact({"choices": [{"logprobs": {"content": [{**ENTRY, "token_id": -1}]}}]}),
        compact({"choices": [{"logprobs": {"content": [{"logprob": -1.0, "token_id": 5, "top_logprobs": []}]}}]}),
        compact({"choices": [{"logprobs": {"content": [{"token": "five", "logprob": -1.0, "top_logprobs": []}]}}]}),
        compact({"choices": [{"logprobs": {"content": [ENTRY, 7]}}]}),
        compact({"choices": [{"logprobs": {"content": [ENTRY]}}]})[:-20],
        compact({"choices": [{"logprobs": {"content": []}}]}),
        b'{"choices":[{"logprobs":{"content":[{"token_id":5,"logprob":NaN,"top_logprobs":[]}]}}]}',
    ],
)
def test_what_is_spelled_otherwise_is_left_to_the_ordinary_parser(raw: bytes) -> None:
    rest, heads = take_heads(raw)
    assert heads is None
    assert rest is raw


@pytest.mark.parametrize(
    "raw",
    [
        compact({"sampling_mask": [[1, 2], [3, "x"]]}),
        compact({"sampling_mask": [[1, 2], 3]}),
        compact({"sampling_mask": [[1 << 70]]}),
        compact({"sampling_mask": []}),
        compact({"sampling_mask": {"ids": 1}}),
        compact({"a": {"sampling_mask": [[1]]}, "b": {"sampling_mask": [[1]]}}),
        b'{"sampling_mask":[[1,2',
    ],
)
def test_masks_that_are_no_lists_of_ids_are_left_to_the_ordinary_parser(raw: bytes) -> None:
    rest, mask = take_mask(raw)
    assert mask is None
    assert rest is raw
