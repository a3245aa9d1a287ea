"""``fsref bench keep``: encoding and publishing one sample from an env worker, against zarr-python and raw writes of the same arrays."""

import asyncio
import functools
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import zarr
import zarr.codecs

from fsref.bench.measure import interleaved, machine, ratio, rss_bytes
from fsref.bench.pause import idle, watched
from fsref.bench.shapes import raw_bytes, shape_of
from fsref.bench.workload import CODECS, Options, Workload, arrays, blob, workload
from fsref.objects import encode
from fsref.objects.codec import shuffle_width
from fsref.plan import chunk_tokens
from fsref.refs import Codec, Payload
from fsref.refs.export import cut
from fsref.store.base import Durability
from fsref.writer import Receipts, Writer

PUT: Final = "fsref, rename only"
PUT_SYNC: Final = "fsref, with fsync"
PUT_NONE: Final = "fsref, codec none, rename only"
ENCODE: Final = "encoding alone"
ZARR_ZIP: Final = "zarr-python, ZipStore, the same codec"
ZARR_FOLDER: Final = "zarr-python, LocalStore, the same codec"
RAW: Final = "raw write of the arrays, rename only"
TARGETS: Final = (
    ("fsref / zarr-python in a ZIP", PUT, ZARR_ZIP, 2.5),
    ("fsref / zarr-python in a folder", PUT, ZARR_FOLDER, 2.5),
    ("fsref / raw write", PUT, RAW, 0.0),
)
STEADY_TOKENS: Final = 1024


def keep(options: Options, *, steady_keeps: int = 1000) -> dict[str, Any]:
    """Measures; ``steady_keeps`` is how often a small sample is kept to see whether memory grows."""
    shape = shape_of(options.shape).without(heads=options.heads, masks=options.masks)
    with workload(options, shape) as work:
        sample, raw = work.sample(0), raw_bytes(work.sample(0))
        cases: dict[str, Callable[[], Any]] = {
            PUT: functools.partial(_writer(work, "process").put, sample),
            PUT_SYNC: functools.partial(_writer(work, "node").put, sample),
            PUT_NONE: functools.partial(_writer(work, "process", CODECS["none"]).put, sample),
            ENCODE: functools.partial(encode, sample, work.schema("default")),
            ZARR_ZIP: functools.partial(_zarr, work, zipped=True, number=itertools.count()),
            ZARR_FOLDER: functools.partial(_zarr, work, zipped=False, number=itertools.count()),
            RAW: functools.partial(_raw, work.folder, blob(sample)[0]),
        }
        timings = interleaved(cases, repeats=options.repeats, turn_s=0, after=functools.partial(_clear, work))
        ratios = []
        for label, a, b, reach in TARGETS:
            found = ratio(timings, a, b)
            assert found is not None
            spread = {"median": found.median, "least": found.least, "most": found.most, "cpu": found.cpu}
            ratios.append({"ratio": label, **spread, "reach": reach, "at_least": True})
        pauses = asyncio.run(_pauses(cases[PUT], options.repeats))
        growth = _growth(work, options, steady_keeps)
        return {
            "bench": "keep",
            "machine": machine(),
            "shape": shape.name,
            "tokens": options.tokens,
            "repeats": options.repeats,
            "raw_bytes": raw,
            "object_bytes": work.refs["default"][0].byte_count,
            "rows": [{"method": n, **t.figures(raw)} for n, t in timings.items()],
            "pause": pauses,
            "memory": growth,
            "ratios": [
                *ratios,
                _at_most("p99 pause of the event loop beyond its idle value, ms", pauses["p99_ms"] - pauses["idle_p99_ms"], 5.0),
                _at_most(f"memory after {steady_keeps} keeps beyond that after 10, MiB", growth["growth_mib"], 64.0),
            ],
        }


def _at_most(label: str, value: float, reach: float) -> dict[str, Any]:
    value = round(value, 2)
    return {"ratio": label, "median": value, "least": value, "most": value, "reach": reach, "at_least": False}


def _writer(work: Workload, durability: Durability, codec: Codec = CODECS["default"]) -> Writer:
    return Writer(work.stores["default"], work.shape.schema(codec), Receipts("bench"), durability=durability)


def _clear(work: Workload) -> None:
    """Removes what a turn wrote; the workload's own objects stay."""
    store = work.stores["default"]
    own = {f"obj/{object_id}.zip" for refs in work.refs.values() for ref in refs for object_id in ref.object_ids}
    store.delete([e.name for e in store.list("obj") if e.name not in own])
    for path in work.folder.glob("zarr-*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


async def _pauses(work: Callable[[], Any], repeats: int) -> dict[str, float]:
    quiet = await idle(0.2 * max(repeats, 3))
    found = (await watched(work, max(repeats, 10)))["pause"]
    return {"idle_p99_ms": quiet["p99_ms"], "idle_longest_ms": quiet["longest_ms"], **found}


def _growth(work: Workload, options: Options, keeps: int) -> dict[str, float]:
    """Resident memory of this process over many keeps of a small sample."""
    tokens = min(options.tokens, STEADY_TOKENS)
    sample = work.sample(0)
    small = Payload(sample.token_ids[:tokens], {n: cut(d, 0, tokens) for n, d in sample.fields.items()})
    writer = _writer(work, "process")
    after_10 = 0
    for n in range(keeps):
        ref = writer.put(small)
        work.stores["default"].delete([f"obj/{ref.object_ids[0]}.zip"])
        if n == min(10, keeps) - 1:
            after_10 = rss_bytes()
    return {"keeps": keeps, "tokens": tokens, "growth_mib": round((rss_bytes() - after_10) / 2**20, 1)}


def _zarr(work: Workload, *, zipped: bool, number: "itertools.count[int]") -> None:
    """The same arrays, chunks and codec chain, written by zarr-python to a new place."""
    path = work.folder / f"zarr-{'zip' if zipped else 'folder'}-{next(number)}"
    store: Any = zarr.storage.ZipStore(path.with_suffix(".zip"), mode="w") if zipped else zarr.storage.LocalStore(path)
    group = zarr.create_group(store, zarr_format=3)
    sample, codec = work.sample(0), CODECS["default"]
    step = chunk_tokens(sample.token_count)
    ranges = -(-sample.token_count // step)
    for name, columns in arrays(sample, sample.token_count, row_columns=True).items():
        for column, values in columns.items():
            rows = step if len(values) == sample.token_count else max(1, -(-len(values) // ranges))
            width = shuffle_width(rows * values[:1].nbytes, values.dtype.itemsize)
            made = group.create_array(
                f"{name}/{column}" if column else name,
                shape=values.shape,
                dtype=values.dtype,
                chunks=(rows, *values.shape[1:]),
                filters=None,
                compressors=[
                    zarr.codecs.BloscCodec(cname="lz4", clevel=codec.level, shuffle="bitshuffle", typesize=width),
                    zarr.codecs.Crc32cCodec(),
                ],
                config={"write_empty_chunks": True},
            )
            made[...] = values
    if zipped:
        store.close()


def _raw(folder: Path, data: bytes) -> None:
    temp = folder / "raw.tmp"
    temp.write_bytes(data)
    temp.replace(folder / "raw")
