"""``fsref bench scaling``: where the cost of a sample bends: over samples of a step, tokens of a sample, threads, and ranks (processes)."""

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from fsref.bench.measure import Timing, interleaved, machine
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
    load = round(os.getloadavg()[0], 1)
    by_samples, ratios = _by_samples(options, samples)
    return {
        "bench": "scaling",
        "machine": machine(),
        "load": load,
        "shape": shape_of(options.shape).name,
        "repeats": options.repeats,
        "samples of a step": by_samples,
        "tokens of a sample": [_by_tokens(options, t) for t in tokens],
        "threads": list(_by_threads(options)),
        "ranks": [_by_ranks(options, n) for n in ranks],
        "ratios": ratios,
    }


def _by_samples(options: Options, counts: Sequence[int]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Microseconds per small sample, planning and all, and the change from steps of 100 to the largest; every reference names an object of
    its own.

    A round reads every object once by steps of each size, so that none finds its files more at hand than another.
    """
    schema = _SMALL.schema()
    with tempfile.TemporaryDirectory(prefix="fsref-bench-") as folder, open_root(folder, run="scaling", create=True) as store:
        writer = Writer(store, schema, Receipts("bench"), durability="process")
        sample = payload(_SMALL, _SMALL_TOKENS)
        refs = [writer.put(sample) for _ in range(max(counts))]
        steps = {count: max(counts) // count for count in counts}
        with Reader(store, schema, threads=options.threads) as reader:
            out = {"routed_experts": allocate(reader.plan(refs[0]), schema, "routed_experts")}
            cases = {str(count): partial(_steps, reader, _slices(refs, count, steps[count]), out) for count in counts}
            _read_all(reader, refs, out)
            timings = interleaved(cases, repeats=options.repeats)
    rows = [_per_sample(count, count * steps[count], timings[str(count)]) for count in counts]
    return rows, _change(counts, steps, timings)


def _slices(refs: Sequence[PayloadRef], count: int, steps: int) -> list[Sequence[PayloadRef]]:
    """``steps`` steps of ``count`` references, one after the other."""
    return [refs[n * count : (n + 1) * count] for n in range(steps)]


def _steps(reader: Reader, steps: Sequence[Sequence[PayloadRef]], out: Any) -> None:
    for refs in steps:
        _read_all(reader, refs, out)


def _per_sample(count: int, samples: int, timing: Timing) -> dict[str, Any]:
    us = [s / samples * 1e6 for s in timing.wall_s]
    cpu = statistics.median(timing.cpu_s) / samples * 1e6
    spread = {"us_min": round(min(us), 1), "us_max": round(max(us), 1), "cpu_us": round(cpu, 1)}
    return {"samples": count, "us_per_sample": round(statistics.median(us), 1), **spread}


def _change(counts: Sequence[int], steps: Mapping[int, int], timings: Mapping[str, Timing]) -> list[dict[str, Any]]:
    """From steps of 100 to the largest, by the least round of each: rounds of the same work differ more by what else runs than sizes do.

    Its range is that of single rounds; none where there are not both sizes.
    """
    most = max(counts)
    if 100 not in counts or most <= 100:
        return []
    share = 100 * steps[100] / (most * steps[most])
    few, many = timings["100"], timings[str(most)]
    each = [m / f * share - 1 for m, f in zip(many.wall_s, few.wall_s, strict=True)]
    best = min(many.wall_s) / min(few.wall_s) * share - 1
    return [
        {
            "ratio": f"cost per sample, {most:,} against 100, change of the least round",
            "median": round(abs(best), 3),
            "least": round(min(each), 3),
            "most": round(max(each), 3),
            "reach": 0.2,
            "at_least": False,
        }
    ]


def _read_all(reader: Reader, refs: Sequence[PayloadRef], out: Any) -> None:
    """At most 64 plans are under way at once, as a loader's budget has it."""
    for at in range(0, len(refs), 64):
        futures = [f for ref in refs[at : at + 64] for f in reader.submit(reader.plan(ref), out)]
        errors = reader.collect(futures)
        if errors:
            raise errors[0]


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
        ms = {k: round(figures[k] / count, 2) for k in ("ms", "ms_min", "ms_max", "cpu_ms")}
        return {"tokens": tokens, "samples": count, **ms, "gb_per_s": figures["gb_per_s"]}


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
            yield {"threads": int(n), **t.figures(work.raw_bytes)}


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
        rates = [rounds * work.raw_bytes / 1e9 for rounds in each]
        return {"ranks": ranks, "gb_per_s": round(sum(rates), 2), "slowest": round(min(rates), 2), "fastest": round(max(rates), 2)}


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
