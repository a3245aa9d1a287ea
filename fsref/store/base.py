"""The contract of a store: what every backend implements, the least of it.

A name is a ``/``-separated path below the run's root, made of parts that match ``[A-Za-z0-9._=-]+`` (no ``..``); the store refuses
others with ``BadRef`` before any I/O. Every failure is a ``StoreError`` subclass; anything else is a bug of the backend. Removal tells
what became of each name; on S3 an absent key counts as removed, so outcomes say nothing about what existed.
"""

import abc
import enum
import re
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from fsref.errors import BadRef, StoreError

Buffer = bytes | bytearray | memoryview | NDArray[Any]
Durability = Literal["node", "process"]
Versioning = Literal["none", "off", "suspended", "on", "unknown"]
"""Whether removed objects live on as old versions; ``none``: the backend has no such thing."""

_PART: Final = re.compile(r"(?!\.\.?$)[A-Za-z0-9._=-]{1,255}", re.ASCII)
NAME_MAX: Final = 512
CLEAR_NAMES_MAX: Final = 1000


def check_name(name: str) -> str:
    """Returns ``name`` if it is a legal object name or prefix, else raises ``BadRef``."""
    if len(name) > NAME_MAX or not name or not all(_PART.fullmatch(p) for p in name.split("/")):
        raise BadRef(f"{name[:80]!r} is not a legal name below a run's root")
    return name


class Entry(NamedTuple):
    """One listed object."""

    name: str
    byte_count: int


class Deletion(enum.Enum):
    """What a removal found."""

    DONE = "done"
    """It is gone. Where the backend does not tell (S3), this includes what was not there."""
    ABSENT = "absent"
    """It was not there."""


class ObjectFile(abc.ABC):
    """One open object for ranged reads. Close it; a context manager."""

    name: str
    byte_count: int
    """Size of the whole object."""
    descriptor: int | None = None
    """Of the open local file, where it is one: for a reader that reads many ranges at once and comes back here with those that fail."""

    @abc.abstractmethod
    def read_into(self, offset: int, out: NDArray[np.uint8]) -> None:
        """Fills ``out`` (uint8, contiguous) from ``offset``; safe from several threads.

        Raises ``ObjectCorrupt`` if the object ends before ``out`` is full, or has another size than it was opened with; ``ObjectMissing``
        where the backend looks for the object only now; never leaves a part of ``out`` unset in silence.
        """

    @abc.abstractmethod
    def close(self) -> None: ...

    def read_scattered(self, offset: int, outs: Sequence[NDArray[np.uint8]]) -> None:
        """As ``read_into``, the bytes from ``offset`` on spread over ``outs`` (uint8, contiguous) one after the other."""
        whole = np.empty(sum(map(len, outs)), np.uint8)
        self.read_into(offset, whole)
        at = 0
        for out in outs:
            out[:] = whole[at : at + len(out)]
            at += len(out)

    def read_view(self, offset: int, size: int, scratch: Callable[[int], NDArray[np.uint8]]) -> NDArray[np.uint8]:
        """``size`` bytes from ``offset`` on, not to be written to: in the backend's own memory where they come in it, else in
        ``scratch(size)``, the caller's (uint8, contiguous). Raises as ``read_into``.
        """
        out = scratch(size)
        self.read_into(offset, out)
        return out

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Store(abc.ABC):
    """Named byte objects below one root. Safe from several threads; open one per process (never pickle one)."""

    url: str
    """For people; without credentials."""
    posix_path: str | None = None
    """The root as a local path, where it is one."""
    bulk_delete_max: int = 1
    """Names that one removal request takes; callers that split work keep their pieces at least this large."""
    create_only: bool = False
    """Whether ``put`` asks the backend itself to refuse a taken name, so that it holds between processes. ``capabilities.probe`` finds
    out whether the backend honours it."""
    versioning: Versioning = "none"
    retries_itself: bool = False
    """Whether a ``StoreUnavailable`` from this store was retried inside, as the config says; callers then give up at once."""

    @abc.abstractmethod
    def put(self, name: str, buffers: Sequence[Buffer], *, durability: Durability = "node") -> None:
        """Publishes a new object atomically: readers see all of it or nothing, and no staging file stays after an error.

        Raises ``ObjectExists`` if the name is taken (names are never reused), ``StoreFull``, ``StoreDenied``, ``StoreUnavailable``.
        After ``StoreUnavailable`` the object may be there or not. On object stores a name that holds the very same bytes counts as
        published by this call (its reply was lost before): what processes race for must say in its bytes who put it.
        """

    @abc.abstractmethod
    def replace(self, name: str, data: bytes) -> None:
        """Publishes a small control file atomically and durably, over an older one if there is one."""

    @abc.abstractmethod
    def open(self, name: str, *, byte_count: int | None = None) -> ObjectFile:
        """Opens an object for ranged reads; raises ``ObjectMissing``.

        ``byte_count`` is the object's size where the caller knows it. Backends for which asking costs a request do not ask then:
        absence (``ObjectMissing``) and another size (``ObjectCorrupt``) show at the first read.
        """

    @abc.abstractmethod
    def delete(self, names: Sequence[str]) -> dict[str, Deletion | StoreError]:
        """Removes objects; the outcome of each name is in the result, nothing is raised for one that failed.

        A ``StoreError`` as outcome: it is not known to be gone. Backends with bulk removal read the reply's per-key errors.
        """

    @abc.abstractmethod
    def list(self, prefix: str) -> Iterator[Entry]:
        """Every object whose name starts with ``prefix + "/"``, staging files included, in any order.

        Raises ``StoreError`` if the listing is not complete; a prefix without objects yields nothing.
        """

    @abc.abstractmethod
    def close(self) -> None: ...

    def remove_all(self, prefix: str) -> int:
        """Removes everything below ``prefix``, and its folders where there are any; for runs whose end is proved. Returns how many objects.

        Raises the ``StoreError`` of the first one that could not be removed; what went before is gone, call it again.
        """
        names = [entry.name for entry in self.list(prefix)]
        for at in range(0, len(names), CLEAR_NAMES_MAX):
            for outcome in self.delete(names[at : at + CLEAR_NAMES_MAX]).values():
                if isinstance(outcome, StoreError):
                    raise outcome
        return len(names)

    def read(self, name: str, *, bytes_max: int) -> bytes:
        """A whole small object; raises ``StoreError`` if it is larger than ``bytes_max``."""
        with self.open(name) as file:
            if file.byte_count > bytes_max:
                raise StoreError(f"{self.url}/{name} has {file.byte_count} bytes, at most {bytes_max} are read here")
            out = np.empty(file.byte_count, np.uint8)
            file.read_into(0, out)
            return out.tobytes()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a store holds connections and may hold credentials, so it is not pickled: open one per process, with open_root")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
