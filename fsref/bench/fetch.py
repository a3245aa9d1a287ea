"""``fsref bench fetch``: one workload brought to its buffers by every method there is, interleaved, in one process."""

import importlib.util
from typing import Any, Final

from fsref.bench import methods, others
from fsref.bench.measure import Ratio, interleaved, machine, peak_growth, ratio
from fsref.bench.methods import Method
from fsref.bench.shapes import shape_of
from fsref.bench.workload import Options, Workload, stored_bytes, workload

TARGETS: Final = (
    ("fsref / zarr-python", methods.FSREF, methods.ZARR, 4.0),
    ("fsref / whole blobs over HTTP", methods.FSREF, methods.HTTP, 1.6),
    ("fsref / decode alone by numcodecs", methods.FSREF, methods.DECODE_NUMCODECS, 0.8),
    ("fsref / decode alone", methods.FSREF, methods.DECODE, 0.8),
    ("fsref / a hand loop", methods.FSREF, methods.HAND, 0.0),
    ("fsref, codec none / a hand loop", methods.FSREF_NONE, methods.HAND_NONE, 0.0),
    ("fsref, codec none / preadv", methods.FSREF_NONE, methods.PREADV, 0.75),
    ("fsref, codec none, without checks / preadv", methods.FSREF_UNCHECKED, methods.PREADV, 0.95),
    ("fsref / GETs and decode", methods.FSREF, methods.GETS_DECODE, 0.9),
    ("fsref, codec none / GETs", methods.FSREF_NONE, methods.GETS, 0.9),
    ("fsref / safetensors slices", methods.FSREF, methods.SAFETENSORS, 0.0),
    ("fsref / Ray object store", methods.FSREF, methods.RAY, 0.0),
    ("fsref, codec none / Ray object store", methods.FSREF_NONE, methods.RAY, 0.0),
    ("fsref / TransferQueue", methods.FSREF, methods.TRANSFER_QUEUE, 0.0),
    ("fsref, codec none / TransferQueue", methods.FSREF_NONE, methods.TRANSFER_QUEUE, 0.0),
    ("fsref / s3fs and decode", methods.FSREF, others.S3FS_DECODE, 0.0),
    ("fsref, codec none / s3fs", methods.FSREF_NONE, others.S3FS, 0.0),
    ("obstore GETs / s3fs", methods.GETS, others.S3FS, 0.0),
)
"""What is compared: label, the method, what it is compared with, and the ratio of speeds to reach (0: none is set)."""
NOT_INSTALLED: Final = "not installed"


def fetch(options: Options) -> dict[str, Any]:
    """Measures every method; raises ``AssertionError`` if one that should fill the buffers did not fill them rightly."""
    shape = shape_of(options.shape).without(heads=options.heads, masks=options.masks)
    with workload(options, shape) as work:
        local = all(s.posix_path is not None for s in work.stores.values())
        made, absent = _make(work, {**methods.LOCAL, **others.LOCAL} if local else {**methods.REMOTE, **others.REMOTE})
        try:
            peaks = {name: _peak(work, name, m) for name, m in made.items()}
            timings = interleaved({n: m.run for n, m in made.items()}, repeats=options.repeats)
            rows = [
                {"method": n, **t.figures(work.raw_bytes), "bytes_read": made[n].bytes_read, "requests": made[n].requests, "peak": peaks[n]}
                for n, t in timings.items()
            ]
            ratios = [_ratio(label, found, reach) for label, a, b, reach in TARGETS if (found := ratio(timings, a, b)) is not None]
            return {
                "bench": "fetch",
                "machine": machine(),
                "shape": shape.name,
                "tokens": options.tokens,
                "kept": work.kept,
                "samples": options.samples,
                "threads": options.threads,
                "repeats": options.repeats,
                "skew": options.skew,
                "raw_bytes": work.raw_bytes,
                "sample_bytes": stored_bytes(work),
                "rows": rows,
                "absent": absent,
                "ratios": [*ratios, *_bytes(work, made)],
            }
        finally:
            for m in made.values():
                m.close()


def _make(work: Workload, makers: dict[str, Any]) -> tuple[dict[str, Method], dict[str, str]]:
    needs = methods.NEEDS | others.NEEDS
    absent = {name: NOT_INSTALLED for name in makers if name in needs and importlib.util.find_spec(needs[name]) is None}
    made: dict[str, Method] = {}
    try:
        for name, make in makers.items():
            if name not in absent:
                made[name] = make(work)
    except BaseException:
        for m in made.values():
            m.close()
        raise
    return made, absent


def _peak(work: Workload, name: str, method: Method) -> int:
    """Memory that the method's first run took beside the buffers, and proof that it fills them."""
    work.clear()
    peak = peak_growth(method.run)
    if name in methods.FILLS | others.FILLS:
        work.check()
    return peak


def _ratio(label: str, found: Ratio, reach: float) -> dict[str, Any]:
    spread = {"median": found.median, "least": found.least, "most": found.most, "cpu": found.cpu}
    return {"ratio": label, **spread, "reach": reach, "at_least": True}


def _bytes(work: Workload, made: dict[str, Method]) -> list[dict[str, Any]]:
    """Ratios of counts: these do not depend on the machine."""
    read, requests = made[methods.FSREF].bytes_read or 0, made[methods.FSREF].requests or 0
    needed = sum(p.size for r in work.ranged("default") for p in r.places)
    out = [_count("bytes read / bytes of the touched chunks", read / needed, 1.05)]
    over_http = made[methods.HTTP].bytes_read if methods.HTTP in made else None
    if over_http:
        out.append(_count("bytes read / bytes over HTTP", read / over_http, 0.75))
    out.append(_count("requests per sample", requests / work.options.samples, 0.0 if over_http else 1.0))
    return out


def _count(label: str, value: float, reach: float) -> dict[str, Any]:
    value = round(value, 4)
    return {"ratio": label, "median": value, "least": value, "most": value, "reach": reach, "at_least": False}
