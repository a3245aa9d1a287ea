"""Small runs on disk, with objects, step files and a ledger, and processes that train them."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fsref.config import Config, ParallelSection, RunSection, StoreSection, TrainerSection
from fsref.errors import FsrefError
from fsref.journal import create_run
from fsref.reaper import ConsumerHolder, EnvHolder, audit
from fsref.refs import Dense, Payload, Ragged, Schema, object_name, routed_experts, sampling_mask, top_logprobs
from fsref.steps import MicroBatch, RankFile, SampleSequence, StepInfo, digest, encode_rank_files, publish, sum_of
from fsref.store import open_root
from fsref.writer import Writer
from tests.support.forks import fork_context
from tests.support.ports import free_port
from tests.trainer.builders import EXPERTS, MOE_LAYERS, TOP_K, VOCABULARY, save_tiny_model

RUN = "r-test"
SCHEMA = Schema((routed_experts(layer_ids=MOE_LAYERS, top_k=TOP_K, expert_count=EXPERTS), top_logprobs(), sampling_mask()))
DEADLINE_S = 120.0


class _Keeper:
    """The env holder as the writer's keeper, whichever form ``fields`` has."""

    def __init__(self, holder: EnvHolder) -> None:
        self._holder = holder
        self.inc = holder.inc

    def next_seq(self) -> int:
        return self._holder.next_seq()

    def keep(self, seq: int, *, byte_count: int, checksum: int, token_count: int, fields: Any) -> None:
        mask = fields if isinstance(fields, int) else sum(1 << n for n, f in enumerate(SCHEMA.fields) if f.name in fields)
        self._holder.keep(seq, byte_count=byte_count, checksum=checksum, token_count=token_count, fields=mask)


def payload(tokens: np.ndarray, sampled_from: int, rng: np.random.Generator) -> Payload:
    """Arrays of one sample: routes for every token, a kept set and a head for every sampled one."""
    count = len(tokens)
    routes = rng.permuted(np.tile(np.arange(EXPERTS, dtype=np.uint8), (count, len(MOE_LAYERS), 1)), axis=-1)[..., :TOP_K]
    kept: list[list[int]] = []
    for position, token in enumerate(tokens.tolist()):
        others = [v for v in rng.permutation(VOCABULARY)[:6].tolist() if v != token]
        kept.append([token, *others] if position >= sampled_from else [])
    heads = [k[:3] for k in kept]
    logprobs = np.log(np.concatenate([np.full(len(h), 0.9 / len(h)) for h in heads if h])).astype(np.float32)
    return Payload(
        tokens,
        {
            "routed_experts": Dense(routes),
            "sampling_mask": Ragged(np.array([len(k) for k in kept], np.int32), {"ids": np.concatenate(kept).astype(np.int32)}),
            "top_logprobs": Ragged(
                np.array([len(h) for h in heads], np.int32),
                {"ids": np.concatenate(heads).astype(np.int32), "logprobs": logprobs},
            ),
        },
    )


