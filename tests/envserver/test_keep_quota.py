"""A keep that waits for room under the run's quota, and is given up meanwhile."""

from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError, Future
from pathlib import Path

import numpy as np
import pytest

from fsref.envserver.keep import KeepJob
from fsref.episodes.branches import Branch
from fsref.store.posix import PosixStore
from fsref.writer import Writer
from tests.test_quota import CountingStore, arrays, blocked, thread


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CountingStore]:
    with CountingStore(tmp_path / "run") as made:
        yield made


@pytest.mark.payload("F20")
def test_a_keep_that_is_given_up_while_it_waits_ends_at_once_and_leaves_nothing(store: CountingStore) -> None:
    discarded: list[str] = []

    class Ledger:
        def discard(self, object_ids: Iterable[str], reason: str = "never_sent") -> int:
            del reason
            discarded.extend(object_ids)
            return 0

    jobs: list[KeepJob] = []
    flags = np.ones(100, np.bool_)
    branch = Branch("t", 0, np.zeros(100, np.int32), flags, flags, np.zeros(100, np.float32), ())
    with thread() as pool:

        def start(writer: Writer) -> Future[object]:
            jobs.append(KeepJob(lambda: iter([(branch, arrays())]), writer, Ledger()))
            return pool.submit(jobs[0].run)

        own, future = blocked(store, start)
        jobs[0].give_up()
        assert isinstance(future.exception(timeout=60), CancelledError)
    assert (discarded, own.counters["quota_waiting"], len(list(PosixStore.list(store, "obj")))) == ([], 0, 1)
