"""The loop of one trainer rank.

Owns what is done with a step that the loader hands out: train, export weights, checkpoint, commit, report. Refuses to go on where ranks
disagree: every decision (go, stop, fail) is agreed by a collective, so no rank waits for one that left.
"""

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from fsref.config import Config
from fsref.events import Event, Hook, memory_metrics
from fsref.failpoints import failpoint
from fsref.folders import prune
from fsref.loader import Ranks, Removed, Step, StepLoader
from fsref.loader.batch import fresh_tokens
from fsref.trainer import checkpoint, metrics, weights
from fsref.trainer.learner import Learner
from fsref.trainer.routes import write_routes

_log: Final = logging.getLogger(__name__)


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
    learner: Learner
    loader: StepLoader
    folders: Folders
    version: int
    """Optimiser steps that are done, which is also the next step to train."""
    hook: Hook | None = None
    """Rank 0's listener to metrics."""

    def train(self) -> None:
        """All steps that are left, then the clean end."""
        checkpointed = self.version
        started = time.perf_counter()
        for step in self.loader:
            step_metrics = self._train_step(step)
            last = self.version == self.config.run.steps
            if durable := last or self.version % self.config.trainer.checkpoint_every == 0:
                step_metrics["time/checkpoint"] = self._checkpoint()
                checkpointed = self.version
            removed = self.loader.commit(step.number, durable=durable)
            if last:
                removed += self.loader.finish()
            step_metrics["time/step"] = time.perf_counter() - started
            self._report(step.number, step_metrics | _removal_metrics(removed))
            started = time.perf_counter()
        if self.version > checkpointed:  # stopped between checkpoints
            self._checkpoint()
            self.loader.commit(self.version - 1, durable=True)
        self._settle_rest()
        _log.info("trainer rank %d ends after %d of %d steps", self.ranks.rank, self.version, self.config.run.steps)

    def _train_step(self, step: Step) -> dict[str, float]:
        start = time.perf_counter()
        self._forward_backward(step)
        update = self.learner.update()
        trained_s = time.perf_counter() - start
        self.version += 1
        exported_s = self._export()

        loss = self.config.trainer.loss
        shared = self.ranks.gather((step.metrics, metrics.sample_sums(step.rank_file), memory_metrics()))
        return {
            **metrics.loss_metrics(update),
            **(metrics.comparison_metrics(update, replay=loss.replay) if loss.compare_replay else {}),
            **metrics.added(p for p, _, _ in shared),
            **metrics.sample_metrics(metrics.added(s for _, s, _ in shared)),
            **{name: max(m[name] for _, _, m in shared) for name in memory_metrics()},
            **step.shared_metrics,
            "optimizer/learning_rate": self.config.trainer.learning_rate,
            "time/train": trained_s,
            "time/weights": exported_s,
            "time/wait": step.waited_s,
        }

    def _forward_backward(self, step: Step) -> None:
        """Every micro batch, dropped ones as stand-ins."""
        for micro_batch in step.micro_batches:
            batch = micro_batch.tensors
            fresh = fresh_tokens(micro_batch.source, version=self.version, device=self.ranks.device)
            used = self.learner.add(batch, fresh_T=fresh)
            if self.folders.routes is not None and used is not None:
                write_routes(self.folders.routes, batch, used, step=step.number, rank=self.ranks.rank, micro_batch=micro_batch.number)

    def _export(self) -> float:
        start = time.perf_counter()
        self.ranks.together("exporting weights", self._write_weights)
        return time.perf_counter() - start

    def _write_weights(self) -> None:
        if self.ranks.rank == 0:
            weights.export(self.learner.model, version=self.version, parent=self.folders.weights, base=self.folders.base)
            prune(self.folders.weights, keep=self.config.trainer.weights_keep)

    def _checkpoint(self) -> float:
        """Saves on rank 0; returns the seconds that it took."""
        start = time.perf_counter()
        generators = self.ranks.gather(torch.get_rng_state())
        self.ranks.together("saving a checkpoint", lambda: self._save(generators))
        failpoint("checkpoint.after")
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
        removed = self.loader.settle()
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
