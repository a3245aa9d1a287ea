"""A small run made with the real writer, ledger and step files: four samples in step 0, one of which is dropped before."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from fsref import steps
from fsref.inspection.find import Place, find_run
from fsref.journal import RunInfo, create_run
from fsref.reaper import ConsumerHolder, EnvHolder, StepHolder, delete_objects
from fsref.refs import Dense, Payload, PayloadRef, Ragged, Schema, TokenRange, routed_experts, sampling_mask
from fsref.store import Store, open_root
from fsref.writer import Writer

SCHEMA = Schema((routed_experts(layer_ids=(1, 3), top_k=2, expert_count=8), sampling_mask()))
TOKENS = 6


@dataclass
class Run:
    """The run and what the test put into it."""

    root: Path
    info: RunInfo
    refs: list[PayloadRef] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return self.root / "r1"

    @property
    def place(self) -> Place:
        return find_run(str(self.folder), here=self.root)

    def store(self) -> Store:
        return open_root(str(self.root), run="r1")

    def train_and_remove(self) -> None:
        """The trainer takes step 0, uses it, and removes its arrays."""
        with self.store() as store, StepHolder(store, self.folder / "ledger", run=self.info) as trainer:
            info = steps.read_info(store, 0)
            trainer.taken(info)
            trainer.used(0)
            trainer.drop_steps(0, 0)
            outcome = delete_objects(store, [i for r in range(2) for i in steps.read_rank(store, info, r).owned])
            assert not outcome.failed
            trainer.done_steps(0, 0)


def payload(seed: int) -> Payload:
    """Experts 0..3 only; the last row is missing; tokens 3.. were sampled with sets of two."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 4, (TOKENS, 2, 2)).astype(np.uint8)
    counts = np.array([0, 0, 0, 2, 2, 2], np.int32)
    mask = Ragged(counts, {"ids": rng.integers(0, 99, 6).astype(np.int32)})
    missing = (TokenRange(TOKENS - 1, TOKENS),)
    return Payload(np.arange(TOKENS, dtype=np.int32) + seed, {"routed_experts": Dense(rows, missing), "sampling_mask": mask})


def sequence(n: int, ref: PayloadRef, *, padding: bool = False) -> steps.SampleSequence:
    trained = np.zeros(TOKENS, np.uint8) if padding else np.array([0, 0, 0, 1, 1, 1], np.uint8)
    return steps.SampleSequence(
        sample=f"{n:032x}/0",
        token_ids=payload(n).token_ids.tobytes(),
        loss_mask=trained.tobytes(),
        logprobs=np.zeros(TOKENS, "<f4").tobytes(),
        advantages=np.full(TOKENS, 0.5, "<f4").tobytes(),
        ref=ref,
        reward=n / 4,
        padding=padding,
    )


def rank_file(data_rank: int, refs: list[PayloadRef], first: int) -> steps.RankFile:
    sequences = [sequence(first + n, r) for n, r in enumerate(refs)] + [sequence(first, refs[0], padding=True)]
    return steps.RankFile(
        v=steps.VERSION,
        run="r1",
        step=0,
        data_rank=data_rank,
        schema=SCHEMA,
        micro_batches=(steps.MicroBatch(tuple(sequences)),),
        owned=tuple(i for r in refs for i in r.object_ids),
    )


@pytest.fixture
def run(tmp_path: Path) -> Run:
    root = tmp_path / "runs"
    with open_root(str(root), run="r1", create=True) as store:
        info = create_run(store, "r1", SCHEMA)
        made = Run(root, info)
        ledger = made.folder / "ledger"
        with EnvHolder(store, ledger, run=info, label="demo-0-0") as env, ConsumerHolder(store, ledger, run=info) as orc:
            writer = Writer(store, SCHEMA, env)
            refs = [writer.put(payload(n)) for n in range(5)]
            objects = {i: r.byte_count for r in refs for i in r.object_ids}
            env.sent("q", list(objects))
            orc.take("q", objects)
            made.refs, made.dropped = refs[:4], list(refs[4].object_ids)
            orc.drop(made.dropped, "filtered")
            assert orc.flush(deadline_s=30) == 0
            shipped = {i: r.byte_count for r in made.refs for i in r.object_ids}
            n, total = orc.ship(0, shipped)
            files = [rank_file(0, made.refs[:2], 0), rank_file(1, made.refs[2:], 2)]
            encoded = steps.encode_rank_files(files)
            steps.publish(store, _info(info, n, total, shipped, encoded), encoded)
    return made


def _info(info: RunInfo, n: int, total: int, shipped: dict[str, int], files: list[bytes]) -> steps.StepInfo:
    return steps.StepInfo(
        v=steps.VERSION,
        run="r1",
        run_uuid=info.run_uuid,
        step=0,
        data_ranks=2,
        micro_batches=1,
        samples=4,
        tokens=4 * TOKENS,
        n=n,
        bytes=sum(shipped.values()),
        sum=total,
        version=3,
        schema=SCHEMA,
        digests=tuple(map(steps.digest, files)),
        metrics={"reward/mean": 0.375},
    )
