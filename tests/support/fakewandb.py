"""A stand-in for the package wandb that keeps what it is told: the few calls that a tracking client makes, with its rules about steps."""

from types import ModuleType
from typing import Any


class Refused(Exception):
    """``wandb.Error``."""


class Run:
    """What ``wandb.init`` returns."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.axes: dict[str, str | None] = {}
        self.logged: list[dict[str, float]] = []
        self.finished = 0

    def define_metric(self, name: str, *, step_metric: str | None = None) -> None:
        self.axes[name] = step_metric

    def log(self, data: dict[str, float]) -> None:
        assert not self.finished, "logged after the end"
        self.logged.append(data)

    def finish(self) -> None:
        self.finished += 1


class Package(ModuleType):
    """Put it into ``sys.modules``."""

    Error = Refused

    def __init__(self, refusal: str = "") -> None:
        super().__init__("wandb")
        self.refusal = refusal
        self.runs: list[Run] = []

    def init(self, **settings: Any) -> Run:
        if self.refusal:
            raise Refused(self.refusal)
        self.runs.append(Run(settings))
        return self.runs[-1]
