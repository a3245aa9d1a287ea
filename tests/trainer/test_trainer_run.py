"""Whole trainer runs over small step files: one rank in this process, two ranks in processes of their own."""

import os
import signal
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fsref.config import LossSection, MetricsSection
from fsref.errors import StepError, StepLost, StepReleased, StoreUnavailable
from fsref.loader.ranks import Place
from fsref.refs import object_name
from fsref.steps import info_name, read_info
from fsref.trainer.main import main
from tests.support.fakewandb import Package
from tests.trainer.runs import DEADLINE_S, RUN, SmallRun, run_ranks, start_ranks

ALONE = Place()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[SmallRun]:
    run = SmallRun(tmp_path)
    yield run
    run.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[SmallRun]:
    run = SmallRun(tmp_path, data_ranks=2)
    yield run
    run.close()


def test_one_rank_trains_every_step_and_leaves_nothing_behind(small: SmallRun) -> None:
    for step in range(3):
        small.publish_step(step)
    main(small.config(steps=3, checkpoint_every=2), place=ALONE)
    assert small.present() == []
    records = [r for r in small.metrics() if "loss/mean" in r]
    assert [r["step"] for r in records] == [0, 1, 2]
    assert all(r["loss/tokens"] > 0 and r["routing/rows_different"] == 0 and r["routing/rows"] > 0 for r in records)
    assert sum(r["payload/bytes_removed"] for r in small.metrics()) == small.bytes_shipped
    assert (small.run_dir / "weights" / "step_000003" / "STABLE").is_file()
    assert (small.run_dir / "checkpoints" / "step_000003").is_dir()
    assert small.verdict() == "PROVED"


