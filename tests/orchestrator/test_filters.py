"""Selection: every sample comes out once, with the right reason."""

from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsref.errors import MissingArrays, PayloadError
from fsref.orchestrator.filters import Reason, Rules, select
from fsref.orchestrator.metrics import selection_metrics
from fsref.refs import Schema, TokenRange

RULES = Rules(
    fields=("routed_experts",),
    missing="strict",
    tokens_max=8,
    overlong="truncate",
    off_policy_max=2,
    prune=True,
    normalise=False,
    shuffle_seed=None,
)


def reasons(selection: Any) -> dict[str, str]:
    return {d.name: str(d.reason) for d in selection.dropped}


def test_a_group_with_spread_trains_on_its_advantages(make: Any, schema: Schema) -> None:
    out = select([make.sample("a/0", reward=1.0), make.sample("b/0", reward=0.0)], schema, RULES, step=0)
    assert [(s.name, s.advantage) for s in out.samples] == [("a/0", 0.5), ("b/0", -0.5)]
    assert out.dropped == ()


def test_a_group_without_spread_is_pruned(make: Any, schema: Schema) -> None:
    samples = [make.sample(f"{t}/0", group=g, reward=r) for t, g, r in [("a", 0, 1.0), ("b", 0, 1.0), ("c", 1, 1.0), ("d", 1, 0.0)]]
    out = select(samples, schema, RULES, step=0)
    assert reasons(out) == {"a/0": "pruned", "b/0": "pruned"}
    assert [s.name for s in out.samples] == ["c/0", "d/0"]
    kept = select(samples, schema, replace(RULES, prune=False), step=0)
    assert [(s.name, s.advantage) for s in kept.samples] == [("a/0", 0.0), ("b/0", 0.0), ("c/0", 0.5), ("d/0", -0.5)]


def test_a_dropped_sample_names_its_objects_and_bytes(make: Any, schema: Schema) -> None:
    sample = make.sample("a/0", trained=[])
    (dropped,) = select([sample], schema, RULES, step=0).dropped
    assert (dropped.reason, dropped.objects) == (Reason.UNTRAINED, {sample.ref.object_ids[0]: 100_000})


def test_a_sample_is_stale_beyond_the_bound_and_not_at_it(make: Any, schema: Schema) -> None:
    samples = [make.sample("a/0", reward=1.0, version=3), make.sample("b/0", version=2)]
    out = select(samples, schema, RULES, step=5)
    assert reasons(out) == {"b/0": "stale"}
    assert [(s.name, s.advantage) for s in out.samples] == [("a/0", 0.5)]  # the stale one's reward still compares


def test_an_overlong_sample_is_cut_or_dropped(make: Any, schema: Schema) -> None:
    samples = [make.sample("a/0", token_ids=list(range(12)), trained=[5, 11], reward=1.0), make.sample("b/0")]
    cut = select(samples, schema, RULES, step=0)
    assert [(s.name, s.token_count) for s in cut.samples] == [("a/0", 8), ("b/0", 4)]
    assert cut.truncated == 1
    dropped = select(samples, schema, replace(RULES, overlong="drop"), step=0)
    assert reasons(dropped) == {"a/0": "filtered"}
    assert "12 tokens, at most 8" in dropped.dropped[0].why


def test_a_cut_that_leaves_no_trained_token_is_untrained(make: Any, schema: Schema) -> None:
    samples = [make.sample("a/0", token_ids=list(range(12)), trained=[9, 11], reward=1.0), make.sample("b/0")]
    assert reasons(select(samples, schema, RULES, step=0)) == {"a/0": "untrained"}


def test_branches_of_one_trace_share_its_advantage_and_count_once(make: Any, schema: Schema) -> None:
    samples = [
        make.sample("a/0", reward=3.0),
        make.sample("a/1", reward=3.0),
        make.sample("b/0", reward=0.0),
        make.sample("c/0", reward=0.0),
    ]
    out = select(samples, schema, RULES, step=0)
    assert [s.advantage for s in out.samples] == [2.0, 2.0, -1.0, -1.0]


def test_agents_of_one_group_are_compared_apart(make: Any, schema: Schema) -> None:
    samples = [make.sample(f"{n}/0", agent=a, reward=r) for n, a, r in [("a", "x", 1.0), ("b", "x", 0.0), ("c", "y", 5.0), ("d", "y", 5.0)]]
    out = select(samples, schema, RULES, step=0)
    assert [(s.name, s.advantage) for s in out.samples] == [("a/0", 0.5), ("b/0", -0.5)]
    assert reasons(out) == {"c/0": "pruned", "d/0": "pruned"}


