"""The demo tasks in a worker that also writes down, in a file beside, what inline transport would have carried.

Importing this module wraps ``Writer.put`` in that process: the payload goes to ``$FSREF_INLINE/<object id>.npz`` before the reference
is returned. Only tests use it.
"""

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np

from fsref.envserver.demo_tasks import DemoHarness, DemoTaskset
from fsref.refs import Dense, Payload, PayloadRef
from fsref.writer import Writer

_put = Writer.put


def put(self: Writer, payload: Payload, *, stop: threading.Event | None = None) -> PayloadRef:
    """``Writer.put``, and the arrays inline."""
    ref = _put(self, payload, stop=stop)
    folder = os.environ.get("FSREF_INLINE")
    if folder:
        arrays: dict[str, Any] = {"token_ids": payload.token_ids}
        for name, data in payload.fields.items():
            arrays[f"{name}/missing"] = np.asarray([[r.start, r.stop] for r in data.missing], np.int64).reshape(-1, 2)
            if isinstance(data, Dense):
                arrays[f"{name}/rows"] = np.asarray(data.rows)
            else:
                arrays[f"{name}/counts"] = np.asarray(data.counts)
                arrays |= {f"{name}/column/{n}": np.asarray(c) for n, c in data.columns.items()}
        path = Path(folder) / (ref.object_ids[0].replace("/", "_") + ".npz")
        np.savez(path.with_suffix(".tmp.npz"), **arrays)
        path.with_suffix(".tmp.npz").rename(path)
    return ref


Writer.put = put  # type: ignore[method-assign]

__all__ = ["DemoHarness", "DemoTaskset"]
