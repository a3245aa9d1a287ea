"""The cost model against requests that were counted at a proxy: a small run with real objects, step files, ledger and removals."""

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fsref.loader.feed import POLL_ROOT_S, POLL_S, poll_s
from fsref.reader import Reader
from fsref.reaper import Verdict, delete_objects
from fsref.refs import Dense, Payload, PayloadRef, Schema, TokenRange, routed_experts
from fsref.steps import MicroBatch, RankFile, SampleSequence, StepInfo, digest, encode_rank_files, publish, read_info, read_rank, sum_of
from fsref.store import open_root
from fsref.writer import Writer
from tests.reaper.rootstage import RootStage
from tests.reaper.stage import RUN
from tests.support.faultproxy import FaultProxy
from tests.support.s3servers import BUCKET, S3Server
from tools.s3_cost import MONTH_S, Prices, Shape, cost, looks, main, money, report

STEPS = 4
TOKENS = 256
SCHEMA = Schema((routed_experts(layer_ids=range(4), top_k=4, expert_count=32),))
SHAPES = {
    "each step committed": Shape(samples=6, dropped=3, data=2, seconds=1.0, commit="fetched"),
    "every second step, context ranks": Shape(samples=4, dropped=2, data=2, context=2, seconds=1.0, checkpoint_every=2),
    "nothing dropped": Shape(samples=2, dropped=0, data=1, seconds=1.0, checkpoint_every=4),
}


def sequence(ref: PayloadRef) -> SampleSequence:
    count = ref.token_count
    zeros = np.zeros(count, np.float32).tobytes()
    tokens, mask = np.zeros(count, np.int32).tobytes(), np.ones(count, np.uint8).tobytes()
    return SampleSequence(sample="t/0", token_ids=tokens, loss_mask=mask, logprobs=zeros, advantages=zeros, ref=ref)


class SmallRun:
    """A run of one shape on a server behind a counting proxy."""

    def __init__(self, folder: Path, server: S3Server, proxy: FaultProxy, shape: Shape) -> None:
        self.shape, self.proxy = shape, proxy
        root = f"s3://{BUCKET}/cost-{os.urandom(4).hex()}"
        self.store = open_root(root, run=RUN, settings=server.settings(endpoint=proxy.endpoint))
        self.stage = RootStage(folder, store=self.store, batch_wait_s=0.2)
        self.stage.store = self.store  # type: ignore[assignment]  # the faulty one removes name by name
        self.env, self.orc, self.trn = self.stage.env(), self.stage.orc(), self.stage.trn()
        self.writer = Writer(self.store, SCHEMA, self.env)
        self.numbers = itertools.count()

    def keep(self, count: int) -> list[PayloadRef]:
        rng = np.random.default_rng(0)
        refs = []
        for _ in range(count):
            rows = rng.integers(0, 32, (TOKENS, 4, 4), np.uint8)
            ref = self.writer.put(Payload(np.arange(TOKENS, dtype=np.int32), {"routed_experts": Dense(rows)}))
            self.env.sent(q := f"q{next(self.numbers)}", ref.object_ids)
            self.orc.take(q, dict.fromkeys(ref.object_ids, ref.byte_count))
            refs.append(ref)
        return refs

    def step(self, step: int) -> list[list[str]]:
        """One step from keeps to used; returns what each data rank owns."""
        shape = self.shape
        dropped, shipped = self.keep(shape.dropped), self.keep(shape.samples)
        if dropped:
            self.orc.drop([i for r in dropped for i in r.object_ids], "filtered")
        ids = {i: r.byte_count for r in shipped for i in r.object_ids}
        n, checksum = self.orc.ship(step, ids)
        shares = [shipped[r :: shape.data] for r in range(shape.data)]
        ranks = [
            RankFile(
                v=1, run=RUN, step=step, data_rank=r, schema=SCHEMA, micro_batches=(MicroBatch(tuple(map(sequence, share))),),
                owned=tuple(i for ref in share for i in ref.object_ids),
            )
            for r, share in enumerate(shares)
        ]  # fmt: skip
        files = encode_rank_files(ranks)
        info = StepInfo(
            v=1, run=RUN, run_uuid=self.stage.run.run_uuid, step=step, data_ranks=shape.data, micro_batches=1, samples=n,
            tokens=n * TOKENS, n=n, bytes=sum(ids.values()), sum=checksum, version=0, schema=SCHEMA, digests=tuple(map(digest, files)),
        )  # fmt: skip
        assert checksum == sum_of(list(ids))
        publish(self.store, info, files)
        self.trn.taken(info)
        for data_rank in range(shape.data):
            for part in range(shape.context):
                self.fetch(step, data_rank, part)
        self.trn.used(step)
        assert self.orc.flush() == 0
        return [list(r.owned) for r in ranks]

    def fetch(self, step: int, data_rank: int, part: int) -> None:
        """What one rank does: both step files, then its tokens of each sample: for zigzag a chunk from the front and one from the back."""
        rank = read_rank(self.store, read_info(self.store, step), data_rank)
        size = TOKENS // (2 * self.shape.context)
        with Reader(self.store, SCHEMA) as reader:
            for s in rank.micro_batches[0].sequences:
                assert s.ref is not None
                if self.shape.context == 1:
                    reader.read(s.ref)
                    continue
                for chunk in (part, 2 * self.shape.context - 1 - part):
                    reader.read(s.ref, tokens=TokenRange(chunk * size, (chunk + 1) * size))

    def commit(self, lo: int, hi: int, owned: list[list[list[str]]]) -> None:
        """``owned`` by step and data rank; each leader removes its share of all the steps."""
        self.trn.drop_steps(lo, hi)
        for data_rank in range(self.shape.data):
            outcome = delete_objects(self.store, [i for step in owned for i in step[data_rank]])
            assert not outcome.failed
        self.trn.done_steps(lo, hi)

    def close(self) -> None:
        for holder in (self.trn, self.orc, self.env):
            assert holder.close() == 0
        self.stage.faulty.close()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.usefixtures("s3_credentials")
