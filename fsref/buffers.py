"""Memory for arrays that is made once and used again: blocks by size, lent out through leases, one lease for a step's arrays.

Owns which block is whose. A lease hands out writable arrays and takes all of them back at once when it is released; nothing is taken
back before, so an array of a lease that nobody releases is simply memory that the garbage collector frees. Refuses to know what stands in a
block, torch and CUDA: where pinned memory is wanted, ``allocate`` makes it.

After ``release`` another step may write where an array points to. A pool with ``poison`` fills what comes back with 0xFF bytes (-1,
255, NaN), so that a use after the release is seen.
"""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from fsref.errors import PayloadError

Allocate = Callable[[int], NDArray[np.uint8]]
"""Makes a block: uint8 [n], writable, aligned for every dtype."""
Empty = Callable[[Sequence[int], DTypeLike], NDArray[Any]]
"""Makes a writable C-contiguous array of a shape and dtype with anything in it: ``np.empty``, or ``Lease.empty``."""
BLOCK_BYTES_MIN: Final = 4096
_POISON: Final = 0xFF


def pageable(byte_count: int) -> NDArray[np.uint8]:
    """A block of ordinary memory, at a page's start."""
    block = np.empty(byte_count + BLOCK_BYTES_MIN, np.uint8)
    start = -block.ctypes.data % BLOCK_BYTES_MIN
    return block[start : start + byte_count]


@dataclass
class BufferCounters:
    """What a pool did; plain numbers that a metrics hook may copy."""

    blocks_made: int = 0
    blocks_reused: int = 0
    bytes_lent: int = 0
    """In leases that were not released."""
    bytes_idle: int = 0
    """Kept for the next lease."""
    bytes_lent_peak: int = 0


class BufferPool:
    """Blocks that come back when a lease is released. Thread-safe."""

    def __init__(self, *, bytes_idle_max: int, allocate: Allocate = pageable, poison: bool = False) -> None:
        """``bytes_idle_max``: idle blocks beyond it are given back to the system; 0 keeps none."""
        self._allocate, self._poison = allocate, poison
        self._bytes_idle_max = bytes_idle_max
        self._lock = threading.Lock()
        self._idle: dict[int, list[NDArray[np.uint8]]] = {}
        self.counters = BufferCounters()

    def lease(self) -> "Lease":
        """A new, empty lease."""
        return Lease(self)

    def take(self, byte_count: int) -> NDArray[np.uint8]:
        """For leases: a block of at least ``byte_count`` bytes."""
        size = block_bytes(byte_count)
        with self._lock:
            counters, stack = self.counters, self._idle.get(size)
            block = stack.pop() if stack else None
            if block is None:
                counters.blocks_made += 1
            else:
                counters.blocks_reused += 1
                counters.bytes_idle -= size
            counters.bytes_lent += size
            counters.bytes_lent_peak = max(counters.bytes_lent_peak, counters.bytes_lent)
        if block is not None:
            return block
        try:
            return self._allocate(size)
        except BaseException:
            with self._lock:
                self.counters.bytes_lent -= size
            raise

    def give_back(self, blocks: Sequence[NDArray[np.uint8]]) -> None:
        """For leases: blocks that nobody uses any more."""
        if self._poison:
            for block in blocks:
                block.fill(_POISON)
        with self._lock:
            for block in blocks:
                self.counters.bytes_lent -= len(block)
                if self.counters.bytes_idle + len(block) <= self._bytes_idle_max:
                    self.counters.bytes_idle += len(block)
                    self._idle.setdefault(len(block), []).append(block)

    def forget(self, blocks: Sequence[NDArray[np.uint8]]) -> None:
        """For leases: blocks that must never be lent again."""
        with self._lock:
            self.counters.bytes_lent -= sum(len(b) for b in blocks)

    def trim(self) -> None:
        """Gives all idle blocks back to the system."""
        with self._lock:
            self._idle.clear()
            self.counters.bytes_idle = 0


class Lease:
    """The arrays of one user, usually of one step. Thread-safe; a context manager that releases."""

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._blocks: list[NDArray[np.uint8]] = []
        self._before: list[Callable[[], None]] = []
        self._over = False

    @property
    def byte_count(self) -> int:
        """Bytes of its blocks."""
        with self._lock:
            return sum(len(b) for b in self._blocks)

    def empty(self, shape: Sequence[int], dtype: DTypeLike, /) -> NDArray[Any]:
        """A writable C-contiguous array with anything in it, valid until ``release``. Raises ``PayloadError`` after that."""
        kind = np.dtype(dtype)
        dims = tuple(shape)
        size = math.prod(dims) * kind.itemsize
        if size == 0:
            return np.empty(dims, kind)
        block = self._pool.take(size)
        with self._lock:
            if not self._over:
                self._blocks.append(block)
                return block[:size].view(kind).reshape(dims)
        self._pool.give_back([block])
        raise PayloadError(f"an array of {size} bytes was asked of a lease that was released: take a new lease for each step")

    def zeros(self, shape: Sequence[int], dtype: DTypeLike, /) -> NDArray[Any]:
        """``empty``, filled with zeros."""
        out = self.empty(shape, dtype)
        out[...] = 0
        return out

    def before_release(self, call: Callable[[], None]) -> None:
        """``release`` calls it first: for a copy to a device that still reads the arrays (``event.synchronize``)."""
        with self._lock:
            self._before.append(call)

    def abandon(self) -> None:
        """Ends the lease without giving a block back: something that cannot be stopped may still write to them."""
        blocks, _ = self._end()
        self._pool.forget(blocks)

    def release(self) -> None:
        """Gives every array back; none of them may be used any more. Idempotent."""
        blocks, before = self._end()
        for call in before:
            call()
        self._pool.give_back(blocks)

    def _end(self) -> tuple[list[NDArray[np.uint8]], list[Callable[[], None]]]:
        with self._lock:
            self._over = True
            blocks, before = self._blocks, self._before
            self._blocks, self._before = [], []
        return blocks, before

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


def block_bytes(byte_count: int) -> int:
    """The size of the block that serves ``byte_count``: steps of an eighth of its power of two, so that steps of like size share blocks
    and at most a seventh of a block is left over.
    """
    if byte_count <= BLOCK_BYTES_MIN:
        return BLOCK_BYTES_MIN
    step = max(BLOCK_BYTES_MIN, 1 << ((byte_count - 1).bit_length() - 4))
    return -(-byte_count // step) * step
