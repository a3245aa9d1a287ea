"""The settings of a run: names, types, bounds, defaults, and what must hold between them.

The string under each key is its documentation (``tools/config_docs.py`` makes the page of them).
"""

from typing import Annotated, Any, Literal

from msgspec import Meta

from fsref.config.base import Count, Fraction, Natural, Positive, Section
from fsref.config.slurm import SlurmSection
from fsref.errors import ConfigError
from fsref.refs import Codec, Field, Lints

ParallelAxis = Literal["data", "context", "tensor", "pipeline"]
Targets = Literal["own", "next"]
"""An axis of a parallel layout."""


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


class ModelSection(Section, frozen=True, kw_only=True):
    """``[model]``: the policy's folder in Hugging Face format."""

    path: str = ""
    """Empty: a tiny random Qwen3-MoE is made under ``<run_dir>/model``."""
    name: str = "policy"
    """The name under which inference serves it."""


class InferenceSection(Section, frozen=True, kw_only=True):
    """``[inference]``: who samples."""

    kind: Literal["demo", "vllm"] = "demo"
    """``demo``: the server in this package; ``vllm``: ``vllm.entrypoints.openai.api_server`` in its own process."""
    address: str = ""
    """``http://host:port`` of a server that runs already; empty: the launcher starts one on a free loopback port."""
    concurrent_max: Count = 64
    """Demo server: sequences in one decode batch."""
    context_max: Count = 1024
    """Tokens of prompt plus completion."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of weights, activations and cache."""
    threads: Count = 1
    """Compute threads; on the demo server's small matrices more than one gains little."""
    routes_log: str = ""
    """Demo server: folder in which it writes each completion's tokens and experts itself, apart from what it replies. Empty: none."""
    python: str = ""
    """Interpreter that has vLLM, which often lives in an environment of its own. Empty: this one."""
    args: tuple[str, ...] = ()
    """Further command-line arguments for vLLM."""
    env: dict[str, str] = {}
    """Further environment variables of the inference process."""
    start_s: Positive = 300.0
    """How long to wait until it answers."""
    servers: Natural = 0
    """Set by the launcher of a job: servers that publish their addresses in ``<run_dir>/inference``, one per inference node. Runs on a
    node's env server are sampled by that node's. 0: one, at ``address``."""


class EnvSection(Section, frozen=True, kw_only=True):
    """``[[env]]``: one environment source and its servers."""

    name: str
    """``[a-z0-9-]{1,32}``; part of incarnation labels, addresses and logs."""
    split: Literal["train", "eval"] = "train"
    taskset: str = "fsref.envserver.demo_tasks"
    """verifiers taskset id."""
    args: dict[str, Any] = {}
    """verifiers taskset config."""
    env_id: str = ""
    """verifiers environment id, for environments of several agents; empty: the taskset's own."""
    env_args: dict[str, Any] = {}
    """verifiers environment config beside the taskset: seats, retries, timeouts."""
    replicas: Count = 1
    """Server processes that the launcher starts; limits below apply to each. In a job: one per inference node."""
    workers: Count = 1
    """Worker processes of each server."""
    concurrent_max: Count = 64
    """Runs in flight per replica."""
    weight: Positive = 1.0
    """Share of groups among sources of the same split."""
    serve_address: str = ""
    """``tcp://host:port`` of a server that someone else runs; empty: the launcher starts the replicas."""
    bind: str = "127.0.0.1"
    """Address that a replica listens on; ``0.0.0.0`` publishes the node's own."""
    torch: bool = False
    """Whether the taskset uses transformers with torch in the server. Without, prompts are rendered without loading it, which saves
    each worker about 180 MB and some seconds."""
    decode_threads: Count = 2
    """Threads per worker that read engine replies, so that its event loop never does."""
    health_s: Positive = 5.0
    """How long a health check of a replica may take."""
    misses_max: Count = 6
    """Health checks that a replica may miss in a row before its runs fail over; a process seen dead does at once."""


