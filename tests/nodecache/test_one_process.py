"""Several members of a node cache as threads of one process: single flight, exact bytes, bounds, and nothing that outlives its use."""

import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsref.errors import ConfigError, ObjectMissing, StoreDenied, StoreUnavailable
from fsref.nodecache import NodeCache, Span
from fsref.nodecache.shared import SharedFile, remove_leftovers
from tests.nodecache.contents import content

OBJECT = "env.test.0123456789abcdef/7"
DEADLINE_S = 60.0


class Gate:
    """Something that says when it is reached, and waits."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self.entered, self.go, self._then = threading.Event(), threading.Event(), then

    def __call__(self) -> None:
        self.entered.set()
        assert self.go.wait(DEADLINE_S)
        self._then()


class Rank:
    """A member with a store whose reads can be counted, stopped and broken."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.cache = NodeCache(folder, **{"name": "run", "bytes_max": 1 << 20, "wait_s": DEADLINE_S, **options})
        self.fetched: list[tuple[int, int]] = []
        self.before: Callable[[], object] = lambda: None

    def read(self, spans: list[Span], *, object_id: str = OBJECT, step: int = 0) -> int:
        """Fills the spans and checks every byte; returns how many came from others."""
        base = spans[0].object_offset - spans[0].start
        out = np.zeros(spans[-1].stop, np.uint8)

        def fetch(start: int, stop: int) -> None:
            self.fetched.append((base + start, base + stop))
            self.before()
            out[start:stop] = content(object_id, base + start, stop - start)

        shared = self.cache.fill(object_id, spans, out, fetch, step=step)
        for span in spans:
            assert np.array_equal(out[span.start : span.stop], content(object_id, span.object_offset, span.size)), span
        return shared


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[..., Rank]]:
    ranks: list[Rank] = []

    def join(**options: Any) -> Rank:
        ranks.append(Rank(tmp_path, **options))
        return ranks[-1]

    yield join
    for rank in ranks:
        rank.cache.close()
    assert list(tmp_path.iterdir()) == []


def spans(*pieces: tuple[int, int], base: int = 0) -> list[Span]:
    return [Span(n, base + start, start, size) for n, (start, size) in enumerate(pieces)]


def touching(count: int, size: int = 1000, *, first: int = 0) -> list[Span]:
    return spans(*((n * size, size) for n in range(count)), base=first * size)


def thread(work: Callable[[], object]) -> threading.Thread:
    started = threading.Thread(target=work, daemon=True)
    started.start()
    return started


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_what_one_member_fetched_the_others_do_not_fetch_again(node: Callable[..., Rank]) -> None:
    a, b, c = node(), node(), node()
    assert a.read(touching(5)) == 0
    assert b.read(touching(5)) == c.read(touching(5)) == a.read(touching(5)) == 5
    assert (a.fetched, b.fetched, c.fetched) == ([(0, 5000)], [], [])
    assert (b.cache.counters.hits, b.cache.counters.bytes_saved, a.cache.counters.fetched) == (5, 5000, 5)
    assert a.cache.bytes_held == 5000


def test_a_request_is_one_ranged_read_as_planned_and_what_is_missing_of_it_one_for_each_run(node: Callable[..., Rank]) -> None:
    a, b = node(), node()
    gapped = spans((0, 100), (150, 100), (250, 50), (400, 10))  # gaps are part of the plan's request
    a.read(gapped)
    assert a.fetched == [(0, 410)]
    b.read(touching(3, first=10))
    a.fetched.clear()
    a.read(touching(10, first=8))  # 8 9 [10 11 12] 13 .. 17
    assert a.fetched == [(8000, 10_000), (13_000, 18_000)]


def test_objects_offsets_and_sizes_do_not_mix(node: Callable[..., Rank]) -> None:
    a = node()
    for object_id in ("env.x/1", "env.x/2", "env.y/1"):
        assert a.read(touching(4), object_id=object_id) == 0
    assert a.read(spans((0, 999), (1000, 1001)), object_id="env.x/1") == 0
    assert a.read(touching(4), object_id="env.x/2") == 4


