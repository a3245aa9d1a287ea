"""From the settings to the hook of one role: one backend for each name, all of them called with every event.

Owns which names there are and the order in which they are opened and closed. An error of a backend is the role's error: figures that
someone asked for are not lost in silence.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self

from fsref.errors import ConfigError, MissingExtra
from fsref.events.jsonlines import JsonLines
from fsref.events.records import Event
from fsref.events.textfile import TextFile
from fsref.events.tracking import EXTRA, PACKAGE, Tracking, installed


class MetricsSettings(Protocol):
    """``[metrics]`` of the config."""

    @property
    def backends(self) -> Sequence[str]: ...
    @property
    def project(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def group(self) -> str: ...
    @property
    def mode(self) -> Literal["online", "offline"]: ...
    @property
    def textfile_dir(self) -> str: ...


class Backend(Protocol):
    """What listens to events. A further one implements this and gets its name in ``open_backends``."""

    def __call__(self, event: Event) -> None:
        """Takes one event; quickly, the role waits."""

    def close(self) -> None:
        """Lets go what it has open; called once."""


class Backends:
    """Several backends as one hook. A context manager."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        self._backends = tuple(backends)

    def __call__(self, event: Event) -> None:
        for backend in self._backends:
            backend(event)

    def close(self) -> None:
        """Closes all of them, the last opened first, also where one raises."""
        with ExitStack() as stack:
            for backend in self._backends:
                stack.callback(backend.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def check_installed(settings: MetricsSettings) -> None:
    """Raises ``MissingExtra`` for a backend whose package is not there, before a run is made of it. Loads nothing."""
    if "wandb" in settings.backends and not installed():
        raise MissingExtra.of(EXTRA, PACKAGE)


def open_backends(settings: MetricsSettings, run_dir: Path, *, run: str, role: str) -> Backends:
    """The hook of one role of a run. Close it. Raises ``MissingExtra``, ``ConfigError``."""
    with ExitStack() as undo:
        opened: list[Backend] = []
        for name in settings.backends:
            backend = _open(name, settings, run_dir, run=run, role=role)
            undo.callback(backend.close)
            opened.append(backend)
        undo.pop_all()
    return Backends(opened)


def _open(name: str, settings: MetricsSettings, run_dir: Path, *, run: str, role: str) -> Backend:
    match name:
        case "jsonl":
            return JsonLines(run_dir / "metrics.jsonl")
        case "prometheus":
            folder = Path(settings.textfile_dir) if settings.textfile_dir else run_dir / "metrics"
            return TextFile(folder / f"fsref-{run}-{role}.prom", run=run, role=role)
        case "wandb":
            return Tracking(
                project=settings.project,
                name=settings.name or run,
                group=settings.group or run,
                run=run,
                role=role,
                folder=run_dir,
                mode=settings.mode,
            )
    raise ConfigError(f"metrics.backends: {name!r} is unknown; known are jsonl, wandb, prometheus")
