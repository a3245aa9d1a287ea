"""``fsref bench codecs``: how tightly and how fast each way of packing takes real arrays, and which way suits which storage.

The rule: threads read, check and decode side by side, so a way moves raw bytes at ``min(S / packed, threads * D)``, S being what the
storage gives and D one core's decoding (writing alike, with E). Every byte is written once and read once: the way with the highest
``1 / (1 / write + 1 / read)`` suits S best, of equals the one that stores less. The default is judged at ``RATE_DEFAULT``, which it
must not slow down.

Arrays are cut into chunks of 2,048 tokens, as objects have them. Shape letters: T tokens, L layers, K experts per token, N values.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from numcodecs import blosc
from numpy.typing import NDArray

from fsref.bench.measure import machine
from fsref.bench.shapes import payload, shape_of
from fsref.bench.workload import Options
from fsref.objects import decode_chunk  # also turns Blosc's own threads off
from fsref.objects.codec import pack_chunk, shuffle_width
from fsref.objects.native import KERNELS
from fsref.plan.layout import CHUNK_TOKENS_MIN, SHUFFLED_VALUES
from fsref.refs import Codec, Dense, Ragged

RATES: Final = (0.5, 2.0, 8.0)
"""GB/s of storage."""
RATE_DEFAULT: Final = 2.0
DEFAULT: Final = f"lz4 {Codec().level}, bitshuffle"
OWN_WIDTH: Final = f"{DEFAULT}, own width"
"""With the array's item size as Blosc's ``typesize``."""
OWN_KERNELS: Final = f"{DEFAULT}, kernels"
"""The default as objects are packed and read where the kernels are there, crc32c included; all other ways are numcodecs'."""
_SHUFFLES: Final = {"bitshuffle": blosc.BITSHUFFLE, "shuffle": blosc.SHUFFLE, "no shuffle": blosc.NOSHUFFLE}
_BLOSC: Final = (
    ("lz4", 1, "bitshuffle"),
    ("lz4", 5, "bitshuffle"),
    ("lz4", 9, "bitshuffle"),
    ("lz4", 1, "shuffle"),
    ("lz4", 1, "no shuffle"),
    ("blosclz", 1, "bitshuffle"),
    ("blosclz", 5, "bitshuffle"),
    ("zstd", 1, "bitshuffle"),
    ("zstd", 3, "bitshuffle"),
    ("zstd", 5, "bitshuffle"),
)


class Way(NamedTuple):
    """One way of packing a chunk and of getting it back."""

    encode: Callable[[NDArray[Any]], Any]
    decode: Callable[[Any, NDArray[Any]], None]


def codecs(options: Options, *, routes: NDArray[Any] | None = None) -> dict[str, Any]:
    """Measures every way on every array. ``routes`` [T, L, K]: routing of a real router, beside the synthetic one."""
    shape = shape_of(options.shape)
    sample = payload(shape, options.tokens, skew=options.skew).checked(shape.schema())
    found: list[dict[str, Any]] = []
    for name, chunks in _arrays(sample.fields, routes).items():
        experts = shape.experts if name.startswith("routing") else 0
        for label, way in ways(experts, chunks[0]).items():
            found.append({"array": name, "way": label, **_measured(chunks, way, options.repeats)})
    for row in found:
        row |= {f"GB/s at {rate:g}": round(moved(row, rate, options.threads), 2) for rate in RATES}
    return {
        "bench": "codecs",
        "machine": machine(),
        "shape": shape.name,
        "tokens": options.tokens,
        "threads": options.threads,
        "repeats": options.repeats,
        "skew": options.skew,
        "rows": found,
        "best": [
            {"array": a, **{f"at {rate:g} GB/s": best(found, a, rate, options.threads) for rate in RATES}}
            for a in dict.fromkeys(r["array"] for r in found)
        ],
    }


def moved(row: Mapping[str, Any], rate: float, threads: int) -> float:
    """The rule: raw GB/s of writing once and reading once on storage of ``rate`` GB/s."""
    through = rate / float(row["packed"])
    write, read = (min(through, threads * float(row[f"{way}_gb_per_s"])) for way in ("encode", "decode"))
    return 1 / (1 / write + 1 / read)


def best(rows: list[dict[str, Any]], array: str, rate: float, threads: int) -> str:
    """The way that the rule chooses for an array."""
    own = [r for r in rows if r["array"] == array]
    return str(max(own, key=lambda r: (round(moved(r, rate, threads), 2), -r["packed"]))["way"])


