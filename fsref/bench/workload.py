"""The same samples in every form that is compared: objects of both codecs, raw blobs, safetensors; and the buffers that all of them fill.

Owns the files, which lie in the folder it is given, and the packed buffers. Refuses to time anything.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fsref.bench.shapes import SKEW, Shape, payload, raw_bytes
from fsref.config import StoreSection
from fsref.plan import ChunkRead, ReadPlan, SegmentRead
from fsref.reader import DenseOut, Out, RaggedOut, Reader, allocate
from fsref.refs import Codec, Dense, Payload, PayloadRef, Ragged, Schema, object_name
from fsref.store import Store, open_root
from fsref.writer import Receipts, Writer

Coded = Literal["default", "none"]
CODECS: Final[dict[Coded, Codec]] = {"default": Codec(), "none": Codec(name="none")}
_DISTINCT: Final = 4
"""Samples with arrays of their own; more samples than that store the same arrays again, in objects of their own."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What a fetch or a keep is measured on."""

    shape: str = "qwen3-30b"
    heads: bool = True
    masks: bool = True
    tokens: int = 16_384
    samples: int = 4
    kept: float = 1.0
    """Share of each sample's tokens that survives truncation and is read."""
    threads: int = 2
    repeats: int = 7
    skew: float = SKEW
    root: str = ""
    """An fsspec URL for the objects; empty: a temporary folder."""
    endpoint: str = ""
    """Of an S3 root; credentials come from the environment, as for a run."""
    region: str = ""


class Place(NamedTuple):
    """A chunk and where its decoded bytes go."""

    offset: int
    """In the object."""
    size: int
    """Stored bytes, crc included."""
    target: NDArray[np.uint8]
    """uint8, exactly its decoded bytes: a part of the packed buffers, or scratch where it does not fit them whole."""


class Ranged(NamedTuple):
    """One request of a plan."""

    sample: int
    name: str
    """Of the object."""
    offset: int
    size: int
    places: tuple[Place, ...]


@dataclass(frozen=True)
class Workload:
    """Samples of one shape, stored in every form."""

    options: Options
    shape: Shape
    folder: Path
    payloads: tuple[Payload, ...]
    stores: dict[Coded, Store]
    refs: dict[Coded, tuple[PayloadRef, ...]]

    @property
    def kept(self) -> int:
        """Tokens of each sample that are read."""
        return max(1, round(self.options.tokens * self.options.kept))

    def schema(self, coded: Coded) -> Schema:
        """The schema with that codec."""
        return self.shape.schema(CODECS[coded])

    def sample(self, n: int) -> Payload:
        """The arrays of sample ``n``."""
        return self.payloads[n % len(self.payloads)]

    @cached_property
    def outs(self) -> tuple[Out, ...]:
        """Per sample, its slices of one packed buffer per dense field and column. Every method fills these."""
        with self.reader("none") as reader:
            plans = [reader.plan(r.truncated(self.kept)) for r in self.refs["none"]]
        tokens = self.kept * len(plans)
        packed: dict[str, NDArray[Any]] = {}
        outs = []
        for n, plan in enumerate(plans):
            out: dict[str, DenseOut | RaggedOut] = {}
            for f in self.schema("none").fields:
                if f.ragged:
                    out[f.name] = allocate(plan, self.schema("none"), f.name)
                    _touch(out[f.name])
                    continue
                rows = packed.setdefault(f.name, np.zeros((tokens, *f.row_shape), f.dtype))
                out[f.name] = DenseOut(rows[n * self.kept : (n + 1) * self.kept])
            outs.append(out)
        return tuple(outs)

    @cached_property
    def raw_bytes(self) -> int:
        """Decoded bytes of the rows that are read: what GB/s counts."""
        return sum(
            v.nbytes
            for n in range(self.options.samples)
            for columns in arrays(self.sample(n), self.kept, row_columns=True).values()
            for v in columns.values()
        )

    def reader(self, coded: Coded) -> Reader:
        """A reader of the objects of one codec; the caller closes it."""
        return Reader(self.stores[coded], self.schema(coded), threads=self.options.threads)

    def ranged(self, coded: Coded) -> list[Ranged]:
        """Every request of every sample with the places of its chunks."""
        with self.reader(coded) as reader:
            return [
                r
                for n, (ref, out) in enumerate(zip(self.refs[coded], self.outs, strict=True))
                for r in _ranged(n, reader.plan(ref.truncated(self.kept)), out)
            ]

    def path(self, coded: Coded, sample: int) -> Path | None:
        """The object's file, where the store is a folder."""
        root = self.stores[coded].posix_path
        return Path(root) / object_name(self.refs[coded][sample].object_ids[0]) if root is not None else None

    def check(self) -> None:
        """Raises ``AssertionError`` unless the buffers hold the samples: a method that is fast because it is wrong must not be reported."""
        for n, out in enumerate(self.outs):
            for name, columns in arrays(self.sample(n), self.kept).items():
                target = out[name]
                if isinstance(target, DenseOut):
                    known = len(columns[""]) - (self.kept == self.options.tokens)  # the last row is missing
                    assert np.array_equal(target.rows[:known], columns[""][:known]), (n, name)
                    continue
                assert np.array_equal(target.counts, columns["counts"]), (n, name)
                for column, values in target.columns.items():
                    assert np.array_equal(values[: len(columns[column])], columns[column]), (n, name, column)

    def clear(self) -> None:
        """Fills the buffers with what no sample holds, so that ``check`` sees the next method's work only."""
        for out in self.outs:
            for target in out.values():
                for values in [target.rows] if isinstance(target, DenseOut) else [target.counts, *target.columns.values()]:
                    values.view(np.uint8).fill(0xA5)


