"""A run that was interrupted goes on: what is on disk of it is settled and cleared before any role starts.

Owns the order: everyone provably dead (``RunBusy`` else), the ledger recovered up to the newest checkpoint, then what the ended attempt
left beyond it: step files (``run.replay = "drop"``), weights, address files; at last the new ``config.json``. Each of these can be cut off
and done again. Refuses a config that does not fit what is there, and to replay steps whose arrays are gone.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fsref import config as settings
from fsref import folders, steps
from fsref.errors import ConfigError, RunMismatch, StepError, StepReleased
from fsref.events import Event, JsonLines
from fsref.journal import RunInfo, read_run
from fsref.journal.place import Ledger
from fsref.journal.read import LedgerReader
from fsref.pipeline.metrics import LAUNCHER, PUBLISHED, TRAINED
from fsref.pipeline.schema import build_schema
from fsref.reaper import recover
from fsref.store import Store, open_root
from fsref.store.posix import raise_mapped


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on."""

    trained: int
    """Optimiser steps that the newest checkpoint holds, which is the step that the trainer begins with."""
    published: int
    """The step that the orchestrator begins with."""
    steps: int
    """Of the whole run."""

    @property
    def finished(self) -> bool:
        """Nothing is left to train."""
        return self.trained >= self.steps

    def told(self) -> str:
        """For people."""
        if self.finished:
            return f"all {self.steps} steps are trained already: nothing is started"
        before = f"steps 0 to {self.trained - 1} are in its newest checkpoint" if self.trained else "there is no checkpoint yet"
        again = f", {self.published - self.trained} published steps are trained again" if self.published > self.trained else ""
        return f"the run goes on: {before}{again}, step {self.published} is the next to generate"


def resume(config: settings.Config, say: Callable[[str], None]) -> Resumed:
    """Makes an existing run ready for its roles; a finished one is left as it is.

    Raises ``RunBusy`` naming the processes that may be alive, ``RunMismatch`` for another schema, ``ConfigError``, ``StepReleased`` if
    published steps cannot be replayed, ``JournalCorrupt``, ``StoreError``.
    """
    run_dir = Path(config.run.run_dir)
    with open_root(config.run.root, run=config.run.id, settings=config.store) as store:
        info = read_run(store)
        _check_fits(config, info)
        done = max(folders.published(run_dir / "checkpoints"), default=0)
        if done >= config.run.steps:
            return Resumed(trained=done, published=done, steps=config.run.steps)
        say("settling what the ended processes left")
        found = recover(store, run_dir / "ledger", run=info, resume_step=done - 1, replay=config.run.replay, section=config.ledger)
        if found.pending:
            say(f"{len(found.pending)} removals failed and are tried again at the end of the run: {found.pending[0]} ...")
        published = _settle_steps(config, store, info, done)
    for version, folder in folders.published(run_dir / "weights").items():
        if version > done:
            folders.remove(folder)
    for address in (run_dir / "envs").glob("*/*.address"):
        address.unlink(missing_ok=True)
    _write_config(config, run_dir)
    resumed = Resumed(trained=done, published=published, steps=config.run.steps)
    _note(run_dir, resumed)
    return resumed


def _check_fits(config: settings.Config, info: RunInfo) -> None:
    path = Path(config.run.run_dir) / "config.json"
    try:
        before = settings.parse(path.read_bytes())
    except FileNotFoundError as e:
        raise ConfigError(
            f"the run {config.run.id!r} exists at {config.run.root}, but {path} is not there: give the run.run_dir it has"
        ) from e
    except OSError as e:
        raise_mapped(e, f"reading {path}")
    if info.run != config.run.id:
        raise RunMismatch(f"the folder of {config.run.id!r} holds the run {info.run!r}: use another root")
    if build_schema(config) != info.schema:
        raise RunMismatch(f"run {info.run!r} was created with other fields or codec: give the new run its own id, or restore the config")
    ranks = before.trainer.parallel.data
    if ranks != config.trainer.parallel.data:
        raise ConfigError(
            f"trainer.parallel.data is {config.trainer.parallel.data}, the run {info.run!r} has checkpoints and steps of {ranks} ranks: set"
            f" it to {ranks}, or start a new run"
        )


def _settle_steps(config: settings.Config, store: Store, info: RunInfo, done: int) -> int:
    """Published steps behind the checkpoint: all there and whole, or removed. Returns the next step to generate."""
    later = [s for s in steps.published(store) if s >= done]
    if config.run.replay == "drop":
        for step in reversed(later):
            steps.remove(store, step)
        return done
    advice = "start with --run.replay drop, which removes them and generates new ones"
    if later and later != list(range(done, later[-1] + 1)):
        raise StepError(f"of the steps after the checkpoint, {done} to {later[-1]}, only {later} are published: {advice}")
    reader = LedgerReader(Ledger.of(store, Path(config.run.run_dir) / "ledger"), run_uuid=info.run_uuid)
    reader.refresh()
    released = reader.merge(accept_corrupt=True).released()
    for step in later:
        found = steps.read_info(store, step)
        if by := released.get((step, found.n, found.sum)):
            raise StepReleased(
                f"the newest checkpoint has {done} steps, and the arrays of step {step} were removed by {by}: it cannot be trained"
                f" again; {advice}"
            )
    return later[-1] + 1 if later else done


def _write_config(config: settings.Config, run_dir: Path) -> None:
    path, staging = run_dir / "config.json", run_dir / ".config.json.tmp"
    try:
        with staging.open("wb") as file:
            file.write(settings.dump(config))
            file.flush()
            os.fsync(file.fileno())
        staging.replace(path)
    except OSError as e:
        raise_mapped(e, f"writing {path}")


def _note(run_dir: Path, resumed: Resumed) -> None:
    """Lines of metrics.jsonl after this one take the place of earlier ones of the same steps."""
    hook = JsonLines(run_dir / "metrics.jsonl")
    hook(Event(role=LAUNCHER, step=-1, metrics={TRAINED: float(resumed.trained), PUBLISHED: float(resumed.published)}))
    hook.close()
