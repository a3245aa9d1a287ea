"""A trainer rank that takes its arrays from the step file: imported by ``site/sitecustomize.py`` before the rank starts."""

from typing import Any

import msgspec

from fsref import steps
from fsref.errors import StepError
from fsref.loader.fetch import StepFetcher, _MicroBatchFetch
from fsref.steps import RankFile
from fsref.tensors import PackedMicroBatch, rank_batch
from tools.inline.messages import packed_slice, unpacked

CARRIED: dict[int, dict[str, bytes]] = {}
"""Messages of each step that is not trained yet, by object id."""

_decode, _release = steps._decode, StepFetcher.release  # noqa: SLF001 - a patch looks inside


def decode(data: bytes, kind: Any, name: str, *, json: bool) -> Any:
    """As the product's, for rank files with arrays behind them."""
    if kind is not RankFile:
        return _decode(data, kind, name, json=json)
    try:
        inner, arrays = msgspec.msgpack.decode(data, type=tuple[bytes, dict[str, bytes]])
    except msgspec.DecodeError as e:
        raise StepError(f"{name} carries no arrays: {e}") from e
    rank = _decode(inner, RankFile, name, json=False)
    CARRIED[rank.step] = arrays
    return rank


def start(self: Any) -> None:
    """Nothing to fetch."""
    self._reads = []


def finish(self: Any) -> PackedMicroBatch:
    """The micro batch, packed from the step file's arrays."""
    owner, rank = self._owner, self._fetch.rank
    micro_batch, carried = rank.micro_batches[self._number], CARRIED[rank.step]
    ids = {i for s in micro_batch.sequences if s.ref is not None for i in s.ref.object_ids}
    arrays = {i: unpacked(carried[i]) for i in ids}
    got = packed_slice(micro_batch, arrays, self._plan, owner.schema, expert_dtype=owner.expert_dtype)
    return rank_batch(micro_batch, got, owner.schema, expert_ids=owner.expert_ids, targets_ahead=owner.parallel.targets_ahead)


def release(self: StepFetcher, step: int) -> None:
    """As the product's; the arrays go too."""
    CARRIED.pop(step, None)
    _release(self, step)


def install() -> None:
    """Patches this process."""
    steps._decode = decode  # noqa: SLF001
    _MicroBatchFetch.start, _MicroBatchFetch.finish = start, finish  # type: ignore[method-assign]
    StepFetcher.release = release  # type: ignore[method-assign]
