"""One trainer rank, from start to clean end: opens what the loop needs, in an order in which every failure reaches all ranks.

SIGTERM or SIGINT on any rank ends all ranks after the step under way, with a checkpoint.
"""

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import torch

from fsref.config import Config
from fsref.events import JsonLines
from fsref.folders import published
from fsref.journal import RunInfo, read_run
from fsref.loader.commit import Committer
from fsref.loader.feed import StepFeed
from fsref.loader.fetch import StepFetcher
from fsref.loader.ranks import Place, Ranks
from fsref.loader.standin import ROUTING, StandIns
from fsref.reaper import StepHolder
from fsref.store import open_root
from fsref.trainer import checkpoint, weights
from fsref.trainer.learner import Learner
from fsref.trainer.loop import Folders, Trainer
from fsref.trainer.model import load_policy
from fsref.trainer.stop import StopSignal

_log: Final = logging.getLogger(__name__)


def main(config: Config, *, place: Place | None = None) -> None:
    """Trains until ``run.steps`` steps are done or a stop is asked for. Blocks; one call per process.

    ``place``: this process among the ranks; None reads torchrun's environment variables.

    Raises ``FsrefError``: ``ConfigError`` before anything is written, ``StepLost``, ``StepReleased``, ``MissingArrays``, ``StoreError``,
    ``RoleFailed`` where another rank is at fault.
    """
    torch.set_num_threads(config.trainer.threads)
    torch.manual_seed(config.run.seed)
    run_dir = Path(config.run.run_dir) if config.run.run_dir else Path(config.run.root) / config.run.id
    base = Path(config.model.path) if config.model.path else run_dir / "model"
    routes = run_dir / "routes" if config.trainer.record_routes else None
    folders = Folders(run_dir / "weights", run_dir / "checkpoints", base, routes)
    with ExitStack() as stack:
        stop = stack.enter_context(StopSignal())
        ranks = stack.enter_context(Ranks(config, place))
        store = stack.enter_context(open_root(config.run.root, run=config.run.id, settings=config.store))
        run = ranks.together("reading run.json", lambda: read_run(store))
        learner = ranks.together("loading the model", lambda: _learner(config, ranks, run, base))
        version = ranks.together("reading the newest checkpoint", lambda: _resume(config, ranks, folders, learner))
        ledger = hook = None
        if ranks.rank == 0:
            ledger = ranks.together(
                "opening the ledger", lambda: StepHolder(store, run_dir / "ledger", run=run, label="rank0", section=config.ledger)
            )
            stack.callback(ledger.close)
            hook = JsonLines(run_dir / "metrics.jsonl")
            stack.callback(hook.close)
        else:
            ranks.together("opening the ledger", lambda: None)
        ranks.together("exporting weights", lambda: _export_resumed(ranks, folders, learner, version))
        loader = stack.enter_context(StepFetcher(store, run.schema, config=config.store))
        committer = Committer(ranks, store, ledger, config.trainer, delete_threads=config.ledger.delete_threads)
        stack.enter_context(committer)
        committer.inherit(version)
        feed = StepFeed(
            store,
            loader,
            run=run.run,
            run_uuid=run.run_uuid,
            data_rank=ranks.data_rank,
            first=version,
            last=config.run.steps - 1,
            ahead=config.store.prefetch_steps,
        )
        stack.enter_context(feed)
        Trainer(
            config=config,
            ranks=ranks,
            stop=stop,
            learner=learner,
            stand_ins=StandIns(next((f for f in run.schema.fields if f.name == ROUTING), None)),
            loader=loader,
            feed=feed,
            committer=committer,
            folders=folders,
            version=version,
            ledger=ledger,
            hook=hook,
        ).train()


def _learner(config: Config, ranks: Ranks, run: RunInfo, base: Path) -> Learner:
    return Learner(load_policy(base, device=ranks.device), ranks, run.schema, config.trainer)


def _resume(config: Config, ranks: Ranks, folders: Folders, learner: Learner) -> int:
    """Puts the newest checkpoint in place; the number of steps that it has done, 0 without one."""
    found = checkpoint.newest(folders.checkpoints)
    if found is None:
        return 0
    checkpoint.load(ranks.rank, ranks.world_size, found, run=config.run.id, model=learner.model, optimizer=learner.optimizer)
    _log.info("trainer rank %d resumes from %s", ranks.rank, found.folder)
    return found.version


def _export_resumed(ranks: Ranks, folders: Folders, learner: Learner, version: int) -> None:
    """Inference starts again with the weights of the checkpoint; newer ones of the ended attempt go."""
    if ranks.rank != 0:
        return
    weights.remove_future(folders.weights, version=version)
    if version and version not in published(folders.weights):  # an export of this version is the checkpoint's own: it came first
        weights.export(learner.model, version=version, parent=folders.weights, base=folders.base)
