"""Arrays that are legal and look wrong: what is seen, what is refused, what travels in the reference."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsref.errors import PayloadError
from fsref.refs import Dense, FieldData, Lint, Lints, Payload, Ragged, Schema, TokenRange, find, routed_experts, sampling_mask
from fsref.refs.lints import counts
from fsref.store import open_root
from fsref.writer import Receipts, Writer


def schema(*, layers: int = 2, top_k: int = 2, experts: int = 16) -> Schema:
    return Schema((routed_experts(layer_ids=range(1, layers + 1), top_k=top_k, expert_count=experts), sampling_mask()))


def distinct(tokens: int, layers: int = 2, top_k: int = 2) -> np.ndarray[Any, Any]:
    """Rows without a duplicate in a layer, and without two equal rows in a row."""
    first = np.arange(tokens * layers).reshape(tokens, layers, 1) % 13
    return (first + np.arange(top_k)).astype(np.uint8)


def found(run_schema: Schema, *, lints: Lints | None = None, token_ids: Any = None, **fields: FieldData) -> dict[str, int]:
    data = next(iter(fields.values()))
    tokens = len(data.rows) if isinstance(data, Dense) else len(data.counts)
    ids = np.arange(tokens, dtype=np.int32) if token_ids is None else np.asarray(token_ids, np.int32)
    payload = Payload(ids, fields).checked(run_schema)
    return {f.lint.value: f.total for f in find(payload, run_schema, lints or Lints.warning())}


def test_plain_rows_are_not_found() -> None:
    assert found(schema(), routed_experts=Dense(distinct(50))) == {}


@pytest.mark.payload("B9")
def test_a_layer_of_zeros_is_an_uncaptured_one() -> None:
    rows = np.zeros((5, 2, 2), np.uint8)
    assert found(schema(), routed_experts=Dense(rows))["zero_layer"] == 2
    half = distinct(5)
    half[:, 1] = 0
    assert found(schema(), routed_experts=Dense(half))["zero_layer"] == 1
    with pytest.raises(PayloadError, match=r"'routed_experts': all ids of layer 2 are 0.*payload.lints.zero_layer"):
        found(schema(), lints=Lints(), routed_experts=Dense(half))
    assert "zero_layer" not in found(schema(), lints=Lints(zero_layer="off"), routed_experts=Dense(half))


@pytest.mark.payload("B9")
def test_missing_rows_do_not_hide_a_layer_of_zeros_and_are_not_judged() -> None:
    rows = distinct(4)
    rows[:, 0] = 0
    rows[3] = 5
    assert found(schema(), routed_experts=Dense(rows, (TokenRange(3, 4),)))["zero_layer"] == 1
    rows = distinct(4)
    rows[2:] = 0
    assert found(schema(), routed_experts=Dense(rows, (TokenRange(2, 4),))) == {}


@pytest.mark.payload("B10")
def test_one_expert_per_token_may_be_expert_zero() -> None:
    assert found(schema(top_k=1), lints=Lints(), routed_experts=Dense(np.zeros((5, 2, 1), np.uint8))) == {}


@pytest.mark.payload("A18")
def test_a_run_of_equal_rows_is_named_with_its_range() -> None:
    run_schema, rows = schema(), distinct(20)
    rows[4:13] = rows[4]
    payload = Payload(np.arange(20, dtype=np.int32), {"routed_experts": Dense(rows)}).checked(run_schema)
    (finding,) = find(payload, run_schema, Lints(repeated_rows_min=9))
    assert (finding.lint, finding.where, finding.total) == (Lint.REPEATED_ROWS, TokenRange(4, 13), 9)
    assert find(payload, run_schema, Lints(repeated_rows_min=10)) == ()
    with pytest.raises(PayloadError, match=r"rows of tokens \[4, 13\) are all equal"):
        find(payload, run_schema, Lints(repeated_rows="refuse", repeated_rows_min=9))


@pytest.mark.payload("A18")
def test_runs_of_equal_rows_are_what_a_loop_finds() -> None:
    rng = np.random.default_rng(0)
    run_schema = schema()
    for _ in range(30):
        rows = np.repeat(rng.integers(0, 2, (12, 2, 2)), rng.integers(1, 5, 12), axis=0).astype(np.uint8)
        sizes, run = [], 1
        for t in range(1, len(rows) + 1):
            if t < len(rows) and np.array_equal(rows[t], rows[t - 1]):
                run += 1
            else:
                sizes.append(run)
                run = 1
        expected = sum(s for s in sizes if s >= 4)
        got = found(run_schema, lints=Lints(zero_layer="off", duplicate_ids="off", repeated_rows_min=4), routed_experts=Dense(rows))
        assert got.get("repeated_rows", 0) == expected


@pytest.mark.payload("B8")
@pytest.mark.parametrize(("top_k", "experts"), [(2, 16), (8, 16), (3, 300)])
def test_duplicate_ids_are_counted_per_token_and_layer(top_k: int, experts: int) -> None:
    rng = np.random.default_rng(top_k)
    run_schema = schema(top_k=top_k, experts=experts)
    rows = rng.integers(0, experts, (200, 2, top_k)).astype(np.uint16)
    expected = sum(len(set(r.tolist())) < top_k for r in rows.reshape(-1, top_k))
    assert found(run_schema, routed_experts=Dense(rows)).get("duplicate_ids", 0) == expected
    one = distinct(3, top_k=top_k).astype(np.uint16)
    one[1, 1] = 0
    payload = Payload(np.arange(3, dtype=np.int32), {"routed_experts": Dense(one)}).checked(run_schema)
    with pytest.raises(PayloadError, match="first token 1 in layer 2"):
        find(payload, run_schema, Lints(duplicate_ids="refuse"))


@pytest.mark.payload("B8")
def test_of_a_long_payload_a_warning_samples_tokens_and_a_refusal_looks_at_all() -> None:
    run_schema, rows = schema(), distinct(4100)
    rows[[9, 12, 4096]] = 3  # every token of both layers; of these only multiples of four are sampled
    assert found(run_schema, routed_experts=Dense(rows))["duplicate_ids"] == 4
    payload = Payload(np.arange(4100, dtype=np.int32), {"routed_experts": Dense(rows)}).checked(run_schema)
    with pytest.raises(PayloadError, match="6 of 8200 rows of ids name an expert twice, first token 9 "):
        find(payload, run_schema, Lints(duplicate_ids="refuse"))


@pytest.mark.payload("E3")
def test_a_mask_without_its_sampled_token_is_found_and_order_does_not_matter() -> None:
    run_schema = schema()
    mask = Ragged(np.asarray([3, 0, 2], np.int32), {"ids": np.asarray([9, 4, 7, 1, 2])})
    assert found(run_schema, token_ids=[7, 5, 2], sampling_mask=mask) == {}
    assert found(run_schema, token_ids=[7, 5, 3], sampling_mask=mask) == {"sampled_outside": 1}
    with pytest.raises(PayloadError, match="sampled token 3 of row 2 is not among the 2 ids"):
        found(run_schema, lints=Lints(), token_ids=[7, 5, 3], sampling_mask=mask)


@pytest.mark.payload("B8", "A18")
def test_what_lints_count_travels_in_the_reference_and_what_they_refuse_is_not_stored(tmp_path: Path) -> None:
    run_schema, rows = schema(), distinct(40)
    rows[3, 0] = 7
    payload = Payload(np.arange(40, dtype=np.int32), {"routed_experts": Dense(rows)})
    with open_root(str(tmp_path), run="run", create=True) as store:
        ref = Writer(store, run_schema, Receipts("t")).put(payload)
        assert ref.lints == (0, 0, 1, 0)
        assert Writer(store, run_schema, Receipts("t"), lints=Lints(duplicate_ids="off")).put(payload).lints == ()
        before = len(list(store.list("obj")))
        with pytest.raises(PayloadError, match="duplicate_ids"):
            Writer(store, run_schema, Receipts("t"), lints=Lints(duplicate_ids="refuse")).put(payload)
        assert len(list(store.list("obj"))) == before
    assert counts(()) == ()
