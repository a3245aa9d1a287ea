"""What each role does when it is told to. Arguments and results are JSON values; the arrays of a sample follow from its number.

Owns no decision: the test says what happens next.
"""

import base64
import hashlib
import os
import signal
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from fsref.config import LedgerSection
from fsref.errors import FsrefError, ObjectMissing
from fsref.failpoints import failpoint
from fsref.journal import read_run
from fsref.reader import Reader, failure_kind
from fsref.reaper import ConsumerHolder, EnvHolder, StepHolder, close_run, delete_objects, recover
from fsref.refs import Dense, FieldData, Payload, PayloadRef, Schema, routed_experts, top_logprobs
from fsref.steps import (
    MicroBatch,
    RankFile,
    SampleSequence,
    StepInfo,
    check_counts,
    digest,
    encode_rank_files,
    publish,
    read_info,
    read_rank,
    sum_of,
)
from fsref.store import open_root
from fsref.writer import Writer
from tests.support.payloads import payload

SCHEMA = Schema((routed_experts(layer_ids=range(2), top_k=2, expert_count=16), top_logprobs()))
DATA_RANKS = 2
CHECKPOINT = "checkpoint.json"
FAST = LedgerSection(batch_wait_s=0.005, adopt_poll_s=3600.0, adopt_drain_s=0.0)


def arrays_of(number: int) -> Payload:
    """Sample ``number``'s arrays, the same in every process."""
    rng = np.random.default_rng(number)
    return payload(rng, SCHEMA, int(rng.integers(3, 9)))


def digest_of(fields: dict[str, FieldData]) -> str:
    """Over every byte of every field."""
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(fields):
        data = fields[name]
        found.update(name.encode())
        if isinstance(data, Dense):
            found.update(np.ascontiguousarray(data.rows).tobytes())
        else:
            found.update(data.counts.tobytes())
            for column in sorted(data.columns):
                found.update(np.ascontiguousarray(data.columns[column]).tobytes())
    return found.hexdigest()


def digest_of_sample(number: int) -> str:
    """What a correct read of sample ``number`` gives."""
    return digest_of(dict(arrays_of(number).fields))


def set_clock(offset_s: float) -> None:
    """This process's wall clock is wrong by so much."""
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + offset_s
    time.time_ns = lambda: real_ns() + int(offset_s * 1e9)


class Actor:
    """One process of a role."""

    def __init__(self, root: str, run: str, *, clock_s: float = 0.0, strict: bool = False) -> None:
        if clock_s:
            set_clock(clock_s)
        self.store = open_root(root, run=run)
        self.ledger = Path(root) / run / "ledger"
        self.run = read_run(self.store)
        self.section = msgspec.structs.replace(FAST, strict=strict)
        self.holder: Any = None

    @property
    def inc(self) -> str:
        return str(self.holder.inc)

    def flush(self) -> int:
        """Waits for the removals; returns what is left."""
        return int(self.holder.flush(deadline_s=30.0))

    def counters(self) -> dict[str, int]:
        return dict(self.holder.counters)

    def flush_then_check(self) -> None:
        """Waits for the removals; raises what stopped them."""
        self.holder.flush(deadline_s=30.0)
        self.holder._deleter.check()

    def close_on_signals(self) -> None:
        """SIGTERM and SIGINT close the holder and end the process, as the roles do."""

        def close(*_: object) -> None:
            self.holder.close()
            os._exit(0)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, close)

    def close(self, **how: Any) -> int:
        return int(self.holder.close(**how))


