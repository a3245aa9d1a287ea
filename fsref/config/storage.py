"""Settings of the store, where arrays lie, and of the ledger, by which they are removed."""

from typing import Annotated, Literal

from msgspec import Meta

from fsref.config.base import Count, Natural, Positive, Section


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
    """Threads that remove objects, per process, where the store takes longer than 0.1 ms for each; a faster one is not worth them."""
    seal_wait_s: Positive = 60.0
    """On a root that is no folder: how long an object that the orchestrator dropped may wait for the records of the next step, so that
    both are stored by one request; ``batch_ids_max`` of them do not wait. Also between looks for marks in the root."""
    seal_retry_s: Positive = 60.0
    """On a root that is no folder: how long a step, a commit or a close tries to store its records before it fails."""
    adopt_poll_s: Positive = 1.0
    """Between the orchestrator's looks for replicas that died."""
    adopt_drain_s: Annotated[float, Meta(ge=0)] = 2.0
    """Between the sight of a dead replica and its adoption, so that replies that arrived before are still taken."""
