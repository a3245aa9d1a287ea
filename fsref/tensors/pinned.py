"""Page-locked memory for arrays on their way to a GPU: copies from it run beside the computation and the fetches."""

import numpy as np
import torch
from numpy.typing import NDArray

from fsref.buffers import Allocate, pageable


def pinned(byte_count: int) -> NDArray[np.uint8]:
    """A block for a ``BufferPool``. Raises torch's ``RuntimeError`` where there is no GPU."""
    block: NDArray[np.uint8] = torch.empty(byte_count, dtype=torch.uint8, pin_memory=True).numpy()
    return block


def memory_for(device: torch.device) -> Allocate:
    """How blocks are made for a rank whose tensors live on ``device``."""
    return pinned if device.type == "cuda" else pageable
