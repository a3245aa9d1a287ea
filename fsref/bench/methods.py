"""Ways to bring the samples of a workload into its buffers: the limit of the machine, fsref, and what a user would pick instead.

Each method has a ``run`` that fills every buffer once, what it read and with how many requests, and a ``close``. All get the same
number of threads, one sample (fsref: one part of a sample) at a time on each. Optional packages are looked for by name: a method whose
package is absent is reported as such.
"""

import functools
import http.client
import importlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import numpy as np
import zarr
from numpy.typing import NDArray

from fsref.bench.blobserver import BlobServer
from fsref.bench.workload import CODECS, Coded, Ranged, Workload, arrays, blob, place, ragged_fields
from fsref.objects import CRC_BYTES, check_chunk, decode_chunk, native
from fsref.reader import RaggedOut, Reader, chunks
from fsref.refs import TokenRange

PREADV: Final = "preadv, the bytes of codec none"
PREADV_STORED: Final = "preadv, the bytes of the default codec"
MEMCPY: Final = "memcpy"
DECODE: Final = "decode alone, default codec"
DECODE_NUMCODECS: Final = "decode alone by numcodecs"
HAND: Final = "a hand loop, default codec"
HAND_NONE: Final = "a hand loop, codec none"
FSREF: Final = "fsref, default codec"
FSREF_NONE: Final = "fsref, codec none"
FSREF_UNCHECKED: Final = "fsref, codec none, without checks"
ZARR: Final = "zarr-python, the same objects"
HTTP: Final = "whole blobs over HTTP"
SAFETENSORS: Final = "safetensors slices"
RAY: Final = "Ray object store"
TRANSFER_QUEUE: Final = "TransferQueue"
GETS: Final = "obstore GETs, the bytes of codec none"
GETS_DECODE: Final = "obstore GETs and decode, default codec"


class Method:
    """One way. ``bytes_read`` and ``requests`` are of one run; None where the method does not say."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        self.bytes_read: int | None = None
        self.requests: int | None = None
        self._pool: ThreadPoolExecutor | None = None

    def run(self) -> None:
        """Fills every buffer of the workload once."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.work.options.threads)
        list(self._pool.map(self.one, range(self.work.options.samples)))

    def one(self, sample: int) -> None:
        """Fills the buffers of one sample."""
        raise NotImplementedError

    def close(self) -> None:
        """Stops what it started."""
        if self._pool is not None:
            self._pool.shutdown()


class Preadv(Method):
    """One ``preadv`` per request of the plan, scattered straight to the places of the chunks: the limit of any reader of these files."""

    def __init__(self, work: Workload, coded: Coded) -> None:
        super().__init__(work)
        self.bytes_read = self.requests = 0
        self.files: dict[int, int] = {}
        self.reads: dict[int, list[tuple[Ranged, list[NDArray[np.uint8]]]]] = {}
        for r in work.ranged(coded):
            if r.sample not in self.files:
                path = work.path(coded, r.sample)
                assert path is not None
                self.files[r.sample] = os.open(path, os.O_RDONLY)
            self.reads.setdefault(r.sample, []).append((r, _scattered(r, plain=coded == "none")))
            self.bytes_read += r.size
            self.requests += 1

    def one(self, sample: int) -> None:
        for r, views in self.reads[sample]:
            self.read(sample, r, views)

    def read(self, sample: int, r: Ranged, views: list[NDArray[np.uint8]]) -> None:
        """One request."""
        if os.preadv(self.files[sample], views, r.offset) != r.size:
            raise OSError(f"a read of {r.size} bytes came short")

    def close(self) -> None:
        super().close()
        for fd in self.files.values():
            os.close(fd)


def _scattered(r: Ranged, *, plain: bool) -> list[NDArray[np.uint8]]:
    """Where the bytes of a request go: chunks to their places (plain ones), the rest to junk."""
    if not plain:
        return [np.zeros(r.size, np.uint8)]
    views: list[NDArray[np.uint8]] = []
    at = r.offset
    for p in r.places:
        if p.offset > at:
            views.append(np.zeros(p.offset - at, np.uint8))
        views += [p.target, np.zeros(p.size - len(p.target), np.uint8)]
        at = p.offset + p.size
    return views


class Memcpy(Method):
    """A copy of the decoded bytes within memory."""

    def __init__(self, work: Workload) -> None:
        super().__init__(work)
        self._targets: dict[int, list[NDArray[np.uint8]]] = {}
        for r in work.ranged("none"):
            self._targets.setdefault(r.sample, []).extend(p.target for p in r.places)
        self._sources = {n: [t.copy() for t in targets] for n, targets in self._targets.items()}

    def one(self, sample: int) -> None:
        for target, source in zip(self._targets[sample], self._sources[sample], strict=True):
            np.copyto(target, source)