class Env(Actor):
    """An env worker: keeps arrays, hands replies out."""

    def __init__(self, root: str, run: str, *, label: str = "math-0-0", **rest: Any) -> None:
        super().__init__(root, run, **rest)
        self.holder = EnvHolder(self.store, self.ledger, run=self.run, label=label, section=self.section)
        self.writer = Writer(self.store, SCHEMA, self.holder)

    def put(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Keeps the samples' arrays: number, reference, size, id of each."""
        out = []
        for number in numbers:
            ref = self.writer.put(arrays_of(number))
            text = base64.b64encode(msgspec.msgpack.encode(ref)).decode()
            out.append({"sample": number, "ref": text, "bytes": ref.byte_count, "id": ref.object_ids[0]})
        return out

    def send(self, request: str, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """The reply goes to the transport now."""
        self.holder.sent(request, [s["id"] for s in samples])
        return {"request": request, "samples": samples}

    def reply(self, request: str, numbers: Sequence[int]) -> dict[str, Any]:
        """Keeps and sends."""
        return self.send(request, self.put(numbers))

    def reply_and_nack(self, request: str, numbers: Sequence[int]) -> int:
        """The client gives up on it."""
        self.reply(request, numbers)
        return self.nack(request)

    def put_and_discard(self, numbers: Sequence[int]) -> int:
        """The episode ends without a reply."""
        return self.discard([s["id"] for s in self.put(numbers)])

    def nack(self, request: str) -> int:
        return self.holder.nack(request)  # type: ignore[no-any-return]

    def discard(self, ids: list[str], reason: str = "never_sent") -> int:
        return self.holder.discard(ids, reason)  # type: ignore[no-any-return]

    def rotate(self) -> str:
        return str(self.holder.rotate())

    def fork_and_keep(self) -> str:
        """A child of this process goes on with the inherited holder; what it gets."""
        seq = self.holder.next_seq()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the deleter is a thread; the child ends at once
            pid = os.fork()
        if pid == 0:
            try:
                self.holder.keep(seq, byte_count=1, checksum=0, token_count=1, fields=1)
            except FsrefError as e:
                os._exit(40 + int(type(e).__name__ == "JournalPoisoned"))
            os._exit(0)
        return str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


class Orc(Actor):
    """An orchestrator: takes replies, drops, ships steps."""

    def __init__(self, root: str, run: str, *, role: str = "orc", **rest: Any) -> None:
        super().__init__(root, run, **rest)
        self.holder = ConsumerHolder(self.store, self.ledger, run=self.run, role=role, section=self.section)
        self.samples: dict[str, dict[str, Any]] = {}

    def take(self, reply: dict[str, Any]) -> list[str]:
        fresh: list[str] = self.holder.take(reply["request"], {s["id"]: s["bytes"] for s in reply["samples"]})
        self.samples.update({s["id"]: s for s in reply["samples"] if s["id"] in fresh})
        return fresh

    def drop(self, ids: list[str], reason: str = "stale") -> int:
        for object_id in ids:
            self.samples.pop(object_id, None)
        return self.holder.drop(ids, reason)  # type: ignore[no-any-return]

    def ship(self, step: int, ids: list[str] | None = None) -> list[str]:
        """Packs, ships and publishes a step of these samples, or of all that are held."""
        chosen = [self.samples.pop(i) for i in (sorted(self.samples) if ids is None else ids)]
        parts = [chosen[rank::DATA_RANKS] for rank in range(DATA_RANKS)]
        count = max(map(len, parts))
        files = [self._rank_file(step, rank, part, count) for rank, part in enumerate(parts)]
        sizes = {s["id"]: s["bytes"] for s in chosen}
        self.holder.ship(step, sizes)
        encoded = encode_rank_files(files)
        info = StepInfo(
            v=1, run=self.run.run, run_uuid=self.run.run_uuid, step=step, data_ranks=DATA_RANKS, micro_batches=count, samples=len(chosen),
            tokens=sum(f.token_count for r in files for f in r.micro_batches), n=len(sizes), bytes=sum(sizes.values()), sum=sum_of(sizes),
            version=0, schema=SCHEMA, digests=tuple(map(digest, encoded)), ms=time.time_ns() // 1_000_000,
        )  # fmt: skip
        publish(self.store, info, encoded)
        return list(sizes)

    def _rank_file(self, step: int, rank: int, part: list[dict[str, Any]], count: int) -> RankFile:
        batches = [MicroBatch((_sequence(s),)) for s in part]
        batches += [MicroBatch(())] * (count - len(batches))
        owned = tuple(s["id"] for s in part)
        return RankFile(v=1, run=self.run.run, step=step, data_rank=rank, schema=SCHEMA, micro_batches=tuple(batches), owned=owned)

    def adopt(self, inc: str, *, force: bool = False) -> dict[str, Any]:
        return msgspec.to_builtins(self.holder.adopt(inc, force=force))  # type: ignore[no-any-return]

    def dead(self) -> list[str]:
        return self.holder.dead_incarnations()  # type: ignore[no-any-return]


def _sequence(sample: dict[str, Any]) -> SampleSequence:
    ref = msgspec.msgpack.decode(base64.b64decode(sample["ref"]), type=PayloadRef)
    tokens = arrays_of(sample["sample"]).token_ids
    ones = np.ones(len(tokens), np.float32)
    return SampleSequence(
        f"{sample['sample']}/0", tokens.astype("<i4").tobytes(), ones.astype(np.uint8).tobytes(), ones.tobytes(), ones.tobytes(), ref
    )


class Trainer(Actor):
    """Rank 0 and its leaders, as the trainer's committer has them."""

    def __init__(self, root: str, run: str, **rest: Any) -> None:
        super().__init__(root, run, **rest)
        self.holder = StepHolder(self.store, self.ledger, run=self.run, label="rank0", section=self.section)
        self.owned: dict[int, list[list[str]]] = {}
        self.files: dict[int, list[RankFile]] = {}

    def take(self, step: int) -> int:
        """Reads and checks the step files; the right passes."""
        info = read_info(self.store, step)
        files = [read_rank(self.store, info, rank) for rank in range(info.data_ranks)]
        check_counts(info, files)
        self.holder.taken(info)
        self.files[step], self.owned[step] = files, [list(f.owned) for f in files]
        return info.n

    def fetch(self, step: int) -> dict[str, str]:
        """Reads every sample: its number to the digest of its arrays, or to the class of the failure."""
        out: dict[str, str] = {}
        with Reader(self.store, SCHEMA, retries_max=0, retry_s=1.0) as reader:
            for sequence in [s for f in self.files[step] for m in f.micro_batches for s in m.sequences]:
                assert sequence.ref is not None
                try:
                    out[sequence.sample.split("/")[0]] = digest_of(reader.read(sequence.ref))
                except FsrefError as e:
                    out[sequence.sample.split("/")[0]] = failure_kind(e)  # type: ignore[arg-type]
        return out

    def use(self, step: int, miss: dict[str, str] | None = None) -> None:
        """The all-reduce has shown that every rank has its arrays."""
        failpoint("agree.after")
        self.holder.used(step, miss or {})

    def train(self, step: int) -> dict[str, str]:
        """Takes, fetches and uses."""
        self.take(step)
        found = self.fetch(step)
        failpoint("agree.before")
        self.use(step)
        return found

    def checkpoint(self, step: int) -> None:
        """Durable: training resumes behind ``step``."""
        self.store.replace(CHECKPOINT, msgspec.json.encode(step))
        failpoint("checkpoint.after")

    def commit(self, lo: int, hi: int) -> int:
        """Drops, then each leader removes its share, then done."""
        self.holder.drop_steps(lo, hi)
        absent: list[str] = []
        failed = 0
        shares: list[list[str]] = [[] for _ in range(DATA_RANKS)]
        for step in range(lo, hi + 1):
            for rank, ids in enumerate(self.owned.pop(step)):
                shares[rank] += ids
        for share in shares:
            failpoint("leader.before_delete")
            outcome = delete_objects(self.store, share, deadline_s=5.0)
            failpoint("leader.after_delete")
            absent += outcome.absent
            failed += len(outcome.failed)
        if not failed:
            self.holder.done_steps(lo, hi, absent)
        return failed

    def train_checkpoint_commit(self, step: int) -> dict[str, str]:
        """Trains, and releases all that was trained."""
        found = self.train(step)
        self.checkpoint(step)
        self.commit(min(self.owned), step)
        return found

    def checkpoint_and_commit(self, step: int) -> int:
        self.checkpoint(step)
        return self.commit(step, step)

    def drop_again(self, lo: int, hi: int) -> int:
        return self.holder.drop_steps(lo, hi)  # type: ignore[no-any-return]


class Recoverer(Actor):
    """``fsref recover`` and ``fsref close``."""

    def recover(self, resume_step: int | None = None, replay: Literal["drop", "keep"] = "drop", **how: Any) -> dict[str, Any]:
        done = recover(self.store, self.ledger, run=self.run, resume_step=resume_step, replay=replay, section=self.section, **how)
        return msgspec.to_builtins(done)  # type: ignore[no-any-return]

    def close_run(self) -> str:
        return str(close_run(self.store, self.ledger, run=self.run, section=self.section).verdict)


def last_checkpoint(root: Path, run: str) -> int:
    """The last step that a durable checkpoint covers; -1 if there is none."""
    with open_root(str(root), run=run) as store:
        try:
            return int(msgspec.json.decode(store.read(CHECKPOINT, bytes_max=100)))
        except ObjectMissing:
            return -1


ROLES: dict[str, type[Actor]] = {"env": Env, "orc": Orc, "trn": Trainer, "rec": Recoverer}
