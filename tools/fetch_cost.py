"""What fetching costs a trainer rank: throughput over threads and chunks, exposed time, memory, and what siblings of a node share.

    python -m tools.fetch_cost                    # all of it; writes docs/results/fetch.json and its section of docs/results.md
    python -m tools.fetch_cost exposed shared     # parts of it: throughput, exposed, shared, memory; the others stay as they are

Objects of 16,384 tokens with the routing of Qwen3-30B-A3B (48 layers, 8 of 128 experts), in the page cache. *fetch* is a read plan
through ``Reader`` into buffers that were written to before. *preadv* reads the same ranges with as many threads and does nothing with
them. *decode* checks and unpacks the same chunks from memory, with as many threads. The three are interleaved; ratios are medians over the
repeats. GB/s are of unpacked rows (10^9 bytes).
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsref.config import StoreSection
from fsref.loader.fetch import StepFetcher
from fsref.nodecache import NodeCache
from fsref.objects import decode_chunk
from fsref.plan import ContextLayout, ReadPlan, SlicePlan, Source, packed, plan_slice, rank_rows
from fsref.reader import DenseOut, Reader
from fsref.refs import Codec, Dense, Payload, PayloadRef, Schema, object_name, routed_experts
from fsref.slices import SliceBuffers, buffer_bytes
from fsref.steps import MicroBatch, RankFile, SampleSequence
from fsref.store import Store, open_root
from fsref.writer import Receipts, Writer
from tools.results import replace_section

LAYERS, TOP_K, EXPERTS = 48, 8, 128
TOKENS, SAMPLES, REPEATS = 16_384, 6, 5
THREADS = (1, 2, 4, 8, 16)
CHUNKS = {"48 layers": (0, Codec()), "12 layers": (12, Codec()), "6 layers": (6, Codec())}
OUT = Path(__file__).resolve().parent.parent / "docs" / "results" / "fetch.json"
STEPS_MEMORY = 100


def main() -> None:
    """Measures, prints and writes."""
    if sys.argv[1:2] == ["memory-of"]:
        print(json.dumps(memory(Path(sys.argv[2]))))
        return
    parts = sys.argv[1:] or ["throughput", "exposed", "shared", "memory"]
    found: dict[str, Any] = json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() else {}
    found["machine"] = {"cores": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()}
    rows = experts(np.random.default_rng(0), TOKENS)
    with tempfile.TemporaryDirectory() as folder:
        if "throughput" in parts:
            found["throughput"] = [line for name in CHUNKS for line in throughput(Path(folder), name, rows)]
        if "exposed" in parts:
            found["exposed"] = exposed(Path(folder), rows)
        if "shared" in parts:
            found["shared"] = shared(Path(folder), rows)
        if "memory" in parts:
            command = [sys.executable, "-m", "tools.fetch_cost", "memory-of", folder]
            found["memory"] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=600).stdout)
    OUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    replace_section("Fetching", section(found))
    print("\n".join(section(found)))


def experts(rng: np.random.Generator, tokens: int) -> NDArray[np.uint8]:
    """[T, L, K] without repeats in a row, some experts twice as popular as others."""
    out = np.empty((tokens, LAYERS, TOP_K), np.uint8)
    for at in range(0, tokens, 2048):
        some = out[at : at + 2048]
        weights = rng.random((len(some), LAYERS, EXPERTS), np.float32) * (1 + (np.arange(EXPERTS) % 2))
        some[...] = np.argpartition(weights, -TOP_K, axis=-1)[..., -TOP_K:]
    return out


def put(store: Store, schema: Schema, rows: NDArray[np.uint8], count: int) -> list[PayloadRef]:
    """``count`` objects whose rows differ."""
    writer = Writer(store, schema, Receipts("fetch"), durability="process")
    ids = np.arange(TOKENS, dtype=np.int32)
    return [writer.put(Payload(ids, {"routed_experts": Dense(np.roll(rows, n, axis=0))})) for n in range(count)]


def schema_of(layers_per_chunk: int, codec: Codec) -> Schema:
    """Routing only."""
    return Schema(
        (routed_experts(layer_ids=range(LAYERS), top_k=TOP_K, expert_count=EXPERTS, layers_per_chunk=layers_per_chunk),), codec=codec
    )


def throughput(folder: Path, name: str, rows: NDArray[np.uint8]) -> list[dict[str, Any]]:
    """One line per thread count."""
    layers_per_chunk, codec = CHUNKS[name]
    schema = schema_of(layers_per_chunk, codec)
    out = []
    with open_root(str(folder), run=f"chunks-{layers_per_chunk}-{codec.name}", create=True) as store:
        refs = put(store, schema, rows, SAMPLES)
        for threads in THREADS:
            with Reader(store, schema, threads=threads) as reader, ThreadPoolExecutor(threads) as pool:
                plans = [reader.plan(ref) for ref in refs]
                outs = [{"routed_experts": DenseOut(np.zeros((TOKENS, LAYERS, TOP_K), np.uint8))} for _ in refs]
                jobs: dict[str, Callable[[], None]] = {
                    "fetch": lambda r=reader, p=plans, o=outs: collect(r, p, o),  # type: ignore[misc]
                    "preadv": preadv_job(store, plans, pool),
                    "decode": decode_job(store, plans, codec, pool),
                }
                seconds = interleaved(jobs)
            raw = SAMPLES * rows.nbytes / 1e9
            rate = {n: [raw / s for s in seconds[n]] for n in jobs}
            chunk = plans[0].segments[0].requests[0].chunks[0]
            out.append(
                {
                    "chunks": name, "chunk_raw_bytes": chunk.nbytes, "threads": threads, "stored_bytes": sum(p.byte_count for p in plans),
                    **{f"{n}_gb_s": round(statistics.median(r), 2) for n, r in rate.items()},
                    "of_decode": ratio(rate["fetch"], rate["decode"]), "of_preadv": ratio(rate["fetch"], rate["preadv"]),
                    "fetch_gb_s_core": round(statistics.median(rate["fetch"]) / min(threads, os.cpu_count() or 1), 2),
                }
            )  # fmt: skip
            print(json.dumps(out[-1]), file=sys.stderr)
    return out


def collect(reader: Reader, plans: Sequence[ReadPlan], outs: Sequence[dict[str, DenseOut]]) -> None:
    """All plans at once, as a loader does."""
    errors = reader.collect([f for plan, out in zip(plans, outs, strict=True) for f in reader.submit(plan, out)])
    if errors:
        raise errors[0]


def preadv_job(store: Store, plans: Sequence[ReadPlan], pool: ThreadPoolExecutor) -> Callable[[], None]:
    """Reads the plans' ranges into memory that stays."""
    assert store.posix_path is not None
    paths = [(Path(store.posix_path) / object_name(s.object_id), s.requests) for p in plans for s in p.segments]

    def one(path: Path, requests: Sequence[Any]) -> None:
        scratch = bytearray(max(r.size for r in requests))
        fd = os.open(path, os.O_RDONLY)
        try:
            for r in requests:
                if os.preadv(fd, [memoryview(scratch)[: r.size]], r.offset) != r.size:
                    raise RuntimeError(f"{path} was read short")
        finally:
            os.close(fd)

    def all_of_them() -> None:
        list(pool.map(lambda item: one(*item), paths))

    return all_of_them


