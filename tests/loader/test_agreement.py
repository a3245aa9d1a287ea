"""What all ranks know after one all-reduce, here of one rank with itself (``test_faults`` has four processes)."""

from collections.abc import Iterator

import pytest

from fsref.errors import ObjectCorrupt, ObjectMissing, StepError, StepLost, StoreError, StoreUnavailable
from fsref.loader.agreement import _missed, agree
from fsref.loader.fetch import FetchFailure
from fsref.loader.ranks import Place, Ranks
from fsref.parallel import Parallel
from fsref.reader import failure_kind
from fsref.steps import RankFile
from fsref.tensors import pack_tokens
from tests.loader.layouts import Whole, make_step


@pytest.fixture(scope="module")
def rank_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankFile]:
    made: Whole = make_step(tmp_path_factory.mktemp("agreement"))
    yield made.rank_file
    made.store.close()


def failed(rank_file: RankFile, number: int, error: StoreError) -> FetchFailure:
    batch = rank_file.micro_batches[number]
    ids = tuple(dict.fromkeys(i for s in batch.sequences if s.ref for i in s.ref.object_ids))
    return FetchFailure(error, failure_kind(error), ids, pack_tokens(batch))


def alone() -> Ranks:
    return Ranks(Parallel(), Place())


@pytest.mark.parametrize(
    ("error", "kind"),
    [(ObjectMissing("404"), "missing"), (ObjectCorrupt("crc32c"), "corrupt"), (StoreUnavailable("503"), "unavailable")],
)
def test_what_failed_is_told_apart_by_its_kind(rank_file: RankFile, error: StoreError, kind: str) -> None:
    broken = failed(rank_file, 1, error)
    got = agree(alone(), rank_file, [pack_tokens(rank_file.micro_batches[0]), broken])
    assert (got.dropped, got.dropped_count) == ((False, True), 1)
    assert got.kinds == {"corrupt": 0, "missing": 0, "unavailable": 0} | {kind: 1}
    assert got.missed == dict.fromkeys(broken.object_ids, kind)


def test_a_step_with_nothing_left_is_lost_and_the_message_counts_the_kinds(rank_file: RankFile) -> None:
    taken = [failed(rank_file, 0, ObjectMissing("404")), failed(rank_file, 1, StoreUnavailable("503"))]
    with pytest.raises(StepLost, match=r"could be fetched \(1 missing, 1 unavailable; \d objects, such as .*/0 missing"):
        agree(alone(), rank_file, taken)


def test_an_error_of_this_rank_is_raised_after_the_all_reduce(rank_file: RankFile) -> None:
    ranks = alone()
    calls: list[int] = []
    ranks.sum_in_place = lambda tensor: calls.append(int(tensor[0]))  # type: ignore[method-assign]
    with pytest.raises(StepError, match="arrays differ in length"):
        agree(ranks, rank_file, StepError("arrays differ in length"))
    assert calls == [1]  # the others saw the flag


def test_where_ranks_differ_about_an_object_the_most_telling_kind_counts() -> None:
    assert _missed([{"a": "unavailable", "b": "missing"}, {"a": "missing", "b": "corrupt"}, {"a": "unavailable"}]) == {
        "a": "missing",
        "b": "corrupt",
    }