@dataclass
class SmallRun:
    """A run folder with a model and published steps. Close it before the audit."""

    folder: Path
    data_ranks: int = 1
    seed: int = 0
    objects: dict[int, list[list[str]]] = field(default_factory=dict)
    """Step to the owned ids of each data rank."""
    routes: dict[str, np.ndarray] = field(default_factory=dict)
    """Sample to the rows that went into its object."""

    def __post_init__(self) -> None:
        self.store = open_root(str(self.folder), run=RUN, create=True)
        self.run_dir = self.folder / RUN
        self.info = create_run(self.store, RUN, SCHEMA)
        save_tiny_model(self.run_dir / "model", seed=self.seed)
        self.env = EnvHolder(self.store, self.run_dir / "ledger", run=self.info, label="sums-0-0")
        self.orc = ConsumerHolder(self.store, self.run_dir / "ledger", run=self.info, role="orc", label="main")
        self.writer = Writer(self.store, SCHEMA, _Keeper(self.env), durability="process")
        self.rng = np.random.default_rng(self.seed)
        self.bytes_shipped = 0

    def sample(self, step: int, name: str) -> SampleSequence:
        count, sampled_from = int(self.rng.integers(6, 14)), 3
        tokens = self.rng.integers(0, VOCABULARY, count).astype(np.int32)
        arrays = payload(tokens, sampled_from, self.rng)
        routing = arrays.fields["routed_experts"]
        assert isinstance(routing, Dense)
        self.routes[name] = routing.rows
        ref = self.writer.put(arrays)
        mask = (np.arange(count) >= sampled_from).astype(np.uint8)
        return SampleSequence(
            sample=name,
            token_ids=tokens.astype("<i4").tobytes(),
            loss_mask=mask.tobytes(),
            logprobs=np.where(mask, -1.5, 0.0).astype("<f4").tobytes(),
            advantages=np.full(count, self.rng.standard_normal(), "<f4").tobytes(),
            ref=ref,
            reward=float(self.rng.integers(0, 2)),
            version=max(0, step - 1),
        )

    def publish_step(self, step: int, *, micro_batches: int = 2, samples: int = 2) -> None:
        ranks = []
        for data_rank in range(self.data_ranks):
            packs = [
                MicroBatch(tuple(self.sample(step, f"s{step}-r{data_rank}-m{m}-{n}/0") for n in range(samples)))
                for m in range(micro_batches)
            ]
            owned = tuple(i for p in packs for s in p.sequences if s.ref for i in s.ref.object_ids)
            ranks.append(RankFile(v=1, run=RUN, step=step, data_rank=data_rank, schema=SCHEMA, micro_batches=tuple(packs), owned=owned))
        self.publish(step, ranks)

    def publish(self, step: int, ranks: Sequence[RankFile]) -> None:
        sizes = {s.object_id: s.byte_count for r in ranks for m in r.micro_batches for q in m.sequences if q.ref for s in q.ref.segments}
        self.bytes_shipped += sum(sizes.values())
        self.objects[step] = [list(r.owned) for r in ranks]
        self.env.sent(f"q-{step}", list(sizes))
        self.orc.take(f"q-{step}", sizes)
        self.env.delivered(f"q-{step}")
        self.orc.ship(step, sizes)
        files = encode_rank_files(ranks)
        info = StepInfo(
            v=1,
            run=RUN,
            run_uuid=self.info.run_uuid,
            step=step,
            data_ranks=len(ranks),
            micro_batches=len(ranks[0].micro_batches),
            samples=sum(len(m.sequences) for r in ranks for m in r.micro_batches),
            tokens=sum(m.token_count for r in ranks for m in r.micro_batches),
            n=len(sizes),
            bytes=sum(sizes.values()),
            sum=sum_of(sizes),
            version=0,
            schema=SCHEMA,
            digests=tuple(map(digest, files)),
        )
        publish(self.store, info, files)

    def lose(self, object_id: str) -> None:
        """Removes an object behind everyone's back."""
        (self.run_dir / object_name(object_id)).unlink()

    def present(self) -> list[str]:
        """Object files that are still there."""
        return sorted(str(p.relative_to(self.run_dir)) for p in (self.run_dir / "obj").rglob("*.zip"))

    def config(self, *, steps: int, **trainer: Any) -> Config:
        return Config(
            run=RunSection(id=RUN, root=str(self.folder), run_dir=str(self.run_dir), steps=steps, replay="drop"),
            trainer=TrainerSection(
                parallel=ParallelSection(data=self.data_ranks),
                **{"step_wait_s": DEADLINE_S, "collective_s": 2 * DEADLINE_S, "learning_rate": 1e-2, **trainer},
            ),
            store=StoreSection(retries_max=0, retry_s=1.0, durability="process"),
        )

    def metrics(self) -> list[dict[str, float]]:
        lines = (self.run_dir / "metrics.jsonl").read_bytes().splitlines()
        return [msgspec.json.decode(line) for line in lines]

    def weights(self, version: int) -> bytes:
        return (self.run_dir / "weights" / f"step_{version:06d}" / "model.safetensors").read_bytes()

    def verdict(self) -> str:
        """What the audit says once every holder has closed."""
        self.env.close()
        self.orc.close(discard=True)
        return str(audit(self.store, self.run_dir / "ledger", run=RUN).verdict)

    def close(self) -> None:
        self.env.close()
        self.orc.close(discard=True)
        self.store.close()


@dataclass
class RankProcess:
    process: BaseProcess
    outcome: Any

    def finish(self) -> str:
        """``ok``, or ``<error class>: <message>``."""
        assert self.outcome.poll(DEADLINE_S), "the rank neither ended nor failed"
        text: str = self.outcome.recv()
        self.process.join(DEADLINE_S)
        return text

    def died(self) -> int | None:
        """The signal that ended it, negative."""
        self.process.join(DEADLINE_S)
        return self.process.exitcode


def start_ranks(config: Config, fail: Mapping[int, str] | None = None, *, record: Path | None = None) -> list[RankProcess]:
    """One process per data rank, forked from a server that has torch and transformers loaded.

    ``fail``: rank to its failpoints. ``record``: a file to which each rank appends the digests of the tensors that it takes.
    """
    context, port = fork_context(), free_port()
    world = config.trainer.parallel.data
    out = []
    for rank in range(world):
        parent, child = context.Pipe(duplex=False)
        env = {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        process = context.Process(target=_rank, args=(config, env, child, (fail or {}).get(rank, ""), record), daemon=True)
        process.start()
        child.close()
        out.append(RankProcess(process, parent))
    return out


def run_ranks(config: Config) -> list[str]:
    return [r.finish() for r in start_ranks(config)]


def _rank(config: Config, env: dict[str, str], outcome: Any, rules: str, record: Path | None) -> None:
    from fsref.trainer.main import main
    from tests.trainer.armed import arm

    arm(rules)
    os.environ.update(env)
    if record is not None:
        _record_tensors(record, int(env["RANK"]))
    try:
        main(config)
        outcome.send("ok")
    except FsrefError as e:
        outcome.send(f"{type(e).__name__}: {e}")


def _record_tensors(record: Path, rank: int) -> None:
    """Every step that the loader hands out leaves one line: rank, step, and a digest of all bytes of its tensors."""
    from fsref.loader.fetch import StepFetcher

    inner = StepFetcher.take

    def take(self: StepFetcher, rank_file: RankFile) -> Any:
        taken = inner(self, rank_file)
        total = hashlib.sha256()
        for part in (p for t in taken for p in _bytes_of(t)):
            total.update(part)
        with record.open("a") as file:
            file.write(json.dumps([rank, rank_file.step, total.hexdigest()]) + "\n")
        return taken

    setattr(StepFetcher, "take", take)  # noqa: B010 - in a process of its own


def _bytes_of(value: Any) -> Iterator[bytes]:
    import torch

    if isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    elif dataclasses.is_dataclass(value):
        yield type(value).__name__.encode()
        for f in dataclasses.fields(value):
            yield f.name.encode()
            yield from _bytes_of(getattr(value, f.name))
    elif isinstance(value, Mapping):
        for name in sorted(value):
            yield str(name).encode()
            yield from _bytes_of(value[name])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _bytes_of(item)
    else:
        yield repr(value).encode()
