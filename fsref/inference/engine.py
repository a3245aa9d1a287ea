"""Continuous batching: sequences join and leave one running decode batch, between steps.

Owns the engine thread, its cache and the policy's weights. A request waits in a queue until a slot is free, is prefilled together with
others that wait, and then decodes one token a step with all that run. New weights are taken between two steps: running sequences go on
with them over the keys and values that the old weights made, as in vLLM, and each completion says which version sampled which tokens.

Refuses HTTP and JSON; callers on other threads submit and get a ``concurrent.futures.Future``.
"""

import dataclasses
import queue
import random
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fsref.errors import MissingExtra
from fsref.inference.network import Architecture, Cache, Group, Weights, forward
from fsref.inference.sampling import Drawn, Sampling, draw, heads_sampled_first
from fsref.refs import Ragged, expert_dtype

try:
    import torch
except ImportError as e:
    raise MissingExtra.of("demo", "torch") from e

PREFILL_TOKENS_MAX: Final = 4096
"""Padded prompt tokens of one prefill; a longer prompt is prefilled alone."""


class EngineStopped(RuntimeError):
    """The engine was closed, or died, before the request was done. Stays within this role, which answers 503."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One completion to make."""

    prompt: tuple[int, ...]
    sampling: Sampling
    tokens_max: int
    """Completion tokens; prompt plus completion fit the cache."""
    stop_ids: frozenset[int]
    """A token of these ends the completion and belongs to it."""
    seed: int
    """Decides every draw, whatever else runs."""
    start: int = 0
    """Routes are returned from this token position on."""


class VersionSpan(NamedTuple):
    """Completion tokens ``[start, stop)`` were sampled by one version of the weights."""

    version: str
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Completion:
    """What came of a request. T completion tokens."""

    token_ids: NDArray[np.int32]
    finish_reason: str
    """``stop`` or ``length``."""
    logprobs: NDArray[np.float32]
    ranks: NDArray[np.int64]
    heads: Ragged | None
    """The sampled token first; ``None`` if not asked for."""
    mask: Ragged | None
    """``None`` where no truncation was in force."""
    route_weights: NDArray[np.float32]
    """Of the same rows: the weight of each expert, slots in the same order."""
    routes: NDArray[Any]
    """[prompt + completion - 1 - start, layers, top_k] in the dtype of the expert count."""
    versions: tuple[VersionSpan, ...]


class _Sequence:
    """A request while it runs."""

    def __init__(self, request: Request, future: "Future[Completion]") -> None:
        self.request = request
        self.future = future
        self.rng = random.Random(request.seed)  # noqa: S311  (sampling, no secrets)
        self.length = 0  # tokens in the cache
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.ranks: list[int] = []
        self.tops: list[tuple[NDArray[Any], NDArray[Any]]] = []
        self.masks: list[NDArray[Any]] = []
        self.versions: list[tuple[str, int]] = []

    def take(self, drawn: Drawn, row: int, version: str) -> None:
        """Appends the token that was drawn."""
        sampling = self.request.sampling
        if not self.versions or self.versions[-1][0] != version:
            self.versions.append((version, len(self.ids)))
        self.ids.append(int(drawn.ids[row]))
        self.logprobs.append(float(drawn.logprobs[row]))
        self.ranks.append(int(drawn.ranks[row]))
        if sampling.head is not None:
            width = min(max(sampling.head, 1), drawn.top_ids.shape[1])
            self.tops.append((drawn.top_ids[row, :width].copy(), drawn.top_logprobs[row, :width].copy()))  # a view would keep the batch
        if sampling.truncates:
            self.masks.append(drawn.top_ids[row, : drawn.kept[row]].copy())

    @property
    def finish_reason(self) -> str:
        """Empty while it runs."""
        if self.ids and self.ids[-1] in self.request.stop_ids:
            return "stop"
        return "length" if len(self.ids) >= self.request.tokens_max else ""

    def completion(self, routes: NDArray[Any], route_weights: NDArray[np.float32]) -> Completion:
        ids = np.asarray(self.ids, dtype=np.int32)
        logprobs = np.asarray(self.logprobs, dtype=np.float32)
        ends = [start for _, start in self.versions[1:]] + [len(ids)]
        return Completion(
            token_ids=ids,
            finish_reason=self.finish_reason,
            logprobs=logprobs,
            ranks=np.asarray(self.ranks),
            heads=self._heads(ids, logprobs) if self.tops else None,
            mask=_ragged_ids(self.masks) if self.masks else None,
            routes=routes,
            route_weights=route_weights,
            versions=tuple(VersionSpan(v, a, b) for (v, a), b in zip(self.versions, ends, strict=True)),
        )

    def _heads(self, ids: NDArray[Any], logprobs: NDArray[Any]) -> Ragged:
        top_ids, top_logprobs = (np.stack(rows) for rows in zip(*self.tops, strict=True))
        top_ids, top_logprobs = heads_sampled_first(top_ids, top_logprobs, ids, logprobs)
        counts = np.full(len(ids), top_ids.shape[1], dtype=np.int32)
        columns = {"ids": top_ids.reshape(-1).astype(np.int32), "logprobs": top_logprobs.reshape(-1).astype(np.float32)}
        return Ragged(counts, columns)


