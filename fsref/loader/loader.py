"""A run's steps as tensors on one rank: step in, tensors out, commit.

Owns the order of a step up to the forward (wait for the step file, check who owns what, take the arrays, agree on what failed, put
stand-ins in the place of what was dropped) and its end (when arrays are removed). Refuses models, losses and checkpoints: the caller
trains, and says what is trained and what is durable. Every method but ``close`` is collective: all ranks call it, in the same order.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import torch
from torch import Tensor

from fsref.config import Config
from fsref.errors import FsrefError, RoleFailed, StepError, StoreUnavailable
from fsref.journal import RunInfo, read_run
from fsref.loader.agreement import Agreement, Taken, agree
from fsref.loader.batch import copied_to, ready_batches
from fsref.loader.commit import Committer, Removed, StepLedger
from fsref.loader.feed import Published, StepFeed
from fsref.loader.fetch import StepFetcher
from fsref.loader.ranks import Ranks
from fsref.loader.standin import StandIns
from fsref.nodecache import NodeCache
from fsref.parallel import Coordinate, Parallel
from fsref.plan import PackedRows
from fsref.reaper import StepHolder
from fsref.steps import MicroBatch, RankFile, StepInfo, step_name, sum_of
from fsref.store import Store, open_root
from fsref.tensors import ExpertIds, PackedMicroBatch, memory_for

ROUND_S: Final = 0.5
"""How often waiting ranks tell each other that they still wait, and whether to stop."""


@dataclass(frozen=True, eq=False)
class ReadyMicroBatch:
    """One micro batch on one rank. Every rank gets equally many of a step, and runs a forward of each."""

    number: int
    tensors: PackedMicroBatch
    """This rank's rows, layers and fields, on its device. Of a dropped micro batch a stand-in: its tokens, with routing that repeats real
    rows of this rank, without other fields and with nothing to train."""
    dropped: bool
    """Its arrays could not be fetched on some rank that trains it: it must not count in the loss."""
    cu_seqlens_padded: Tensor
    """int32 [S + 1], on the CPU: bounds of its sequences with their padding, before context and tensor ranks shared the rows."""
    source: MicroBatch
    """The token-level data of all of its rows, as in the step file."""


@dataclass(frozen=True, eq=False)
class Step:
    """One step on one rank."""

    number: int
    info: StepInfo
    rank_file: RankFile
    micro_batches: tuple[ReadyMicroBatch, ...]
    agreement: Agreement
    """What all ranks know about its fetches."""
    metrics: dict[str, float]
    """This rank's own, ``payload/...``: to be added up over ranks."""
    shared_metrics: dict[str, float]
    """Equal on every rank."""
    waited_s: float
    """Until its step file was there."""


