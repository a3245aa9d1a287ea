"""Memory that is used again: never before its lease is released, always after, and what was done with it can be counted."""

import gc
import math
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fsref.buffers import BLOCK_BYTES_MIN, BufferPool, block_bytes
from fsref.errors import PayloadError

DTYPES = ["uint8", "int16", "int32", "int64", "float16", "float32", "float64"]


def pool(**options: Any) -> BufferPool:
    return BufferPool(**{"bytes_idle_max": 1 << 30, **options})


@given(st.integers(1, 1 << 40))
def test_a_block_holds_what_was_asked_for_and_wastes_at_most_a_seventh_of_it(byte_count: int) -> None:
    size = block_bytes(byte_count)
    assert size >= byte_count
    assert size % BLOCK_BYTES_MIN == 0
    assert size <= max(byte_count * 8 / 7, byte_count + BLOCK_BYTES_MIN)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (7, 3, 2), (5000, 4)])
def test_arrays_are_writable_contiguous_aligned_and_of_the_shape_asked_for(dtype: str, shape: tuple[int, ...]) -> None:
    with pool().lease() as lease:
        array = lease.empty(shape, dtype)
        assert (array.shape, array.dtype.name) == (shape, dtype)
        assert array.flags.writeable
        assert array.flags.c_contiguous
        assert array.flags.aligned
        assert math.prod(shape) == 0 or array.ctypes.data % BLOCK_BYTES_MIN == 0
        array[...] = 1
        assert np.all(lease.zeros(shape, dtype) == 0)


def test_a_block_is_lent_again_only_after_its_lease_was_released() -> None:
    buffers = pool()
    first, second = buffers.lease(), buffers.lease()
    a = first.empty((10_000,), "int32")
    b = second.empty((10_000,), "int32")
    assert not np.shares_memory(a, b)
    first.release()
    c = second.empty((9_990,), "int32")  # of the same block size
    assert np.shares_memory(a, c)
    assert not np.shares_memory(b, c)
    assert (buffers.counters.blocks_made, buffers.counters.blocks_reused) == (2, 1)
    second.release()
    assert buffers.counters.bytes_lent == 0
    assert buffers.counters.bytes_idle == 2 * block_bytes(40_000)


def test_a_steady_user_makes_no_more_blocks_than_its_first_steps_needed() -> None:
    buffers, rng = pool(), np.random.default_rng(0)
    for _ in range(3):  # two steps at a time
        held = [buffers.lease(), buffers.lease()]
        for lease in held:
            for size in range(1, 9):
                lease.empty((size * 100_000,), "uint8")
        for lease in held:
            lease.release()
    made = buffers.counters.blocks_made
    assert made == 16
    for _ in range(200):
        with buffers.lease() as lease:
            for size in rng.permutation(np.arange(1, 9)):
                lease.empty((int(size) * 100_000 - int(rng.integers(0, 100)),), "uint8")
    assert buffers.counters.blocks_made == made
    assert buffers.counters.blocks_reused == 2 * 16 + 200 * 8


def test_releasing_twice_gives_a_block_back_once() -> None:
    buffers = pool()
    lease = buffers.lease()
    a = lease.empty((5000,), "uint8")
    lease.release()
    lease.release()
    b, c = buffers.lease().empty((5000,), "uint8"), buffers.lease().empty((5000,), "uint8")
    assert np.shares_memory(a, b)
    assert not np.shares_memory(b, c)


def test_a_released_lease_lends_nothing_more() -> None:
    lease = pool().lease()
    lease.release()
    with pytest.raises(PayloadError, match="take a new lease for each step"):
        lease.empty((1,), "uint8")


def test_use_after_release_is_seen_where_the_pool_poisons() -> None:
    buffers = pool(poison=True)
    lease = buffers.lease()
    ids, logprobs = lease.zeros((100,), "int32"), lease.zeros((100,), "float32")
    experts = lease.zeros((10, 4, 2), "uint8")
    lease.release()
    assert np.all(ids == -1)
    assert np.all(np.isnan(logprobs))
    assert np.all(experts == 255)


def test_idle_blocks_beyond_the_limit_go_back_to_the_system() -> None:
    buffers = pool(bytes_idle_max=block_bytes(100_000))
    lease = buffers.lease()
    watched = [weakref.ref(_base(lease.empty((100_000,), "uint8"))) for _ in range(3)]
    lease.release()
    gc.collect()
    assert buffers.counters.bytes_idle == block_bytes(100_000)
    assert [w() is None for w in watched].count(True) == 2
    buffers.trim()
    gc.collect()
    assert all(w() is None for w in watched)


def test_arrays_of_a_lease_that_nobody_releases_stay_valid_and_are_freed_with_the_last_of_them() -> None:
    buffers = pool()
    array = buffers.lease().zeros((100_000,), "uint8")  # the lease itself is gone
    gc.collect()
    other = buffers.lease().empty((100_000,), "uint8")
    assert not np.shares_memory(array, other)
    assert np.all(array == 0)
    watched = weakref.ref(_base(array))
    del array
    gc.collect()
    assert watched() is None


def test_what_still_reads_the_arrays_is_waited_for_before_they_are_lent_again() -> None:
    buffers = pool(poison=True)
    lease = buffers.lease()
    source = lease.zeros((5000,), "uint8")
    copied: list[int] = []
    lease.before_release(lambda: copied.append(int(source.sum())))  # as a copy that ends only when it is waited for
    lease.release()
    assert copied == [0]


def test_blocks_that_a_stuck_thread_may_still_write_to_are_never_lent_again() -> None:
    buffers = pool()
    lease = buffers.lease()
    stuck = lease.empty((100_000,), "uint8")
    lease.abandon()
    assert buffers.counters.bytes_lent == buffers.counters.bytes_idle == 0
    assert not any(np.shares_memory(stuck, buffers.lease().empty((100_000,), "uint8")) for _ in range(3))


def test_a_failed_allocation_leaves_the_counts_as_they_were() -> None:
    def full(byte_count: int) -> NDArray[np.uint8]:
        raise MemoryError(byte_count)

    buffers = pool(allocate=full)
    with pytest.raises(MemoryError):
        buffers.lease().empty((5000,), "uint8")
    assert buffers.counters.bytes_lent == 0


def test_threads_never_get_the_same_block_at_once() -> None:
    buffers, wrong, barrier = pool(), [], threading.Barrier(4)

    def work(number: int) -> None:
        barrier.wait(30)
        for _ in range(300):
            with buffers.lease() as lease:
                arrays = [lease.empty((20_000,), "uint8") for _ in range(3)]
                for array in arrays:
                    array.fill(number)
                if any(not np.all(array == number) for array in arrays):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert buffers.counters.blocks_made <= 12
    assert buffers.counters.bytes_lent == 0


def _base(array: NDArray[Any]) -> NDArray[Any]:
    """The array that owns the memory."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
