"""One of four ranks has a broken store: what every rank does, in processes over gloo."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from fsref.config import ParallelSection
from fsref.refs import object_name
from fsref.steps import MicroBatch, RankFile
from tests.loader.four_ranks import FETCH_DEADLINE_S, ONE_BATCH, PAIRS, Outcome, load, settings, small_run
from tests.loader.rank_process import Breakage, Kind, Report
from tests.trainer.runs import RUN, SCHEMA, SmallRun


@pytest.fixture
def pairs(tmp_path: Path) -> Iterator[SmallRun]:
    run = small_run(tmp_path, PAIRS)
    yield run
    run.close()


def broken(run: SmallRun, kind: Kind, *, rank: int = 1) -> Outcome:
    """The first sample of the first step's first micro batch of data rank 0 is broken for one rank."""
    name = object_name(run.objects[0][0][0])
    return load(run, settings(run, PAIRS), Breakage(rank, kind, (name,)))


def drops(reports: list[Report]) -> list[list[list[bool]]]:
    return [[[b["dropped"] for b in step["batches"]] for step in r.steps] for r in reports]


@pytest.mark.fault(29)
@pytest.mark.payload("F12")
@pytest.mark.parametrize(
    ("kind", "called"), [("404", "missing"), ("corrupt", "corrupt"), ("refused", "unavailable"), ("hanging", "unavailable")]
)
def test_a_micro_batch_that_one_rank_cannot_fetch_is_dropped_by_the_ranks_that_train_it(pairs: SmallRun, kind: Kind, called: str) -> None:
    got = broken(pairs, kind)
    assert [r.error for r in got.ranks] == [""] * 4
    # Ranks 0 and 1 share the micro batches of data rank 0; those of data rank 1 train on, and so does the next step.
    assert drops(got.ranks) == [[[True, False], [False, False]]] * 2 + [[[False, False], [False, False]]] * 2
    first = pairs.objects[0][0][:2]
    for report in got.ranks:
        step = report.steps[0]
        assert step["shared"] == {
            "payload/dropped_micro_batches": 1.0,
            "payload/dropped_corrupt": float(called == "corrupt"),
            "payload/dropped_missing": float(called == "missing"),
            "payload/dropped_unavailable": float(called == "unavailable"),
        }
        assert step["missed"] == dict.fromkeys(first, called)
    for report in got.ranks[:2]:
        dropped, fetched = report.steps[0]["batches"]
        assert (dropped["trained"], dropped["fields"], any(dropped["real"])) == (0, ["routed_experts"], False)
        assert sum(b["trained"] for b in (fetched, *report.steps[1]["batches"])) > 0
        real = {row for row, is_real in zip(fetched["rows"], fetched["real"], strict=True) if is_real}
        assert set(dropped["rows"]) <= real  # its routing repeats real rows of this rank's slice
        assert report.steps[0]["metrics"]["payload/generated_routing"] == 0
    assert got.left == 0


def test_slow_storage_on_one_rank_delays_a_step_and_drops_nothing(pairs: SmallRun) -> None:
    got = broken(pairs, "slow")
    assert [r.error for r in got.ranks] == [""] * 4
    assert drops(got.ranks) == [[[False, False], [False, False]]] * 4
    assert got.left == 0


@pytest.mark.parametrize(("kind", "called"), [("404", "missing"), ("hanging", "unavailable")])
def test_a_step_with_nothing_left_stops_every_rank_alike(tmp_path: Path, kind: Kind, called: str) -> None:
    """All four ranks train the same micro batches, of which one rank can fetch none."""
    run = small_run(tmp_path, ONE_BATCH, steps=1)
    got = load(run, settings(run, ONE_BATCH, steps=1), Breakage(2, kind))
    said = {r.error for r in got.ranks}
    assert len(said) == 1
    text = said.pop()
    assert text.startswith(f"StepLost: step_000000: the arrays of none of its 2 micro batches could be fetched (2 {called}; 4 objects")
    assert got.left == 4  # a restarted trainer finds them
    run.close()