@pytest.mark.fault(40)
def test_a_chunk_is_fetched_once_however_many_want_it_at_the_same_time(node: Callable[..., Rank]) -> None:
    ranks = [node() for _ in range(6)]
    barrier = threading.Barrier(len(ranks))

    def work(rank: Rank) -> None:
        barrier.wait(DEADLINE_S)
        for first in range(0, 40, 4):
            rank.read(touching(8, first=first))  # each request shares half with the one before

    threads = [thread(lambda r=r: work(r)) for r in ranks]  # type: ignore[misc]
    for t in threads:
        t.join(DEADLINE_S)
        assert not t.is_alive()
    fetched = sorted(p for r in ranks for start, stop in r.fetched for p in range(start, stop, 1000))
    assert fetched == list(range(0, 44_000, 1000))


def test_who_waits_gets_the_bytes_when_they_are_there_and_fetches_its_own_meanwhile(node: Callable[..., Rank]) -> None:
    a, b = node(), node()
    gate = a.before = Gate()
    first = thread(lambda: a.read(touching(4)))
    assert gate.entered.wait(DEADLINE_S)
    second = thread(lambda: b.read(touching(8)))
    until(lambda: b.fetched == [(4000, 8000)])
    assert second.is_alive()
    gate.go.set()
    for t in (first, second):
        t.join(DEADLINE_S)
    assert b.fetched == [(4000, 8000)]
    assert (b.cache.counters.hits, b.cache.counters.waits, b.cache.counters.takeovers) == (4, 1, 0)


def test_two_that_want_each_others_chunks_do_not_wait_for_each_other(node: Callable[..., Rank]) -> None:
    a, b = node(), node()
    both = threading.Barrier(2)
    a.before = b.before = lambda: both.wait(DEADLINE_S)  # each is in its fetch before either ends
    first = thread(lambda: a.read(touching(2)))
    until(lambda: a.fetched != [])
    second = thread(lambda: b.read(touching(4)))
    for t in (first, second):
        t.join(DEADLINE_S)
        assert not t.is_alive()
    assert (a.fetched, b.fetched) == ([(0, 2000)], [(2000, 4000)])


@pytest.mark.fault(40)
def test_one_that_hangs_while_fetching_holds_the_others_up_to_the_deadline_only_and_its_late_bytes_are_not_left(
    node: Callable[..., Rank],
) -> None:
    a, b, c = node(), node(wait_s=0.2), node(wait_s=0.2)
    gate = a.before = Gate()
    hung = thread(lambda: a.read(touching(3)))
    assert gate.entered.wait(DEADLINE_S)
    assert b.read(touching(3)) == 0
    assert (b.fetched, b.cache.counters.takeovers, b.cache.counters.waits) == ([(0, 3000)], 3, 1)
    assert c.read(touching(3)) == 3  # what b left
    held = c.cache.bytes_held
    gate.go.set()
    hung.join(DEADLINE_S)
    assert c.cache.bytes_held == held == 3000


def test_a_fetch_that_failed_is_nobodys_but_its_own(node: Callable[..., Rank]) -> None:
    a, b = node(), node()

    def fail() -> None:
        raise ObjectMissing("not there for a")

    gate = Gate(then=fail)
    a.before = gate
    failures: list[type[BaseException]] = []

    def work() -> None:
        try:
            a.read(touching(4))
        except ObjectMissing:
            failures.append(ObjectMissing)

    first = thread(work)
    assert gate.entered.wait(DEADLINE_S)
    second = thread(lambda: b.read(touching(4)))
    gate.go.set()
    for t in (first, second):
        t.join(DEADLINE_S)
        assert not t.is_alive()
    assert failures == [ObjectMissing]
    assert b.fetched == [(0, 4000)]
    a.before = lambda: None
    assert a.read(touching(4)) == 4


def test_of_a_request_that_fails_midway_what_was_fetched_stays(node: Callable[..., Rank]) -> None:
    a, b = node(), node()
    b.read(touching(1, first=2))
    calls = []

    def second_fails() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise StoreUnavailable("later")

    a.before = second_fails
    with pytest.raises(StoreUnavailable):
        a.read(touching(5))
    assert b.read(touching(5)) == 3
    assert b.fetched == [(2000, 3000), (3000, 5000)]