class SamplingSection(Section, frozen=True, kw_only=True):
    """``[sampling]``: sent with every train request."""

    temperature: Positive = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = 64
    min_p: Fraction = 0.0
    tokens_max: Count = 32
    """Completion tokens per turn."""
    top_logprobs: Natural = 8
    """Entries of the top-k head; 0 where the run has no such field."""


class OrchestratorSection(Section, frozen=True, kw_only=True):
    """``[orchestrator]``: dispatch, advantages, filters, packing."""

    batch_size: Count = 64
    """Episodes a step, before filters; a multiple of ``group_size``."""
    group_size: Annotated[int, Meta(ge=2)] = 8
    """Episodes of one task whose rewards are compared."""
    tokens_per_micro_batch: Count = 2048
    """Token budget of a packed micro batch."""
    sequence_tokens_max: Count = 1024
    """Longer samples are truncated or dropped, see ``overlong``."""
    overlong: Literal["truncate", "drop"] = "truncate"
    off_policy_max: Natural = 2
    """Versions that a sample's weights may lag behind the step that trains it; older samples are dropped as stale."""
    ahead_max: Natural = 1
    """Batches that may be generated ahead of the newest weights."""
    filter_zero_advantage: bool = True
    """Drop groups whose rewards are all equal."""
    normalise_advantages: bool = False
    """Divide advantages by the standard deviation of their group's rewards."""
    shuffle_advantages: bool = False
    """A control for experiments: permutes advantages over the samples of a batch, so nothing can be learned."""
    eval_every: Natural = 0
    """Steps between evaluations; 0: none."""
    eval_episodes: Natural = 16
    run_deadline_s: Positive = 120.0
    """An episode that takes longer is cancelled and counted as failed."""
    retries_max: Natural = 3
    """Attempts for an episode that failed because its replica died."""
    env_server_replicas: Natural = 0
    """Set by the launcher of a job to the number of inference nodes, each of which runs one replica of every source. 0: what the sources'
    own ``replicas`` say."""
    replica_wait_s: Positive = 120.0
    """How long to wait for the address files and health of the replicas."""
    groups_failed_max: Count = 16
    """Groups dropped one after the other, because a member could not finish, before the run ends with the last one's reason."""
    batches_empty_max: Count = 16
    """Batches collected one after the other of which nothing is left to train, before the run ends."""
    weights_wait_s: Positive = 600.0
    """How long to wait for the weights that the next batch needs."""
    weights_poll_s: Positive = 0.1
    """Seconds between looks for new weights."""


class ParallelSection(Section, frozen=True, kw_only=True):
    """``[trainer.parallel]``: how a step is laid over ranks. ``fsref trainer`` is data parallel; the other axes are
    for trainers of one's own (``fsref.loader``)."""

    data: Count = 2
    """Data ranks; each reads its own rank file."""
    context: Count = 1
    """Context parallel ranks, which share the rows of every sequence."""
    tensor: Count = 1
    """Tensor parallel ranks."""
    pipeline: Count = 1
    """Pipeline ranks."""
    layout: Literal["", "zigzag", "contiguous", "allgather"] = ""
    """How context ranks share rows; needed where there are several, and never guessed."""
    stages: str = ""
    """Layer ids of the pipeline ranks, ``0-2,7;3-6``, with ``|`` between a rank's virtual stages; needed where there are several ranks."""
    sequence: bool = False
    """Sequence parallelism: tensor ranks share the rows of a context rank. Off: all of them see the same rows."""
    sequence_multiple: Natural = 0
    """Every sequence is padded to a multiple of it before the split; 0: to the least that the layout divides."""
    multiple: Count = 1
    """A context rank's rows are padded to a multiple of it, behind the split (``allgather``: before it)."""
    expert_shards: Count = 1
    """Expert parallel ranks that a layer's experts are spread over; padding rows are balanced over them."""
    targets: Targets = "own"
    """Whose loss mask, logprobs, advantages, heads and masks stand at a row: its token's ``own``, or the ``next`` token's, which the row
    predicts, with ``labels`` beside them. Context ranks need ``next``: the split cuts a token apart from the row that predicts it."""
    loss_stage: Annotated[int, Meta(ge=-1)] = -1
    """Pipeline rank that has the logits, and so reads the fields without layers; -1: the last."""
    order: tuple[ParallelAxis, ...] = ()
    """The axes, slowest first, that ranks are numbered along; needed where several have more than one rank."""


