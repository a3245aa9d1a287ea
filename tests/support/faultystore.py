"""A store that wraps another one and breaks chosen operations of it; everything else passes through.

What it can do: an error before the operation or after it was carried out (a rename that reports failure but happened), an error in the
middle of a listing, an operation that hangs until the test lets it go, create-only publishing that is ignored, objects that show late.
"""

import re
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fsref.errors import ObjectMissing, StoreError
from fsref.store import Buffer, Deletion, Entry, ObjectFile, Store
from fsref.store.base import Durability

Operation = Literal["put", "replace", "open", "read_into", "delete", "list", "list_entry"]
GIVE_UP_S = 120.0
"""A hanging operation that no test lets go ends with an assertion then."""


@dataclass
class Gate:
    """One operation that hangs. ``entered`` is set when it does; ``release`` lets it, and all after it, go on."""

    entered: threading.Event = field(default_factory=threading.Event)
    left: threading.Event = field(default_factory=threading.Event)
    """Set when the operation went on and ended."""
    _go: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        """Called by the store."""
        self.entered.set()
        assert self._go.wait(GIVE_UP_S), "nobody released the operation"

    def release(self) -> None:
        """Lets it go on."""
        self._go.set()


@dataclass
class Fault:
    """What to break. ``used`` counts how often it did."""

    operation: Operation
    name: str = ""
    """Regular expression that must be found in the object's name (for ``list``: the prefix)."""
    error: StoreError | None = None
    after: bool = False
    """Raise when the operation was carried out."""
    gate: Gate | None = None
    skip: int = 0
    times: int = 1
    used: int = 0
    seen: int = 0

    def takes(self, operation: Operation, name: str) -> bool:
        """Whether this fault breaks the operation; counts it."""
        if operation != self.operation or not re.search(self.name, name):
            return False
        self.seen += 1
        if self.seen <= self.skip or self.used >= self.times:
            return False
        self.used += 1
        return True


class FaultyStore(Store):
    """Wraps ``inner``; closing it closes ``inner``."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.url, self.posix_path = inner.url, inner.posix_path
        self.faults: list[Fault] = []
        self.calls: Counter[str] = Counter()
        self.hidden: set[str] = set()
        """Names that exist but are not seen yet: opening says missing, listings leave them out. Remove a name to show it."""
        self.honours_create_only = True
        """False: ``put`` overwrites what is there, as a server does that ignores If-None-Match."""
        self.create_only, self.bulk_delete_max = True, inner.bulk_delete_max
        self.versioning, self.retries_itself = inner.versioning, inner.retries_itself
        self._lock = threading.Lock()

    def fail(self, operation: Operation, error: StoreError, **options: object) -> Fault:
        """``operation`` raises ``error``; ``options`` are the fields of ``Fault``. ``delete`` gives it as the outcome of the name."""
        fault = Fault(operation, error=error, **options)  # type: ignore[arg-type]
        self.faults.append(fault)
        return fault

    def hang(self, operation: Operation, **options: object) -> Gate:
        """``operation`` waits at the returned gate, then goes on as usual."""
        gate = Gate()
        self.faults.append(Fault(operation, gate=gate, **options))  # type: ignore[arg-type]
        return gate

    def clear(self) -> None:
        """Faults off; whatever hangs goes on."""
        for fault in self.faults:
            if fault.gate is not None:
                fault.gate.release()
        self.faults.clear()
        self.hidden.clear()
        self.honours_create_only = True

    def put(self, name: str, buffers: Sequence[Buffer], *, durability: Durability = "node") -> None:
        fault = self._before("put", name)
        if not self.honours_create_only:
            self.inner.replace(name, b"".join(bytes(memoryview(b).cast("B")) for b in buffers))
        else:
            self.inner.put(name, buffers, durability=durability)
        _after(fault)

    def replace(self, name: str, data: bytes) -> None:
        fault = self._before("replace", name)
        self.inner.replace(name, data)
        _after(fault)

    def open(self, name: str, *, byte_count: int | None = None) -> "FaultyFile":
        fault = self._before("open", name)
        if name in self.hidden:
            raise ObjectMissing(f"{name} is not visible yet")
        file = FaultyFile(self, self.inner.open(name, byte_count=byte_count))
        _after(fault)
        return file

    def delete(self, names: Sequence[str]) -> dict[str, Deletion | StoreError]:
        out: dict[str, Deletion | StoreError] = {}
        for name in names:
            try:
                fault = self._before("delete", name)
                found = self.inner.delete([name])[name]
                _after(fault)
            except StoreError as e:
                out[name] = e
            else:
                out[name] = found
        return out

    def list(self, prefix: str) -> Iterator[Entry]:
        fault = self._before("list", prefix)
        for entry in self.inner.list(prefix):
            self._before("list_entry", entry.name)
            if entry.name not in self.hidden:
                yield entry
        _after(fault)

    def close(self) -> None:
        self.clear()
        self.inner.close()

    def _before(self, operation: Operation, name: str) -> Fault | None:
        with self._lock:
            self.calls[operation] += 1
            fault = next((f for f in self.faults if f.takes(operation, name)), None)
        if fault is None:
            return None
        if fault.gate is not None:
            fault.gate.wait()
        if fault.error is not None and not fault.after:
            raise _copy(fault.error)
        return fault


class FaultyFile(ObjectFile):
    """A file of a faulty store."""

    def __init__(self, store: FaultyStore, inner: ObjectFile) -> None:
        self._store, self._inner = store, inner
        self.name, self.byte_count = inner.name, inner.byte_count

    def read_into(self, offset: int, out: NDArray[np.uint8]) -> None:
        fault = self._store._before("read_into", self.name)
        self._inner.read_into(offset, out)
        _after(fault)

    def close(self) -> None:
        self._inner.close()


def _after(fault: Fault | None) -> None:
    if fault is None:
        return
    if fault.gate is not None:
        fault.gate.left.set()
    if fault.error is not None:
        raise _copy(fault.error)


def _copy(error: StoreError) -> StoreError:
    """A fresh exception of the same kind: one object raised by several threads would mix their tracebacks."""
    return type(error)(*error.args)