class StepLoader:
    """The steps of a run on one rank, each once, in order. Close it."""

    def __init__(
        self,
        store: Store,
        run: RunInfo,
        ranks: Ranks,
        config: Config,
        *,
        first: int,
        stopping: Callable[[], bool] = lambda: False,
        expert_ids: ExpertIds = "int32",
    ) -> None:
        """Over open resources, which the caller closes; ``open`` makes them. Collective.

        ``first``: the step to begin with, which is the number of optimiser steps that a checkpoint holds; arrays of earlier steps that an
        earlier trainer left are removed after the policy ``trainer.commit``. ``stopping``: asked between steps; where one rank says
        True, all ranks get no further step. ``expert_ids``: the form of expert ids in the tensors.

        Raises ``ConfigError`` for a layout, or a form of ids, that does not fit the schema, ``LedgerError`` subclasses if rank 0 may not
        hold the steps.
        """
        self._store, self._ranks, self._config, self._stopping = store, ranks, config, stopping
        self._next, self._last = first, config.run.steps - 1
        self._expert_ids: ExpertIds = expert_ids
        self._stand_ins = StandIns.of(run.schema, ranks.parallel, ranks.at, expert_ids=expert_ids)
        self._copying: tuple[Taken, Callable[[], None]] | None = None
        self._ledger: StepLedger | None = None
        self._closing, self._outer = ExitStack(), ExitStack()
        with ExitStack() as opening:
            self._ledger = ranks.together("opening the ledger", lambda: self._holder(run, opening))
            section = config.store
            self._fetcher = ranks.together("starting to fetch", lambda: self._open_fetcher(run, opening))
            self._committer = opening.enter_context(
                Committer(
                    ranks, store, self._ledger, config.trainer, delete_threads=config.ledger.delete_threads, abandon_s=section.abandon_s
                )
            )
            self._committer.inherit(first)
            self._feed = opening.enter_context(
                StepFeed(
                    store,
                    self._fetcher,
                    run=run.run,
                    run_uuid=run.run_uuid,
                    data_rank=ranks.data_rank,
                    first=first,
                    last=self._last,
                    ahead=section.prefetch_steps,
                    fields=config.run.fields if config.run.missing == "strict" else (),
                    abandon_s=section.abandon_s,
                )
            )
            self._closing = opening.pop_all()

    @classmethod
    def open(
        cls,
        config: Config,
        *,
        first: int = 0,
        at: Coordinate | None = None,
        device: torch.device | None = None,
        stopping: Callable[[], bool] = lambda: False,
        expert_ids: ExpertIds = "int32",
    ) -> Self:
        """Opens everything over torch's default process group, which the caller has joined (a single process needs none). Collective.

        The layout is ``config.trainer.parallel``; ``at`` is this rank's place in it where ``order`` does not say it. Other arguments and
        errors as in the constructor, and those of ``Ranks.over``, ``open_root`` and ``read_run``.
        """
        with ExitStack() as opening:
            parallel = Parallel.of(config.trainer.parallel)
            ranks = opening.enter_context(Ranks.over(parallel, at=at, device=device, collective_s=config.trainer.collective_s))
            store, run = ranks.together("opening the run", lambda: _opened(config, opening))
            loader = cls(store, run, ranks, config, first=first, stopping=stopping, expert_ids=expert_ids)
            loader._outer = opening.pop_all()
        return loader

    def next(self) -> Step | None:
        """The next step, on all ranks at once; None on all ranks after the last one, or if one is stopping.

        Raises, and then on every rank: ``StepLost`` if none of its arrays could be fetched, ``StoreUnavailable`` if it did not come within
        ``trainer.step_wait_s``, ``StepError`` for a step of another run or one that does not add up, ``MissingArrays``, ``StoreError``;
        on ranks that are not themselves at fault ``RoleFailed``.
        """
        step = self._next
        if step > self._last:
            return None
        started = time.monotonic()
        published = self._published(step)
        if published is None:
            return None
        waited_s = time.monotonic() - started
        rank_file = published.rank_file
        taken = self._taken(rank_file)
        agreement = agree(self._ranks, rank_file, taken)
        assert not isinstance(taken, FsrefError)
        ledger = self._ledger
        self._ranks.together("marking the step as used", lambda: ledger and ledger.used(step, agreement.missed))
        self._committer.fetched(rank_file)
        self._committer.after_fetch(step)
        batches, generated = ready_batches(taken, agreement, self._stand_ins, device=self._ranks.device)
        self._keep_while_copied(taken)
        whole = self._fetcher.whole_rows(step)
        ready = [
            ReadyMicroBatch(n, batch, agreement.dropped[n], _bounds(whole[n]), rank_file.micro_batches[n])
            for n, batch in enumerate(batches)
        ]
        metrics = self._fetcher.metrics(step) | {"payload/generated_routing": float(generated)}
        self._fetcher.release(step)
        self._feed.release(step)
        self._next = step + 1
        shared = {"payload/dropped_micro_batches": float(agreement.dropped_count)} | {
            f"payload/dropped_{kind}": float(count) for kind, count in agreement.kinds.items()
        }
        return Step(step, published.info, rank_file, tuple(ready), agreement, metrics, shared, waited_s)

    def __iter__(self) -> Iterator[Step]:
        """Steps until ``next`` gives None."""
        while (step := self.next()) is not None:
            yield step

    def commit(self, step: int, *, durable: bool) -> Removed:
        """Step ``step`` is trained; ``durable``: a checkpoint on disk covers it, so that nobody will read it again.

        What is removed follows ``trainer.commit``. Returns what earlier removals have come to.
        """
        self._committer.after_step(step)
        if durable:
            self._committer.after_checkpoint(step + 1)
        return self._committer.settle(wait=False)

    def settle(self) -> Removed:
        """Waits for removals under way, up to half of ``trainer.collective_s``."""
        return self._committer.settle(wait=True)

    def finish(self) -> Removed:
        """The clean end: nothing of the run is read again, so the arrays of every step that was handed out go. Waits as ``settle`` does."""
        self._committer.finish(self._next - 1)
        return self._committer.settle(wait=True)

    def close(self) -> None:
        """Stops threads, within ``store.abandon_s`` each, and leaves what ``open`` joined. Without ``finish`` steps stay for a restart."""
        if self._copying is not None:
            _, wait = self._copying
            wait()
            self._copying = None
        self._closing.close()
        self._outer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _holder(self, run: RunInfo, opening: ExitStack) -> StepLedger | None:
        if self._ranks.rank != 0:
            return None
        holder = StepHolder(self._store, run_dir(self._config) / "ledger", run=run, label="rank0", section=self._config.ledger)
        opening.callback(holder.close)
        return holder

    def _open_fetcher(self, run: RunInfo, opening: ExitStack) -> StepFetcher:
        section, ranks, cache = self._config.store, self._ranks, None
        if section.node_cache_bytes:
            cache = NodeCache(
                section.node_cache_dir, name=run.run_uuid, bytes_max=section.node_cache_bytes, wait_s=section.node_cache_wait_s
            )
            opening.enter_context(cache)
        fetcher = StepFetcher(
            self._store,
            run.schema,
            config=section,
            parallel=ranks.parallel,
            at=ranks.at,
            cache=cache,
            allocate=memory_for(ranks.device),
            expert_ids=self._expert_ids,
        )
        return opening.enter_context(fetcher)

    def _keep_while_copied(self, taken: Taken) -> None:
        """Copies to a device read memory that nothing refers to any more: it is kept until the next step is here. By then they are over,
        so that nobody waits.
        """
        if self._copying is not None:
            _, wait = self._copying
            wait()
        copied = copied_to(self._ranks.device)
        self._copying = None if copied is None else (taken, copied)

    def _published(self, step: int) -> Published | None:
        """The step on all ranks at once, or None on all ranks if one was asked to stop."""
        end = time.monotonic() + self._config.trainer.step_wait_s
        while True:
            published: Published | None = None
            error: FsrefError | None = None
            try:
                published = self._feed.wait(step, timeout_s=ROUND_S)
            except FsrefError as e:
                error = e
            if published is None and error is None and time.monotonic() >= end:
                error = self._late(step)
            waiting, stopping, failed = self._ranks.maximum([published is None, self._stopping(), error is not None])
            if error is not None:
                raise error
            if failed:
                raise RoleFailed(
                    f"trainer rank {self._ranks.rank}: another rank failed while waiting for {step_name(step)}; its log says why"
                )
            if stopping:
                return None
            if not waiting and published is not None:
                self._take_right(published)
                return published

    def _late(self, step: int) -> StoreUnavailable:
        limit_s, trouble = self._config.trainer.step_wait_s, self._feed.trouble
        why = f"the store said: {trouble}" if trouble else "see the orchestrator's log"
        return StoreUnavailable(f"{step_name(step)} did not come within trainer.step_wait_s = {limit_s:g} s: {why}")

    def _take_right(self, published: Published) -> None:
        """Checks that all rank files together own what was shipped; then the step's right passes to rank 0."""
        info, owned = published.info, published.rank_file.owned if self._ranks.is_leader else ()
        parts = self._ranks.gather((len(set(owned)), sum_of(owned)))
        found = sum(n for n, _ in parts), sum(s for _, s in parts) % (1 << 64)
        if found != (info.n, info.sum):
            raise StepError(f"{step_name(info.step)}: the rank files own {found[0]} objects, {info.n} were shipped, or other ones")
        ledger = self._ledger
        self._ranks.together("taking the step", lambda: ledger and ledger.taken(info))

    def _taken(self, rank_file: RankFile) -> Taken | FsrefError:
        try:
            return self._fetcher.take(rank_file)
        except FsrefError as e:
            return e


def run_dir(config: Config) -> Path:
    """The POSIX folder that all roles of the run see."""
    return Path(config.run.run_dir) if config.run.run_dir else Path(config.run.root) / config.run.id


def _opened(config: Config, opening: ExitStack) -> tuple[Store, RunInfo]:
    store = opening.enter_context(open_root(config.run.root, run=config.run.id, settings=config.store))
    return store, read_run(store)


def _bounds(whole: PackedRows) -> Tensor:
    return torch.from_numpy(whole.cu_seqlens())
