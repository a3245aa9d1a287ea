"""Readers of one node that share what they fetch: the same arrays as without, fewer reads, and damage that does not spread."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fsref.errors import ObjectCorrupt, ObjectMissing, StoreUnavailable
from fsref.nodecache import NodeCache
from fsref.reader import ReadCounters, Reader, allocate
from fsref.refs import Dense, FieldData, Payload, PayloadRef, TokenRange, object_name
from fsref.store import open_root
from fsref.writer import Writer
from tests.support.faultystore import FaultyStore
from tests.support.payloads import Numbers, cut, payload, schema

SCHEMA = schema(layers=8, layers_per_chunk=2)
TOKENS = 9000


class Node:
    """A store, the folder of a cache, and readers that join it."""

    def __init__(self, folder: Path) -> None:
        self.store = FaultyStore(open_root(str(folder / "root"), run="run", create=True))
        self.folder = folder / "shm"
        self.caches: list[NodeCache] = []
        numbers = Numbers()
        self.arrays = [payload(np.random.default_rng(n), SCHEMA, TOKENS) for n in range(2)]
        self.refs = [Writer(self.store, SCHEMA, numbers, durability="process").put(a) for a in self.arrays]
        self.store.calls.clear()

    def reader(self, *, bytes_max: int = 64 << 20, **options: float) -> Reader:
        self.caches.append(NodeCache(self.folder, name="run", bytes_max=bytes_max, wait_s=60))
        return Reader(self.store, SCHEMA, cache=self.caches[-1], **options)  # type: ignore[arg-type]

    def flip_cached(self) -> None:
        """One byte in every 512 of the cached bytes becomes another."""
        shared = self.caches[0]._file
        held = os.pread(shared.fd, self.caches[0].bytes_held, shared.geometry.data_at)
        os.pwrite(shared.fd, bytes(b ^ (n % 512 == 100) for n, b in enumerate(held)), shared.geometry.data_at)

    def path(self, ref: PayloadRef) -> Path:
        assert self.store.posix_path is not None
        return Path(self.store.posix_path) / object_name(ref.object_ids[0])


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    for cache in made.caches:
        cache.close()
    assert not list(made.folder.iterdir())
    made.store.close()


def assert_same(arrays: Payload, got: dict[str, FieldData], start: int = 0, stop: int = TOKENS) -> None:
    assert set(got) == set(arrays.fields)
    for name, data in got.items():
        rows, columns = cut(arrays.fields[name], start, stop)
        if isinstance(data, Dense):
            assert data.rows.tobytes() == rows.tobytes(), name
        else:
            assert data.counts.tobytes() == rows.astype(np.int32).tobytes(), name
            assert {n: v.tobytes() for n, v in data.columns.items()} == {n: v.tobytes() for n, v in columns.items()}, name


def test_siblings_get_the_same_arrays_and_the_store_is_read_by_one_of_them(node: Node) -> None:
    with Reader(node.store, SCHEMA) as alone:
        alone.read(node.refs[0])
    once = node.store.calls["read_into"]
    node.store.calls.clear()
    with node.reader() as a, node.reader() as b:
        for reader in (a, b, b):
            assert_same(node.arrays[0], reader.read(node.refs[0]))
        assert node.store.calls["read_into"] == once  # as few reads as without the cache, once for all
        assert node.store.calls["open"] == 1  # what is in the cache costs no look at the store
        assert (b.counters.requests, b.counters.bytes_fetched) == (0, 0)
        assert a.counters.requests == once


def test_parts_that_overlap_are_put_together_from_what_is_there_and_what_is_not(node: Node) -> None:
    rng = np.random.default_rng(5)
    with node.reader() as a, node.reader(bytes_max=64 << 20) as b:
        for n in range(60):
            start, stop = sorted(int(t) for t in rng.integers(0, TOKENS + 1, 2))
            number = int(rng.integers(0, 2))
            reader = (a, b)[n % 2]
            assert_same(node.arrays[number], reader.read(node.refs[number], tokens=TokenRange(start, stop)), start, stop)
            layers = [int(v) for v in rng.choice(8, 3, replace=False)]
            got = reader.read(node.refs[number], tokens=TokenRange(start, stop), fields=["routed_experts"], layers=layers)
            whole = node.arrays[number].fields["routed_experts"]
            assert isinstance(whole, Dense)
            assert np.array_equal(got["routed_experts"].rows, whole.rows[start:stop][:, layers])  # type: ignore[union-attr]
        stored = sum(node.path(r).stat().st_size for r in node.refs)
        assert a.counters.bytes_fetched + b.counters.bytes_fetched < 1.1 * stored


@pytest.mark.fault(43)
def test_damage_in_the_shared_memory_is_found_and_read_from_the_store_once(node: Node) -> None:
    with node.reader() as a, node.reader() as b:
        a.read(node.refs[0])
        node.flip_cached()
        node.store.calls.clear()
        assert_same(node.arrays[0], b.read(node.refs[0]))
        assert b.counters.requests == node.store.calls["read_into"] == a.counters.requests
        assert b.counters.retries == 0
        assert node.caches[1].counters.discards > 0
        assert_same(node.arrays[0], a.read(node.refs[0]))  # fetched anew for all
        assert_same(node.arrays[0], b.read(node.refs[0]))


@pytest.mark.fault(43)
def test_damage_in_the_store_is_each_ranks_own_error_and_does_not_stay_in_the_cache(node: Node) -> None:
    path = node.path(node.refs[0])
    good = path.read_bytes()
    bad = bytearray(good)
    bad[len(good) // 3] ^= 1
    path.chmod(0o600)
    path.write_bytes(bad)
    with node.reader() as a, node.reader() as b:
        for reader in (a, b):
            with pytest.raises(ObjectCorrupt, match="given up after 2 attempts"):
                reader.read(node.refs[0])
        path.write_bytes(good)
        assert_same(node.arrays[0], b.read(node.refs[0]))


@pytest.mark.fault(45)
def test_an_object_that_one_rank_does_not_see_yet_is_not_missing_for_its_sibling(node: Node) -> None:
    with node.reader(retries_max=0) as a, node.reader() as b:
        node.store.fail("open", ObjectMissing("not visible yet"), times=8)
        with pytest.raises(ObjectMissing):
            a.read(node.refs[0])
        node.store.clear()
        assert_same(node.arrays[0], b.read(node.refs[0]))
        assert_same(node.arrays[0], a.read(node.refs[0]))


@pytest.mark.fault(40)
def test_a_sibling_whose_store_hangs_is_given_up_and_its_chunks_are_read_by_the_other(node: Node) -> None:
    a = node.reader(threads=1, deadline_s=0.3, abandon_s=0.1)
    gate = node.store.hang("read_into")
    with pytest.raises(StoreUnavailable, match="nothing came within"):
        a.read(node.refs[0], fields=["routed_experts"])
    assert gate.entered.is_set()
    a.close()
    node.caches[0].close()  # with its membership, its claims end
    with node.reader() as b:
        assert_same(node.arrays[0], b.read(node.refs[0]))
    gate.release()
    assert gate.left.wait(60)


def test_siblings_begin_at_different_objects_of_the_same_plan(node: Node) -> None:
    opened: dict[int, list[str]] = {0: [], 1: []}
    with node.reader(threads=1) as a, node.reader(threads=1) as b:
        node.caches[0].release(-1)  # it looks how many they are
        plans = [r.plan(ref, fields=["routed_experts"]) for r in (a,) for ref in node.refs]
        both = plans[0]._replace(segments=plans[0].segments + plans[1].segments)
        for n, reader in enumerate((a, b)):
            first = threading.Event()
            real = node.store.open

            def watched(name: str, *, byte_count: int | None = None, seen: list[str] = opened[n], real=real, first=first):  # type: ignore[no-untyped-def]
                seen.append(name)
                first.set()
                return real(name, byte_count=byte_count)

            node.store.open = watched  # type: ignore[method-assign]
            out = {"routed_experts": allocate(both, SCHEMA, "routed_experts")}
            reader.read_into(both, out)
            node.store.open = real  # type: ignore[method-assign]
            for cache in node.caches:
                cache.release(0)
    assert opened[0][0] != opened[1][0]


def test_a_plans_own_tally_counts_what_it_read_and_nothing_of_others(node: Node) -> None:
    with node.reader() as a, node.reader() as b:
        for reader, expected in ((a, True), (b, False)):
            plan = reader.plan(node.refs[0], fields=["routed_experts"])
            mine = ReadCounters()
            futures = reader.submit(plan, {"routed_experts": allocate(plan, SCHEMA, "routed_experts")}, step=4, tally=mine)
            assert reader.collect(futures) == []
            assert (mine.requests, mine.bytes_fetched) == ((plan.request_count, plan.byte_count) if expected else (0, 0))
            reader.read(node.refs[1])
            assert mine.bytes_fetched == (plan.byte_count if expected else 0)
