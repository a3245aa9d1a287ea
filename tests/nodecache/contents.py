"""What the store of these tests holds: bytes that follow from an object's name and the place in it."""

import numpy as np
from numpy.typing import NDArray


def content(object_id: str, offset: int, size: int) -> NDArray[np.uint8]:
    """Bytes [offset, offset + size) of an object."""
    seed = np.frombuffer(object_id.encode(), np.uint8).sum(dtype=np.uint64)
    out: NDArray[np.uint8] = ((np.arange(offset, offset + size, dtype=np.uint64) * np.uint64(2654435761) + seed) >> np.uint64(7)).astype(
        np.uint8
    )
    return out
