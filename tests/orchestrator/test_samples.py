"""Samples: the token-id hash, truncation, the fields that a run needs."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsref.errors import MissingArrays, PayloadError
from fsref.orchestrator.samples import check_fields, check_hash, is_routed, missing_rows, needed_rows
from fsref.refs import Schema, TokenRange

ALL = ("routed_experts", "top_logprobs", "sampling_mask")


def test_a_sample_of_the_stored_tokens_passes_the_hash_check(make: Any) -> None:
    check_hash(make.sample())


def test_a_sample_with_other_tokens_is_refused_with_its_name(make: Any) -> None:
    with pytest.raises(PayloadError, match=r"sample t0/0: the hash of its first 4 token ids"):
        check_hash(make.sample(token_ids=[5, 6, 7, 9], ref=make.ref([5, 6, 7, 8])))


def test_a_sample_that_was_cut_before_the_check_is_refused(make: Any) -> None:
    with pytest.raises(PayloadError, match="has 3 tokens, its arrays were stored for 4"):
        check_hash(make.sample(token_ids=[5, 6, 7], trained=[2], ref=make.ref([5, 6, 7, 8])))


def test_extra_trailing_tokens_pass_the_hash_check_and_are_missing_rows(make: Any, schema: Schema) -> None:
    # Stored 5, sample 6: an end-of-sequence token was added after generation, and trains.
    sample = make.sample(token_ids=[1, 2, 3, 4, 5, 0], trained=[3, 4, 5], ref=make.ref([1, 2, 3, 4, 5]))
    check_hash(sample)
    assert missing_rows(sample, schema.field("sampling_mask"), schema) == (TokenRange(5, 6),)
    assert missing_rows(sample, schema.field("routed_experts"), schema) == ()  # row 4 gives token 5; row 5 is not needed


def test_extra_trailing_tokens_stop_a_strict_run_and_train_in_a_lenient_one(make: Any, schema: Schema) -> None:
    sample = make.sample(token_ids=[1, 2, 3, 4, 5, 0], trained=[3, 4, 5], ref=make.ref([1, 2, 3, 4, 5]))
    with pytest.raises(MissingArrays, match=r"needs 'top_logprobs', its rows of tokens \[5, 6\) are missing.*fallback"):
        check_fields(sample, schema, fields=ALL, missing="strict")
    assert check_fields(sample, schema, fields=ALL, missing="fallback") is False


def test_extra_trailing_tokens_that_do_not_train_are_complete(make: Any, schema: Schema) -> None:
    sample = make.sample(token_ids=[1, 2, 3, 4, 5, 0], trained=[3, 4], ref=make.ref([1, 2, 3, 4, 5]))
    assert check_fields(sample, schema, fields=ALL, missing="strict") is True


def test_truncation_keeps_a_prefix_and_lowers_the_reference(make: Any) -> None:
    sample = make.sample(token_ids=list(range(10)), trained=[5, 8]).truncated(7)
    assert sample.token_ids.tolist() == list(range(7))
    assert sample.loss_mask.tolist() == [False] * 5 + [True, False]
    assert (sample.ref.token_count, sample.ref.hashed_count, sample.ref.byte_count) == (7, 10, 100_000)


def test_truncation_behind_the_stored_rows_leaves_the_reference(make: Any) -> None:
    sample = make.sample(token_ids=[1, 2, 3, 4, 5, 0, 0], trained=[3], ref=make.ref([1, 2, 3, 4, 5])).truncated(6)
    assert (sample.token_count, sample.ref.token_count) == (6, 5)


def test_truncation_to_more_than_there_is_changes_nothing(make: Any) -> None:
    sample = make.sample()
    assert sample.truncated(4) is sample
    assert sample.truncated(99) is sample


def test_the_last_sampled_token_needs_no_input_row(schema: Schema) -> None:
    mask = np.array([False, False, True, True, False, True])
    assert needed_rows(schema.field("routed_experts"), mask).tolist() == [False, True, True, False, True, False]
    assert needed_rows(schema.field("sampling_mask"), mask).tolist() == mask.tolist()


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("routed_experts", "--enable-return-routed-experts"),
        ("top_logprobs", "sampling.top_logprobs"),
        ("sampling_mask", "--return-sampling-mask"),
    ],
)
def test_an_absent_field_is_named_with_sample_and_fix(make: Any, schema: Schema, name: str, fix: str) -> None:
    sample = make.sample("t7/1", ref=make.ref([5, 6, 7, 8], fields=[f for f in ALL if f != name]))
    with pytest.raises(MissingArrays) as caught:
        check_fields(sample, schema, fields=ALL, missing="strict")
    message = str(caught.value)
    assert "sample t7/1" in message
    assert f"needs {name!r}" in message
    assert fix in message


def test_a_sample_without_a_reference_lacks_every_field(make: Any, schema: Schema) -> None:
    with pytest.raises(MissingArrays, match="needs 'routed_experts', it came without a reference"):
        check_fields(make.sample(ref=None), schema, fields=ALL, missing="strict")
    assert check_fields(make.sample(ref=None), schema, fields=ALL, missing="fallback") is False


def test_a_field_that_the_run_does_not_need_may_be_absent(make: Any, schema: Schema) -> None:
    sample = make.sample(ref=make.ref([5, 6, 7, 8], fields=["routed_experts"]))
    assert check_fields(sample, schema, fields=["routed_experts"], missing="strict") is True


def test_a_hole_among_the_needed_rows_is_missing_and_others_are_not(make: Any, schema: Schema) -> None:
    # Tokens 2 and 3 train: routing rows 1 and 2, mask rows 2 and 3.
    prompt = make.ref([5, 6, 7, 8], missing={"routed_experts": (TokenRange(0, 1), TokenRange(3, 4)), "sampling_mask": (TokenRange(0, 2),)})
    assert check_fields(make.sample(ref=prompt), schema, fields=ALL, missing="strict") is True
    hole = make.ref([5, 6, 7, 8], missing={"routed_experts": (TokenRange(2, 4),)})
    assert missing_rows(make.sample(ref=hole), schema.field("routed_experts"), schema) == (TokenRange(2, 3),)


def test_only_a_reference_with_expert_ids_is_routed(make: Any, schema: Schema) -> None:
    assert is_routed(make.ref([1, 2]), schema)
    assert not is_routed(make.ref([1, 2], fields=["top_logprobs"]), schema)
    assert not is_routed(None, schema)


@given(st.integers(1, 12), st.integers(0, 14), st.sets(st.integers(0, 11)))
def test_truncation_never_creates_a_missing_row(make: Any, schema: Schema, count: int, keep: int, trained: set[int]) -> None:
    sample = make.sample(token_ids=list(range(count)), trained=[t for t in trained if t < count])
    assert check_fields(sample.truncated(keep), schema, fields=ALL, missing="strict") is True
