"""Step files are found as they appear, never past the allowed lead, and handed out with their fetch begun."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fsref.errors import MissingArrays, StepError, StoreUnavailable
from fsref.loader.feed import StepFeed
from fsref.refs import Payload
from fsref.steps import MicroBatch, RankFile, rank_file_name
from tests.trainer.runs import DEADLINE_S, RUN, SmallRun, payload


class Started:
    def __init__(self) -> None:
        self.steps: list[int] = []

    def prefetch(self, rank: RankFile) -> None:
        self.steps.append(rank.step)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[SmallRun]:
    run = SmallRun(tmp_path)
    yield run
    run.close()


def feed(run: SmallRun, started: Started, *, last: int = 9, ahead: int = 1, uuid: str = "") -> StepFeed:
    return StepFeed(run.store, started, run=RUN, run_uuid=uuid or run.info.run_uuid, data_rank=0, first=0, last=last, ahead=ahead)


def test_a_step_is_handed_out_after_its_fetch_began(small: SmallRun) -> None:
    started = Started()
    with feed(small, started) as steps:
        assert steps.wait(0, timeout_s=0.01) is None
        small.publish_step(0)
        found = steps.wait(0, timeout_s=DEADLINE_S)
    assert found is not None
    assert found.rank_file.step == 0
    assert started.steps == [0]


def test_later_steps_are_fetched_ahead_but_not_further_than_allowed(small: SmallRun) -> None:
    for step in range(4):
        small.publish_step(step)
    started = Started()
    with feed(small, started, ahead=1) as steps:
        steps.wait(0, timeout_s=DEADLINE_S)
        wait_until(lambda: started.steps == [0, 1])
        steps.wait(2, timeout_s=DEADLINE_S)
        wait_until(lambda: started.steps == [0, 1, 2, 3])


def test_nothing_is_sought_past_the_last_step(small: SmallRun) -> None:
    for step in range(3):
        small.publish_step(step)
    started = Started()
    with feed(small, started, last=1, ahead=5) as steps:
        steps.wait(1, timeout_s=DEADLINE_S)
        steps._thread.join(DEADLINE_S)
        assert started.steps == [0, 1]


class Away:
    """A store that does not answer until it does."""

    posix_path = None

    def __init__(self, run: SmallRun) -> None:
        self._run, self.back = run, False

    def read(self, name: str, *, bytes_max: int) -> bytes:
        if not self.back:
            raise StoreUnavailable("the store is away")
        return self._run.store.read(name, bytes_max=bytes_max)


def test_a_store_that_does_not_answer_is_asked_again_and_its_words_are_kept(small: SmallRun) -> None:
    small.publish_step(0)
    away = Away(small)
    with StepFeed(
        away,  # type: ignore[arg-type]
        Started(),
        run=RUN,
        run_uuid=small.info.run_uuid,
        data_rank=0,
        first=0,
        last=0,
        ahead=0,
    ) as steps:
        wait_until(lambda: steps.trouble == "the store is away")
        away.back = True
        assert steps.wait(0, timeout_s=DEADLINE_S) is not None


@pytest.mark.fault(13)
@pytest.mark.payload("G10")
def test_a_rank_file_that_shows_after_its_step_is_waited_for(small: SmallRun) -> None:
    """Another node's client may see the two names in any order."""
    small.publish_step(0)
    path = small.run_dir / rank_file_name(0, 0)
    path.rename(small.folder / "away")
    with feed(small, Started(), ahead=0) as steps:
        wait_until(lambda: "No such file" in steps.trouble)
        (small.folder / "away").rename(path)
        assert steps.wait(0, timeout_s=DEADLINE_S) is not None


def test_a_step_of_another_run_is_an_error_for_whoever_waits(small: SmallRun) -> None:
    small.publish_step(0)
    with feed(small, Started(), uuid="0" * 32) as steps, pytest.raises(StepError, match="used before"):
        steps.wait(0, timeout_s=DEADLINE_S)


@pytest.mark.payload("G9")
def test_a_trained_sample_without_arrays_is_named(small: SmallRun) -> None:
    bare = msgspec.structs.replace(small.sample(0, "trace-7/1"), ref=None)
    small.publish(
        0, [RankFile(v=1, run=RUN, step=0, data_rank=0, schema=small.info.schema, micro_batches=(MicroBatch((bare,)),), owned=())]
    )
    with feed(small, Started()) as steps, pytest.raises(MissingArrays, match="trace-7/1 trains but has no arrays"):
        steps.wait(0, timeout_s=DEADLINE_S)


@pytest.mark.payload("G9")
def test_a_field_that_was_dropped_on_the_way_is_named_before_anything_is_fetched(small: SmallRun) -> None:
    """An orchestrator of someone else's, whose list of allowed fields does not know this one."""
    tokens = np.arange(6, dtype=np.int32)
    for step in range(2):
        whole = payload(tokens, 3, small.rng)
        part = Payload(tokens, {n: d for n, d in whole.fields.items() if n != "sampling_mask"})
        sample = msgspec.structs.replace(small.sample(0, "trace-8/0"), ref=small.writer.put(part))
        dummy = msgspec.structs.replace(sample, loss_mask=bytes(len(sample.loss_mask)), padding=True, sample="dummy")
        batch = MicroBatch((dummy, sample) if step else (dummy,))
        small.publish(step, [RankFile(v=1, run=RUN, step=step, data_rank=0, schema=small.info.schema, micro_batches=(batch,), owned=())])
    started = Started()
    strict: dict[str, Any] = {"run": RUN, "run_uuid": small.info.run_uuid, "data_rank": 0, "first": 0, "last": 1, "ahead": 0}
    with StepFeed(small.store, started, **strict, fields=["routed_experts", "sampling_mask", "not_in_the_schema"]) as steps:
        assert steps.wait(0, timeout_s=DEADLINE_S) is not None
        with pytest.raises(
            MissingArrays, match=r"step_000001: sample trace-8/0 trains without \['sampling_mask'\], which run.fields needs"
        ):
            steps.wait(1, timeout_s=DEADLINE_S)
    assert started.steps == [0]
    with StepFeed(small.store, started, **strict) as steps:
        assert steps.wait(1, timeout_s=DEADLINE_S) is not None, "run.missing = fallback"


def wait_until(condition) -> None:  # type: ignore[no-untyped-def]
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
