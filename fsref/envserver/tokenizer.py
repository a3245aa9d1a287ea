"""Loads what renders prompts before the first episode needs it, and without torch.

transformers loads torch wherever it is installed, for models that an env server never runs. It decides so once, at its own import; so
that happens here, while torch looks absent. A taskset may import torch itself afterwards; one that uses transformers' models with it sets
``torch = true`` in its ``[[env]]`` table.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import renderers.base


def warm(folder: str, *, torch: bool) -> None:
    """Loads the tokenizer in ``folder`` once, if there is one (episodes may name another place)."""
    if not (Path(folder) / "tokenizer.json").exists():
        return
    if torch:
        renderers.base.load_tokenizer(folder)
        return
    with _hidden("torch"):
        renderers.base.load_tokenizer(folder)


@contextmanager
def _hidden(package: str) -> Iterator[None]:
    """The package cannot be found in this block, unless it is loaded already. Not for use beside other importing threads."""
    if package in sys.modules:
        yield
        return
    modules: dict[str, Any] = sys.modules  # None means: do not look for it
    modules[package] = None
    try:
        yield
    finally:
        del modules[package]