def test_the_hash_is_checked_before_the_cut(make: Any, schema: Schema) -> None:
    # The first eight tokens are equal; a check after truncation could not see the difference.
    tokens = list(range(12))
    sample = make.sample("a/0", token_ids=[*tokens[:-1], 99], trained=[5], ref=make.ref(tokens))
    with pytest.raises(PayloadError, match="sample a/0: the hash"):
        select([sample], schema, RULES, step=0)


def test_a_trainable_sample_without_a_needed_field_stops_the_selection(make: Any, schema: Schema) -> None:
    with pytest.raises(MissingArrays, match="sample a/0"):
        select([make.sample("a/0", ref=None)], schema, RULES, step=0)
    lenient = select([make.sample("a/0", ref=None, reward=1.0), make.sample("b/0")], schema, replace(RULES, missing="fallback"), step=0)
    assert (len(lenient.samples), lenient.incomplete) == (2, 1)


def test_a_branch_that_does_not_train_needs_no_fields(make: Any, schema: Schema) -> None:
    assert reasons(select([make.sample("a/0", ref=None, trained=[])], schema, RULES, step=0)) == {"a/0": "untrained"}


@pytest.mark.payload("F5")
def test_two_samples_of_one_object_are_refused(make: Any, schema: Schema) -> None:
    ref = make.ref([5, 6, 7, 8])
    with pytest.raises(PayloadError, match="samples a/0 and b/0 both name the object"):
        select([make.sample("a/0", ref=ref), make.sample("b/0", ref=ref)], schema, RULES, step=0)


def test_shuffled_advantages_are_the_same_values_on_other_samples(make: Any, schema: Schema) -> None:
    samples = [make.sample(f"t{n}/0", reward=float(n)) for n in range(8)]
    plain = select(samples, schema, RULES, step=1)
    control = select(samples, schema, replace(RULES, shuffle_seed=1), step=1)
    assert sorted(s.advantage for s in control.samples) == sorted(s.advantage for s in plain.samples)
    assert [s.advantage for s in control.samples] != [s.advantage for s in plain.samples]
    assert [s.reward for s in control.samples] == [s.reward for s in plain.samples]


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from([0.0, 1.0]), st.integers(0, 6), st.integers(4, 12), st.booleans()),
        max_size=12,
    ),
    st.sampled_from(["truncate", "drop"]),
)
def test_every_sample_comes_out_exactly_once(make: Any, schema: Schema, rows: list[Any], overlong: Any) -> None:
    samples = [
        make.sample(f"t{n}/0", group=g, reward=r, version=v, token_ids=list(range(length)), trained=[length - 1] if trains else [])
        for n, (g, r, v, length, trains) in enumerate(rows)
    ]
    out = select(samples, schema, replace(RULES, overlong=overlong), step=6)
    names = [s.name for s in out.samples] + [d.name for d in out.dropped]
    assert Counter(names) == Counter(s.name for s in samples)
    objects = [o for s in out.samples for o in s.objects] + [o for d in out.dropped for o in d.objects]
    assert Counter(objects) == Counter(o for s in samples for o in s.objects)
    assert all(6 - s.version <= 2 and s.token_count <= 8 and s.trains for s in out.samples)


@pytest.mark.payload("A8", "A14", "G8")
def test_coverage_and_lints_are_counted_per_sample_whatever_the_policy(make: Any, schema: Schema) -> None:
    ids = (5, 6, 7, 8)
    partial = make.ref(ids, missing={"routed_experts": (TokenRange(1, 2), TokenRange(3, 4))})
    absent = make.ref(ids, fields=("routed_experts",), missing={"sampling_mask": (TokenRange(0, 4),)})
    looks_wrong = msgspec.structs.replace(make.ref(ids), lints=(0, 0, 5, 0))
    samples = [make.sample(f"{t}/0", ref=r, reward=v) for t, r, v in (("a", partial, 1.0), ("b", absent, 0.0), ("c", looks_wrong, 0.5))]
    rules = replace(RULES, fields=("routed_experts", "sampling_mask"), missing="fallback")
    selection = select(samples, schema, rules, step=0)
    assert (len(selection.samples), selection.incomplete) == (3, 2)
    found = selection_metrics(selection, schema, step=0)
    assert {k: v for k, v in found.items() if k.startswith(("coverage/", "lints/"))} == {
        "coverage/routed_experts/partial": 1.0,
        "coverage/routed_experts/rows_missing": 2.0,
        "coverage/sampling_mask/absent": 1.0,
        "coverage/sampling_mask/rows_missing": 4.0,
        "lints/duplicate_ids": 5.0,
        "lints/duplicate_ids_samples": 1.0,
    }
    with pytest.raises(MissingArrays, match=r"run.fields needs 'routed_experts', its rows of tokens"):
        select(samples[:1], schema, replace(rules, missing="strict"), step=0)
