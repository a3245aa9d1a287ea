"""Memory for arrays that is made once and used again: a block comes back when nothing refers to it any more.

Owns which block is whose. ``BufferPool.empty`` makes arrays as ``np.empty`` does. When the last array, view or tensor over an array's
memory is gone, its block is lent again; so nobody has to give anything back, memory that somebody still holds is never written to, and a
fetch that cannot be stopped keeps what it may still write to for itself. What uses memory without referring to it, as a copy to a device
that is under way does, has to be waited for before the last reference goes. Refuses to know what stands in a block, and torch: where
pinned memory is wanted, ``allocate`` makes it.

Fresh memory costs a page fault for every 4 KiB of it; memory that is used again costs none.
"""

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

Allocate = Callable[[int], NDArray[np.uint8]]
"""Makes a block: uint8 [n], writable, aligned for every dtype."""
Empty = Callable[[Sequence[int], DTypeLike], NDArray[Any]]
"""Makes a writable C-contiguous array of a shape and dtype with anything in it: ``np.empty``, or ``BufferPool.empty``."""
PAGE: Final = 4096
BLOCK_BYTES_MIN: Final = 64 << 10
"""Smaller arrays are ordinary ones: the allocator of the language reuses such memory by itself."""
_POISON: Final = 0xFF


def pageable(byte_count: int) -> NDArray[np.uint8]:
    """A block of ordinary memory, at a page's start."""
    block = np.empty(byte_count + PAGE, np.uint8)
    start = -block.ctypes.data % PAGE
    return block[start : start + byte_count]


@dataclass
class BufferCounters:
    """What a pool did; plain numbers that a metrics hook may copy."""

    blocks_made: int = 0
    blocks_reused: int = 0
    bytes_lent: int = 0
    """Of blocks that somebody refers to, as of the last request."""
    bytes_idle: int = 0
    """Of blocks that wait for the next request."""
    bytes_lent_peak: int = 0


class _Loan:
    """What an array of a block refers to; its end gives the block back."""

    def __init__(self, block: NDArray[np.uint8], size: int) -> None:
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (size,), "data": (block.ctypes.data, False)}


class BufferPool:
    """Blocks that are lent to arrays. Thread-safe. Holds at most as much as was lent at one time, rounded up to blocks."""

    def __init__(self, *, allocate: Allocate = pageable, poison: bool = False) -> None:
        """``poison``: fills what comes back with 0xFF bytes (-1, 255, NaN), so that a use of memory that nobody refers to is seen."""
        self._allocate, self._poison = allocate, poison
        self._lock = threading.Lock()
        self._idle: dict[int, list[NDArray[np.uint8]]] = {}
        # The end of a loan can come at any moment, also inside this class: it must not need the lock.
        self._returned: deque[NDArray[np.uint8]] = deque()
        self.counters = BufferCounters()

    def empty(self, shape: Sequence[int], dtype: DTypeLike, /) -> NDArray[Any]:
        """A writable C-contiguous array with anything in it. Arrays below ``BLOCK_BYTES_MIN`` bytes are not of the pool."""
        kind, dims = np.dtype(dtype), tuple(shape)
        size = math.prod(dims) * kind.itemsize
        if size < BLOCK_BYTES_MIN:
            return np.empty(dims, kind)
        block = self._block(block_bytes(size))
        loan = _Loan(block, size)
        weakref.finalize(loan, self._returned.append, block).atexit = False
        return np.asarray(loan).view(kind).reshape(dims)

    def trim(self) -> None:
        """Gives all idle blocks back to the system."""
        with self._lock:
            self._collect()
            self._idle.clear()
            self.counters.bytes_idle = 0

    def _block(self, size: int) -> NDArray[np.uint8]:
        with self._lock:
            self._collect()
            counters, stack = self.counters, self._idle.get(size)
            if stack:
                block = stack.pop()
                counters.blocks_reused += 1
                counters.bytes_idle -= size
            else:
                self._drop_idle(size)
                block = self._allocate(size)
                counters.blocks_made += 1
            counters.bytes_lent += size
            counters.bytes_lent_peak = max(counters.bytes_lent_peak, counters.bytes_lent)
            return block

    def _collect(self) -> None:
        """Takes back what has come back."""
        while self._returned:
            block = self._returned.popleft()
            if self._poison:
                block.fill(_POISON)
            self.counters.bytes_lent -= len(block)
            self.counters.bytes_idle += len(block)
            self._idle.setdefault(len(block), []).append(block)

    def _drop_idle(self, size: int) -> None:
        """A new block takes the place of idle ones, the largest first, so that sizes that nobody asks for again do not stay."""
        for other in sorted(self._idle, reverse=True):
            stack = self._idle[other]
            while stack and size > 0:
                stack.pop()
                self.counters.bytes_idle -= other
                size -= other


def block_bytes(byte_count: int) -> int:
    """The size of the block that serves ``byte_count``: steps of an eighth of its power of two, so that arrays of like size share blocks
    and at most a seventh of a block is left over.
    """
    if byte_count <= BLOCK_BYTES_MIN:
        return BLOCK_BYTES_MIN
    step = max(PAGE, 1 << ((byte_count - 1).bit_length() - 4))
    return -(-byte_count // step) * step