def arrays(sample: Payload, kept: int, *, row_columns: bool = False) -> dict[str, dict[str, NDArray[Any]]]:
    """Field to column (``""`` dense, ``counts``, names) to the values of the first ``kept`` tokens; with ``row_columns`` those too."""
    out: dict[str, dict[str, NDArray[Any]]] = {}
    for name, data in sample.fields.items():
        if isinstance(data, Dense):
            out[name] = {"": data.rows[:kept]}
            continue
        count = int(data.counts[:kept].sum())
        out[name] = {"counts": data.counts[:kept]} | {n: c[:count] for n, c in data.columns.items()}
        if row_columns:
            out[name] |= {n: c[:kept] for n, c in data.row_columns.items()}
    return out


@contextmanager
def workload(options: Options, shape: Shape) -> Iterator[Workload]:
    """Stores the samples in a temporary folder, or under ``options.root`` where one is named, and removes them at the end."""
    payloads = tuple(
        payload(shape, options.tokens, seed=n, skew=options.skew).checked(shape.schema()) for n in range(min(options.samples, _DISTINCT))
    )
    settings = StoreSection(endpoint=options.endpoint, region=options.region) if options.endpoint else None
    with tempfile.TemporaryDirectory(prefix="fsref-bench-") as folder:
        stores: dict[Coded, Store] = {}
        refs: dict[Coded, tuple[PayloadRef, ...]] = {}
        try:
            for coded, codec in CODECS.items():
                receipts = Receipts(f"bench-{coded}")
                stores[coded] = open_root(
                    options.root or folder, run=f"bench-{receipts.inc.rpartition('.')[2]}", settings=settings, create=True
                )
                writer = Writer(stores[coded], shape.schema(codec), receipts, durability="process")
                refs[coded] = tuple(writer.put(payloads[n % len(payloads)]) for n in range(options.samples))
            yield Workload(options, shape, Path(folder), payloads, stores, refs)
        finally:
            for store in stores.values():
                if options.root:
                    store.remove_all("obj")
                store.close()


def _touch(out: DenseOut | RaggedOut) -> None:
    """Writes to every page once: page faults are no method's cost."""
    if isinstance(out, RaggedOut):
        for column in out.columns.values():
            column.fill(0)


def _ranged(sample: int, plan: ReadPlan, out: Out) -> Iterator[Ranged]:
    for segment in plan.segments:
        for request in segment.requests:
            places = tuple(
                Place(request.offset + c.offset, c.size, _target(c, segment, out, scratch=lambda size: np.zeros(size, np.uint8)))
                for c in request.chunks
            )
            yield Ranged(sample, object_name(segment.object_id), request.offset, request.size, places)


def _target(chunk: ChunkRead, segment: SegmentRead, out: Out, *, scratch: Callable[[int], NDArray[np.uint8]]) -> NDArray[np.uint8]:
    read = segment.fields[chunk.field]
    target = out[read.field.name]
    if isinstance(target, DenseOut):
        part: NDArray[Any] = target.rows[chunk.start : chunk.stop]
    elif chunk.flat:
        part = target.columns[chunk.column][chunk.start : chunk.stop]
    else:
        part = (target.counts if chunk.column == "counts" else target.row_columns[chunk.column])[chunk.start : chunk.stop]
    if part.nbytes != chunk.nbytes or not part.flags.c_contiguous:
        return scratch(chunk.nbytes)
    return part.reshape(-1).view(np.uint8)


def stored_bytes(work: Workload) -> dict[str, int]:
    """Bytes of one sample's arrays and of its objects."""
    sizes: dict[str, int] = {coded: sum(r.byte_count for r in refs) // len(refs) for coded, refs in work.refs.items()}
    return {"raw": raw_bytes(work.sample(0)), **sizes}


def blob(sample: Payload) -> tuple[bytes, dict[str, dict[str, tuple[str, tuple[int, ...], int]]]]:
    """All arrays back to back, and field to column to (dtype, shape, offset): the whole blob of the HTTP design."""
    parts: list[bytes] = []
    places: dict[str, dict[str, tuple[str, tuple[int, ...], int]]] = {}
    at = 0
    for name, columns in arrays(sample, sample.token_count).items():
        for column, values in columns.items():
            places.setdefault(name, {})[column] = (values.dtype.str, values.shape, at)
            parts.append(np.ascontiguousarray(values).tobytes())
            at += len(parts[-1])
    return b"".join(parts), places


def place(out: Out, name: str, columns: dict[str, NDArray[Any]], kept: int) -> None:
    """Copies one field's whole arrays, cut to the first ``kept`` tokens, to the buffers: what follows any transport of whole arrays."""
    target = out[name]
    if isinstance(target, DenseOut):
        target.rows[...] = columns[""][:kept]
        return
    counts = columns["counts"][:kept]
    target.counts[...] = counts
    total = int(counts.sum(dtype=np.int64))
    for column, values in target.columns.items():
        values[:total] = columns[column][:total]


def ragged_fields(sample: Payload) -> list[str]:
    """Names of its ragged fields."""
    return [n for n, d in sample.fields.items() if isinstance(d, Ragged)]
