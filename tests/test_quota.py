"""The run's limit on live bytes: below it nothing is listed, at it puts wait, and nobody removes anything because of it."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fsref.config import Config, EnvSection, StoreSection, quota_share
from fsref.errors import ConfigError, StoreFull, StoreUnavailable
from fsref.ledger import Verdict
from fsref.quota import Quota
from fsref.reaper import EnvHolder
from fsref.refs import Payload, PayloadRef
from fsref.store import Buffer
from fsref.store.base import Durability, Entry
from fsref.store.posix import PosixStore
from fsref.writer import Writer
from tests.reaper.stage import Stage
from tests.support.payloads import INC, Numbers, payload, schema

SCHEMA = schema()
MIB = 1 << 20


class CountingStore(PosixStore):
    """Counts listings, and tells who waits for one."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, create=True)
        self.lists = 0
        self.fail: Exception | None = None
        self._listed = threading.Condition()

    def put(self, name: str, buffers: Sequence[Buffer], *, durability: Durability = "node") -> None:
        if self.fail is not None:
            raise self.fail
        super().put(name, buffers, durability=durability)

    def list(self, prefix: str) -> Iterator[Entry]:
        found = list(super().list(prefix))
        with self._listed:
            self.lists += 1
            self._listed.notify_all()
        return iter(found)

    def wait_for_lists(self, count: int) -> None:
        with self._listed:
            assert self._listed.wait_for(lambda: self.lists >= count, timeout=60)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CountingStore]:
    with CountingStore(tmp_path / "run") as made:
        yield made


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.store.close()


def quota(store: PosixStore, share_bytes: int, *, wait_s: float = 60.0, fresh: bool = True) -> Quota:
    return Quota(store, lambda: [f"obj/{INC}"], share_bytes=share_bytes, wait_s=wait_s, fresh=fresh)


def arrays(tokens: int = 100) -> Payload:
    return payload(np.random.default_rng(tokens), SCHEMA, tokens)


def size_of(store: CountingStore, tokens: int = 100) -> int:
    ref = Writer(store, SCHEMA, Numbers()).put(arrays(tokens))
    store.delete([e.name for e in list(PosixStore.list(store, "obj"))])
    return ref.byte_count


@contextmanager
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.mark.payload("F20")
def test_below_the_limit_nothing_is_listed(store: CountingStore) -> None:
    own = quota(store, 100 * MIB)
    writer = Writer(store, SCHEMA, Numbers(), quota=own)
    total = sum(writer.put(arrays()).byte_count for _ in range(20))
    assert (store.lists, own.bytes_live, own.counters["quota_waits"]) == (0, total, 0)


