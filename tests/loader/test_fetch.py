"""What a rank fetches ahead: in order, under its budget, with the right clocks, into memory that is used again."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsref.config import StoreSection
from fsref.errors import StoreUnavailable
from fsref.loader.fetch import FetchFailure, StepFetcher
from fsref.nodecache import NodeCache
from fsref.refs import PayloadRef, object_name
from fsref.steps import MicroBatch, RankFile
from fsref.store import open_root
from fsref.tensors import DenseTensor, PackedMicroBatch
from fsref.writer import Writer
from tests.support.faultystore import FaultyStore, Gate
from tests.support.payloads import Numbers, payload, schema
from tests.tensors.test_assembly import rank_file, sequence

SCHEMA = schema(layers=4)
TOKENS = 300
DEADLINE_S = 60.0


class Stage:
    """Steps of micro batches of one sequence each, in a store that can be stopped at any object."""

    def __init__(self, folder: Path, *, steps: int, micro_batches: int) -> None:
        self.store = FaultyStore(open_root(str(folder), run="run", create=True))
        rng, writer = np.random.default_rng(0), Writer(self.store, SCHEMA, Numbers(), durability="process")
        self.refs = [[writer.put(payload(rng, SCHEMA, TOKENS)) for _ in range(micro_batches)] for _ in range(steps)]
        self.ranks = [rank_file(SCHEMA, [MicroBatch((sequence(rng, TOKENS, r),)) for r in refs], n) for n, refs in enumerate(self.refs)]
        self.clock = [0.0]
        self.opened: list[tuple[int, int]] = []
        where = {object_name(r.object_ids[0]): (n, m) for n, refs in enumerate(self.refs) for m, r in enumerate(refs)}
        inner, lock = self.store.open, threading.Lock()

        def watched(name: str, *, byte_count: int | None = None) -> Any:
            with lock:
                self.opened.append(where[name])
            return inner(name, byte_count=byte_count)

        self.store.open = watched  # type: ignore[method-assign]

    def fetcher(self, **options: Any) -> StepFetcher:
        cache = options.pop("cache", None)
        return StepFetcher(self.store, SCHEMA, config=StoreSection(**options), cache=cache, now=lambda: self.clock[0])

    def hold(self, step: int, number: int) -> Gate:
        return self.store.hang("read_into", name=name_of(self.refs[step][number]))


def name_of(ref: PayloadRef) -> str:
    return object_name(ref.object_ids[0])


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    made: list[Stage] = []

    def one(*, steps: int = 3, micro_batches: int = 4) -> Stage:
        made.append(Stage(tmp_path / str(len(made)), steps=steps, micro_batches=micro_batches))
        return made[-1]

    yield one
    for stage in made:
        stage.store.close()


def taken(fetcher: StepFetcher, rank: RankFile) -> list[PackedMicroBatch]:
    got = fetcher.take(rank)
    assert all(isinstance(g, PackedMicroBatch) for g in got), got
    return [g for g in got if isinstance(g, PackedMicroBatch)]


def done(fetcher: StepFetcher, step: int) -> None:
    for future in fetcher._steps[step].futures:
        future.exception(DEADLINE_S)


def test_a_fetch_that_ends_before_the_step_is_taken_is_hidden_and_only_that(make: Callable[..., Stage]) -> None:
    stage = make(steps=1, micro_batches=1)
    gate = stage.hold(0, 0)
    with stage.fetcher() as fetcher:
        fetcher.prefetch(stage.ranks[0])
        assert gate.entered.wait(DEADLINE_S)
        stage.clock[0] = 3.0
        gate.release()
        done(fetcher, 0)
        stage.clock[0] = 50.0
        taken(fetcher, stage.ranks[0])
        seen = fetcher.metrics(0)
    assert [seen[f"payload/fetch_time{n}"] for n in ("", "_hidden", "_exposed")] == [3.0, 3.0, 0.0]


def test_a_fetch_that_is_waited_for_is_exposed_from_when_the_step_is_taken(make: Callable[..., Stage]) -> None:
    stage = make(steps=1, micro_batches=1)
    gate = stage.hold(0, 0)
    with stage.fetcher() as fetcher:
        fetcher.prefetch(stage.ranks[0])
        assert gate.entered.wait(DEADLINE_S)
        stage.clock[0] = 3.0
        began = threading.Event()
        want = fetcher._ahead.want

        def wanted(step: int) -> None:
            want(step)
            began.set()

        fetcher._ahead.want = wanted  # type: ignore[method-assign]
        trainer = threading.Thread(target=lambda: taken(fetcher, stage.ranks[0]))
        trainer.start()
        assert began.wait(DEADLINE_S)
        stage.clock[0] = 5.0
        gate.release()
        trainer.join(DEADLINE_S)
        seen = fetcher.metrics(0)
    assert [seen[f"payload/fetch_time{n}"] for n in ("", "_hidden", "_exposed")] == [5.0, 3.0, 2.0]


@pytest.mark.parametrize("threads", [1, 3])
def test_the_store_is_asked_for_steps_in_order_whatever_hangs(make: Callable[..., Stage], threads: int) -> None:
    stage = make(steps=3, micro_batches=4)
    gate = stage.hold(0, 1)
    with stage.fetcher(fetch_threads=threads) as fetcher:
        for rank in stage.ranks:
            fetcher.prefetch(rank)
        assert gate.entered.wait(DEADLINE_S)
        gate.release()
        for rank in stage.ranks:
            taken(fetcher, rank)
    first_of_next = next(n for n, (step, _) in enumerate(stage.opened) if step > 0)
    assert {m for step, m in stage.opened[:first_of_next] if step == 0} >= {0, 1, 2}
    assert [s for s, _ in stage.opened] == sorted(s for s, _ in stage.opened) or threads > 1


def test_a_next_step_that_hangs_does_not_keep_this_one_from_training(make: Callable[..., Stage]) -> None:
    stage = make(steps=2, micro_batches=3)
    gates = [stage.hold(1, n) for n in range(3)]
    with stage.fetcher(fetch_threads=1, fetch_deadline_s=0.5, abandon_s=0.2) as fetcher:
        for rank in stage.ranks:
            fetcher.prefetch(rank)
        assert len(taken(fetcher, stage.ranks[0])) == 3
        lost = fetcher.take(stage.ranks[1])
        assert all(isinstance(g, FetchFailure) and isinstance(g.error, StoreUnavailable) for g in lost)
    for gate in gates:
        gate.release()


def test_arrays_that_nobody_took_yet_stay_under_the_budget_and_the_step_that_trains_is_outside_of_it(make: Callable[..., Stage]) -> None:
    stage = make(steps=3, micro_batches=6)
    with stage.fetcher() as plain:
        plain.prefetch(stage.ranks[0])
        done(plain, 0)
        one = plain._ahead.bytes_ahead // 6
    limit = 3 * one + one // 2  # stored bytes of one under way come on top of its arrays
    stage.opened.clear()
    with stage.fetcher(bytes_inflight_max=limit) as fetcher:
        first = taken(fetcher, stage.ranks[0])
        assert len(first) == 6
        for rank in stage.ranks[1:]:
            fetcher.prefetch(rank)
        for future in fetcher._steps[1].futures[:2]:
            future.result(DEADLINE_S)
        assert not fetcher._steps[1].futures[4].done()
        assert fetcher._ahead.bytes_ahead <= limit
        assert len(taken(fetcher, stage.ranks[1])) == len(taken(fetcher, stage.ranks[2])) == 6
        assert 0 < fetcher._ahead.bytes_ahead_peak <= limit


def test_memory_is_used_again_once_the_trainer_has_dropped_its_tensors_and_never_before(make: Callable[..., Stage]) -> None:
    stage = make(steps=8, micro_batches=1)
    big = [payload(np.random.default_rng(n), SCHEMA, 6000) for n in range(8)]
    writer = Writer(stage.store.inner, SCHEMA, _Later(), durability="process")
    rng = np.random.default_rng(1)
    ranks = [rank_file(SCHEMA, [MicroBatch((sequence(rng, 6000, writer.put(p)),))], n) for n, p in enumerate(big)]
    stage.store.open = stage.store.inner.open  # type: ignore[method-assign, assignment]
    with stage.fetcher() as fetcher:
        held, made = list[PackedMicroBatch](), 0
        for n, rank in enumerate(ranks):
            if n + 1 < len(ranks):
                fetcher.prefetch(ranks[n + 1])
            held = [*held[-1:], *taken(fetcher, rank)]  # the trainer keeps the step before
            fetcher.release(n)
            for batch, arrays in zip(held, big[max(0, n - 1) : n + 1], strict=True):
                field = batch.fields["routed_experts"]
                assert isinstance(field, DenseTensor)
                assert np.array_equal(field.rows.numpy(), arrays.fields["routed_experts"].rows)  # type: ignore[union-attr]
            if n == 4:
                made = fetcher.memory.counters.blocks_made
        assert fetcher.memory.counters.blocks_made == made


class _Later(Numbers):
    def __init__(self) -> None:
        super().__init__()
        self._next = 1000


def test_ranks_of_a_node_read_a_step_once_and_free_it_when_both_have_released_it(make: Callable[..., Stage], tmp_path: Path) -> None:
    stage = make(steps=2, micro_batches=3)
    caches = [NodeCache(tmp_path / "shm", name="run", bytes_max=8 << 20, wait_s=DEADLINE_S) for _ in range(2)]
    with stage.fetcher(cache=caches[0]) as a, stage.fetcher(cache=caches[1]) as b:
        for rank in stage.ranks:
            for fetcher in (a, b):
                fetcher.prefetch(rank)
        for fetcher in (a, b):
            done(fetcher, 1)  # nothing is added to the cache from here on
        for rank in stage.ranks:
            for x, y in zip(taken(a, rank), taken(b, rank), strict=True):
                ours, theirs = x.fields["routed_experts"], y.fields["routed_experts"]
                assert isinstance(ours, DenseTensor)
                assert isinstance(theirs, DenseTensor)
                assert bool((ours.rows == theirs.rows).all())
            read = [f.metrics(rank.step)["payload/bytes_fetched"] for f in (a, b)]
            once = sum(a.reader.plan(r).byte_count for r in stage.refs[rank.step])
            assert 0.95 * once <= sum(read) <= once  # gaps between chunks that different ranks fetched are not read
        for rank in stage.ranks:  # all of them are read by now: nothing else changes what is held
            held = caches[0].bytes_held
            a.release(rank.step)
            assert caches[0].bytes_held == held
            b.release(rank.step)
            assert caches[0].bytes_held < held
    for cache in caches:
        cache.close()
