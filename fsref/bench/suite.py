"""Which benches there are, and the sizes that each runs at. Every one runs in a process of its own: none inherits another's memory."""

import importlib
import multiprocessing
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from fsref.bench.codecs import codecs
from fsref.bench.fetch import fetch
from fsref.bench.keep import keep
from fsref.bench.ledger import ledger
from fsref.bench.memory import memory
from fsref.bench.scaling import scaling
from fsref.bench.shapes import SHAPES
from fsref.bench.workload import Options
from fsref.errors import ConfigError

Size = Literal["full", "quick", "least"]
"""``full``: all shapes and lengths. ``quick``: what docs/benchmarks.md shows, in a few minutes. ``least``: whether it works at all."""
NAMES: Final = ("fetch", "keep", "codecs", "memory", "ledger", "scaling")
_LENGTHS: Final = (1_024, 131_072)
_FILE_BYTES_MAX: Final = 1 << 30


def plan(what: str, options: Options, *, size: Size, routing: str = "") -> dict[str, Callable[[], dict[str, Any]]]:
    """Label to what runs it: one bench, or with ``all`` each of them. Raises ``ConfigError`` for a name or a routing that there is not."""
    if what not in (*NAMES, "all"):
        raise ConfigError(f"there is no bench {what!r}; there are {', '.join(NAMES)} and all")
    if size == "least":
        options = msgspec.structs.replace(options, tokens=min(options.tokens, 1_024), samples=2, repeats=2)
    makers: Mapping[str, Callable[[], dict[str, Callable[[], dict[str, Any]]]]] = {
        "fetch": partial(_fetch, options, size, everything=what == "all"),
        "keep": lambda: {"keep": partial(keep, options, steady_keeps=20 if size == "least" else 1_000)},
        "codecs": lambda: {"codecs": partial(codecs, options, routes=_routes(routing, 1_024 if size == "least" else 8_192))},
        "memory": lambda: {"memory": partial(memory, _shorter(options), samples=40 if size == "least" else 2_000)},
        "ledger": lambda: {"ledger": partial(ledger, **_ledger_sizes(size))},
        "scaling": lambda: {"scaling": _scaling(options, size)},
    }
    return {label: run for name in NAMES if what in (name, "all") for label, run in makers[name]().items()}


def in_process(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The finding of ``run``, made in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(run).result()


def _fetch(options: Options, size: Size, *, everything: bool) -> dict[str, Callable[[], dict[str, Any]]]:
    """The asked workload; ``bench all`` adds other models, fewer fields and other lengths."""
    runs: dict[str, Callable[[], dict[str, Any]]] = {"fetch": partial(fetch, options)}
    if not everything or options.root:
        return runs
    change = partial(msgspec.structs.replace, options)
    if size != "least":
        runs["fetch, routing only"] = partial(fetch, change(heads=False, masks=False))
        runs["fetch, truncated to 60 %"] = partial(fetch, change(kept=0.6))
    if size == "full":
        runs |= {f"fetch, {name}": partial(fetch, change(shape=name)) for name in SHAPES if name != options.shape}
        runs |= {f"fetch, {n} tokens": partial(fetch, change(tokens=n, samples=64 if n < 4_096 else 2)) for n in _LENGTHS}
    return runs


def _scaling(options: Options, size: Size) -> Callable[[], dict[str, Any]]:
    if size == "least":
        return partial(scaling, options, samples=(1, 4), tokens=(1_024,), ranks=(1,))
    if size == "quick":
        return partial(scaling, msgspec.structs.replace(options, repeats=3), samples=(1, 100, 10_000), tokens=(1_024, 16_384), ranks=(1, 2))
    return partial(scaling, options)


def _ledger_sizes(size: Size) -> dict[str, int]:
    return {"full": {}, "quick": {"objects": 10_000, "audited": 100_000}, "least": {"objects": 500, "audited": 1_000}}[size]


def _shorter(options: Options) -> Options:
    """Samples in flight are many: of at most 2,048 tokens each."""
    return msgspec.structs.replace(options, tokens=min(options.tokens, 2_048))


def _routes(routing: str, tokens: int) -> NDArray[Any] | None:
    """Routing [T, L, K] of a real router: ``demo`` asks the demo model, else an .npy file; empty: none."""
    if not routing:
        return None
    if routing == "demo":
        found: NDArray[Any] = importlib.import_module("fsref.bench.router").demo_routes(tokens)
        return found
    path = Path(routing)
    try:
        if path.stat().st_size > _FILE_BYTES_MAX:
            raise ConfigError(f"{path} has more than {_FILE_BYTES_MAX} bytes; a thousand tokens are enough")
        rows: NDArray[Any] = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as e:
        raise ConfigError(f"--routing {routing}: demo, or an .npy file of expert ids [tokens, layers, top_k] was expected: {e}") from e
    if rows.ndim != 3 or rows.dtype not in (np.uint8, np.uint16) or not rows.size:
        raise ConfigError(f"{path}: expert ids uint8 or uint16 [tokens, layers, top_k] expected, {rows.dtype} {rows.shape} found")
    return rows
