"""``fsref bench scaling``: where the cost of a sample bends: over samples of a step, tokens of a sample, threads, and ranks (processes)."""

import multiprocessing
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from fsref.bench.measure import interleaved, machine
from fsref.bench.methods import Fsref
from fsref.bench.shapes import Shape, payload, shape_of
from fsref.bench.workload import Options, workload
from fsref.reader import Reader, allocate
from fsref.refs import PayloadRef
from fsref.store import open_root
from fsref.writer import Receipts, Writer

SAMPLES: Final = (1, 10, 100, 1_000, 10_000)
TOKENS: Final = (1_024, 4_096, 16_384, 65_536, 131_072)
THREADS: Final = (1, 2, 4, 8, 16)
RANKS: Final = (1, 2, 4, 8)
_SMALL: Final = Shape("4 layers, 2 of 16", 4, 2, 16, head=0, masks=False)
_SMALL_TOKENS: Final = 64
_RANK_S: Final = 1.0
_BYTES_MAX: Final = 400_000_000
"""Raw bytes of the samples of one length: longer ones are fewer."""


def scaling(
    options: Options, *, samples: Sequence[int] = SAMPLES, tokens: Sequence[int] = TOKENS, ranks: Sequence[int] = RANKS
) -> dict[str, Any]:
    """Measures all four; ``samples`` are of 64 tokens, so that what is paid per sample shows."""
    by_samples = list(_by_samples(options, samples))
    wide = {r["samples"]: r["us_per_sample"] for r in by_samples}
    ratios = []
    if 100 in wide and max(wide) > 100:
        change = abs(wide[max(wide)] / wide[100] - 1)
        ratios = [
            {
                "ratio": f"cost per sample, {max(wide):,} against 100, change",
                "median": round(change, 3),
                "least": round(change, 3),
                "most": round(change, 3),
                "reach": 0.2,
                "at_least": False,
            }
        ]
    return {
        "bench": "scaling",
        "machine": machine(),
        "shape": shape_of(options.shape).name,
        "repeats": options.repeats,
        "samples of a step": by_samples,
        "tokens of a sample": [_by_tokens(options, t) for t in tokens],
        "threads": list(_by_threads(options)),
        "ranks": [_by_ranks(options, n) for n in ranks],
        "ratios": ratios,
    }


def _by_samples(options: Options, counts: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Microseconds per small sample, planning and all; every reference names an object of its own."""
    schema = _SMALL.schema()
    with tempfile.TemporaryDirectory(prefix="fsref-bench-") as folder, open_root(folder, run="scaling", create=True) as store:
        writer = Writer(store, schema, Receipts("bench"), durability="process")
        sample = payload(_SMALL, _SMALL_TOKENS)
        refs = [writer.put(sample) for _ in range(max(counts))]
        with Reader(store, schema, threads=options.threads) as reader:
            out = {"routed_experts": allocate(reader.plan(refs[0]), schema, "routed_experts")}
            _read_all(reader, refs[: min(len(refs), 100)], out)
            for count in counts:
                best = min(_read_all(reader, refs[:count], out) for _ in range(max(1, min(options.repeats, 2_000 // count))))
                yield {"samples": count, "us_per_sample": round(best / count * 1e6, 1)}


def _read_all(reader: Reader, refs: Sequence[PayloadRef], out: Any) -> float:
    """Seconds; at most 64 plans are under way at once, as a loader's budget has it."""
    start = time.perf_counter()
    for at in range(0, len(refs), 64):
        futures = [f for ref in refs[at : at + 64] for f in reader.submit(reader.plan(ref), out)]
        errors = reader.collect(futures)
        if errors:
            raise errors[0]
    return time.perf_counter() - start


def _by_tokens(options: Options, tokens: int) -> dict[str, Any]:
    shape = shape_of(options.shape).without(heads=options.heads, masks=options.masks)
    count = max(1, min(options.samples, _BYTES_MAX // (tokens * 1_600)))
    with workload(msgspec.structs.replace(options, tokens=tokens, samples=count, root=""), shape) as work:
        method = Fsref(work, "default")
        try:
            timing = interleaved({"fsref": method.run}, repeats=options.repeats)["fsref"]
        finally:
            method.close()
        figures = timing.figures(work.raw_bytes)
        return {"tokens": tokens, "samples": count, "ms_per_sample": round(figures["ms"] / count, 2), "gb_per_s": figures["gb_per_s"]}


def _by_threads(options: Options) -> Iterator[dict[str, Any]]:
    shape = shape_of(options.shape).without(heads=options.heads, masks=options.masks)
    with workload(msgspec.structs.replace(options, root=""), shape) as work:
        methods = {n: Fsref(replace(work, options=msgspec.structs.replace(options, threads=n)), "default") for n in THREADS}
        try:
            timings = interleaved({str(n): m.run for n, m in methods.items()}, repeats=options.repeats)
        finally:
            for m in methods.values():
                m.close()
        for n, t in timings.items():
            yield {"threads": int(n), "gb_per_s": t.figures(work.raw_bytes)["gb_per_s"]}


def _by_ranks(options: Options, ranks: int) -> dict[str, Any]:
    """Ranks as processes of one thread each; every one reads all samples, over and over for a second, after a common start."""
    shape = shape_of(options.shape).without(heads=options.heads, masks=options.masks)
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(ranks)
    with workload(msgspec.structs.replace(options, root=""), shape) as work:
        root = work.stores["default"].posix_path
        assert root is not None
        refs = [r.to_json() for r in work.refs["default"]]
        with ProcessPoolExecutor(ranks, mp_context=context, initializer=_join, initargs=(barrier,)) as pool:
            each = list(pool.map(_rank, [root] * ranks, [refs] * ranks, [options] * ranks))
        return {"ranks": ranks, "gb_per_s": round(sum(each) * work.raw_bytes / 1e9, 2)}


_BARRIERS: list[Any] = []
"""The barrier of this rank's process."""


def _join(barrier: Any) -> None:
    _BARRIERS.append(barrier)


def _rank(root: str, refs: list[Any], options: Options) -> float:
    """In a process of its own: how many times a second it reads all samples."""
    schema = shape_of(options.shape).without(heads=options.heads, masks=options.masks).schema()
    wanted = [PayloadRef.decode(r) for r in refs]
    with open_root(str(Path(root).parent), run=Path(root).name) as store, Reader(store, schema, threads=1) as reader:
        outs = [{f.name: allocate(plan, schema, f.name) for f in schema.fields} for plan in map(reader.plan, wanted)]

        def read_all() -> None:
            for ref, out in zip(wanted, outs, strict=True):
                reader.read_into(reader.plan(ref), out)

        read_all()
        _BARRIERS[0].wait(120)
        start, rounds = time.perf_counter(), 0
        while time.perf_counter() - start < _RANK_S:
            read_all()
            rounds += 1
        return rounds / (time.perf_counter() - start)
