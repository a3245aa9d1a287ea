"""The loop of one trainer rank.

Owns the order of a step: wait for the step file, take its arrays, agree on what failed, train, export weights, checkpoint, commit, report.
Refuses to go on where ranks disagree: every decision (go, stop, fail) is agreed by a collective, so no rank waits for one that left.
"""

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from fsref.config import Config
from fsref.errors import FsrefError, RoleFailed, StepError, StoreUnavailable
from fsref.events import Event, Hook, memory_metrics
from fsref.failpoints import failpoint
from fsref.folders import prune
from fsref.loader.agreement import Agreement, Taken, agree
from fsref.loader.batch import fresh_tokens, ready_batches
from fsref.loader.commit import Committer, Removed, StepLedger
from fsref.loader.feed import Published, StepFeed
from fsref.loader.fetch import StepFetcher
from fsref.loader.ranks import Ranks
from fsref.loader.standin import StandIns
from fsref.steps import RankFile, step_name, sum_of
from fsref.trainer import checkpoint, metrics, weights
from fsref.trainer.learner import Learner
from fsref.trainer.routes import write_routes
from fsref.trainer.stop import StopSignal

_log: Final = logging.getLogger(__name__)
ROUND_S: Final = 0.5
"""How often waiting ranks tell each other that they still wait, and whether to stop."""


@dataclass(frozen=True)
class Folders:
    """Where a run's weights, checkpoints and initial model lie."""

    weights: Path
    checkpoints: Path
    base: Path
    routes: Path | None = None
    """Where the experts' inputs are written, if they are."""