def test_whoever_was_named_gets_the_figures_of_every_step_under_their_names(small: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    package = Package()
    monkeypatch.setitem(sys.modules, "wandb", package)
    for step in range(2):
        small.publish_step(step)
    listeners = MetricsSection(backends=("jsonl", "wandb", "prometheus"))
    main(msgspec.structs.replace(small.config(steps=2), metrics=listeners), place=ALONE)
    (tracked,) = package.runs
    assert (tracked.settings["id"], tracked.settings["group"], tracked.finished) == (f"{RUN}-trainer", RUN, 1)
    steps = [r for r in tracked.logged if "loss/mean" in r]
    assert [r["step"] for r in steps] == [0, 1]
    for name in ("payload/dropped_micro_batches", "payload/fetch_time", "payload/fetch_time_exposed", "payload/fetch_time_hidden"):
        assert all(name in r for r in steps), name
        assert f"fsref_{name.replace('/', '_')}{{" in (small.run_dir / "metrics" / f"fsref-{RUN}-trainer.prom").read_text()
    lines = [{k: v for k, v in r.items() if k not in ("ms", "role")} for r in small.metrics() if "loss/mean" in r]
    assert lines == steps


def recorded_routes(run: SmallRun) -> list[tuple[np.ndarray, np.ndarray]]:
    """Per sequence: the experts that the model's dispatch was given, and the rows that went into the sample's object."""
    out = []
    for path in sorted((run.run_dir / "routes").rglob("*.npz")):
        with np.load(path) as file:
            experts, ends, samples = file["experts"], file["cu_seqlens"], file["samples"].tolist()
        out += [(experts[ends[n] : ends[n + 1]], run.routes[name]) for n, name in enumerate(samples)]
    return out


def test_the_experts_are_given_the_rows_that_went_into_the_objects(small: SmallRun) -> None:
    for step in range(2):
        small.publish_step(step)
    main(small.config(steps=2, record_routes=True), place=ALONE)
    pairs = recorded_routes(small)
    assert len(pairs) == 8
    assert all(np.array_equal(used, given) for used, given in pairs)
    assert not any(np.array_equal(used, np.roll(given, 1, axis=0)) for used, given in pairs)


def test_without_replay_the_experts_are_not_given_them(small: SmallRun) -> None:
    small.publish_step(0)
    main(small.config(steps=1, record_routes=True, loss=LossSection(replay=False)), place=ALONE)
    assert not any(np.array_equal(used, given) for used, given in recorded_routes(small))


def test_without_replay_rows_route_differently_and_are_counted(small: SmallRun) -> None:
    small.publish_step(0)
    main(small.config(steps=1, loss=LossSection(replay=False)), place=ALONE)
    assert small.metrics()[0]["routing/rows_different_share"] > 0.5


@pytest.mark.parametrize(
    ("commit", "left_after_step_1"), [("fetched", set()), ("checkpoint", {0, 1}), ("keep_last", {0, 1}), ("keep_last_1", {1})]
)
@pytest.mark.payload("F12")
def test_each_policy_removes_a_steps_arrays_at_its_own_time(small: SmallRun, commit: str, left_after_step_1: set[int]) -> None:
    """The third step is missing, so the trainer gives up with the policy's state on disk."""
    for step in range(2):
        small.publish_step(step)
    policy = {"commit": "keep_last", "keep_last": 1} if commit == "keep_last_1" else {"commit": commit, "keep_last": 2}
    with pytest.raises(StoreUnavailable, match="step_000002"):
        main(small.config(steps=3, checkpoint_every=4, step_wait_s=0.3, **policy), place=ALONE)
    expected = sorted(object_name(i) for s in left_after_step_1 for ids in small.objects[s] for i in ids)
    assert small.present() == expected


@pytest.mark.payload("F15")
def test_a_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(tmp_path: Path) -> None:
    runs = []
    for name in ("whole", "parts"):
        run = SmallRun(tmp_path / name, seed=7)
        for step in range(4):
            run.publish_step(step)
        runs.append(run)
    whole, parts = runs
    main(whole.config(steps=4, checkpoint_every=2), place=ALONE)
    main(parts.config(steps=2, checkpoint_every=2), place=ALONE)
    main(parts.config(steps=4, checkpoint_every=2), place=ALONE)
    assert whole.weights(4) == parts.weights(4)
    assert whole.weights(4) != whole.weights(3)
    for run in runs:
        run.close()


@pytest.mark.parametrize(("commit", "keep_last"), [("keep_last", 2), ("keep_last", 1)])
def test_a_resumed_run_also_removes_what_the_one_before_it_left(small: SmallRun, commit: str, keep_last: int) -> None:
    for step in range(2):
        small.publish_step(step)
    policy = {"commit": commit, "keep_last": keep_last, "checkpoint_every": 2}
    with pytest.raises(StoreUnavailable):
        main(small.config(steps=3, step_wait_s=0.3, **policy), place=ALONE)
    assert len(small.present()) == 4 * keep_last
    small.publish_step(2)
    main(small.config(steps=3, **policy), place=ALONE)
    assert small.present() == []
    assert small.verdict() == "PROVED"


@pytest.mark.fault(28)
@pytest.mark.payload("F16")
def test_a_step_that_was_released_is_refused_and_the_message_names_the_checkpoint(small: SmallRun) -> None:
    small.publish_step(0)
    main(small.config(steps=1), place=ALONE)
    for folder in (small.run_dir / "checkpoints").iterdir():
        folder.rename(small.run_dir / "elsewhere")
    with pytest.raises(StepReleased, match=r"the arrays of step 0 were removed by .*; checkpoint step_000001 covers them"):
        main(small.config(steps=1), place=ALONE)


def test_a_step_in_which_nothing_can_be_fetched_is_lost(small: SmallRun) -> None:
    small.publish_step(0)
    for object_id in small.objects[0][0]:
        small.lose(object_id)
    with pytest.raises(StepLost, match="none of its 2 micro batches"):
        main(small.config(steps=1), place=ALONE)
    assert not (small.run_dir / "weights").exists()


@pytest.mark.fault(61)
def test_a_step_file_of_another_run_is_refused(small: SmallRun, tmp_path: Path) -> None:
    other = SmallRun(tmp_path / "other")
    other.publish_step(0)
    (other.run_dir / "steps").rename(small.run_dir / "steps")
    with pytest.raises(StepError, match="used before"):
        main(small.config(steps=1), place=ALONE)
    other.close()


@pytest.mark.fault(24)
def test_a_step_that_lacks_a_rank_file_is_refused_before_it_is_taken(tmp_path: Path) -> None:
    run = SmallRun(tmp_path, data_ranks=2)
    run.publish_step(0)
    info = read_info(run.store, 0)
    run.store.replace(info_name(0), msgspec.json.encode(msgspec.structs.replace(info, data_ranks=1, digests=info.digests[:1])))
    run.data_ranks = 1
    with pytest.raises(StepError, match="the rank files own 4 objects, 8 were shipped"):
        main(run.config(steps=1), place=ALONE)
    assert len(run.present()) == 8
    assert not any(path.read_bytes().count(b'"t":"step"') for path in (run.run_dir / "ledger").glob("trn.*.jnl"))
    run.close()


def test_two_ranks_train_to_the_weights_of_one(tmp_path: Path) -> None:
    """The same samples on one rank or spread over two give the same update, up to the order of sums."""
    import torch
    from safetensors.torch import load

    one, two = SmallRun(tmp_path / "one", seed=3), SmallRun(tmp_path / "two", data_ranks=2, seed=3)
    one.publish_step(0, micro_batches=4)
    two.publish_step(0, micro_batches=2)
    main(one.config(steps=1), place=ALONE)
    assert run_ranks(two.config(steps=1)) == ["ok", "ok"]
    first, second = load(one.weights(1)), load(two.weights(1))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], rtol=2e-2, atol=2e-3)
    keys = ("loss/tokens", "batch/samples", "reward/mean", "payload/bytes_fetched", "payload/requests")
    assert [one.metrics()[0][k] for k in keys] == [two.metrics()[0][k] for k in keys]
    assert two.present() == []
    assert two.verdict() == "PROVED"
    one.close()


