"""Step files: what the orchestrator hands to the trainer.

``steps/step_000042/`` holds one ``data_rank_00000.msgpack`` per data rank and, written last, ``STEP.json``, which readers wait for.
Owns the types, the encoding and the checks of counts. Refuses arrays: token-level data and references only.

A step file is published after the ledger's ``ship`` record is durable (ledger.md W2); that order is the caller's.
"""

import hashlib
import re
import time
from collections.abc import Sequence
from typing import Final, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from fsref.errors import ObjectMissing, StepError, StoreError, StoreUnavailable
from fsref.failpoints import failpoint
from fsref.ledger.ids import hash64 as hash64
from fsref.ledger.ids import sum_of as sum_of
from fsref.refs import PayloadRef, Schema
from fsref.store import Store

VERSION: Final = 1
_File = TypeVar("_File", "StepInfo", "RankFile")
BYTES_MAX: Final = 1 << 30
_INFO: Final = re.compile(r"steps/step_([0-9]{6,9})/STEP\.json", re.ASCII)
INFO_BYTES_MAX: Final = 16 << 20


class SampleSequence(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One sample (or a padding dummy) inside a micro batch. T tokens; arrays are little-endian bytes."""

    sample: str
    """``<trace>/<branch>``, for people and error messages."""
    token_ids: bytes
    """int32 [T]."""
    loss_mask: bytes
    """uint8 [T]: 1 where the token was sampled and trains."""
    logprobs: bytes
    """float32 [T]: the sampler's logprob of the token, 0 where it was not sampled."""
    advantages: bytes
    """float32 [T]."""
    ref: PayloadRef | None
    """None: the sample has no arrays (or is a dummy without routing)."""
    reward: float = 0.0
    version: int = 0
    """Weights that sampled it; the oldest, where several did."""
    temperature: float = 1.0
    padding: bool = False
    """A dummy: its ``ref`` names only routing rows of a real sample, and it has no loss."""

    @property
    def token_count(self) -> int:
        return len(self.token_ids) // 4

    def tokens(self) -> NDArray[np.int32]:
        return np.frombuffer(self.token_ids, "<i4")


class MicroBatch(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Sequences that are packed one after the other and go through one forward."""

    sequences: tuple[SampleSequence, ...]

    @property
    def token_count(self) -> int:
        return sum(s.token_count for s in self.sequences)

    @property
    def needs_arrays(self) -> bool:
        """Whether any sequence has a reference, so that something must be fetched before it trains."""
        return any(s.ref is not None for s in self.sequences)


class RankFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one data rank trains in one step."""

    v: int
    run: str
    step: int
    data_rank: int
    schema: Schema
    micro_batches: tuple[MicroBatch, ...]
    """Equally many on every data rank, so that collectives match."""
    owned: tuple[str, ...]
    """Object ids that this rank removes and counts; every shipped id is owned by exactly one rank."""


class StepInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``STEP.json``: the commit marker with the counts that the rank files must add up to."""

    v: int
    run: str
    run_uuid: str
    step: int
    data_ranks: int
    micro_batches: int
    """Per data rank."""
    samples: int
    tokens: int
    n: int
    """Shipped objects."""
    bytes: int
    """Bytes of the shipped objects."""
    sum: int
    """Sum of ``hash64`` over the shipped ids, modulo 2**64."""
    version: int
    """The newest weights that sampled any of it."""
    groups: int = 0
    """Groups that the run had dispatched when this step was complete: its successor goes on there in the stream of tasks."""
    schema: Schema
    digests: tuple[str, ...]
    """blake2b-16 of each rank file, hex."""
    metrics: dict[str, float] = {}
    """The orchestrator's metrics of this step."""
    ms: int = 0
    """Wall clock in milliseconds, for people only."""


def step_name(step: int) -> str:
    """``step_000042``."""
    if not 0 <= step <= 999_999_999:
        raise StepError(f"step {step} is not in 0..999999999")
    return f"step_{step:06d}"


def rank_file_name(step: int, data_rank: int) -> str:
    return f"steps/{step_name(step)}/data_rank_{data_rank:05d}.msgpack"


def info_name(step: int) -> str:
    return f"steps/{step_name(step)}/STEP.json"


def encode_rank_files(ranks: Sequence[RankFile]) -> list[bytes]:
    """The msgpack form of each rank file."""
    return [msgspec.msgpack.encode(r) for r in ranks]


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def publish(store: Store, info: StepInfo, rank_files: Sequence[bytes]) -> None:
    """Writes every rank file, then ``STEP.json``; each is durable before the next. Call after ``ship``."""
    if len(rank_files) != info.data_ranks or tuple(map(digest, rank_files)) != info.digests:
        raise StepError(f"step {info.step}: {len(rank_files)} rank files do not match the digests of STEP.json")
    for data_rank, data in enumerate(rank_files):
        store.put(rank_file_name(info.step, data_rank), [data])
    failpoint("steps.before_info")
    store.put(info_name(info.step), [msgspec.json.encode(info)])
    failpoint("steps.after_info")


def read_info(store: Store, step: int) -> StepInfo:
    """``STEP.json`` of a step; ``ObjectMissing`` if it was not published."""
    return _decode(store.read(info_name(step), bytes_max=INFO_BYTES_MAX), StepInfo, info_name(step), json=True)


def published(store: Store) -> list[int]:
    """Numbers of the published steps, ascending."""
    return sorted({int(m[1]) for e in store.list("steps") if (m := _INFO.fullmatch(e.name))})


def remove(store: Store, step: int) -> int:
    """Removes a step's files, ``STEP.json`` first, so that nobody reads half a step; also what a publication that was cut off left.

    Returns how many. Its arrays are not touched: whoever calls this has settled them. Raises ``StoreError``.
    """
    folder = f"steps/{step_name(step)}"
    names = [e.name for e in store.list(folder)]
    count = 0
    for some in ([n for n in names if n == info_name(step)], [n for n in names if n != info_name(step)]):
        for outcome in store.delete(some).values() if some else ():
            if isinstance(outcome, StoreError):
                raise outcome
            count += 1
    return count


def wait(store: Store, step: int, *, deadline_s: float, poll_s: float = 0.05) -> StepInfo:
    """Waits until a step is published. Raises ``StoreUnavailable`` after ``deadline_s`` seconds."""
    end = time.monotonic() + deadline_s
    while True:
        try:
            return read_info(store, step)
        except ObjectMissing:
            if time.monotonic() >= end:
                raise StoreUnavailable(f"{step_name(step)} was not published within {deadline_s:g} s: see the orchestrator's log") from None
        time.sleep(poll_s)


def read_rank(store: Store, info: StepInfo, data_rank: int) -> RankFile:
    """One rank's file, checked against the digest and the identity in ``info``; raises ``StepError`` for a mismatch."""
    name = rank_file_name(info.step, data_rank)
    if not 0 <= data_rank < min(info.data_ranks, len(info.digests)):
        raise StepError(
            f"{step_name(info.step)} has {info.data_ranks} data ranks, rank {data_rank} was asked for: check trainer.parallel.data"
        )
    data = store.read(name, bytes_max=BYTES_MAX)
    if digest(data) != info.digests[data_rank]:
        raise StepError(f"{name} differs from the digest in STEP.json: a batch of another attempt, or a damaged file")
    rank = _decode(data, RankFile, name, json=False)
    if (rank.run, rank.step, rank.data_rank) != (info.run, info.step, data_rank) or len(rank.micro_batches) != info.micro_batches:
        raise StepError(
            f"{name} is of run {rank.run!r} step {rank.step} rank {rank.data_rank}; {info.run!r} {info.step} {data_rank} was asked for"
        )
    return rank


def check_counts(info: StepInfo, ranks: Sequence[RankFile]) -> None:
    """All rank files together must own exactly what was shipped: ``n`` and ``sum``. Raises ``StepError``."""
    owned = [i for r in ranks for i in r.owned]
    if len(set(owned)) != len(owned) or (len(owned), sum_of(owned)) != (info.n, info.sum):
        raise StepError(f"{step_name(info.step)}: {len(owned)} owned ids do not match the {info.n} shipped ones")


def _decode(data: bytes, kind: type[_File], name: str, *, json: bool) -> _File:
    try:
        out = msgspec.json.decode(data, type=kind) if json else msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as e:
        raise StepError(f"{name} cannot be read: {e}") from e
    if out.v != VERSION:
        raise StepError(f"{name} has format {out.v}, this version reads {VERSION}")
    return out
