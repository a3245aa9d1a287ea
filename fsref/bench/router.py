"""Routing of a real router: the demo model's, over tokens as common as words are. Needs the extra ``demo``; imported where asked.

Shape letters: T tokens, L layers, K experts per token.
"""

import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fsref.errors import MissingExtra
from fsref.inference.model import ModelSizes, make_model
from fsref.inference.network import Cache, Group, forward, read_architecture, read_weights

try:
    import torch
except ImportError as e:
    raise MissingExtra.of("demo", "torch") from e

SIZES: Final = ModelSizes(layers=8, experts=64, top_k=8)
"""As many experts as the demo server runs, and as many of them per token as large models use."""
_CONTEXT: Final = 512


def demo_routes(tokens: int, *, seed: int = 0) -> NDArray[Any]:
    """uint8 [T, L, K], T a multiple of 512, of a model of ``SIZES`` with weights from the seed."""
    with tempfile.TemporaryDirectory(prefix="fsref-bench-") as folder:
        path = Path(folder) / "model"
        make_model(path, seed=seed, sizes=SIZES)
        arch = read_architecture(path)
        weights = read_weights(path, arch, torch.float32)
    slots = max(1, tokens // _CONTEXT)
    words = np.random.default_rng(seed).zipf(1.3, (slots, _CONTEXT)) % SIZES.vocab_count
    cache = Cache(arch, slots=slots, context=_CONTEXT, dtype=torch.float32)
    for slot in range(slots):
        group = Group(
            slots=slice(slot, slot + 1),
            token_ids=torch.from_numpy(words[slot : slot + 1].astype(np.int64)),
            starts=torch.zeros(1, dtype=torch.int64),
            lasts=torch.tensor([_CONTEXT - 1]),
        )
        forward(weights, arch, cache, [group])
    routes: NDArray[Any] = cache.routes.numpy().reshape(slots * _CONTEXT, SIZES.layers, SIZES.top_k).astype(np.uint8)
    return routes