class Decode(Method):
    """The chunks in memory already: checks and decoding to the same places, no I/O; with the compiled kernels where they are there, or by
    numcodecs and google_crc32c alone.
    """

    def __init__(self, work: Workload, coded: Coded, *, kernels: bool = True) -> None:
        super().__init__(work)
        self._codec, self._kernels = CODECS[coded], kernels
        self._chunks: dict[int, list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]] = {}
        for r in work.ranged(coded):
            with work.stores[coded].open(r.name) as file:
                stored = np.empty(r.size, np.uint8)
                file.read_into(r.offset, stored)
            cut = [(stored[p.offset - r.offset : p.offset - r.offset + p.size], p.target) for p in r.places]
            self._chunks.setdefault(r.sample, []).extend(cut)

    def run(self) -> None:
        with _as_is() if self._kernels else _patched(native, KERNELS=None):
            super().run()

    def one(self, sample: int) -> None:
        for stored, target in self._chunks[sample]:
            decode_chunk(stored, target, self._codec)


class HandLoop(Preadv):
    """What one would write by hand for exactly these files, every place known before: ``preadv``, checksum, decoding. What fsref adds to
    it is planning, refusing what does not add up, retries, deadlines and counters.
    """

    def __init__(self, work: Workload, coded: Coded) -> None:
        super().__init__(work, coded)
        self._coded, self._codec = coded, CODECS[coded]
        self._scratch = threading.local()
        self._size = max(r.size for reads in self.reads.values() for r, _ in reads)

    def one(self, sample: int) -> None:
        if self._coded == "none":
            self._plain(sample)
            return
        scratch = getattr(self._scratch, "stored", None)
        if scratch is None:
            scratch = self._scratch.stored = np.empty(self._size, np.uint8)
        for r, _ in self.reads[sample]:
            self.read(sample, r, [scratch[: r.size]])
            for p in r.places:
                at = p.offset - r.offset
                decode_chunk(scratch[at : at + p.size], p.target, self._codec)

    def _plain(self, sample: int) -> None:
        for r, views in self.reads[sample]:
            self.read(sample, r, views)
            crcs = [v for v in views if len(v) == CRC_BYTES]
            for p, crc in zip(r.places, crcs, strict=True):
                check_chunk(p.target, crc)


class Fsref(Method):
    """Planning, reading, checking, decoding to the packed buffers, and moving ragged values together: what a trainer rank does."""

    def __init__(self, work: Workload, coded: Coded, *, check: bool = True) -> None:
        super().__init__(work)
        self._coded, self._check = coded, check
        self._refs = [r.truncated(work.kept) for r in work.refs[coded]]
        self._ragged = ragged_fields(work.sample(0))
        self.reader: Reader = work.reader(coded)

    def run(self) -> None:
        before = (self.reader.counters.bytes_fetched, self.reader.counters.requests)
        with _unchecked() if not self._check else _as_is():
            plans, futures = [], []
            for ref, out in zip(self._refs, self.work.outs, strict=True):  # as the loader does: what is planned is fetched at once
                plans.append(self.reader.plan(ref, tokens=TokenRange(0, ref.token_count)))
                futures += self.reader.submit(plans[-1], out)
            errors = self.reader.collect(futures)
        if errors:
            raise errors[0]
        for plan, out in zip(plans, self.work.outs, strict=True):
            for name in self._ragged:
                target = out[name]
                assert isinstance(target, RaggedOut)
                target.compact(plan, name)
        self.bytes_read = self.reader.counters.bytes_fetched - before[0]
        self.requests = self.reader.counters.requests - before[1]

    def close(self) -> None:
        self.reader.close()


@contextmanager
def _as_is() -> Iterator[None]:
    yield


@contextmanager
def _patched(module: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


def _unchecked() -> AbstractContextManager[None]:
    """Chunks are decoded without their crc: a figure only, no setting of the product."""
    unpack, fetch = chunks.unpack, chunks.fetch  # type: ignore[attr-defined]
    return _patched(chunks, unpack=functools.partial(unpack, check=False), fetch=functools.partial(fetch, check=False))


class ZarrPython(Method):
    """``zarr.storage.ZipStore`` on the very objects, arrays cut at the kept tokens."""

    def one(self, sample: int) -> None:
        path = self.work.path("default", sample)
        assert path is not None
        store = zarr.storage.ZipStore(path, mode="r")
        group = zarr.open_group(store, mode="r", zarr_format=3)
        for name, columns in arrays(self.work.sample(sample), 0).items():
            found = {c: _zarr_values(group, f"{name}/{c}" if c else name, self.work.kept) for c in columns if not c or c == "counts"}
            if "counts" in columns:
                values = int(found["counts"].sum(dtype=np.int64))
                found |= {c: _zarr_values(group, f"{name}/{c}", values) for c in columns if c != "counts"}
            place(self.work.outs[sample], name, found, self.work.kept)
        store.close()


def _zarr_values(group: zarr.Group, path: str, count: int) -> NDArray[Any]:
    array = group[path]
    assert isinstance(array, zarr.Array)
    return np.asarray(array[:count])


class Http(Method):
    """References over HTTP from another process's memory: whole blobs, neither packed nor checked, one kept connection per thread."""

    def __init__(self, work: Workload) -> None:
        super().__init__(work)
        blobs = [blob(p) for p in work.payloads]
        self._places = [places for _, places in blobs]
        self._server = BlobServer([data for data, _ in blobs], folder=work.folder)
        self._thread = threading.local()
        self._connections: list[http.client.HTTPConnection] = []
        self.bytes_read = sum(len(blobs[n % len(blobs)][0]) for n in range(work.options.samples))
        self.requests = work.options.samples

    def one(self, sample: int) -> None:
        connection: http.client.HTTPConnection | None = getattr(self._thread, "connection", None)
        if connection is None:
            connection = self._thread.connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=60)
            self._connections.append(connection)
        number = sample % len(self._places)
        connection.request("GET", f"/{number}")
        data = connection.getresponse().read()
        for name, columns in self._places[number].items():
            found = {c: np.frombuffer(data, dtype, int(np.prod(shape)), at).reshape(shape) for c, (dtype, shape, at) in columns.items()}
            place(self.work.outs[sample], name, found, self.work.kept)

    def close(self) -> None:
        super().close()
        for connection in self._connections:
            connection.close()
        self._server.close()


