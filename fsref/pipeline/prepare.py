"""Making a run on disk before its roles start: folder, lock, config.json, model, run.json; in this order, each checked.

Owns what a failed start leaves behind: nothing, until the model is made; after that the folder with its logs, and no object.
"""

import contextlib
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from fsref import config as settings
from fsref.errors import ConfigError, ObjectMissing, RunBusy
from fsref.events import check_installed
from fsref.journal import identity
from fsref.journal import run as run_file
from fsref.pipeline.layout import model_command
from fsref.pipeline.processes import Command
from fsref.pipeline.schema import build_schema, check_names
from fsref.refs import Schema
from fsref.store import Store, open_root
from fsref.store.posix import raise_mapped


class RunLock:
    """One launcher for one run: a lock on ``<run_dir>/launcher.lock`` that ends with its process, however that ends. A context manager."""

    def __init__(self, run_dir: Path, run: str) -> None:
        """Makes the folder if it is not there. Raises ``RunBusy`` with the other launcher's process, ``StoreError``."""
        self.path = run_dir / "launcher.lock"
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
        except OSError as e:
            raise_mapped(e, f"creating {self.path}")
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            who = os.read(self._fd, 200).decode(errors="replace")
            os.close(self._fd)
            raise RunBusy(f"the run {run!r} is being run by another launcher ({who}): wait for it, or stop it") from None
        me = identity.this_process()
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"pid {me.pid} on {me.host}".encode(), 0)
        except OSError as e:
            os.close(self._fd)
            self.path.unlink(missing_ok=True)
            raise_mapped(e, f"writing {self.path}")

    def close(self) -> None:
        """Lets the run go. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def claim(config: settings.Config) -> tuple[RunLock, bool]:
    """Checks the root, locks the run for this launcher and, for a new one, makes ``config.json`` in its folder. The lock, to be closed, and
    whether the run exists already: then nothing was written.

    Raises ``ConfigError`` for unknown fields, ``MissingExtra`` for a metrics backend that is not installed, ``StoreError`` for a root that
    cannot be reached or written, ``RunBusy`` if another launcher has the run or objects are there that no run explains. A start that fails
    here leaves nothing.
    """
    check_names(config)
    check_installed(config.metrics)
    run_dir = Path(config.run.run_dir)
    with contextlib.ExitStack() as undo:
        if not run_dir.exists():
            undo.callback(_remove_if_empty, run_dir)
        with open_root(config.run.root, run=config.run.id, settings=config.store, create=True) as store:
            lock = RunLock(run_dir, config.run.id)
            undo.callback(lock.close)
            existed = _is_run(store)
            if not existed:
                undo.callback(lock.path.unlink)
                if next(store.list("obj"), None) is not None:
                    raise RunBusy(f"{store.url} holds objects and no {run_file.NAME}: choose another run.id, or remove what is there")
                _write_config(config, run_dir)
        undo.pop_all()
    return lock, existed


def _is_run(store: Store) -> bool:
    try:
        store.open(run_file.NAME).close()
    except ObjectMissing:
        return False
    return True


def _write_config(config: settings.Config, run_dir: Path) -> None:
    """Over the one of a start that was cut off before there was a run."""
    path = run_dir / "config.json"
    try:
        with path.open("wb") as file:
            try:
                file.write(settings.dump(config))
                file.flush()
            except OSError:
                path.unlink()
                raise
    except OSError as e:
        raise_mapped(e, f"writing {path}")


def make_model(config: settings.Config, run_to_end: Callable[[Command], None]) -> None:
    """Makes the model folder by ``run_to_end`` if it lies in the run's folder; an own model must be there. Raises ``ConfigError``,
    ``RoleFailed``.
    """
    folder = Path(config.model.path)
    there = (folder / "config.json").is_file()  # written last
    if folder == Path(config.run.run_dir) / "model":
        if not there:
            run_to_end(model_command(config))
    elif not there:
        raise ConfigError(f"model.path {str(folder)!r} has no config.json: name a model folder in Hugging Face format, or leave it empty")


def make_run_file(config: settings.Config, create_run: Callable[[Store, str, Schema], object]) -> None:
    """Writes ``run.json``, which makes it a run."""
    schema = build_schema(config)
    with open_root(config.run.root, run=config.run.id, settings=config.store) as store:
        create_run(store, config.run.id, schema)


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()