def test_damaged_chunks_are_thrown_out(node: Callable[..., Rank]) -> None:
    a, b = node(), node()
    a.read(touching(3))
    a.cache.discard(OBJECT, touching(2))
    assert a.cache.counters.discards == 2
    assert b.read(touching(3)) == 1
    a.cache.discard(OBJECT, touching(2, first=50))  # never there
    assert a.cache.counters.discards == 2


def test_a_full_cache_makes_room_and_never_fails_a_read(node: Callable[..., Rank]) -> None:
    a, b = node(bytes_max=64 << 10), node(bytes_max=64 << 10)
    rng = np.random.default_rng(0)
    for n in range(400):
        size = int(rng.integers(1, 16 << 10))
        a.read(spans((0, size), (size, 300)), object_id=f"env.x/{n}")
        assert b.read(spans((0, size), (size, 300)), object_id=f"env.x/{n}") == 2
        assert 0 < a.cache.bytes_held <= 64 << 10
    assert a.cache.evictions > 600
    assert b.fetched == []
    assert a.cache.counters.bypasses == 0


def test_a_chunk_that_is_too_large_is_read_past_the_cache(node: Callable[..., Rank]) -> None:
    a, b = node(bytes_max=64 << 10), node(bytes_max=64 << 10)
    large = spans((0, 500), (500, 40_000), (40_500, 500))
    assert a.read(large) == 0
    assert b.read(large) == 2
    assert b.fetched == [(500, 40_500)]
    assert (a.cache.counters.bypasses, b.cache.counters.bypasses) == (1, 1)


def test_a_step_is_freed_when_every_member_has_released_it(node: Callable[..., Rank]) -> None:
    a, b = node(), node()
    for step in (1, 2):
        a.read(touching(4), object_id=f"env.x/{step}", step=step)
    a.cache.release(1)
    assert b.read(touching(4), object_id="env.x/1", step=1) == 4
    b.cache.release(1)
    assert a.cache.bytes_held == 4000
    assert a.read(touching(4), object_id="env.x/2", step=2) == 4
    assert a.read(touching(4), object_id="env.x/1", step=2) == 0
    a.cache.release(2)
    b.cache.release(2)
    assert a.cache.bytes_held == 0
    assert a.cache.evictions == 0


def test_a_member_that_left_is_not_waited_for(node: Callable[..., Rank]) -> None:
    a, b = node(), node()
    a.read(touching(4), step=1)
    a.cache.release(1)
    assert a.cache.bytes_held == 4000
    b.cache.close()
    a.cache.release(1)
    assert a.cache.bytes_held == 0


def test_memory_of_released_steps_goes_back_to_the_system(node: Callable[..., Rank]) -> None:
    a = node(bytes_max=8 << 20)
    empty = a.cache.path.stat().st_blocks
    for step in range(20):
        a.read(touching(30, 100_000), object_id=f"env.x/{step}", step=step)
        assert a.cache.path.stat().st_blocks - empty >= 3_000_000 // 512
        a.cache.release(step)
        assert a.cache.path.stat().st_blocks - empty <= 16  # the pages that the next bytes share with the last


