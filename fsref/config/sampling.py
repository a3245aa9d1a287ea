"""Settings of who makes episodes and of what becomes of them: inference, env servers, orchestrator."""

from typing import Annotated, Any, Literal

from msgspec import Meta

from fsref.config.base import Count, Fraction, Natural, Positive, Section


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
