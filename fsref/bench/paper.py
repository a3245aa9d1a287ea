"""A cluster on paper: requests, bytes and metadata operations per second of many nodes and ranks. Every assumption has a name.

Pure arithmetic. Refuses to say how fast a storage is: it says what would be asked of it.
"""

import math
from typing import Any, Final

import msgspec

PUT_PARTS_BYTES: Final = 64 << 20


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """What is assumed; defaults are those of docs/benchmarks.md."""

    inference_nodes: int = 64
    trainer_ranks: int = 512
    data_ranks: int = 64
    """Ranks that read different samples; the others of each (tensor and pipeline ranks) read the same samples, or a part of them."""
    readers_per_data_rank: int = 1
    """Ranks of a node that read by themselves: 1 with the node's cache, else as many as share the samples."""
    step_s: float = 60.0
    samples_per_step: int = 1_024
    """Samples that train."""
    kept_share: float = 0.9
    """Of the objects that are written: the others are filtered, stale or dropped."""
    tokens: int = 16_384
    token_bytes_stored: float = 1_093.0
    """Stored bytes per token: 48 x 8 of 128 experts, heads of 128 and masks, as ``fsref bench fetch`` measures them."""
    workers_per_node: int = 8
    steps_kept: int = 2
    """Steps whose objects are still there: the one that trains, and those that no checkpoint covers yet."""


def on_paper(cluster: Cluster, *, object_storage: bool) -> list[dict[str, Any]]:
    """Load per second, on object storage or on a filesystem; rows of (what, each second, why)."""
    c = cluster
    written = c.samples_per_step / c.kept_share
    object_bytes = c.tokens * c.token_bytes_stored
    reads = c.samples_per_step * c.readers_per_data_rank
    dropped = written - c.samples_per_step
    rows = [
        ("bytes written", written * object_bytes / c.step_s, "objects / step x bytes of an object"),
        ("bytes read", reads * object_bytes / c.step_s, "samples x ranks that read them by themselves x bytes of an object"),
        ("bytes at rest", written * object_bytes * c.steps_kept, "not a rate: objects of the steps that are still there"),
    ]
    if object_storage:
        parts = math.ceil(object_bytes / PUT_PARTS_BYTES)
        puts = written * (1 if parts == 1 else parts + 2) + c.data_ranks + 2 + math.ceil(dropped / 1000) + math.ceil(c.step_s / 60)
        rows += [
            ("PUT requests", puts / c.step_s, "one per object, the step's files, the ledger's segments"),
            ("GET requests", (reads + c.trainer_ranks) / c.step_s, "one per sample where ranges touch, one step file per rank"),
            ("DELETE requests", math.ceil(written / 1000) / c.step_s, "1,000 names each"),
            ("metadata reads", 0.0, "references carry the index"),
        ]
    else:
        requests = math.ceil(object_bytes / (2 << 20))
        rows += [
            ("metadata operations", (written * 3 + reads + c.trainer_ranks + written) / c.step_s, "create, rename and sync; open; unlink"),
            ("reads", reads * requests / c.step_s, "of 1-2 MiB"),
            ("ledger writes", (written * 3 + c.samples_per_step / 100) / c.step_s, "appends to one file per process; synced in groups"),
        ]
    return [{"what": what, "each_second": round(value, 1), "why": why} for what, value, why in rows]