class LossSection(Section, frozen=True, kw_only=True):
    """``[trainer.loss]``."""

    replay: bool = True
    """Route as the sampler did."""
    compare_replay: bool = False
    """Also runs every micro batch the other way round (without replay, or with), for the metrics only: one more forward, no gradient."""
    ratio_low: Fraction = 0.5
    ratio_high: Annotated[float, Meta(ge=1)] = 2.0
    """IcePop band: a token whose trainer-to-sampler ratio lies outside gives no policy gradient."""
    ratio_weight: bool = False
    """Also weigh by the ratio inside the band, as IcePop does; off: the band is a mask only, and score centering corrects the rest."""
    center_weight: Annotated[float, Meta(ge=0)] = 1.0
    """Weight of the score-centering term over the top-k head; 1 cancels the drift exactly, 0 turns it off."""


class TrainerSection(Section, frozen=True, kw_only=True):
    """``[trainer]``: ranks, optimiser, checkpoints."""

    parallel: ParallelSection = ParallelSection()
    loss: LossSection = LossSection()
    learning_rate: Positive = 3e-3
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    grad_norm_max: Positive = 1.0
    dtype: Literal["float32", "bfloat16"] = "float32"
    checkpoint_every: Count = 4
    """Steps between checkpoints; the last step always gets one."""
    commit: Literal["fetched", "checkpoint", "keep_last"] = "checkpoint"
    """When a step's arrays are removed."""
    keep_last: Count = 2
    """Steps whose arrays stay, where ``commit = "keep_last"``."""
    record_routes: bool = False
    """Also write what the experts were given, to ``<run_dir>/routes``; to prove replay, not to train."""
    checkpoints_keep: Count = 2
    """Checkpoints that stay on disk."""
    weights_keep: Count = 3
    """Weight folders that stay on disk."""
    step_wait_s: Positive = 600.0
    """How long to wait for the next step file."""
    collective_s: Positive = 300.0
    """Deadline of a collective operation."""
    threads: Count = 1
    """Compute threads per rank."""


