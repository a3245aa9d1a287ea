"""All settings of a run, and what must hold between sections.

Each section's names, types, bounds and defaults stand in the module of who obeys it; the string under a key is its documentation
(``tools/config_docs.py`` makes the page of them).
"""

from fsref.config.base import Section
from fsref.config.run import LauncherSection, MetricsSection, PayloadSection, RunSection
from fsref.config.sampling import EnvSection, InferenceSection, ModelSection, OrchestratorSection, SamplingSection
from fsref.config.slurm import SlurmSection
from fsref.config.storage import LedgerSection, StoreSection
from fsref.config.training import TrainerSection
from fsref.errors import ConfigError
from fsref.refs import Codec, Field


class Config(Section, frozen=True, kw_only=True):
    """A whole run."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    inference: InferenceSection = InferenceSection()
    env: tuple[EnvSection, ...] = ()
    sampling: SamplingSection = SamplingSection()
    orchestrator: OrchestratorSection = OrchestratorSection()
    trainer: TrainerSection = TrainerSection()
    store: StoreSection = StoreSection()
    ledger: LedgerSection = LedgerSection()
    metrics: MetricsSection = MetricsSection()
    launcher: LauncherSection = LauncherSection()
    codec: Codec = Codec()
    payload: PayloadSection = PayloadSection()
    field: tuple[Field, ...] = ()
    """``[[field]]``: declarations of fields that this version does not know by name; list them in ``run.fields`` too."""
    slurm: SlurmSection | None = None

    def __post_init__(self) -> None:
        if self.orchestrator.batch_size % self.orchestrator.group_size:
            raise ConfigError(
                f"orchestrator.batch_size {self.orchestrator.batch_size} is not a multiple of group_size {self.orchestrator.group_size}"
            )
        for key, url in {
            "run.root": self.run.root,
            "store.endpoint": self.store.endpoint,
            "inference.address": self.inference.address,
        }.items():
            _refuse_secrets(key, url)
        names = [e.name for e in self.env]
        if len(set(names)) != len(names):
            raise ConfigError(f"two [[env]] tables have the same name: {sorted(names)}")
        trainer = self.trainer
        if self.run.replay == "keep" and trainer.commit == "keep_last" and trainer.keep_last < trainer.checkpoint_every:
            raise ConfigError(
                f"trainer.keep_last {trainer.keep_last} is below checkpoint_every {trainer.checkpoint_every}: after a crash the steps since"
                " the checkpoint could not be trained again, their arrays would be gone; raise it, or set run.replay = 'drop'"
            )
        if trainer.collective_s <= self.store.fetch_deadline_s:
            raise ConfigError(
                f"trainer.collective_s {trainer.collective_s:g} is not longer than store.fetch_deadline_s {self.store.fetch_deadline_s:g}:"
                " a rank whose storage hangs would be given up by the others before it can say so; raise the one or lower the other"
            )
        if 0 < self.store.bytes_live_max < (workers := sum(e.replicas * e.workers for e in self.env)):
            raise ConfigError(f"store.bytes_live_max {self.store.bytes_live_max} leaves nothing for each of {workers} env workers")
        if not self.run.fields:
            raise ConfigError("run.fields is empty: name the arrays that the run needs")


def _refuse_secrets(key: str, url: str) -> None:
    """The config is written to files and shown; a URL in it must hold neither user info nor a query."""
    head, sep, rest = url.partition("://")
    authority, _, path = rest.partition("/")
    if sep and ("@" in authority or "?" in path or "?" in authority):
        raise ConfigError(
            f"{key} holds user info or a query ({head}://...): settings are written to files and shown, so credentials come from the "
            "environment, a profile or the instance"
        )


def quota_share(config: Config) -> int:
    """Bytes of ``store.bytes_live_max`` that one env worker may have in the store; 0: no limit."""
    workers = sum(env.replicas * env.workers for env in config.env)
    return config.store.bytes_live_max // max(1, workers)
