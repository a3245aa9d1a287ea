"""One trainer rank, from start to clean end: opens what the loop needs, in an order in which every failure reaches all ranks.

SIGTERM or SIGINT on any rank ends all ranks after the step under way, with a checkpoint.
"""

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import torch

from fsref.config import Config
from fsref.events import Backends, open_backends
from fsref.folders import published
from fsref.journal import RunInfo, read_run
from fsref.loader import Place, Ranks, StepLoader
from fsref.loader.loader import run_dir
from fsref.parallel import data_parallel
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
    folder = run_dir(config)
    base = Path(config.model.path) if config.model.path else folder / "model"
    routes = folder / "routes" if config.trainer.record_routes else None
    folders = Folders(folder / "weights", folder / "checkpoints", base, routes)
    parallel = data_parallel(config.trainer.parallel)
    with ExitStack() as stack:
        stop = stack.enter_context(StopSignal())
        ranks = stack.enter_context(Ranks.joined(parallel, place, collective_s=config.trainer.collective_s))
        store = stack.enter_context(open_root(config.run.root, run=config.run.id, settings=config.store))
        run = ranks.together("reading run.json", lambda: read_run(store))
        learner = ranks.together("loading the model", lambda: _learner(config, ranks, run, base))
        version = ranks.together("reading the newest checkpoint", lambda: _resume(config, ranks, folders, learner))
        listeners = ranks.together("opening the metrics", lambda: _listeners(config, folder, ranks, run))
        hook = stack.enter_context(listeners) if listeners is not None else None
        loader = stack.enter_context(StepLoader(store, run, ranks, config, first=version, stopping=stop.is_set))
        ranks.together("exporting weights", lambda: _export_resumed(ranks, folders, learner, version))
        Trainer(config=config, ranks=ranks, learner=learner, loader=loader, folders=folders, version=version, hook=hook).train()


def _listeners(config: Config, folder: Path, ranks: Ranks, run: RunInfo) -> Backends | None:
    """Rank 0 speaks for all of them."""
    return open_backends(config.metrics, folder, run=run.run, role="trainer") if ranks.rank == 0 else None


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