def decode_job(store: Store, plans: Sequence[ReadPlan], codec: Codec, pool: ThreadPoolExecutor) -> Callable[[], None]:
    """Unpacks the plans' chunks, which are in memory already."""
    work: list[list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]] = []
    for plan in plans:
        target = np.zeros(TOKENS * LAYERS * TOP_K, np.uint8)
        for segment in plan.segments:
            with store.open(object_name(segment.object_id)) as file:
                items, at = [], 0
                for r in segment.requests:
                    stored = np.empty(r.size, np.uint8)
                    file.read_into(r.offset, stored)
                    for c in r.chunks:
                        items.append((stored[c.offset : c.offset + c.size], target[at : at + c.nbytes]))
                        at += c.nbytes
                work.append(items)

    def one(items: Sequence[tuple[NDArray[np.uint8], NDArray[np.uint8]]]) -> None:
        for stored, out in items:
            decode_chunk(stored, out, codec)

    def all_of_them() -> None:
        list(pool.map(one, work))

    return all_of_them


def interleaved(jobs: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
    """Seconds of each job, taken in turn; the first round does not count."""
    seconds: dict[str, list[float]] = {n: [] for n in jobs}
    for _ in range(REPEATS + 1):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            seconds[name].append(time.perf_counter() - start)
    return {n: s[1:] for n, s in seconds.items()}


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Median, lowest and highest ratio of the repeats."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return [round(statistics.median(ratios), 2), round(min(ratios), 2), round(max(ratios), 2)]


def rank_files(store: Store, schema: Schema, rows: NDArray[np.uint8], steps: int, micro_batches: int) -> list[RankFile]:
    """Steps over the same few objects, one sequence per micro batch."""
    refs = put(store, schema, rows, micro_batches)

    def sequence(ref: PayloadRef) -> SampleSequence:
        return SampleSequence(
            sample="s", token_ids=np.zeros(TOKENS, "<i4").tobytes(), loss_mask=bytes(TOKENS), logprobs=np.zeros(TOKENS, "<f4").tobytes(),
            advantages=np.zeros(TOKENS, "<f4").tobytes(), ref=ref,
        )  # fmt: skip

    batches = tuple(MicroBatch((sequence(ref),)) for ref in refs)
    return [RankFile(v=1, run="fetch", step=n, data_rank=0, schema=schema, micro_batches=batches, owned=()) for n in range(steps)]


def exposed(folder: Path, rows: NDArray[np.uint8]) -> list[dict[str, float]]:
    """Steps whose compute takes a known share of the fetch time; the trainer sleeps, as one on a GPU does."""
    schema, steps = schema_of(0, Codec()), 12
    out: list[dict[str, float]] = []
    with open_root(str(folder), run="exposed", create=True) as store:
        ranks = rank_files(store, schema, rows, steps, 4)
        alone: list[float] = []
        with StepFetcher(store, schema, config=StoreSection()) as fetcher:
            for rank in ranks:
                fetcher.take(rank)
                alone.append(fetcher.metrics(rank.step)["payload/fetch_time"])
                fetcher.release(rank.step)
        fetch_s = statistics.median(alone)
        for factor in (0.0, 0.5, 1.0, 2.0, 4.0):
            with StepFetcher(store, schema, config=StoreSection()) as fetcher:
                waits, totals = [], []
                fetcher.prefetch(ranks[0])
                for n, rank in enumerate(ranks):
                    got = fetcher.take(rank)
                    if n + 1 < steps:
                        fetcher.prefetch(ranks[n + 1])
                    time.sleep(factor * fetch_s)
                    del got
                    seen = fetcher.metrics(n)
                    fetcher.release(n)
                    if n:
                        waits.append(seen["payload/fetch_time_exposed"])
                        totals.append(seen["payload/fetch_time"])
            compute = factor * fetch_s
            out.append(
                {
                    "compute_of_fetch": factor, "compute_s": round(compute, 4), "fetch_s": round(statistics.median(totals), 4),
                    "exposed_s": round(statistics.median(waits), 5),
                    "exposed_of_step": round(sum(waits) / (sum(waits) + compute * len(waits)), 4),
                }
            )  # fmt: skip
            print(json.dumps(out[-1]), file=sys.stderr)
    return out


def shared(folder: Path, rows: NDArray[np.uint8]) -> list[dict[str, Any]]:
    """Bytes from storage of a node's ranks, each for itself and through a node cache."""
    out: list[dict[str, Any]] = []
    whole: list[tuple[int, int, Sequence[int] | None]] = [(0, 1, None)] * 4
    split: list[tuple[int, int, Sequence[int] | None]] = [(r, 4, None) for r in range(4)]
    stages: list[tuple[int, int, Sequence[int] | None]] = [(0, 1, range(r * 12, r * 12 + 12)) for r in range(4)]
    for name, layers_per_chunk, ranks in (
        ("tensor 4: all the same", 0, whole),
        ("context 4, zigzag", 0, split),
        ("pipeline 4, all layers in a chunk", 0, stages),
        ("pipeline 4, 12 layers in a chunk", 12, stages),
    ):
        schema = schema_of(layers_per_chunk, Codec())
        with open_root(str(folder), run=f"shared-{len(out)}", create=True) as store:
            refs = put(store, schema, rows, SAMPLES)
            plans = [slice_of(refs, schema, *rank) for rank in ranks]
            stored = sum(r.byte_count for r in refs)
            alone = sum(p.read.byte_count for p in plans)
            caches = [NodeCache(folder / "shm", name="bench", bytes_max=2 * stored, wait_s=10) for _ in ranks]
            fetched = 0
            for plan, cache in zip(plans, caches, strict=True):
                with Reader(store, schema, cache=cache) as reader:
                    reader.read_into(plan.read, SliceBuffers(plan, schema, step=0, expert_shards=1).out)
                    fetched += reader.counters.bytes_fetched
            for cache in caches:
                cache.close()
            out.append({"ranks": name, "alone_of_stored": round(alone / stored, 2), "shared_of_stored": round(fetched / stored, 2)})
            print(json.dumps(out[-1]), file=sys.stderr)
    return out


def slice_of(refs: Sequence[PayloadRef], schema: Schema, context: int, context_ranks: int, layers: Sequence[int] | None) -> SlicePlan:
    """A rank's part of all samples in one micro batch."""
    bounds = [0, *accumulate(r.token_count for r in refs)]
    rows = rank_rows(
        packed(bounds, bounds), ContextLayout.ZIGZAG, context_rank=context, context_ranks=context_ranks, tensor_rank=0, tensor_ranks=1,
        multiple=1, first_slot=0,
    )  # fmt: skip
    sources = [Source(r, ("routed_experts",)) for r in refs]
    return plan_slice(sources, schema, rows=rows, fields=["routed_experts"], layers=layers, request_bytes_max=2 << 20, gap_bytes_max=4096)


def memory(folder: Path) -> dict[str, Any]:
    """Peak of a rank over many steps, in a process of its own."""
    schema, micro_batches, budget = schema_of(0, Codec()), 4, 64 << 20
    rng = np.random.default_rng(0)
    with open_root(str(folder), run="memory", create=True) as store:
        rows = rng.integers(0, EXPERTS, (TOKENS, LAYERS, TOP_K), dtype=np.uint8)
        ranks = rank_files(store, schema, rows, STEPS_MEMORY, micro_batches)
        del rows
        with StepFetcher(store, schema, config=StoreSection(bytes_inflight_max=budget)) as fetcher:
            reader, refs = fetcher.reader, [mb.sequences[0].ref for mb in ranks[0].micro_batches]
            one = slice_of([r for r in refs if r is not None][:1], schema, 0, 1, None)
            assembled = micro_batches * buffer_bytes(one, schema, expert_dtype="int32")
            scratch = 2 * max(r.size for s in reader.plan(refs[0]).segments for r in s.requests) if refs[0] is not None else 0
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak from here on
            before, peaks = _status("VmRSS"), []
            fetcher.prefetch(ranks[0])
            for n, rank in enumerate(ranks):
                got = fetcher.take(rank)
                if n + 1 < STEPS_MEMORY:
                    fetcher.prefetch(ranks[n + 1])
                    for future in fetcher._steps[n + 1].futures[:1]:  # noqa: SLF001 - the trainer computes until the next step has begun
                        future.result()
                del got
                fetcher.release(n)
                peaks.append(_status("VmHWM") - before)
            made = fetcher.memory.counters
    return {
        "steps": STEPS_MEMORY, "assembled_bytes": assembled, "budget_bytes": budget, "scratch_bytes": scratch, "before_bytes": before,
        "peak_bytes_step_10": peaks[9], "peak_bytes": peaks[-1], "blocks_made": made.blocks_made, "blocks_reused": made.blocks_reused,
        "of_limit": round(peaks[-1] / (assembled + budget + scratch), 2),
    }  # fmt: skip


def _status(key: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text(encoding="ascii").splitlines() if x.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def section(found: dict[str, Any]) -> list[str]:
    """Of docs/results.md."""
    mib = 1 << 20
    lines = [
        "`python -m tools.fetch_cost`: objects of 16,384 tokens with the routing of Qwen3-30B-A3B (48 layers, 8 of 128 experts, 6.3 MB),",
        "in the page cache, 6 at a time. *fetch* runs read plans into buffers that were written to before; *preadv* reads the same ranges",
        "with as many threads; *decode* checks and unpacks the same chunks from memory with as many threads. Interleaved; GB/s of unpacked",
        f"rows, ratios with their range over {REPEATS} repeats, on {found['machine']['cores']} cores shared with other work.",
        "",
        "| chunk | threads | fetch | per core | decode | preadv | fetch / decode | fetch / preadv |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for t in found["throughput"]:
        ratios = [f"{m} ({low} to {high})" for m, low, high in (t["of_decode"], t["of_preadv"])]
        lines.append(
            f"| {t['chunks']} ({t['chunk_raw_bytes'] // 1024} KiB) | {t['threads']} | {t['fetch_gb_s']} | {t['fetch_gb_s_core']} | "
            f"{t['decode_gb_s']} | {t['preadv_gb_s']} | {ratios[0]} | {ratios[1]} |"
        )
    lines += [
        "",
        "The limit is unpacking, and so the cores; reading from the page cache is a third to a half of it, and more threads than cores",
        "add nothing. Chunks of all layers are unpacked straight into the caller's buffer. Of chunks of some layers each block is unpacked",
        "beside it, and its rows are laid between those of the others: hence the lower rate of the smaller chunks.",
        "",
        "**Exposed time.** A trainer that sleeps for a known time per step, with the next step prefetched:",
        "",
        "| compute / fetch time alone | compute | fetch | exposed, median step | exposed of that step |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {e['compute_of_fetch']} | {e['compute_s'] * 1e3:.0f} ms | {e['fetch_s'] * 1e3:.0f} ms | {e['exposed_s'] * 1e3:.2f} ms | "
        f"{e['exposed_s'] / max(1e-9, e['exposed_s'] + e['compute_s']):.2%} |"
        for e in found["exposed"]
    ]
    m = found["memory"]
    lines += [
        "",
        f"**Memory.** {m['steps']} steps of {m['assembled_bytes'] / mib:.0f} MiB of arrays (int32 ids), `bytes_inflight_max` of",
        f"{m['budget_bytes'] / mib:.0f} MiB, each step dropped before the next is taken. Resident memory rose by",
        f"{m['peak_bytes'] / mib:.0f} MiB at most ({m['peak_bytes_step_10'] / mib:.0f} after 10 steps): {m['of_limit']} of arrays,",
        f"budget and the threads' request buffers together. {m['blocks_made']} blocks were made, and used {m['blocks_reused']} times more.",
        "",
        "**One fetch per node.** Bytes from storage over the bytes of the objects, for the ranks of a node together:",
        "",
        "| ranks | each for itself | through the node's cache |",
        "|---|---|---|",
    ]
    return lines + [f"| {s['ranks']} | {s['alone_of_stored']} | {s['shared_of_stored']} |" for s in found["shared"]]


if __name__ == "__main__":
    main()
