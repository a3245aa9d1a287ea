"""Where a segment's bytes come from: its object, opened late and only as the size that its reference says.

Owns the handle. Refuses retries and caching: a reader that failed closes it, and the next attempt opens the object anew.
"""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from fsref.errors import ObjectCorrupt
from fsref.nodecache import Span
from fsref.plan import Request, SegmentRead
from fsref.refs import object_name
from fsref.store import ObjectFile, Store


class Source:
    """The object of a segment, opened when something is first read of it: what the node has already costs no look at the store."""

    def __init__(self, store: Store, segment: SegmentRead) -> None:
        self._store, self._segment = store, segment
        self._file: ObjectFile | None = None

    def read_into(self, offset: int, outs: Sequence[NDArray[np.uint8]]) -> None:
        """Raises ``ObjectCorrupt`` for an object of another size than its reference says, else as ``ObjectFile.read_scattered``."""
        self.open()
        assert self._file is not None
        if len(outs) == 1:
            self._file.read_into(offset, outs[0])
        else:
            self._file.read_scattered(offset, outs)

    def open(self) -> None:
        """Opens the object, which every read does else. Raises as ``read_into``."""
        if self._file is None:
            self._file = self._opened()

    @property
    def descriptor(self) -> int | None:
        """Of the open local file; None where the object is not open or not one."""
        return None if self._file is None else self._file.descriptor

    def read_view(self, request: Request, scratch: Callable[[int], NDArray[np.uint8]]) -> NDArray[np.uint8]:
        """As ``ObjectFile.read_view``, with the errors of ``read_into``."""
        self.open()
        assert self._file is not None
        return self._file.read_view(request.offset, request.size, scratch)

    def _opened(self) -> ObjectFile:
        segment = self._segment
        file = self._store.open(object_name(segment.object_id), byte_count=segment.byte_count)
        if file.byte_count != segment.byte_count:
            file.close()
            raise ObjectCorrupt(f"the object has {file.byte_count} bytes, its reference says {segment.byte_count}: truncated or replaced")
        return file

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def spans(request: Request) -> list[Span]:
    """The request's chunks, each once; several reads may want rows of one."""
    places = sorted({(c.offset, c.size) for c in request.chunks})
    return [Span(n, request.offset + offset, offset, size) for n, (offset, size) in enumerate(places)]