def test_a_step_file_that_one_rank_cannot_read_ends_the_wait_of_all(pairs: SmallRun) -> None:
    config = settings(pairs, PAIRS, step_wait_s=FETCH_DEADLINE_S)
    got = load(pairs, config, Breakage(3, "hanging step file", ("steps/",)))
    assert [r.error.partition(":")[0] for r in got.ranks] == ["RoleFailed"] * 3 + ["StoreUnavailable"]
    assert "step_000000 did not come within trainer.step_wait_s = 2 s" in got.ranks[3].error
    assert got.left == 16


def test_a_removal_that_hangs_on_one_leader_is_left_to_the_close_and_holds_nobody_up(pairs: SmallRun) -> None:
    config = settings(pairs, PAIRS, collective_s=2 * FETCH_DEADLINE_S)
    got = load(pairs, config, Breakage(2, "hanging removal"))
    assert [r.error for r in got.ranks] == [""] * 4
    assert drops(got.ranks) == [[[False, False], [False, False]]] * 4
    assert {r.removed_failed for r in got.ranks} == {8}
    assert got.left == 8  # what data rank 1 was to remove


def test_an_order_that_does_not_place_every_rank_is_refused_on_all(tmp_path: Path) -> None:
    run = small_run(tmp_path, PAIRS, steps=1)
    twice = ParallelSection(data=2, context=2, layout="zigzag", order=("data",))
    got = load(run, settings(run, twice, steps=1), None)
    assert all("leaves out ['context']" in r.error for r in got.ranks)
    run.close()


@pytest.mark.payload("D13")
def test_a_sample_that_stands_in_on_another_data_rank_is_fetched_by_both_and_removed_once(tmp_path: Path) -> None:
    run = SmallRun(tmp_path, data_ranks=2)
    real, other = run.sample(0, "real/0"), run.sample(0, "other/0")
    dummy = msgspec.structs.replace(real, sample="dummy/0", padding=True, loss_mask=bytes(real.token_count))
    assert real.ref is not None
    assert other.ref is not None
    files = [
        RankFile(v=1, run=RUN, step=0, data_rank=n, schema=SCHEMA, micro_batches=tuple(MicroBatch((s,)) for s in samples), owned=owned)
        for n, samples, owned in ((0, (real, other), (*real.ref.object_ids, *other.ref.object_ids)), (1, (dummy, dummy), ()))
    ]
    run.publish(0, files)
    got = load(run, settings(run, PAIRS, steps=1), None)
    assert [r.error for r in got.ranks] == [""] * 4
    assert drops(got.ranks) == [[[False, False]]] * 4
    assert [b["trained"] for r in got.ranks[2:] for b in r.steps[0]["batches"]] == [0] * 4
    assert got.left == 0
    assert run.verdict() == "PROVED"


@pytest.mark.payload("D14")
def test_ranks_of_a_node_fetch_what_they_share_once(tmp_path: Path) -> None:
    """Four tensor parallel ranks want the same rows; what one of them fetched the others find in the node's memory."""
    parallel = ParallelSection(data=1, tensor=4)
    fetched = []
    for cache_bytes in (0, 64 << 20):
        run = small_run(tmp_path / str(cache_bytes), parallel, steps=1)
        store = {"node_cache_bytes": cache_bytes, "node_cache_dir": str(tmp_path), "fetch_deadline_s": 60.0}
        got = load(run, settings(run, parallel, steps=1, store=store), None)
        assert [r.error for r in got.ranks] == [""] * 4
        assert len({str(r.steps[0]["batches"]) for r in got.ranks}) == 1
        fetched.append(sum(r.steps[0]["metrics"]["payload/bytes_fetched"] for r in got.ranks))
        run.close()
    assert 0.9 * fetched[0] < 4 * fetched[1] <= fetched[0]
    assert list(tmp_path.glob("fsref*")) == []
