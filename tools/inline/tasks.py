"""The demo tasks, in env-server workers and an orchestrator that carry arrays in their messages.

Both processes import their taskset, and so this module, which then patches what it finds: in a worker ``Writer`` and the references' form
in a trace, in the orchestrator where traces become samples and samples become step files. ``FSREF_TRANSPORT`` is ``inline`` or
``reference``; with the latter only the bytes of step files are written down, to ``FSREF_STEP_BYTES``.

What inline transport here is not: it still encodes each branch (a reference's coverage, statistics and hash come from that) and the ledger
still runs, over objects of a few bytes. So it differs in where the arrays travel, and in nothing else.
"""

import os
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fsref import steps
from fsref.envserver.demo_tasks import DemoHarness, DemoTaskset
from fsref.episodes import branches
from fsref.objects import EncodedObject
from fsref.reaper.consumer import ConsumerHolder
from fsref.refs import Payload, PayloadRef
from fsref.steps import RankFile, StepInfo
from fsref.store import Store
from fsref.writer import Writer
from tools.inline.messages import packed

KEY = "inline"
PLACEHOLDER = b"inline"
CARRIED: dict[str, bytes] = {}
"""Object id to message: in a worker until the reply is made, in the orchestrator until the sample is shipped or dropped."""

_put, _info_of, _branch_samples = Writer.put, branches.info_of, branches.branch_samples
_encode, _publish, _drop, _ship = steps.encode_rank_files, steps.publish, ConsumerHolder.drop, ConsumerHolder.ship


def put(self: Writer, payload: Payload, *, stop: threading.Event | None = None) -> PayloadRef:
    """As the product's, and the arrays wait for their trace."""
    ref = _put(self, payload, stop=stop)
    CARRIED[ref.object_ids[0]] = packed(payload.checked(self._schema))
    return ref


def publish_nothing(self: Writer, name: str, encoded: EncodedObject) -> None:
    """A name for the ledger, without the arrays."""
    del encoded
    self._store.put(name, [PLACEHOLDER], durability=self._durability)


def info_of(run: str, refs: Mapping[int, PayloadRef]) -> dict[str, Any]:
    """As the product's, and the arrays beside."""
    return _info_of(run, refs) | {KEY: {ref.object_ids[0]: CARRIED.pop(ref.object_ids[0]) for ref in refs.values()}}


def branch_samples(trace: Any, *, run: str) -> list[branches.BranchSample]:
    """As the product's; the arrays stay as long as their samples."""
    found = trace.info.get(branches.KEY)
    if found is not None:
        CARRIED.update(found.pop(KEY))
    return _branch_samples(trace, run=run)


def encode_rank_files(ranks: Sequence[RankFile]) -> list[bytes]:
    """Each rank file, followed by the arrays that it names."""
    return [msgspec.msgpack.encode([data, {i: CARRIED[i] for i in named(rank)}]) for data, rank in zip(_encode(ranks), ranks, strict=True)]


def named(rank: RankFile) -> dict[str, None]:
    """Every object that a rank's sequences name."""
    return dict.fromkeys(i for m in rank.micro_batches for s in m.sequences if s.ref is not None for i in s.ref.object_ids)


def publish(store: Store, info: StepInfo, rank_files: Sequence[bytes]) -> None:
    """As the product's, and its bytes to a file."""
    _publish(store, info, rank_files)
    with Path(os.environ["FSREF_STEP_BYTES"]).open("a", encoding="ascii") as file:
        file.write(f"{info.step} {sum(map(len, rank_files))}\n")


def drop(self: ConsumerHolder, object_ids: Iterable[str], reason: str) -> int:
    """As the product's; the arrays go with the right."""
    ids = list(object_ids)
    for i in ids:
        CARRIED.pop(i, None)
    return _drop(self, ids, reason)


def ship(self: ConsumerHolder, step: int, sizes: Mapping[str, int]) -> tuple[int, int]:
    """As ``drop``."""
    for i in sizes:
        CARRIED.pop(i, None)
    return _ship(self, step, sizes)


def install(transport: str) -> None:
    """Patches this process; twice is once."""
    if "FSREF_STEP_BYTES" in os.environ:
        steps.publish = publish
    if transport != KEY:
        return
    Writer.put, Writer._publish = put, publish_nothing  # type: ignore[method-assign]  # noqa: SLF001
    ConsumerHolder.drop, ConsumerHolder.ship = drop, ship  # type: ignore[method-assign]
    steps.encode_rank_files = encode_rank_files
    for module, name, patch in (("envserver.worker", "info_of", info_of), ("episodes.client", "branch_samples", branch_samples)):
        if f"fsref.{module}" in sys.modules:  # that role's own; the other one is not imported for this
            setattr(sys.modules[f"fsref.{module}"], name, patch)


install(os.environ.get("FSREF_TRANSPORT", ""))

__all__ = ["DemoHarness", "DemoTaskset"]