class StoreSection(Section, frozen=True, kw_only=True):
    """``[store]``: how bytes move."""

    durability: Literal["node", "process"] = "node"
    """``node``: fsync file and directory, survives node loss; ``process``: rename only."""
    fetch_threads: Count = 2
    write_threads: Count = 2
    bytes_inflight_max: Count = 2 << 30
    """Bytes that a trainer rank may hold for steps ahead of the one that trains: their arrays until the step is taken, and stored bytes on
    the way. The step that trains is not counted and never held back. A larger micro batch is fetched alone. Too little of it, and a part of
    the next step is fetched only when it is waited for."""
    bytes_object_max: Annotated[int, Meta(ge=1, le=(1 << 32) - 1)] = (1 << 32) - 1
    bytes_live_max: Natural = 0
    """Bytes of objects that may lie in the store at once, over the whole run; 0: no limit. Each env worker has an equal share. Where it is
    used up, keeping waits until others have removed enough."""
    quota_wait_s: Positive = 60.0
    """How long a put waits for room; then its episode fails with the figures."""
    retries_max: Natural = 4
    """Attempts after the first for an operation that may heal, with exponential back-off and jitter. A damaged read is tried once more."""
    retry_s: Positive = 30.0
    """No further attempt of one operation begins after this long."""
    fetch_deadline_s: Positive = 120.0
    """How long a trainer rank waits for the arrays of one step; what is missing then counts as unavailable."""
    abandon_s: Positive = 5.0
    """How long a closing reader waits for fetch threads; one that is stuck in the kernel is abandoned and counted."""
    prefetch_steps: Natural = 1
    """Steps fetched ahead of the one that trains."""
    node_cache_bytes: Natural = 0
    """Memory that the trainer ranks of a node share, so that chunks which several of them want are fetched once; 0: none. Worth it where
    ranks share a micro batch (tensor, context or pipeline parallel); then the stored bytes of all of a node's steps that are under way.
    A smaller one works, and shares less. Ranks of one data rank each want different objects and gain nothing."""
    node_cache_dir: str = "/dev/shm"  # noqa: S108 - the file in it is checked for its owner and mode
    """Folder of the file behind that memory, on a filesystem in memory."""
    node_cache_wait_s: Positive = 10.0
    """How long a rank waits for another one's fetch of a chunk; then it fetches the chunk itself."""
    driver: Literal["auto", "obstore", "fsspec"] = "auto"
    """Who moves bytes: ``auto`` takes plain files for folders, obstore for ``s3://`` and fsspec for every other URL."""
    server: Literal["none", "seaweedfs"] = "none"
    """``seaweedfs``: ``fsref run`` starts an S3 server of the run's own on loopback, with all that it stores in ``<run_dir>/objectserver``
    and keys that are made for each start, and stops it at the end; ``audit``, ``inspect`` and the others start it while they look. Needs
    an ``s3://`` root, whose bucket is made, and the extra ``pool``."""
    endpoint: str = ""
    """S3-compatible endpoint URL; empty: AWS, or what the environment and the profile say. Credentials never stand in this file: they come
    from the environment, the profile, a credentials file, or the instance's role."""
    region: str = ""
    """Empty: what the environment and the profile say; ``us-east-1`` where an endpoint is set."""
    profile: str = ""
    """Profile of the AWS config and credentials files."""
    credentials_file: str = ""
    """Credentials file in AWS's format; empty: ``~/.aws/credentials``."""
    addressing: Literal["auto", "path", "virtual"] = "auto"
    """Whether the bucket stands in the path or in the host name; ``auto``: in the host name on AWS, else in the path."""
    ca_file: str = ""
    """PEM file of certificate authorities to trust besides the system's."""
    proxy: str = ""
    """HTTP proxy URL for object storage; ``environment`` takes the one of the environment variables. Empty: none, whatever they say."""
    connections_max: Count = 64
    """Requests to object storage in flight, per process."""
    connect_s: Positive = 5.0
    """How long a connection to object storage may take."""
    stall_s: Positive = 10.0
    """How long a reply of object storage may stand still; then the rest of it is asked for again."""
    request_s: Positive = 120.0
    """How long one request to object storage may take in all."""
    bulk_delete: bool = True
    """Remove up to 1,000 objects with one request; off for servers that have no DeleteObjects (Google's S3 interface)."""
    versions: Literal["refuse", "delete"] = "refuse"
    """A bucket that keeps old versions: ``refuse`` it, or ``delete`` each object's versions by id, at one more request per object."""


class LedgerSection(Section, frozen=True, kw_only=True):
    """``[ledger]``: removal."""

    strict: bool = False
    """Raise on a second drop of the same object by the same holder; else it is suppressed and counted."""
    batch_ids_max: Count = 1000
    """Ids of one deletion batch."""
    batch_wait_s: Positive = 0.1
    """How long a dropped object may wait for others, so that they are removed together."""
    queue_ids_max: Count = 65_536
    """Dropped ids that a process holds as work at hand; further ones are kept as bare numbers, 8 bytes each. None is lost."""
    delete_threads: Count = 4
    """Threads that remove objects, per process."""
    seal_wait_s: Positive = 60.0
    """On a root that is no folder: how long an object that the orchestrator dropped may wait for the records of the next step, so that
    both are stored by one request; ``batch_ids_max`` of them do not wait. Also between looks for marks in the root."""
    seal_retry_s: Positive = 60.0
    """On a root that is no folder: how long a step, a commit or a close tries to store its records before it fails."""
    adopt_poll_s: Positive = 1.0
    """Between the orchestrator's looks for replicas that died."""
    adopt_drain_s: Annotated[float, Meta(ge=0)] = 2.0
    """Between the sight of a dead replica and its adoption, so that replies that arrived before are still taken."""


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