def test_a_run_makes_the_requests_that_the_model_says(
    tmp_path: Path, moto: S3Server, fault_proxy: Callable[[S3Server], FaultProxy], shape: Shape
) -> None:
    proxy = fault_proxy(moto)
    run = SmallRun(tmp_path, moto, proxy, shape)
    proxy.clear()
    every = shape.checkpoint_every if shape.commit == "checkpoint" else 1
    waiting: list[list[list[str]]] = []
    for step in range(STEPS):
        waiting.append(run.step(step))
        if (step + 1) % every == 0:
            run.commit(step + 1 - every, step, waiting)
            waiting = []
    objects, ledger, steps, total = (proxy.counts(part) for part in ("/obj/", "/ledger/", "/steps/", ""))
    removals = total["DELETE_MANY"] + total["DELETE"]
    counted = {
        "PUT objects": objects["PUT"],
        "PUT step files": steps["PUT"],
        "PUT ledger": ledger["PUT"],
        "GET objects": objects["GET"],
        "GET step files": steps["GET"],
        "HEAD before removals": total["HEAD"],
        "DELETE": removals,
    }
    said = {name: count * STEPS for name, count in cost(shape).requests.items() if "looking" not in name}
    assert counted == said
    assert total.total() == sum(counted.values()), f"a request that the model does not know: {total}"
    run.close()
    found = run.stage.audit()
    assert found.verdict is Verdict.PROVED, found.render()


def test_a_rank_looks_ever_less_often_for_a_step_that_does_not_come() -> None:
    waits = [poll_s(n, folder=False) for n in range(20)]
    assert waits[0] == POLL_S
    assert waits == sorted(waits)
    assert waits[-1] == POLL_ROOT_S
    assert {poll_s(n, folder=True) for n in range(20)} == {POLL_S}
    for seconds in (0.01, 1.0, 3.0):
        assert sum(waits[: looks(seconds) - 1]) < seconds <= sum(waits[: looks(seconds)])
    assert looks(120.0) == pytest.approx(120 + 5, abs=3)


def test_prices_are_multiplied_by_what_they_are_for() -> None:
    shape = Shape(samples=1000, dropped=0, data=1, seconds=MONTH_S / 1000, commit="keep_last", keep_last=0, ahead=0)
    nothing = Prices(put_1000=0, get_1000=0, delete_1000=0, stored_gib_month=0, in_gib=0, out_gib=0)
    assert sum(money(shape, nothing).values()) == 0
    prices = msgspec.structs.replace(nothing, put_1000=5.0, stored_gib_month=2.0)
    priced = money(shape, prices)
    assert priced["PUT objects"] == pytest.approx(5.0)
    assert priced["GET objects"] == priced["DELETE"] == 0
    assert priced["bytes at rest"] == pytest.approx(cost(shape).bytes_stored / (1 << 30) * 2.0 / 1000)


def test_the_command_reads_a_shape_and_prices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "shape.toml").write_text("samples = 8\n[field_bytes]\nrouted_experts = 12.5\n")
    (tmp_path / "prices.toml").write_text(
        "put_1000 = 1.0\nget_1000 = 0.1\ndelete_1000 = 0\nstored_gib_month = 0.02\nin_gib = 0\nout_gib = 0\n"
    )
    assert main([str(tmp_path / "shape.toml"), "--prices", str(tmp_path / "prices.toml")]) == 0
    shown = capsys.readouterr().out
    assert "| PUT objects | 72.0 | 0.072000 |" in shown
    assert "price" not in "\n".join(report(Shape()))
    with pytest.raises(msgspec.ValidationError):
        msgspec.toml.decode(b"sampels = 8", type=Shape)