@dataclass(kw_only=True)
class Trainer:
    """The loop of one rank over open resources; whoever opened them closes them."""

    config: Config
    ranks: Ranks
    stop: StopSignal
    learner: Learner
    stand_ins: StandIns
    loader: StepFetcher
    feed: StepFeed
    committer: Committer
    folders: Folders
    version: int
    """Optimiser steps that are done, which is also the next step to train."""
    ledger: StepLedger | None = None
    """Rank 0's holder."""
    hook: Hook | None = None
    """Rank 0's listener to metrics."""

    def train(self) -> None:
        """All steps that are left, then the clean end."""
        checkpointed = self.version
        while self.version < self.config.run.steps:
            started = time.perf_counter()
            published = self._next_step(self.version)
            if published is None:
                break
            waited_s = time.perf_counter() - started
            step_metrics = self._train_step(published)
            last = self.version == self.config.run.steps
            if last or self.version % self.config.trainer.checkpoint_every == 0:
                step_metrics["time/checkpoint"] = self._checkpoint()
                checkpointed = self.version
            if last:
                self.committer.finish(published.info.step)
            removed = self.committer.settle(wait=last)
            step_metrics["time/wait"], step_metrics["time/step"] = waited_s, time.perf_counter() - started
            self._report(published.info.step, step_metrics | _removal_metrics(removed))
        if self.version > checkpointed:  # stopped between checkpoints
            self._checkpoint()
        self._settle_rest()
        _log.info("trainer rank %d ends after %d of %d steps", self.ranks.rank, self.version, self.config.run.steps)

    def _next_step(self, step: int) -> Published | None:
        """The step on all ranks at once, or None on all ranks if one was asked to stop."""
        end = time.monotonic() + self.config.trainer.step_wait_s
        while True:
            published: Published | None = None
            error: FsrefError | None = None
            try:
                published = self.feed.wait(step, timeout_s=ROUND_S)
            except FsrefError as e:
                error = e
            if published is None and error is None and time.monotonic() >= end:
                error = self._late(step)
            waiting, stopping, failed = self.ranks.maximum([published is None, self.stop.is_set(), error is not None])
            if error is not None:
                raise error
            if failed:
                raise RoleFailed(
                    f"trainer rank {self.ranks.rank}: another rank failed while waiting for {step_name(step)}; its log says why"
                )
            if stopping:
                return None
            if not waiting and published is not None:
                self._take_right(published)
                return published

    def _late(self, step: int) -> StoreUnavailable:
        limit_s, trouble = self.config.trainer.step_wait_s, self.feed.trouble
        why = f"the store said: {trouble}" if trouble else "see the orchestrator's log"
        return StoreUnavailable(f"{step_name(step)} did not come within trainer.step_wait_s = {limit_s:g} s: {why}")

    def _take_right(self, published: Published) -> None:
        """Checks that all rank files together own what was shipped; then the step's right passes to rank 0."""
        info, owned = published.info, published.rank_file.owned
        parts = self.ranks.gather((len(set(owned)), sum_of(owned)))
        found = sum(n for n, _ in parts), sum(s for _, s in parts) % (1 << 64)
        if found != (info.n, info.sum):
            raise StepError(f"{step_name(info.step)}: the rank files own {found[0]} objects, {info.n} were shipped, or other ones")
        ledger = self.ledger
        self.ranks.together("taking the step", lambda: ledger and ledger.taken(info))

    def _train_step(self, published: Published) -> dict[str, float]:
        step, rank_file = published.info.step, published.rank_file
        taken: Taken = self.loader.take(rank_file)
        agreement = agree(self.ranks, rank_file, taken)
        ledger = self.ledger
        self.ranks.together("marking the step as used", lambda: ledger and ledger.used(step, agreement.missed))
        self.committer.fetched(rank_file)
        self.committer.after_fetch(step)
        payload = self.loader.metrics(step)

        start = time.perf_counter()
        generated = self._forward_backward(rank_file, taken, agreement)
        update = self.learner.update()
        trained_s = time.perf_counter() - start
        self.version += 1
        self.loader.release(step)
        self.feed.release(step)
        exported_s = self._export()
        self.committer.after_step(step)

        loss = self.config.trainer.loss
        shared = self.ranks.gather(
            (payload | {"payload/generated_routing": float(generated)}, metrics.sample_sums(rank_file), memory_metrics())
        )
        return {
            **metrics.loss_metrics(update),
            **(metrics.comparison_metrics(update, replay=loss.replay) if loss.compare_replay else {}),
            **metrics.added(p for p, _, _ in shared),
            **metrics.sample_metrics(metrics.added(s for _, s, _ in shared)),
            **{name: max(m[name] for _, _, m in shared) for name in memory_metrics()},
            "payload/dropped_micro_batches": float(agreement.dropped_count),
            "optimizer/learning_rate": self.config.trainer.learning_rate,
            "time/train": trained_s,
            "time/weights": exported_s,
        }

    def _forward_backward(self, rank_file: RankFile, taken: Taken, agreement: Agreement) -> int:
        """Every micro batch, dropped ones as stand-ins; returns how many of those had to use made-up routing."""
        batches, generated = ready_batches(taken, agreement, self.stand_ins, device=self.ranks.device)
        for number, batch in enumerate(batches):
            fresh = fresh_tokens(rank_file.micro_batches[number], version=self.version, device=self.ranks.device)
            used = self.learner.add(batch, fresh_T=fresh)
            if self.folders.routes is not None and used is not None:
                write_routes(self.folders.routes, batch, used, step=rank_file.step, rank=self.ranks.rank, micro_batch=number)
        return generated

    def _export(self) -> float:
        start = time.perf_counter()
        self.ranks.together("exporting weights", self._write_weights)
        return time.perf_counter() - start

    def _write_weights(self) -> None:
        if self.ranks.rank == 0:
            weights.export(self.learner.model, version=self.version, parent=self.folders.weights, base=self.folders.base)
            prune(self.folders.weights, keep=self.config.trainer.weights_keep)

    def _checkpoint(self) -> float:
        """Saves on rank 0 and removes what the checkpoint releases; returns the seconds that it took."""
        start = time.perf_counter()
        generators = self.ranks.gather(torch.get_rng_state())
        self.ranks.together("saving a checkpoint", lambda: self._save(generators))
        failpoint("checkpoint.after")
        self.committer.after_checkpoint(self.version)
        return time.perf_counter() - start

    def _save(self, generators: list[torch.Tensor]) -> None:
        if self.ranks.rank == 0:
            checkpoint.save(
                self.folders.checkpoints,
                run=self.config.run.id,
                version=self.version,
                generators=generators,
                model=self.learner.model,
                optimizer=self.learner.optimizer,
            )
            prune(self.folders.checkpoints, keep=self.config.trainer.checkpoints_keep)

    def _settle_rest(self) -> None:
        removed = self.committer.settle(wait=True)
        if removed.objects and self.version:
            self._report(self.version - 1, _removal_metrics(removed))

    def _report(self, step: int, values: dict[str, float]) -> None:
        if self.hook is not None:
            self.hook(Event(role="trainer", step=step, metrics=values))


def _removal_metrics(removed: Removed) -> dict[str, float]:
    return {
        "payload/objects_removed": float(removed.objects),
        "payload/bytes_removed": float(removed.bytes),
        "payload/objects_absent": float(removed.absent),
        "payload/pending_delete": float(removed.pending + removed.failed),
    }
