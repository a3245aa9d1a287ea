"""Settings of a run as a whole: its name and places, its arrays, its figures, its processes."""

from typing import Literal

from fsref.config.base import Count, Natural, Positive, Section
from fsref.errors import ConfigError
from fsref.refs import Lints


class RunSection(Section, frozen=True, kw_only=True):
    """``[run]``: what is common to all roles."""

    id: str = ""
    """Run id (``[a-z0-9][a-z0-9._-]*``); empty mints one at start."""
    root: str = "runs"
    """Folder or fsspec URL that holds runs; objects, steps and the ledger lie under ``<root>/<id>``."""
    run_dir: str = ""
    """POSIX folder for addresses, logs, weights, checkpoints and metrics; ``{id}`` in it is the run's id. Empty: ``<root>/<id>``, which
    needs a POSIX root."""
    steps: Count = 24
    """Training steps."""
    seed: Natural = 0
    """Seeds model, tasks, sampling and shuffles."""
    fields: tuple[str, ...] = ("routed_experts", "top_logprobs", "sampling_mask")
    """Arrays that every trainable sample must carry. A sample without one of them ends the run with an error that names it."""
    missing: Literal["strict", "fallback"] = "strict"
    """``strict``: a sample whose needed field has missing rows of trained tokens is an error; ``fallback``: it trains, and is counted."""

    replay: Literal["keep", "drop"] = "keep"
    """A run that is started again goes on from its newest checkpoint. ``keep``: the steps after it that were published are trained again
    from their arrays, byte for byte, and new ones follow. ``drop``: they are removed, and generated anew."""
    attempt: str = ""
    """Set by the launcher of a job: this start of it (``<job>.<restarts>``). Addresses that another start published are never used."""


class PayloadSection(Section, frozen=True, kw_only=True):
    """``[payload]``: how the arrays are checked and laid out."""

    lints: Lints = Lints()
    """See ``[payload.lints]``."""
    layers_per_chunk: Natural = 0
    """Splits routing chunks along the layer axis, so that a pipeline stage fetches its own layers only; 0 keeps all layers in one chunk."""


class MetricsSection(Section, frozen=True, kw_only=True):
    """``[metrics]``: who gets the figures of every step."""

    backends: tuple[Literal["jsonl", "wandb", "prometheus"], ...] = ("jsonl",)
    """``jsonl``: ``<run_dir>/metrics.jsonl``, which the launcher reads, so it is always among them. ``wandb``: a Weights & Biases run for
    each of orchestrator and trainer (extra ``wandb``). ``prometheus``: a text file of the newest values for the node exporter."""
    project: str = "fsref"
    """Weights & Biases: the project."""
    name: str = ""
    """Weights & Biases: how its runs are called, with the role behind it; empty: the run id."""
    group: str = ""
    """Weights & Biases: the group of its runs; empty: the run id."""
    mode: Literal["online", "offline"] = "online"
    """Weights & Biases: ``offline`` keeps everything in ``<run_dir>/wandb``, for ``wandb sync``."""
    textfile_dir: str = ""
    """Prometheus: the node exporter's ``--collector.textfile.directory``; empty: ``<run_dir>/metrics``."""

    def __post_init__(self) -> None:
        if "jsonl" not in self.backends or len(set(self.backends)) != len(self.backends):
            raise ConfigError(f"metrics.backends {list(self.backends)}: each once, and jsonl among them, which the launcher reads")


class LauncherSection(Section, frozen=True, kw_only=True):
    """``[launcher]``: processes."""

    restarts_max: Natural = 3
    """Restarts of a dead env-server replica."""
    stop_s: Positive = 20.0
    """Grace between SIGTERM and SIGKILL."""