def _ragged_ids(rows: Sequence[NDArray[Any]]) -> Ragged:
    return Ragged(np.asarray([len(r) for r in rows], dtype=np.int32), {"ids": np.concatenate(rows).astype(np.int32)})


def _group(first: int, lengths: Sequence[int], inputs: Sequence[Sequence[int]]) -> Group:
    """Inputs of sequences in the slots from ``first`` on, padded at the end to equal width."""
    width = max(map(len, inputs))
    return Group(
        slots=slice(first, first + len(inputs)),
        token_ids=torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in inputs]),
        starts=torch.tensor(lengths),
        lasts=torch.tensor([len(ids) - 1 for ids in inputs]),
    )


class _Reload(NamedTuple):
    weights: Weights
    version: str
    future: "Future[None]"


class _Stop(NamedTuple):
    pass


class Engine:
    """Runs the policy on its own thread. A context manager: leaving it stops the thread and fails what is still open."""

    def __init__(self, weights: Weights, arch: Architecture, *, slots: int, context: int, dtype: torch.dtype, version: str = "0") -> None:
        """``slots`` sequences at a time, each of up to ``context`` tokens (prompt and completion)."""
        self.arch = arch
        self.context = context
        self.version = version
        """Label of the weights that sample now."""
        self._weights = weights
        self._slots = slots
        self._cache = Cache(arch, slots=slots, context=context, dtype=dtype)
        self._inbox: queue.SimpleQueue[_Sequence | _Reload | _Stop] = queue.SimpleQueue()
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._open: set[Future[Completion]] = set()
        self._closed = threading.Event()
        self.ended: Future[None] = Future()
        """Done when the thread ended, by ``close`` or by an error."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether requests are still served."""
        return self._thread.is_alive() and not self._closed.is_set()

    @property
    def load(self) -> int:
        """Sequences that run or wait."""
        return len(self._open)

    def submit(self, request: Request) -> "Future[Completion]":
        """Queues a request. Cancelling the future takes the sequence out of the batch before its next step."""
        assert len(request.prompt) + request.tokens_max <= self.context, "parsed requests fit"
        future: Future[Completion] = Future()
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        self._put(_Sequence(request, future))
        return future

    def reload(self, weights: Weights, version: str) -> "Future[None]":
        """Swaps the weights between two steps; done when the next token is sampled by them."""
        future: Future[None] = Future()
        self._put(_Reload(weights, version, future))
        return future

    def close(self) -> None:
        """Stops after the current step and fails open requests with ``EngineStopped``. May be called twice."""
        self._closed.set()
        self._inbox.put(_Stop())
        self._thread.join()

    def _put(self, item: "_Sequence | _Reload") -> None:
        self._inbox.put(item)
        if not self.alive:  # whoever closed has drained the inbox already, or will see this item
            self._thread.join()
            self._fail(EngineStopped("the engine is stopped"))

    def _run(self) -> None:
        error = EngineStopped("the engine was stopped before the request was done")
        try:
            while not self._closed.is_set():
                self._receive(block=not self._running and not self._waiting)
                self._drop_cancelled()
                self._step()
        except BaseException as e:
            error = EngineStopped(f"the engine died: {type(e).__name__}: {e}")
            raise  # to threading.excepthook, which prints it: nobody else sees the traceback
        finally:
            self._closed.set()
            self._fail(error)
            self.ended.set_result(None)

    def _fail(self, error: EngineStopped) -> None:
        items: list[Any] = [*self._running, *self._waiting]
        self._running, self._waiting = [], deque()
        while True:
            try:
                items.append(self._inbox.get_nowait())
            except queue.Empty:
                break
        for item in items:
            if not isinstance(item, _Stop) and item.future.set_running_or_notify_cancel():
                item.future.set_exception(error)

    def _receive(self, *, block: bool) -> None:
        while True:
            try:
                item = self._inbox.get(block=block)
            except queue.Empty:
                return
            if isinstance(item, _Stop):
                return
            if isinstance(item, _Reload):
                self._weights, self.version = item.weights, item.version
                if item.future.set_running_or_notify_cancel():
                    item.future.set_result(None)
            else:
                self._waiting.append(item)
                block = False

    def _drop_cancelled(self) -> None:
        if any(s.future.cancelled() for s in self._waiting):
            self._waiting = deque(s for s in self._waiting if not s.future.cancelled())
        for row in reversed(range(len(self._running))):
            if self._running[row].future.cancelled():
                self._remove(row)

    def _remove(self, row: int) -> None:
        """Takes a sequence out; the last one moves into its slot."""
        last = self._running.pop()
        if row < len(self._running):
            self._cache.move(len(self._running), row, last.length)
            self._running[row] = last

    def _admit(self) -> list[_Sequence]:
        """Waiting sequences for free slots, in order of arrival, as many as fit one prefill."""
        batch: list[_Sequence] = []
        longest = 0
        while self._waiting and len(self._running) + len(batch) < self._slots:
            longest = max(longest, len(self._waiting[0].request.prompt))
            if batch and longest * (len(batch) + 1) > PREFILL_TOKENS_MAX:
                break
            batch.append(self._waiting.popleft())
        return batch

    def _step(self) -> None:
        """One pass: a token for each running sequence, and the first one for each that starts. Settles those that are done."""
        decoding, starting = list(self._running), self._admit()
        self._running += starting
        groups = [
            _group(first, [s.length for s in part], inputs)
            for first, part, inputs in (
                (0, decoding, [(s.ids[-1],) for s in decoding]),
                (len(decoding), starting, [s.request.prompt for s in starting]),
            )
            if part
        ]
        if not groups:
            return
        sequences = list(self._running)
        logits = forward(self._weights, self.arch, self._cache, groups)
        drawn = draw(logits, [s.request.sampling for s in sequences], [s.rng.random() for s in sequences])
        for row, sequence in enumerate(sequences):
            sequence.length += 1 if row < len(decoding) else len(sequence.request.prompt)
            sequence.take(drawn, row, self.version)
        for row in reversed(range(len(sequences))):
            if sequences[row].finish_reason:
                self._finish(row)

    def _finish(self, row: int) -> None:
        sequence = self._running[row]
        part = (row, slice(sequence.request.start, sequence.length))
        routes = self._cache.routes[part].numpy().astype(expert_dtype(self.arch.shape.expert_count))
        completion = sequence.completion(routes, self._cache.route_weights[part].numpy().copy())
        self._remove(row)
        if sequence.future.set_running_or_notify_cancel():
            sequence.future.set_result(completion)
