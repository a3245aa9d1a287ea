"""Making a run on disk before its roles start: folder, config.json, model, run.json; in this order, each checked.

Owns what a failed start leaves behind: nothing, until the model is made; after that the folder with its logs, and no object.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path

from fsref import config as settings
from fsref.errors import ConfigError, RunBusy
from fsref.pipeline.layout import model_command
from fsref.pipeline.processes import Command
from fsref.pipeline.schema import build_schema, check_names
from fsref.refs import Schema
from fsref.store import Store, open_root
from fsref.store.posix import raise_mapped


def make_run_dir(config: settings.Config) -> Path:
    """Checks the root and creates the run's folder with ``config.json``, exclusively. Returns the folder.

    Raises ``ConfigError`` for unknown fields, ``StoreError`` for a root that cannot be reached or written, ``RunBusy`` if the run exists.
    """
    check_names(config)
    run_dir = Path(config.run.run_dir)
    with contextlib.ExitStack() as undo:
        new = not run_dir.exists()
        if new:
            undo.callback(_remove_if_empty, run_dir)
        with open_root(config.run.root, run=config.run.id, settings=config.store, create=True) as store:
            if next(store.list("obj"), None) is not None:
                raise RunBusy(
                    f"{store.url} holds objects of an earlier run: choose another run.id, or end that run with: fsref close {store.url}"
                )
        _write_config(config, run_dir)
        undo.pop_all()
    return run_dir


def _write_config(config: settings.Config, run_dir: Path) -> None:
    path = run_dir / "config.json"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            try:
                file.write(settings.dump(config))
                file.flush()
            except OSError:
                path.unlink()
                raise
    except FileExistsError as e:
        raise RunBusy(f"the run {config.run.id!r} exists already at {run_dir}: choose another run.id") from e
    except OSError as e:
        raise_mapped(e, f"writing {path}")


def make_model(config: settings.Config, run_to_end: Callable[[Command], None]) -> None:
    """Makes the model folder by ``run_to_end`` if it lies in the run's folder; an own model must be there. Raises ``ConfigError``,
    ``RoleFailed``.
    """
    folder = Path(config.model.path)
    if folder == Path(config.run.run_dir) / "model":
        run_to_end(model_command(config))
    elif not (folder / "config.json").is_file():
        raise ConfigError(f"model.path {str(folder)!r} has no config.json: name a model folder in Hugging Face format, or leave it empty")


def make_run_file(config: settings.Config, create_run: Callable[[Store, str, Schema], object]) -> None:
    """Writes ``run.json``, which makes it a run."""
    schema = build_schema(config)
    with open_root(config.run.root, run=config.run.id, settings=config.store) as store:
        create_run(store, config.run.id, schema)


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()
