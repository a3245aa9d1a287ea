"""Events as a Weights & Biases run. The only place that names the package wandb, which is loaded when such a run is started and not before.

Each role is a run of its own, as they are processes of their own; the group brings the runs of one training together.
"""

import importlib
import importlib.util
from pathlib import Path
from typing import Any, Final, Literal

from fsref.errors import ConfigError, MissingExtra
from fsref.events.records import Event

PACKAGE: Final = "wandb"
EXTRA: Final = "wandb"


def installed() -> bool:
    """Whether the package is there, without loading it."""
    return importlib.util.find_spec(PACKAGE) is not None


class Tracking:
    """A hook that logs every event under its names, over ``step`` as the axis of all of them.

    The step is a value and not the client's own counter: that one must never go back, but a resumed run trains steps again, and an
    evaluation's event may come after those of later steps.
    """

    def __init__(
        self, *, project: str, name: str, group: str, run: str, role: str, folder: Path, mode: Literal["online", "offline"]
    ) -> None:
        """``run`` and ``role`` name the run for good, so that a resumed training goes on in it. Its files lie in ``folder``.

        Raises ``MissingExtra``, and ``ConfigError`` where the client refuses to start.
        """
        try:
            package: Any = importlib.import_module(PACKAGE)
        except ImportError as e:
            raise MissingExtra.of(EXTRA, PACKAGE) from e
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = package.init(
                project=project,
                name=f"{name}-{role}",
                group=group,
                job_type=role,
                id=f"{run}-{role}",
                resume="allow",
                dir=str(folder),
                mode=mode,
            )
        except package.Error as e:
            raise ConfigError(
                f"metrics.backends names wandb, which did not start: {e}; run `wandb login`, set metrics.mode to offline, or leave it out"
            ) from e
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def __call__(self, event: Event) -> None:
        self._run.log({**event.metrics, **({"step": event.step} if event.step >= 0 else {})})

    def close(self) -> None:
        """Sends what is left; the client bounds how long it tries."""
        self._run.finish()