@pytest.mark.payload("F20")
def test_a_quota_of_one_mebibyte_holds_on_disk_and_a_put_waits_until_others_removed_enough(store: CountingStore) -> None:
    own = quota(store, MIB)
    writer = Writer(store, SCHEMA, Numbers(), quota=own)
    refs: list[PayloadRef] = []
    while own.bytes_live + 2 * size_of_ref(refs) <= MIB:
        refs.append(writer.put(arrays(1000)))
    lists = store.lists
    with thread() as pool:
        waiting = [pool.submit(writer.put, arrays(1000)) for _ in range(3)]
        store.wait_for_lists(lists + 3)
        assert not all(f.done() for f in waiting)
        assert own.counters["quota_waiting"] >= 1
        assert on_disk(store) <= MIB
        names = [e.name for e in list(PosixStore.list(store, "obj"))]
        store.delete(names[: len(names) // 2])
        done = [f.result(timeout=60) for f in waiting]
    assert len(done) == 3
    assert on_disk(store) <= MIB
    assert (own.counters["quota_waiting"], own.counters["quota_waits"] >= 1, own.counters["quota_waited_s"] > 0) == (0, True, True)


def size_of_ref(refs: list[PayloadRef]) -> int:
    return refs[-1].byte_count if refs else 0


def on_disk(store: CountingStore) -> int:
    return sum(e.byte_count for e in list(PosixStore.list(store, "obj")))


@pytest.mark.payload("F20")
def test_a_put_that_finds_no_room_fails_with_the_figures_and_leaves_nothing(store: CountingStore) -> None:
    size = size_of(store)
    own, keeper = quota(store, size + 10, wait_s=0.2), Numbers()
    writer = Writer(store, SCHEMA, keeper, quota=own)
    writer.put(arrays())
    with pytest.raises(StoreFull, match=rf"share of store.bytes_live_max is {size + 10} bytes, {size} are there and {size} more were"):
        writer.put(arrays())
    assert (len(keeper.kept), on_disk(store), own.bytes_live) == (1, size, size)


def test_an_object_larger_than_the_share_fails_at_once(store: CountingStore) -> None:
    own = quota(store, size_of(store) - 1, wait_s=3600.0)
    with pytest.raises(StoreFull, match="larger than this worker's whole share"):
        Writer(store, SCHEMA, Numbers(), quota=own).put(arrays())
    assert (store.lists, on_disk(store)) == (0, 0)


def test_puts_side_by_side_cannot_pass_the_share_together(store: CountingStore) -> None:
    size = size_of(store)
    own = quota(store, 3 * size, wait_s=0.3)
    keeper, lock = Numbers(), threading.Lock()
    minted = keeper.next_seq

    def next_seq() -> int:
        with lock:
            return minted()

    keeper.next_seq = next_seq  # type: ignore[method-assign]
    writer = Writer(store, SCHEMA, keeper, quota=own)
    start = threading.Barrier(8)

    def put() -> bool:
        start.wait(60)
        try:
            writer.put(arrays())
        except StoreFull:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        results = [f.result(60) for f in [pool.submit(put) for _ in range(8)]]
    assert (results.count(True), on_disk(store)) == (3, 3 * size)


def test_a_failed_put_gives_its_bytes_back_and_one_of_unknown_outcome_counts_until_a_listing(store: CountingStore) -> None:
    size = size_of(store)
    own = quota(store, size, wait_s=0.1)
    writer = Writer(store, SCHEMA, Numbers(), quota=own)
    store.fail = StoreFull("no space")
    with pytest.raises(StoreFull, match="no space"):
        writer.put(arrays())
    assert own.bytes_live == 0
    store.fail = StoreUnavailable("no answer")
    with pytest.raises(StoreUnavailable):
        writer.put(arrays())
    assert (own.bytes_live, store.lists) == (size, 0)
    store.fail = None
    writer.put(arrays())
    assert (own.bytes_live, store.lists) == (size, 1)


def test_what_a_worker_before_this_one_left_counts(store: CountingStore) -> None:
    size = size_of(store)
    Writer(store, SCHEMA, Numbers()).put(arrays())
    own = quota(store, size, wait_s=0.1, fresh=False)
    with pytest.raises(StoreFull):
        Writer(store, SCHEMA, Numbers(), quota=own).put(arrays())
    assert own.bytes_live == size


def test_a_listing_that_fails_fails_the_put_and_no_waiter_is_counted_on(store: CountingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    own = quota(store, MIB, fresh=False)

    def broken(_: str) -> Iterator[Entry]:
        raise StoreUnavailable("listing failed")

    monkeypatch.setattr(store, "list", broken)
    with pytest.raises(StoreUnavailable, match="listing failed"):
        Writer(store, SCHEMA, Numbers(), quota=own).put(arrays())
    monkeypatch.undo()
    Writer(store, SCHEMA, Numbers(), quota=own).put(arrays())
    assert own.counters["quota_waiting"] == 0


def blocked(store: CountingStore, start: Callable[[Writer], Future[object]]) -> tuple[Quota, Future[object]]:
    """A put that waits for room, for an hour if nobody ends it."""
    own = quota(store, size_of(store), wait_s=3600.0)
    writer = Writer(store, SCHEMA, Numbers(), quota=own)
    writer.put(arrays())
    lists = store.lists
    future = start(writer)
    store.wait_for_lists(lists + 2)
    return own, future


def test_closing_ends_every_wait(store: CountingStore) -> None:
    with thread() as pool:
        own, future = blocked(store, lambda writer: pool.submit(writer.put, arrays()))
        own.close()
        assert isinstance(future.exception(timeout=60), CancelledError)


@pytest.mark.payload("F20")
def test_the_ledger_frees_a_blocked_worker_and_everything_is_accounted_for(stage: Stage) -> None:
    """The real holder, the real deleter: an orchestrator's drop makes room."""
    run_schema = stage.run.schema
    env, orc = stage.env(), stage.orc()
    one = Payload(np.zeros(4, np.int32), {})
    with stage.other_store() as other:
        size = Writer(other, run_schema, Numbers()).put(one).byte_count
        other.delete([e.name for e in list(other.list("obj"))])
    own = Quota(stage.store, env.prefixes, share_bytes=2 * size, wait_s=3600.0)
    writer = Writer(stage.store, run_schema, env, durability="process", quota=own)
    held = [writer.put(one).object_ids[0] for _ in range(2)]
    env.sent("q", held)
    orc.take("q", dict.fromkeys(held, size))
    with thread() as pool:
        future = pool.submit(writer.put, one)
        stage.store.wait_until(lambda: stage.store.lists >= 2)
        assert (future.done(), stage.store.deletes[2:]) == (False, [])
        orc.drop(held[:1], "filtered")
        third = future.result(timeout=60).object_ids
    env.discard(third)
    orc.close()
    env.close()
    assert stage.audit().verdict is Verdict.PROVED


def test_the_share_covers_the_incarnations_before_this_one(stage: Stage) -> None:
    first = stage.env("math-0-0")
    other = stage.env("math-0-1")
    stage.kill(first)
    second: EnvHolder = stage.env("math-0-0")
    assert second.prefixes() == sorted([f"obj/{first.inc}", f"obj/{second.inc}"])
    assert other.prefixes() == [f"obj/{other.inc}"]
    for holder in (second, other):
        holder.close()


def test_each_worker_of_each_replica_of_each_source_has_an_equal_share() -> None:
    tables = (EnvSection(name="a", replicas=3, workers=4), EnvSection(name="b", split="eval", workers=2))
    assert quota_share(Config(env=tables, store=StoreSection(bytes_live_max=14 * MIB))) == MIB
    assert quota_share(Config(env=tables)) == 0
    with pytest.raises(ConfigError, match="nothing for each of 14 env workers"):
        msgspec.structs.replace(Config(env=tables), store=StoreSection(bytes_live_max=13)).__post_init__()