@pytest.mark.fault(29)
def test_a_micro_batch_that_one_rank_cannot_fetch_is_dropped_and_counted(pair: SmallRun) -> None:
    for step in range(2):
        pair.publish_step(step)
    lost = pair.objects[0][1][0]
    pair.lose(lost)
    assert run_ranks(pair.config(steps=2)) == ["ok", "ok"]
    first, second = [r for r in pair.metrics() if "loss/mean" in r]
    assert (first["payload/dropped_micro_batches"], second["payload/dropped_micro_batches"]) == (1, 0)
    assert first["payload/generated_routing"] == 0
    assert pair.present() == []


@pytest.mark.fault(42)
@pytest.mark.fault(43)
@pytest.mark.fault(44)
def test_a_damaged_object_is_dropped_on_all_ranks_and_removed_as_a_failed_fetch(pair: SmallRun) -> None:
    """Cut off at step 0, one bit wrong at step 1, a hole of zeros at step 2."""
    for step in range(4):
        pair.publish_step(step)
    for step in range(3):
        path = pair.run_dir / object_name(pair.objects[step][1][0])
        data = bytearray(path.read_bytes())
        with zipfile.ZipFile(path) as archive:
            chunk = next(i for i in archive.infolist() if "/c/" in i.filename)
        at = data.index(chunk.filename.encode()) + len(chunk.filename)
        if step == 0:
            del data[-1:]
        elif step == 1:
            data[at + chunk.file_size // 2] ^= 1
        else:
            data[at : at + chunk.file_size] = bytes(chunk.file_size)
        path.write_bytes(data)
    assert run_ranks(pair.config(steps=4)) == ["ok", "ok"]
    records = [r for r in pair.metrics() if "loss/mean" in r]
    assert [r["payload/dropped_micro_batches"] for r in records] == [1, 1, 1, 0]
    assert pair.present() == []
    assert pair.verdict() == "PROVED"


def test_a_rank_without_any_real_row_routes_by_generated_ones(pair: SmallRun) -> None:
    pair.publish_step(0)
    for object_id in pair.objects[0][1]:
        pair.lose(object_id)
    assert run_ranks(pair.config(steps=1)) == ["ok", "ok"]
    record = pair.metrics()[0]
    assert record["payload/dropped_micro_batches"] == 2
    assert record["payload/generated_routing"] == 2


def test_a_lost_step_ends_all_ranks_alike(pair: SmallRun) -> None:
    pair.publish_step(0)
    for ids in pair.objects[0]:
        for object_id in ids:
            pair.lose(object_id)
    outcomes = run_ranks(pair.config(steps=1))
    assert [o.split(":")[0] for o in outcomes] == ["StepLost", "StepLost"]


def test_sigterm_on_one_rank_ends_both_with_a_checkpoint(pair: SmallRun) -> None:
    for step in range(2):
        pair.publish_step(step)
    ranks = start_ranks(pair.config(steps=50, checkpoint_every=50))
    wait_for(pair.run_dir / "weights" / "step_000002" / "STABLE")
    pid = ranks[1].process.pid
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    assert [r.finish() for r in ranks] == ["ok", "ok"]
    assert (pair.run_dir / "checkpoints" / "step_000002" / "STABLE").is_file()
    assert pair.present() == []


def test_a_rank_that_dies_ends_the_other_with_an_error(pair: SmallRun) -> None:
    pair.publish_step(0)
    ranks = start_ranks(pair.config(steps=50))
    wait_for(pair.run_dir / "weights" / "step_000001" / "STABLE")
    ranks[1].process.kill()
    assert ranks[0].finish().startswith("RoleFailed: trainer rank 0")


def wait_for(path: Path) -> None:
    import time

    end = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.02)