def _arrays(fields: Mapping[str, Dense | Ragged], routes: NDArray[Any] | None) -> dict[str, list[NDArray[Any]]]:
    out: dict[str, list[NDArray[Any]]] = {}
    for name, data in fields.items():
        if isinstance(data, Dense):
            out["routing, synthetic"] = _cut(data.rows, CHUNK_TOKENS_MIN)
            continue
        ranges = max(1, -(-len(data.counts) // CHUNK_TOKENS_MIN))
        for column, values in data.columns.items():
            size = max(1, -(-len(values) // ranges))
            size += -size % SHUFFLED_VALUES
            out[f"{name}/{column}"] = _cut(_padded(values, size), size)
    if routes is not None:
        out["routing, real router"] = _cut(routes, CHUNK_TOKENS_MIN)
    return out


def _padded(values: NDArray[Any], size: int) -> NDArray[Any]:
    """With zeros behind it up to a whole number of chunks, as edge chunks are stored."""
    return np.concatenate([values, np.zeros(-len(values) % size, values.dtype)])


def _cut(values: NDArray[Any], size: int) -> list[NDArray[Any]]:
    return [np.ascontiguousarray(values[at : at + size]) for at in range(0, len(values), size)]


def ways(experts: int, example: NDArray[Any]) -> dict[str, Way]:
    """Every way for arrays like ``example``; ``experts`` above 0 adds those that know what expert ids are."""
    out = {f"{cname} {level}, {shuffle}": _blosc_way(cname, level, shuffle) for cname, level, shuffle in _BLOSC}
    if shuffle_width(example.nbytes, example.itemsize) != example.itemsize:
        out[OWN_WIDTH] = _blosc_way(Codec().name, Codec().level, "bitshuffle", own_width=True)
    if KERNELS is not None:
        out[OWN_KERNELS] = Way(partial(pack_chunk, KERNELS, level=Codec().level), partial(decode_chunk, codec=Codec()))
    out["none"] = Way(lambda c: c.copy(), lambda p, o: np.copyto(o, p))
    if experts:
        out[f"{DEFAULT}, layers first"] = Way(_layers_first, _layers_last)
        if example.dtype == np.uint8 and experts <= 128:
            out["7 bits each, in numpy"] = Way(_pack7, _unpack7)
    elif example.dtype == np.int32:
        out[f"{DEFAULT}, differences"] = Way(_differences, _sums)
    return out


def _blosc_way(cname: str, level: int, shuffle: str, *, own_width: bool = False) -> Way:
    raw, kind = cname.encode(), _SHUFFLES[shuffle]
    wide = kind == blosc.BITSHUFFLE and not own_width

    def pack(chunk: NDArray[Any]) -> Any:
        width = shuffle_width(chunk.nbytes, chunk.itemsize) if wide else chunk.itemsize
        return blosc.compress(chunk, raw, level, kind, typesize=width)

    return Way(pack, _into)


def _into(packed: Any, out: NDArray[Any]) -> None:
    blosc.decompress(packed, out)


_default: Final = _blosc_way(Codec().name, Codec().level, "bitshuffle").encode


def _layers_first(chunk_TLK: NDArray[Any]) -> Any:
    return _default(np.ascontiguousarray(chunk_TLK.transpose(1, 2, 0)))


def _layers_last(packed: Any, out_TLK: NDArray[Any]) -> None:
    tokens, layers, top_k = out_TLK.shape
    turned = np.empty((layers, top_k, tokens), out_TLK.dtype)
    blosc.decompress(packed, turned)
    out_TLK[...] = turned.transpose(2, 0, 1)


def _pack7(chunk: NDArray[Any]) -> Any:
    return np.packbits(np.unpackbits(chunk.reshape(-1, 1), axis=1)[:, 1:])


def _unpack7(packed: Any, out: NDArray[Any]) -> None:
    bits = np.unpackbits(packed, count=out.size * 7).reshape(-1, 7)
    wide = np.zeros((out.size, 8), np.uint8)
    wide[:, 1:] = bits
    out.reshape(-1)[:] = np.packbits(wide, axis=1).reshape(-1)


def _differences(chunk: NDArray[Any]) -> Any:
    return _default(np.diff(chunk, prepend=chunk.dtype.type(0)))


def _sums(packed: Any, out: NDArray[Any]) -> None:
    blosc.decompress(packed, out)
    np.cumsum(out, out=out)


def _measured(chunks: list[NDArray[Any]], way: Way, repeats: int) -> dict[str, float]:
    raw = sum(c.nbytes for c in chunks)
    outs = [np.empty_like(c) for c in chunks]
    encode_s, decode_s = [], []
    packed: list[Any] = []
    for _ in range(repeats):
        start = time.thread_time()
        packed = [way.encode(c) for c in chunks]
        middle = time.thread_time()
        for p, o in zip(packed, outs, strict=True):
            way.decode(p, o)
        encode_s.append(middle - start)
        decode_s.append(time.thread_time() - middle)
    for chunk, out in zip(chunks, outs, strict=True):
        assert chunk.tobytes() == out.tobytes(), "a codec does not give back what it got"
    size = sum(p.nbytes if isinstance(p, np.ndarray) else len(p) for p in packed)
    return {
        "packed": round(size / raw, 4),
        "encode_gb_per_s": round(raw / max(statistics.median(encode_s), 1e-9) / 1e9, 2),
        "decode_gb_per_s": round(raw / max(statistics.median(decode_s), 1e-9) / 1e9, 2),
    }
