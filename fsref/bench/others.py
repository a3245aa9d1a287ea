"""What a framework's own transport, or another S3 client, would do with the same samples: Ray's object store, TransferQueue, s3fs.

Each is driven as its users drive it, through its public interface, and ends with a copy into the packed buffers. Owns the one Ray
runtime that two of them share. Refuses to tune them beyond what their documentation says.
"""

import importlib
import logging
from typing import Any, Final

import numpy as np

from fsref.bench.methods import RAY, TRANSFER_QUEUE, Method
from fsref.bench.workload import CODECS, Coded, Ranged, Workload, arrays, place
from fsref.objects import decode_chunk

S3FS: Final = "s3fs cat_ranges, the bytes of codec none"
S3FS_DECODE: Final = "s3fs cat_file and decode, default codec"
_STORAGE_UNITS: Final = 2
"""TransferQueue's own default: storage processes per node."""
_PARTITION: Final = "bench"


class RayRuntime:
    """One Ray runtime of this process, started by the first method that needs it and stopped by the last that closes."""

    _holders = 0

    def __init__(self, threads: int) -> None:
        """Raises ``ImportError`` without Ray."""
        self.ray: Any = importlib.import_module("ray")
        if not RayRuntime._holders:
            # Actors take a slot each: TransferQueue's controller and its storage units. Slots are no threads, nothing is pinned.
            slots = threads + 1 + _STORAGE_UNITS
            self.ray.init(num_cpus=slots, log_to_driver=False, include_dashboard=False, configure_logging=False)
        RayRuntime._holders += 1

    def close(self) -> None:
        """Call once per instance."""
        RayRuntime._holders -= 1
        if not RayRuntime._holders:
            self.ray.shutdown()


class Ray(Method):
    """Arrays put to one node's object store, fetched by reference (shared memory, no copy) and copied to the buffers."""

    def __init__(self, work: Workload) -> None:
        super().__init__(work)
        self._runtime = RayRuntime(work.options.threads)
        self._refs = [self._runtime.ray.put(arrays(p, p.token_count)) for p in work.payloads]

    def one(self, sample: int) -> None:
        found = self._runtime.ray.get(self._refs[sample % len(self._refs)])
        for name, columns in found.items():
            place(self.work.outs[sample], name, columns, self.work.kept)

    def close(self) -> None:
        super().close()
        self._runtime.close()


class TransferQueue(Method):
    """A key per sample in its simple storage (units in processes of their own), a tensor per column; the consumer gets by key.

    Whole samples: the key-value interface has no slices of a value.
    """

    def __init__(self, work: Workload) -> None:
        super().__init__(work)
        self._runtime = RayRuntime(work.options.threads)
        self._torch: Any = importlib.import_module("torch")
        conf: Any = importlib.import_module("omegaconf").OmegaConf
        self._queue: Any = importlib.import_module("transfer_queue")
        logging.getLogger("transfer_queue.utils.common").setLevel(logging.ERROR)  # a line per request, about its threads
        self._queue.init(conf.create({"backend": {"SimpleStorage": {"num_data_storage_units": _STORAGE_UNITS}}}))
        for number, sample in enumerate(work.payloads):
            columns = arrays(sample, sample.token_count)
            self._queue.kv_put(str(number), _PARTITION, {n: self._tensor(v) for n, v in flat(columns).items()})
        self._columns = {n: list(c) for n, c in arrays(work.sample(0), 0).items()}
        self.requests = work.options.samples

    def one(self, sample: int) -> None:
        found = self._queue.kv_batch_get(str(sample % len(self.work.payloads)), _PARTITION)
        for name, columns in self._columns.items():
            values = {c: self._array(found[f"{name}.{c}"]) for c in columns}
            place(self.work.outs[sample], name, values, self.work.kept)

    def close(self) -> None:
        super().close()
        self._queue.close()
        self._runtime.close()

    def _tensor(self, values: Any) -> Any:
        values = np.ascontiguousarray(values)
        if values.dtype == np.uint16:  # torch carries it; some of its operations do not
            return self._torch.from_numpy(values.view(np.int16))
        return self._torch.from_numpy(values)

    def _array(self, tensor: Any) -> Any:
        (only,) = tensor.unbind() if tensor.is_nested else (tensor[0],)
        values = only.numpy()
        return values.view(np.uint16) if values.dtype == np.int16 else values


def flat(columns: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """``field.column`` to values: the names of a store that knows no nesting."""
    return {f"{name}.{column}": values for name, inner in columns.items() for column, values in inner.items()}


class S3Fs(Method):
    """The plan's requests as ranged GETs by fsspec's s3fs, as many at once as there are threads."""

    def __init__(self, work: Workload, coded: Coded, *, decode: bool) -> None:
        super().__init__(work)
        options = work.options
        self._files: Any = importlib.import_module("s3fs").S3FileSystem(
            endpoint_url=options.endpoint or None,
            client_kwargs={"region_name": options.region} if options.region else {},
            skip_instance_cache=True,
        )
        self._codec = CODECS[coded] if decode else None
        base = work.stores[coded].url.removeprefix("s3://")
        self._by_sample: dict[int, list[tuple[str, Ranged]]] = {}
        self.bytes_read = self.requests = 0
        for r in work.ranged(coded):
            self._by_sample.setdefault(r.sample, []).append((f"{base}/{r.name}", r))
            self.bytes_read += r.size
            self.requests += 1

    def run(self) -> None:
        if self._codec is not None:
            super().run()  # so that one sample is decoded while another is on its way
            return
        asked = [x for found in self._by_sample.values() for x in found]
        starts = [r.offset for _, r in asked]
        ends = [r.offset + r.size for _, r in asked]
        got = self._files.cat_ranges([p for p, _ in asked], starts, ends, batch_size=self.work.options.threads, on_error="raise")
        for data, (path, r) in zip(got, asked, strict=True):
            _whole(data, path, r)

    def one(self, sample: int) -> None:
        assert self._codec is not None
        for path, r in self._by_sample[sample]:
            data = _whole(self._files.cat_file(path, start=r.offset, end=r.offset + r.size), path, r)
            stored = np.frombuffer(data, np.uint8)
            for p in r.places:
                decode_chunk(stored[p.offset - r.offset : p.offset - r.offset + p.size], p.target, self._codec)


def _whole(data: bytes, path: str, r: Ranged) -> bytes:
    if len(data) != r.size:
        raise OSError(f"{path}: {r.size} bytes were asked for, {len(data)} came")
    return data


LOCAL: Final = {RAY: Ray, TRANSFER_QUEUE: TransferQueue}
REMOTE: Final = {S3FS: lambda w: S3Fs(w, "none", decode=False), S3FS_DECODE: lambda w: S3Fs(w, "default", decode=True)}
NEEDS: Final = {RAY: "ray", TRANSFER_QUEUE: "transfer_queue", S3FS: "s3fs", S3FS_DECODE: "s3fs"}
FILLS: Final = frozenset({RAY, TRANSFER_QUEUE})
"""Methods that leave the whole sample in the buffers, which is then compared."""
