"""Memory that is used again: never while anything refers to it, and what was done with it can be counted."""

import gc
import math
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fsref.buffers import BLOCK_BYTES_MIN, PAGE, BufferPool, block_bytes

DTYPES = ["uint8", "int16", "int32", "int64", "float16", "float32", "float64"]
LARGE = 2 * BLOCK_BYTES_MIN


@given(st.integers(BLOCK_BYTES_MIN, 1 << 40))
def test_a_block_holds_what_was_asked_for_and_wastes_at_most_a_seventh_of_it(byte_count: int) -> None:
    size = block_bytes(byte_count)
    assert byte_count <= size <= byte_count * 8 / 7 + PAGE
    assert size % PAGE == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (7, 3, 2), (50_000, 4)])
def test_arrays_are_writable_contiguous_aligned_and_of_the_shape_asked_for(dtype: str, shape: tuple[int, ...]) -> None:
    array = BufferPool().empty(shape, dtype)
    assert (array.shape, array.dtype.name) == (shape, dtype)
    assert array.flags.writeable
    assert array.flags.c_contiguous
    assert array.flags.aligned
    assert math.prod(shape) < 50_000 or array.ctypes.data % PAGE == 0
    array[...] = 1
    assert np.all(array == 1)


def address(array: NDArray[Any]) -> int:
    return int(array.ctypes.data)


def test_a_block_is_lent_again_when_its_array_is_gone_and_not_before() -> None:
    pool = BufferPool()
    a, b = pool.empty((LARGE,), "uint8"), pool.empty((LARGE,), "uint8")
    was = address(a)
    c = pool.empty((LARGE,), "uint8")
    assert len({address(x) for x in (a, b, c)}) == 3
    del a
    d = pool.empty((LARGE // 4 - 3,), "int32")  # of the same block size
    assert address(d) == was
    assert (pool.counters.blocks_made, pool.counters.blocks_reused) == (3, 1)


HOLDS: dict[str, Callable[[NDArray[Any]], Any]] = {
    "slice": lambda array: array[100:200],
    "view": lambda array: array.view("int32")[5:],
    "reshape": lambda array: array.reshape(2, -1)[1:],
    "memoryview": memoryview,
    "column": lambda array: array.reshape(-1, 16)[:, 3],
}


@pytest.mark.parametrize("hold", HOLDS)
def test_anything_that_shares_the_memory_keeps_it(hold: str) -> None:
    pool = BufferPool(poison=True)
    array = pool.empty((LARGE,), "uint8")
    array[:] = 7
    kept = HOLDS[hold](array)
    was = address(array)
    del array
    gc.collect()
    others = [pool.empty((LARGE,), "uint8") for _ in range(3)]
    for other in others:
        other[:] = 9
    assert was not in {address(o) for o in others}
    assert bytes(kept)[:4] == b"\x07" * 4
    del kept
    assert address(pool.empty((LARGE,), "uint8")) == was


@pytest.mark.torch
def test_a_tensor_keeps_the_memory_too_and_can_be_written_to() -> None:
    import torch

    pool = BufferPool(poison=True)
    array = pool.empty((LARGE,), "int32")
    array[:] = 7
    was = address(array)
    tensor = torch.from_numpy(array)[10:].view(2, -1)[1]
    del array
    gc.collect()
    assert address(pool.empty((LARGE,), "int32")) != was
    assert bool((tensor == 7).all())
    tensor += 1
    del tensor
    assert address(pool.empty((LARGE,), "int32")) == was


def test_a_steady_user_makes_no_more_blocks_than_its_first_steps_needed() -> None:
    pool, rng = BufferPool(), np.random.default_rng(0)
    held: list[list[NDArray[Any]]] = []
    for _ in range(3):
        held = [*held[-1:], [pool.empty((size * 100_000,), "uint8") for size in range(1, 9)]]  # two steps at a time
    made, lent = pool.counters.blocks_made, pool.counters.bytes_lent_peak
    assert made == 3 * 8  # the new step is there before the older one of the two goes
    for _ in range(200):
        held = [
            *held[-1:],
            [pool.empty((int(s) * 100_000 - int(rng.integers(0, 100)),), "uint8") for s in rng.permutation(np.arange(1, 9))],
        ]
    assert pool.counters.blocks_made == made
    assert pool.counters.bytes_lent_peak == lent


def test_sizes_that_are_not_asked_for_again_make_room_for_those_that_are() -> None:
    pool, rng = BufferPool(), np.random.default_rng(1)
    for _ in range(300):
        arrays = [pool.empty((int(rng.integers(LARGE, 20 * LARGE)),), "uint8") for _ in range(3)]
        assert pool.counters.bytes_lent + pool.counters.bytes_idle <= 2 * 3 * block_bytes(20 * LARGE)
        del arrays


def test_memory_that_nobody_refers_to_can_be_seen_to_be_used() -> None:
    pool = BufferPool(poison=True)
    array = pool.empty((LARGE,), "float32")
    array[:] = 1.0
    raw = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_float * LARGE).from_address(address(array)))  # type: ignore[attr-defined]
    del array
    other = pool.empty((LARGE,), "float32")
    assert address(other) == address(raw)
    assert np.all(np.isnan(raw))


def test_idle_blocks_go_back_to_the_system_when_they_are_trimmed() -> None:
    made: list[weakref.ref[NDArray[np.uint8]]] = []

    def allocate(byte_count: int) -> NDArray[np.uint8]:
        block = np.empty(byte_count, np.uint8)
        made.append(weakref.ref(block))
        return block

    pool = BufferPool(allocate=allocate)
    arrays = [pool.empty((LARGE,), "uint8") for _ in range(3)]
    kept = arrays.pop()
    del arrays
    pool.trim()
    gc.collect()
    assert [m() is None for m in made].count(True) == 2
    assert pool.counters.bytes_idle == 0
    del kept
    pool.trim()
    assert all(m() is None for m in made)
    assert pool.counters.bytes_lent == 0


def test_a_failed_allocation_leaves_the_counts_as_they_were() -> None:
    def full(byte_count: int) -> NDArray[np.uint8]:
        raise MemoryError(byte_count)

    pool = BufferPool(allocate=full)
    with pytest.raises(MemoryError):
        pool.empty((LARGE,), "uint8")
    assert (pool.counters.bytes_lent, pool.counters.blocks_made) == (0, 0)


def test_threads_never_get_the_same_block_at_once() -> None:
    pool, wrong, barrier = BufferPool(), [], threading.Barrier(4)

    def work(number: int) -> None:
        barrier.wait(30)
        for _ in range(300):
            arrays = [pool.empty((LARGE,), "uint8") for _ in range(3)]
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
    assert pool.counters.blocks_made <= 4 * 6
