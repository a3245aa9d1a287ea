"""What one worker process holds for its life: store, ledger holder, writer, capture, threads. Opened together, closed in order."""

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fsref.config import Config, EnvSection, parse, quota_share
from fsref.envserver.capture import Capture
from fsref.envserver.generate import Adapter, open_fields
from fsref.errors import ConfigError
from fsref.journal.markers import is_adopted
from fsref.journal.place import Ledger
from fsref.journal.run import RunInfo, read_run
from fsref.quota import Quota
from fsref.reaper import EnvHolder
from fsref.store import Store, open_root
from fsref.wire.modelconfig import ModelShape, read_model_shape
from fsref.writer import Writer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """What a worker process is started with; picklable."""

    config_json: bytes
    """``config.dump`` of the resolved config."""
    env: str
    replica: int

    @property
    def label(self) -> str:
        """``<env>-<replica>``, the head of every incarnation label of this replica."""
        return f"{self.env}-{self.replica}"


def section(config: Config, name: str) -> EnvSection:
    """The ``[[env]]`` table of that name; raises ``ConfigError`` with the names there are."""
    for env in config.env:
        if env.name == name:
            return env
    raise ConfigError(f"the config has no [[env]] table named {name!r}; it has {[e.name for e in config.env]}")


class Resources:
    """Use ``open``; close it once."""

    def __init__(self, *, config: Config, env: EnvSection, store: Store, run: RunInfo, holder: EnvHolder, model: ModelShape | None) -> None:
        self.config, self.store, self.run, self.holder = config, store, run, holder
        self.quota = make_quota(config, store, holder)
        self.writer = Writer(
            store,
            run.schema,
            holder,
            durability=config.store.durability,
            bytes_object_max=config.store.bytes_object_max,
            quota=self.quota,
            lints=config.payload.lints,
        )
        self.capture = Capture()
        self.writers = ThreadPoolExecutor(config.store.write_threads, thread_name_prefix="fsref-keep")
        self._decoders = ThreadPoolExecutor(env.decode_threads, thread_name_prefix="fsref-decode")
        self._undo = Adapter(self.capture, self._decoders, model, open_fields(run.schema), config.payload.lints).install()

    @classmethod
    def open(cls, settings: Settings, *, worker: int) -> "Resources":
        """Opens the run's store and a new incarnation ``env.<env>-<replica>-<worker>.<boot>``; raises ``StoreError``, ``LedgerError``."""
        config = parse(settings.config_json)
        store = open_store(config)
        run = read_run(store)
        holder = EnvHolder(store, Path(config.run.run_dir) / "ledger", run=run, label=f"{settings.label}-{worker}", section=config.ledger)
        return cls(config=config, env=section(config, settings.env), store=store, run=run, holder=holder, model=_model(config, run))

    @property
    def counters(self) -> dict[str, float]:
        """Gauges and counts of this worker: the ledger's (``pending_delete`` is the depth of the deletion queue) and the quota's."""
        return {**self.holder.counters, **(self.quota.counters if self.quota else {})}

    def rotate(self) -> str:
        """Ends the incarnation and opens the next; only while no put is under way. Blocks. Raises ``LedgerError``, ``StoreError``."""
        before, counters = self.holder.inc, self.holder.counters
        inc = self.holder.rotate()
        logger.info("incarnation %s closed for the next session: %s", before, counters)
        return inc

    def is_adopted(self, inc: str) -> bool:
        """Whether somebody adopted an incarnation of this run."""
        return is_adopted(Ledger.of(self.store, Path(self.config.run.run_dir) / "ledger"), inc)

    def close(self) -> None:
        """Waits for threads, drops what was never sent, ends the incarnation."""
        self._undo()
        if self.quota is not None:
            self.quota.close()
        self._decoders.shutdown(wait=True, cancel_futures=True)
        self.writers.shutdown(wait=True, cancel_futures=True)
        counters = self.counters
        try:
            pending = self.holder.close()
        finally:
            self.store.close()
        why = f" ({self.holder.pending_why})" if pending else ""
        logger.info("incarnation %s closed: %s, %d removals pending%s", self.holder.inc, counters, pending, why)


def make_quota(config: Config, store: Store, holder: EnvHolder) -> Quota | None:
    """This worker's share of ``store.bytes_live_max``; None where the run has no limit."""
    share = quota_share(config)
    if not share:
        return None
    prefixes = holder.prefixes()
    return Quota(store, holder.prefixes, share_bytes=share, wait_s=config.store.quota_wait_s, fresh=prefixes == [f"obj/{holder.inc}"])


def open_store(config: Config) -> Store:
    """The store of the config's run."""
    return open_root(config.run.root, run=config.run.id, settings=config.store)


def _model(config: Config, run: RunInfo) -> ModelShape | None:
    """Sizes to check routing against; only runs with that field have a reason to read the model folder."""
    if all(f.name != "routed_experts" for f in run.schema.fields):
        return None
    return read_model_shape(model_folder(config))


def model_folder(config: Config) -> str:
    """The policy's folder, with its sizes and its tokenizer."""
    return config.model.path or f"{config.run.run_dir}/model"