class Safetensors(Method):
    """Slices of a safetensors file per sample: raw arrays, no checks."""

    def __init__(self, work: Workload) -> None:
        super().__init__(work)
        self._open: Any = importlib.import_module("safetensors").safe_open
        save: Any = importlib.import_module("safetensors.numpy").save_file
        for n, sample in enumerate(work.payloads):
            flat = {f"{name}.{c}": v for name, columns in arrays(sample, sample.token_count).items() for c, v in columns.items()}
            save({k: np.ascontiguousarray(v) for k, v in flat.items()}, str(work.folder / f"{n}.safetensors"))

    def one(self, sample: int) -> None:
        kept = self.work.kept
        with self._open(str(self.work.folder / f"{sample % len(self.work.payloads)}.safetensors"), framework="np") as file:
            for name, columns in arrays(self.work.sample(sample), 0).items():
                if "counts" not in columns:
                    place(self.work.outs[sample], name, {"": file.get_slice(f"{name}.")[:kept]}, kept)
                    continue
                counts = file.get_slice(f"{name}.counts")[:kept]
                values = int(counts.sum(dtype=np.int64))
                found = {"counts": counts} | {c: file.get_slice(f"{name}.{c}")[:values] for c in columns if c != "counts"}
                place(self.work.outs[sample], name, found, kept)


class Gets(Method):
    """The plan's requests as ranged GETs by obstore, decoded or not: the limit of any reader on this object storage."""

    def __init__(self, work: Workload, coded: Coded, *, decode: bool) -> None:
        super().__init__(work)
        obstore, s3 = importlib.import_module("obstore"), importlib.import_module("obstore.store")
        self._get: Any = obstore.get_range
        options = {k: v for k, v in (("endpoint", work.options.endpoint), ("region", work.options.region)) if v}
        self._store: Any = s3.from_url(work.stores[coded].url, client_options={"allow_http": True}, **options)
        self._codec = CODECS[coded] if decode else None
        self.bytes_read = self.requests = 0
        self._by_sample: dict[int, list[Ranged]] = {}
        for r in work.ranged(coded):
            self._by_sample.setdefault(r.sample, []).append(r)
            self.bytes_read += r.size
            self.requests += 1

    def one(self, sample: int) -> None:
        for r in self._by_sample[sample]:
            data = np.frombuffer(self._get(self._store, r.name, start=r.offset, length=r.size), np.uint8)
            for p in r.places if self._codec is not None else ():
                assert self._codec is not None
                decode_chunk(data[p.offset - r.offset : p.offset - r.offset + p.size], p.target, self._codec)


LOCAL: Final[dict[str, Callable[[Workload], Method]]] = {
    PREADV: lambda w: Preadv(w, "none"),
    PREADV_STORED: lambda w: Preadv(w, "default"),
    MEMCPY: Memcpy,
    DECODE: lambda w: Decode(w, "default"),
    DECODE_NUMCODECS: lambda w: Decode(w, "default", kernels=False),
    HAND: lambda w: HandLoop(w, "default"),
    HAND_NONE: lambda w: HandLoop(w, "none"),
    FSREF: lambda w: Fsref(w, "default"),
    FSREF_NONE: lambda w: Fsref(w, "none"),
    FSREF_UNCHECKED: lambda w: Fsref(w, "none", check=False),
    ZARR: ZarrPython,
    HTTP: Http,
    SAFETENSORS: Safetensors,
}
REMOTE: Final[dict[str, Callable[[Workload], Method]]] = {
    GETS: lambda w: Gets(w, "none", decode=False),
    GETS_DECODE: lambda w: Gets(w, "default", decode=True),
    DECODE: lambda w: Decode(w, "default"),
    FSREF: lambda w: Fsref(w, "default"),
    FSREF_NONE: lambda w: Fsref(w, "none"),
}
NEEDS: Final = {SAFETENSORS: "safetensors", GETS: "obstore", GETS_DECODE: "obstore"}
FILLS: Final = frozenset({FSREF, FSREF_NONE, FSREF_UNCHECKED, ZARR, HTTP, SAFETENSORS})
"""Methods that leave the whole sample in the buffers, which is then compared."""
