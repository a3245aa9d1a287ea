"""Id sets: packing, limits, and the compact set of sequence numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsref.errors import BadRef, JournalCorrupt
from fsref.ledger.ids import IDS_RECORD_MAX, SeqSet, hash64, ids_of, pack, pack_parts, split, sum_of, unpack, unpack_seqs
from fsref.steps import hash64 as hash64_of_steps

HUGE = ["0-1152921504606846976", "\u0661", "1\n", f"0-{IDS_RECORD_MAX}"]
A = "env.a.0000000000000001"
B = "env.b.0000000000000002"
some_ids = st.sets(st.tuples(st.sampled_from([A, B]), st.integers(0, 300)), max_size=80)


def test_a_set_packs_to_ascending_ranges_per_producer() -> None:
    assert pack([f"{A}/{n}" for n in (7, 0, 1, 2, 3, 4)] + [f"{B}/9"]) == {A: "0-4,7", B: "9"}


@given(some_ids)
def test_packing_and_unpacking_give_the_same_set(pairs: set[tuple[str, int]]) -> None:
    packed = pack(f"{inc}/{seq}" for inc, seq in pairs)
    assert {(inc, seq) for inc, seqs in unpack(packed).items() for seq in seqs} == pairs


@given(some_ids, st.integers(1, 9), st.integers(60, 200))
def test_parts_hold_every_id_once_within_their_limits(pairs: set[tuple[str, int]], ids_max: int, bytes_max: int) -> None:
    ids = sorted(f"{inc}/{seq}" for inc, seq in pairs)
    parts = pack_parts(ids, ids_max=ids_max, bytes_max=bytes_max)
    found = [list(ids_of(p)) for p in parts]
    assert sorted(i for part in found for i in part) == ids
    assert all(len(part) <= ids_max for part in found)
    assert all(sum(len(inc) + len(text) + 6 for inc, text in p.items()) <= bytes_max or len(found[k]) == 1 for k, p in enumerate(parts))


def test_a_step_of_8192_objects_from_256_producers_fits_its_parts() -> None:
    ids = [f"env.w{p}.{p:016x}/{3 * n}" for p in range(256) for n in range(32)]
    parts = pack_parts(ids)
    assert len(parts) >= 1
    assert sorted(i for p in parts for i in ids_of(p)) == sorted(ids)
    assert all(sum(len(inc) + len(text) + 6 for inc, text in p.items()) <= 60_000 for p in parts)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "1-",
        "-1",
        "1,,2",
        "2,1",
        "1,1",
        "3-2",
        "1-1",
        "+1",
        " 1",
        "1_0",
        "01",
        "0-1152921504606846976",
        "\u0661",
        "1\n",
        f"0-{IDS_RECORD_MAX}",
    ],
)
@pytest.mark.fault(58)
def test_ranges_outside_the_grammar_or_above_the_limit_are_refused(text: str) -> None:
    with pytest.raises(JournalCorrupt):
        unpack_seqs(text)


def test_the_limit_counts_over_all_producers_of_a_record() -> None:
    with pytest.raises(JournalCorrupt, match="expand to more"):
        unpack({A: f"0-{IDS_RECORD_MAX - 1}", B: "0"})


def test_a_producer_outside_the_grammar_is_refused() -> None:
    with pytest.raises(JournalCorrupt):
        unpack({"../../etc": "0"})


@pytest.mark.parametrize("text", ["", "x", f"{A}", f"{A}/", f"{A}/01", f"{A}/-1", f"{A}/1/2", f"{A}/99999999999", "env.A.0/1", f"{A}/1\n"])
@pytest.mark.fault(54)
def test_an_id_outside_the_grammar_is_refused(text: str) -> None:
    with pytest.raises(BadRef):
        split(text)


def test_the_sum_is_free_of_order_and_agrees_with_step_files() -> None:
    ids = [f"{A}/{n}" for n in range(50)]
    assert sum_of(ids) == sum_of(reversed(ids)) != sum_of(ids[1:])
    assert hash64(ids[0]) == hash64_of_steps(ids[0])


@given(st.lists(st.integers(0, 60)))
def test_the_compact_set_behaves_as_a_set(seqs: list[int]) -> None:
    compact, plain = SeqSet(), set[int]()
    for seq in seqs:
        assert compact.add(seq) is (seq not in plain)
        plain.add(seq)
    assert list(compact) == sorted(plain)
    assert len(compact) == len(plain)
    assert all((n in compact) is (n in plain) for n in range(-1, 62))


def test_the_compact_set_costs_per_gap_and_not_per_number() -> None:
    compact = SeqSet(range(100_000))
    assert (len(compact), compact.gaps) == (100_000, 1)