@pytest.mark.parametrize("bytes_max", [64 << 10, 1 << 20])
def test_thousands_of_small_objects_leave_descriptors_threads_and_memory_flat(node: Callable[..., Rank], bytes_max: int) -> None:
    a, b = node(bytes_max=bytes_max), node(bytes_max=bytes_max)

    def some(start: int, stop: int) -> None:
        for n in range(start, stop):
            a.read(touching(2, 700), object_id=f"env.x/{n}", step=n // 100)
            b.read(touching(2, 700), object_id=f"env.x/{n}", step=n // 100)
            a.fetched.clear()
            if n % 100 == 99:
                a.cache.release(n // 100)
                b.cache.release(n // 100)

    some(0, 500)
    before = descriptors(), threading.active_count(), resident_kib()
    some(500, 5000)
    after = descriptors(), threading.active_count(), resident_kib()
    assert after[:2] == before[:2]
    assert after[2] - before[2] < 4096
    assert b.cache.counters.hits == 10_000
    assert a.cache.path.stat().st_size == a.cache._file.geometry.file_bytes


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def resident_kib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") // 1024


def test_after_closing_reads_go_past_the_cache_and_a_read_that_is_under_way_ends(node: Callable[..., Rank]) -> None:
    a, b = node(), node()
    gate = a.before = Gate()
    late = thread(lambda: a.read(touching(4)))
    assert gate.entered.wait(DEADLINE_S)
    a.cache.close()
    assert b.read(touching(4)) == 0  # its claims ended with its membership
    gate.go.set()
    late.join(DEADLINE_S)
    assert not late.is_alive()
    before = descriptors()
    a.cache.close()
    assert a.read(touching(4)) == 0
    assert a.cache.counters.bypasses >= 4
    assert descriptors() == before


def test_a_forked_child_reads_past_the_cache(node: Callable[..., Rank]) -> None:
    a = node()
    a.read(touching(2))
    child = os.fork()
    if child == 0:  # what is true in here is said by the exit code
        passed = a.read(touching(2)) == 0 and a.fetched[-1] == (0, 2000)
        a.cache.close()
        os._exit(0 if passed and a.cache.path.exists() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert a.read(touching(2)) == 2


def test_ranks_with_other_sizes_are_refused(node: Callable[..., Rank]) -> None:
    node()
    with pytest.raises(ConfigError, match="in use with another size"):
        node(bytes_max=1 << 21)


@pytest.mark.parametrize("name", ["", "a/b", "..\n", "x" * 200, "a b"])
def test_a_name_that_is_no_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a node cache"):
        NodeCache(tmp_path, name=name, bytes_max=1 << 20, wait_s=1)


def test_the_file_is_the_users_alone(node: Callable[..., Rank]) -> None:
    info = node().cache.path.stat()
    assert stat.S_IMODE(info.st_mode) == 0o600
    assert info.st_uid == os.geteuid()


@pytest.mark.parametrize("trap", ["symlink", "folder", "fifo", "open", "two names"])
def test_a_file_that_others_put_there_or_can_open_is_refused(tmp_path: Path, trap: str) -> None:
    path, victim = tmp_path / f"fsref-cache-{os.geteuid()}-run", tmp_path / "victim"
    victim.write_bytes(b"precious")
    victim.chmod(0o600)
    match trap:
        case "symlink":
            path.symlink_to(victim)
        case "folder":
            path.mkdir()
        case "fifo":
            os.mkfifo(path, 0o600)
        case "open":
            path.touch(0o600)
            path.chmod(0o620)
        case _:
            path.hardlink_to(victim)
    with pytest.raises((StoreDenied, OSError)) as caught:
        NodeCache(tmp_path, name="run", bytes_max=1 << 20, wait_s=1)
    assert isinstance(caught.value, StoreDenied) or trap == "folder"
    assert victim.read_bytes() == b"precious"


@pytest.mark.parametrize("left", [b"", b"fsrefNC1", bytes(8192), os.urandom(1 << 16)], ids=["empty", "torn", "zeros", "noise"])
def test_what_a_dead_run_of_this_name_left_is_made_anew(tmp_path: Path, left: bytes) -> None:
    path = tmp_path / f"fsref-cache-{os.geteuid()}-run"
    path.write_bytes(left)
    path.chmod(0o600)
    rank = Rank(tmp_path)
    assert rank.read(touching(3)) == 0
    assert rank.read(touching(3)) == 3
    rank.cache.close()
    assert not path.exists()


def test_what_dead_runs_left_is_removed_by_whoever_comes_next_and_nothing_else(tmp_path: Path) -> None:
    uid = os.geteuid()
    alive = Rank(tmp_path, name="alive")
    for name in (f"fsref-cache-{uid}-dead", f"fsref-cache-{uid}-dead2", f"fsref-cache-{uid + 1}-other", "something"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / f"fsref-cache-{uid}-link").symlink_to(tmp_path / "something")
    with NodeCache(tmp_path, name="new", bytes_max=1 << 20, wait_s=1):
        left = {p.name for p in tmp_path.iterdir()}
    assert left == {
        f"fsref-cache-{uid}-alive",
        f"fsref-cache-{uid}-new",
        f"fsref-cache-{uid}-link",
        f"fsref-cache-{uid + 1}-other",
        "something",
    }
    assert remove_leftovers(tmp_path, but=alive.cache.path) == 0
    alive.cache.close()


def test_members_get_the_lowest_free_numbers_and_a_new_one_has_nothing_of_the_one_before(node: Callable[..., Rank]) -> None:
    a, b = node(), node()
    gate = b.before = Gate()
    stuck = thread(lambda: b.read(touching(2)))
    assert gate.entered.wait(DEADLINE_S)
    b.cache.close()
    again = node()
    assert (a.cache.member, again.cache.member) == (0, 1)
    assert a.read(touching(2)) == 0  # the claim was the other member 1's
    assert a.cache.counters.takeovers == 2
    gate.go.set()
    stuck.join(DEADLINE_S)


def test_a_change_that_did_not_end_empties_the_table_and_old_bytes_are_never_taken_for_new(node: Callable[..., Rank]) -> None:
    a, b = node(), node()
    a.read(touching(4))
    with pytest.raises(RuntimeError):
        _die_in_the_middle(a)
    assert b.read(touching(4)) == 0
    assert a.read(touching(4)) == 4
    with b.cache._file.locked() as table:
        assert table is not None
        assert table.resets == 2  # the first is the one of the first member


def _die_in_the_middle(rank: Rank) -> None:
    with rank.cache._file.locked() as table:
        assert table is not None
        raise RuntimeError("as if it had died here")


def test_a_stopped_holder_of_the_lock_costs_one_bounded_wait(node: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsref.nodecache.shared.LOCK_S", 0.05)
    a, b = node(), node()
    a.read(touching(2))
    with a.cache._file.locked():
        assert b.read(touching(2)) == 0
        b.read(touching(2))
    assert (b.fetched, b.cache.counters.bypasses) == ([(0, 2000)] * 2, 4)


def test_no_room_for_bytes_is_a_read_past_the_cache(node: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = node(), node()

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fsref.nodecache.spans.os.pwritev", full)
    assert a.read(touching(3)) == b.read(touching(3)) == 0
    assert (a.fetched, b.fetched) == ([(0, 3000)], [(0, 3000)])
    assert a.cache.counters.bypasses == 3
    monkeypatch.undo()
    assert a.read(touching(3)) == 0
    assert b.read(touching(3)) == 3


def test_the_right_bytes_come_whoever_evicts_releases_and_discards_at_the_same_time(node: Callable[..., Rank]) -> None:
    """``read`` compares every byte with what the store has, under a cache that is much too small."""
    ranks = [node(bytes_max=48 << 10, wait_s=5) for _ in range(4)]
    wrong: list[BaseException] = []

    def work(rank: Rank, seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for n in range(250):
                first, count, size = int(rng.integers(0, 12)), int(rng.integers(1, 7)), int(rng.choice([300, 2000, 9000]))
                object_id = f"env.x/{rng.integers(0, 3)}"
                rank.read(touching(count, size, first=first), object_id=object_id, step=n // 50)
                if n % 20 == seed:
                    rank.cache.discard(object_id, touching(count, size, first=first))
                if n % 50 == 49:
                    rank.cache.release(n // 50)
        except BaseException as e:
            wrong.append(e)
            raise

    threads = [thread(lambda r=r, n=n: work(r, n)) for n, r in enumerate(ranks)]  # type: ignore[misc]
    for t in threads:
        t.join(DEADLINE_S)
        assert not t.is_alive()
    assert wrong == []
    assert sum(r.cache.counters.hits for r in ranks) > 100


def test_members_of_a_file_that_was_removed_and_of_the_new_one_do_not_meet(tmp_path: Path) -> None:
    first = SharedFile(tmp_path, name="run", bytes_max=1 << 20)
    first.path.unlink()  # somebody cleaned the folder
    second = SharedFile(tmp_path, name="run", bytes_max=1 << 20)
    assert first.members() == second.members() == [0]
    first.close()
    assert second.path.exists()
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_damage_is_found_by_readers_not_here(node: Callable[..., Rank]) -> None:
    a = node()
    a.read(touching(1))
    os.pwrite(a.cache._file.fd, b"\xff" * 10, a.cache._file.geometry.data_at)
    out = np.zeros(1000, np.uint8)
    assert a.cache.fill(OBJECT, touching(1), out, lambda _a, _b: pytest.fail("it is there"), step=0) == 1
    assert not np.array_equal(out, content(OBJECT, 0, 1000))
