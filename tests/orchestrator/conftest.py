"""Samples and references with values that a test can write down."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsref.journal import RunInfo, create_run
from fsref.ledger.ids import ids_of
from fsref.ledger.records import Drop, Ship, Take, decode_line
from fsref.orchestrator.custody import Custody
from fsref.orchestrator.groups import Source
from fsref.orchestrator.samples import Sample
from fsref.plan import Layout, encode_index, encode_missing
from fsref.reaper import ConsumerHolder, EnvHolder, Verdict, audit
from fsref.refs import PayloadRef, Schema, Segment, TokenRange, object_name, routed_experts, sampling_mask, token_hash, top_logprobs
from fsref.store.posix import PosixStore

INC = "env.math-0-0.0123456789abcdef"


@dataclass
class Maker:
    """Makes references (a new object each, unless told) and samples around them."""

    schema: Schema
    seq: "itertools.count[int]" = field(default_factory=itertools.count)

    def ref(
        self,
        token_ids: Sequence[int],
        *,
        fields: Sequence[str] = ("routed_experts", "top_logprobs", "sampling_mask"),
        missing: dict[str, tuple[TokenRange, ...]] | None = None,
        object_id: str = "",
        byte_count: int = 100_000,
        stats: tuple[tuple[int, int], ...] = (),
    ) -> PayloadRef:
        present = tuple(f.name for f in self.schema.fields if f.name in fields)
        count = len(token_ids)
        ragged = {f.name: [0] for f in self.schema.fields if f.ragged and f.name in present}
        layout = Layout(self.schema, present, count, ragged)
        segment = Segment(
            object_id=object_id or f"{INC}/{next(self.seq)}",
            byte_count=byte_count,
            row_start=0,
            row_stop=count,
            token_start=0,
            index=encode_index(layout, [16] * len(layout.chunks)),
            missing=encode_missing(missing or {}, self.schema),
        )
        return PayloadRef(
            schema_hash=self.schema.hash,
            token_count=count,
            token_hash=token_hash(token_ids),
            hashed_count=count,
            segments=(segment,),
            stats=stats,
        )

    def sample(
        self,
        name: str = "t0/0",
        *,
        token_ids: Sequence[int] = (5, 6, 7, 8),
        trained: Sequence[int] = (2, 3),
        ref: PayloadRef | str | None = "own",
        group: int = 0,
        reward: float = 0.0,
        version: int = 0,
        agent: str = "solver",
    ) -> Sample:
        mask = np.zeros(len(token_ids), np.bool_)
        mask[list(trained)] = True
        return Sample(
            name=name,
            group=group,
            agent=agent,
            trace=name.split("/", maxsplit=1)[0],
            token_ids=np.array(token_ids, np.int32),
            loss_mask=mask,
            logprobs=np.where(mask, np.float32(-0.5), np.float32(0)),
            ref=self.ref(token_ids) if isinstance(ref, str) else ref,
            reward=reward,
            version=version,
            temperature=1.0,
        )


@pytest.fixture(scope="session")
def schema() -> Schema:
    return Schema((routed_experts(layer_ids=[0, 1], top_k=2, expert_count=8), top_logprobs(), sampling_mask()))


@pytest.fixture(scope="session")
def make(schema: Schema) -> Maker:
    return Maker(schema)


@dataclass(eq=False)
class FakeTask:
    index: int
    key: str
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class FakeTrace:
    """The fields of ``fsref.episodes.TraceResult``."""

    trace_id: str
    reward: float
    agent: str = "solver"
    trainable: bool = True
    ok: bool = True
    metrics: dict[str, float] = field(default_factory=dict)
    turns: int = 1
    sampled_tokens: int = 2
    truncated: bool = False
    errors: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class FakeBranch:
    """The fields of ``fsref.episodes.BranchSample``."""

    trace_id: str
    branch_index: int
    token_ids: Any
    loss_mask: Any
    logprobs: Any
    reward: float
    ref: PayloadRef | None
    agent: str = "solver"
    versions: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.trace_id}/{self.branch_index}"


@dataclass(frozen=True, eq=False)
class FakeEpisode:
    """The fields of ``fsref.episodes.Episode``."""

    request_id: str
    task: FakeTask
    ok: bool
    errors: tuple[str, ...]
    traces: tuple[FakeTrace, ...]
    samples: tuple[FakeBranch, ...]
    objects: dict[str, int]
    replica: str = "math-0"
    wall_s: float = 0.1


Script = Callable[[int, FakeTask], Awaitable[Any]]


@dataclass(eq=False)
class World:
    """A run on disk, an env worker that keeps real objects in it, a consumer that takes them, and a scripted source."""

    folder: Path
    make: Maker
    store: PosixStore
    info: RunInfo
    env: EnvHolder
    holder: ConsumerHolder
    custody: Custody
    runs: int = 0
    kept: list[str] = field(default_factory=list)
    script: Script | None = None
    """Given the number of the run and its task, makes the episode; None: ``episode`` with alternating rewards."""

    @property
    def ledger_dir(self) -> Path:
        return self.folder / "ledger"

    def source(self, **changes: Any) -> Source:
        tasks = [FakeTask(n, f"task-{n}") for n in range(4)]
        return Source(**{"name": "math", "tasks": tasks, "run": self.run, "slots": 64, **changes})

    async def run(self, task: Any, seed: int) -> Any:
        del seed
        number = self.runs
        self.runs += 1
        await asyncio.sleep(0)
        return await self.script(number, task) if self.script else self.episode(number, task)

    def keep(self, token_ids: Sequence[int]) -> PayloadRef:
        """Publishes an object and records it, as an env worker does."""
        seq = self.env.next_seq()
        object_id = f"{self.env.inc}/{seq}"
        self.store.put(object_name(object_id), [b"x" * 100], durability="process")
        self.env.keep(seq, byte_count=100, checksum=0, token_count=len(token_ids), fields=7)
        self.kept.append(object_id)
        return self.make.ref(token_ids, object_id=object_id, byte_count=100, stats=((2, 16), (2, 10)))

    def episode(
        self, number: int, task: Any, *, reward: float | None = None, ok: bool = True, branches: int = 1, bare: bool = False, extra: int = 0
    ) -> FakeEpisode:
        """One trace; each branch has an object, unless ``bare``. ``extra`` objects belong to no sample."""
        trace = f"t{number}"
        reward = float(number % 2) if reward is None else reward
        tokens = [1, 2, 3, 4, 5 + number]
        refs = [None if bare else self.keep(tokens) for _ in range(branches)]
        mask = np.array([False, False, True, True, True])
        samples = tuple(FakeBranch(trace, n, np.array(tokens), mask, np.full(5, -0.5), reward, ref) for n, ref in enumerate(refs))
        rest = [self.keep(tokens) for _ in range(extra)]
        objects = {segment.object_id: segment.byte_count for ref in [*refs, *rest] if ref for segment in ref.segments}
        self.env.sent(f"q{number}", objects)
        errors = () if ok else ("HarnessError: broken",)
        traces = (FakeTrace(trace, reward, ok=ok, errors=errors),)
        return FakeEpisode(f"q{number}", task, ok, errors, traces, samples if ok else (), objects)

    def story(self) -> dict[str, list[str]]:
        """What the consumer's and the trainer's journals say of each kept object, in order: take, drop:<reason>, ship:<step>."""
        out: dict[str, list[str]] = {o: [] for o in self.kept}
        for path in sorted(self.ledger_dir.glob("*.jnl")):
            for line in path.read_bytes().splitlines():
                record = decode_line(line)
                what = (
                    "take"
                    if isinstance(record, Take)
                    else f"drop:{record.r}"
                    if isinstance(record, Drop)
                    else f"ship:{record.step}"
                    if isinstance(record, Ship)
                    else ""
                )
                if isinstance(record, Take | Drop | Ship):
                    for object_id in ids_of(record.i):
                        out[object_id].append(what)
        return out

    def ends(self) -> "Counter[str]":
        """How objects left the consumer; fails unless each left exactly once, after one take, and the audit agrees."""
        story = self.story()
        for object_id, moves in story.items():
            assert len(moves) == 2, (object_id, moves)
            assert moves[0] == "take", (object_id, moves)
        found = audit(self.store, self.ledger_dir, run=self.info.run)
        assert found.verdict is Verdict.BALANCED, found.render()
        return Counter(moves[1] for moves in story.values())

    def present(self) -> set[str]:
        """Ids of objects that are in the store."""
        return {o for o in self.kept if (self.folder / object_name(o)).exists()}


@pytest.fixture
def world(tmp_path: Path, make: Maker) -> Iterator[World]:
    tmp_path = tmp_path / "r-1"
    store = PosixStore(tmp_path, create=True)
    info = create_run(store, tmp_path.name, make.schema)
    env = EnvHolder(store, tmp_path / "ledger", run=info, label="math-0-0")
    holder = ConsumerHolder(store, tmp_path / "ledger", run=info)
    yield World(tmp_path, make, store, info, env, holder, Custody(holder))
    holder.close()
    env.close()
    store.close()
