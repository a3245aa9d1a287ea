"""Expert ids of padding rows: distinct, balanced, the same every time, whatever the split."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsref.errors import ConfigError
from fsref.plan import balanced_rows, with_balanced_padding

ROOT = Path(__file__).parents[2]


@pytest.mark.payload("D6")
@pytest.mark.parametrize("step", [0, 1, 41])
def test_64_rows_of_22_of_512_experts_give_each_of_8_shards_176(step: int) -> None:
    rows = balanced_rows(range(64), step=step, layer_ids=[0, 7], top_k=22, expert_count=512, shards=8)
    for layer in range(2):
        assert np.bincount(rows[:, layer].ravel() // 64, minlength=8).tolist() == [176] * 8
        assert set(np.bincount(rows[:, layer].ravel(), minlength=512).tolist()) == {2, 3}
    plain = (np.arange(64 * 22) % 512) // 64
    assert np.bincount(plain, minlength=8).tolist() == [192, 192, 192, 192, 192, 192, 128, 128], "counting up would not"


@pytest.mark.payload("D6")
def test_6_rows_of_2_of_8_experts_use_each_once_or_twice() -> None:
    rows = balanced_rows(range(6), step=3, layer_ids=[0], top_k=2, expert_count=8, shards=2)
    assert set(np.bincount(rows.ravel(), minlength=8).tolist()) == {1, 2}


@settings(max_examples=80, deadline=None)
@given(st.data())
@pytest.mark.payload("D6", "D9")
def test_any_run_of_slots_is_distinct_in_a_row_and_balanced(data: st.DataObject) -> None:
    shards = data.draw(st.sampled_from([1, 2, 3, 4, 8]))
    experts = shards * data.draw(st.integers(1, 40))
    top_k = data.draw(st.integers(1, min(experts, 24)))
    first, count, step = data.draw(st.integers(0, 1 << 27)), data.draw(st.integers(1, 50)), data.draw(st.integers(0, 999_999_999))
    slots = np.arange(first, first + count)
    layers = data.draw(st.lists(st.integers(0, 1 << 16), min_size=1, max_size=4, unique=True))
    rows = balanced_rows(slots, step=step, layer_ids=layers, top_k=top_k, expert_count=experts, shards=shards)
    assert rows.shape == (count, len(layers), top_k)
    assert rows.dtype == np.int32
    assert 0 <= rows.min() <= rows.max() < experts
    for layer in range(len(layers)):
        assert all(len(set(row)) == top_k for row in rows[:, layer].tolist())
        per_expert = np.bincount(rows[:, layer].ravel(), minlength=experts)
        per_shard = np.bincount(rows[:, layer].ravel() // (experts // shards), minlength=shards)
        assert per_expert.max() - per_expert.min() <= 1
        assert per_shard.max() - per_shard.min() <= 1
    again = balanced_rows(slots[::-1], step=step, layer_ids=layers[::-1], top_k=top_k, expert_count=experts, shards=shards)
    assert np.array_equal(rows, again[::-1, ::-1]), "a row depends on its slot, its layer and the step, not on what is made with it"


@pytest.mark.payload("D9")
def test_two_reads_of_a_step_are_equal_and_steps_differ() -> None:
    def rows(step: int) -> list[int]:
        out: list[int] = balanced_rows([0, 1], step=step, layer_ids=[0], top_k=2, expert_count=64, shards=4).ravel().tolist()
        return out

    assert rows(5) == rows(5)
    assert len({tuple(rows(step)) for step in range(16)}) > 8


@pytest.mark.payload("D6")
@pytest.mark.parametrize(("experts", "top_k", "shards"), [(8, 2, 2), (128, 8, 8), (512, 22, 8)])
def test_one_row_on_each_of_many_data_ranks_is_balanced_too(experts: int, top_k: int, shards: int) -> None:
    ranks, step = 256, 7
    ids = np.concatenate(
        [
            balanced_rows([0], step=step * ranks + rank, layer_ids=[0], top_k=top_k, expert_count=experts, shards=shards).ravel()
            for rank in range(ranks)
        ]
    )
    mean = len(ids) / experts
    assert 0.7 * mean <= np.bincount(ids, minlength=experts).min() <= np.bincount(ids).max() <= 1.4 * mean
    per_shard = np.bincount(ids // (experts // shards), minlength=shards)
    assert per_shard.max() <= 1.05 * per_shard.min()


@pytest.mark.payload("D7", "D8")
def test_a_dtype_that_cannot_hold_the_ids_is_widened_before_padding() -> None:
    stored = np.full((4, 1, 2), 255, np.uint8)
    slots = np.asarray([-1, 100, -1, 101])
    rows, padding = with_balanced_padding(stored, slots=slots, step=0, layer_ids=[0], expert_count=512, shards=8)
    assert rows.dtype == np.uint16
    assert rows[[0, 2]].ravel().tolist() == [255] * 4
    assert padding.tolist() == [False, True, False, True]
    expected = balanced_rows([100, 101], step=0, layer_ids=[0], top_k=2, expert_count=512, shards=8)
    assert rows[[1, 3]].tolist() == expected.tolist()
    wide = np.zeros((4, 1, 2), np.int32)
    same, _ = with_balanced_padding(wide, slots=slots, step=0, layer_ids=[0], expert_count=512, shards=8)
    assert same is wide


@pytest.mark.payload("D7")
def test_no_id_wraps_when_a_narrow_dtype_is_padded() -> None:
    slots = np.arange(600)
    rows, _ = with_balanced_padding(np.zeros((600, 1, 1), np.uint8), slots=slots, step=0, layer_ids=[0], expert_count=512, shards=1)
    assert sorted(set(rows.ravel().tolist())) == list(range(512))


@pytest.mark.payload("D6", "D7")
@pytest.mark.parametrize(("experts", "shards"), [(255, 5), (256, 8), (257, 1), (512, 8)])
def test_the_last_ids_that_a_byte_holds_are_as_balanced_as_the_others(experts: int, shards: int) -> None:
    """What a product or sum in 8 bits would wrap at: 256 experts are stored in them, and slots are not."""
    slots = np.arange(1 << 20, (1 << 20) + 300)
    for stored in (np.uint8, np.uint16, np.int32):
        rows, _ = with_balanced_padding(
            np.zeros((300, 2, 6), stored), slots=slots, step=999_999, layer_ids=[90, 3], expert_count=experts, shards=shards
        )
        for layer in range(2):
            ids = rows[:, layer].astype(np.int64)
            assert all(len(set(row)) == 6 for row in ids.tolist())
            for size in (1, experts // shards):
                loads = np.bincount(ids.ravel() // size, minlength=experts // size)
                assert loads.max() - loads.min() <= 1


@pytest.mark.payload("D9")
def test_another_process_makes_the_same_padding_rows() -> None:
    code = (
        "from fsref.plan import balanced_rows; "
        "print(balanced_rows(range(9), step=17, layer_ids=[4, 2], top_k=3, expert_count=24, shards=4).tolist())"
    )
    rows = balanced_rows(range(9), step=17, layer_ids=[4, 2], top_k=3, expert_count=24, shards=4)
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment, cwd=ROOT)
    assert done.stdout == f"{rows.tolist()}\n"


def test_what_cannot_be_balanced_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 distinct experts in a row of 2"):
        balanced_rows([0], step=0, layer_ids=[0], top_k=3, expert_count=2, shards=1)
    with pytest.raises(ConfigError, match="10 experts do not divide by 4"):
        balanced_rows([0], step=0, layer_ids=[0], top_k=3, expert_count=10, shards=4)
