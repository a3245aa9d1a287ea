"""Two nodes on one network filesystem, each with its own client and cache; one of them is lost in the middle of something.

What its client had not sent is gone. W1 and W2 hold: a lost tail makes an object ``recovered`` at most, never lost.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from fsref.errors import Fenced, ObjectMissing, StoreUnavailable
from fsref.journal.file import make_folder
from fsref.journal.markers import acquire_lock, read_adopted, write_adopted
from fsref.reader import Reader
from fsref.refs import object_name
from fsref.steps import StepInfo, digest, publish, read_rank, wait
from fsref.store import open_root
from fsref.writer import Writer
from tests.support import twomounts
from tests.support.payloads import Numbers, payload, schema
from tests.support.roles import Child, Play, Refused, Zygote

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[twomounts.Server]:
    with twomounts.server(tmp_path_factory.mktemp("server")) as made:
        yield made


class Nodes:
    """A run that two nodes work on: what happens on ``a`` is lost with it."""

    def __init__(self, server: twomounts.Server, run: str) -> None:
        self._stack = ExitStack()
        self.a, self.b = server.node("node-a"), server.node("node-b")
        self.on_a, self.on_b = self._play(self.a, run), self._play(self.b, run)

    def _play(self, node: twomounts.Node, run: str) -> Play:
        zygote = Zygote(prefix=node.prefix)
        self._stack.callback(zygote.close)
        play = Play(zygote, node.folder, run)
        self._stack.callback(play.close)
        return play

    def lose_a(self) -> None:
        self.a.lose()
        self.on_a.kill_all()

    def close(self) -> None:
        self._stack.close()
        for node in (self.a, self.b):
            node.lose()


@pytest.fixture
def nodes(server: twomounts.Server, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    made = Nodes(server, f"r{abs(hash(request.node.nodeid)) % 10**9}")
    try:
        yield made
    finally:
        made.close()


def eventually(call: Callable[[], object]) -> object:
    """Repeats what another client's late view may refuse at first."""
    end = time.monotonic() + 60
    while True:
        try:
            return call()
        except (Refused, FileNotFoundError) as e:
            if time.monotonic() > end or (isinstance(e, Refused) and e.kind not in ("ObjectMissing", "StoreUnavailable")):
                raise
            time.sleep(0.05)


def stand_still(child: Child, do: str, *args: object) -> None:
    """Tells a process to do what it stops in the middle of."""
    child.post(do, *args)
    assert child.wait() == 1000 + signal.SIGSTOP


def ended(nodes: Nodes) -> None:
    """Everyone is killed and declared dead by the launcher: the run's close proves that nothing is left and nothing was lost."""
    nodes.on_b.kill_all()
    for child in (*nodes.on_a.children, *nodes.on_b.children):
        nodes.on_b.dead(child)
    before = nodes.on_b.audit()
    assert before.violations == (), before.render()
    found = nodes.on_b.assert_proved()
    assert found.violations == ()
    assert "lost" not in found.violation_counts


WORKER = {
    "store.put.before": "reply",
    "store.put.renamed": "reply",
    "keep.after_append": "reply",
    "sent.after": "reply",
    "drop.after_append": "put_and_discard",
    "deleter.after_sync": "put_and_discard",
    "deleter.after_delete": "put_and_discard",
    "deleter.after_done": "put_and_discard",
}


@pytest.mark.fault(13)
@pytest.mark.parametrize("point", WORKER)
def test_the_node_of_an_env_worker_is_lost(nodes: Nodes, point: str) -> None:
    env, other, orc, trn = nodes.on_a.env("math-0-0"), nodes.on_b.env("math-1-0"), nodes.on_b.orc(), nodes.on_b.trn()
    taken = nodes.on_b.request()
    orc.call("take", env.call("reply", taken, [1, 2]))
    unclaimed = env.call("reply", nodes.on_b.request(), [3])
    nth = ":2" if point.startswith("store.put.") else ""  # the first put is the probe at the start
    victim = nodes.on_a.spawn("env", label="math-2-0", fail=f"{point}=pause{nth}")
    stand_still(victim, WORKER[point], *([[4]] if WORKER[point] == "put_and_discard" else ["q9", [4]]))
    nodes.lose_a()
    for child in (env, victim):
        nodes.on_b.dead(child)
        found = eventually(lambda child=child: orc.call("adopt", child.inc))  # type: ignore[misc]
        assert found["lost"] == 0  # type: ignore[index]
    assert orc.call("take", unclaimed) == [], "its reply comes too late"
    orc.call("take", other.call("reply", nodes.on_b.request(), [5]))
    orc.call("ship", 0)
    nodes.on_b.trained(trn, 0)
    assert nodes.on_b.published_steps() == [0]
    trn.call("checkpoint_and_commit", 0)
    ended(nodes)


ORCHESTRATOR = {
    "take.after_append": "take",
    "drop.after_append": "drop",
    "deleter.after_sync": "drop",
    "deleter.after_delete": "drop",
    "deleter.after_done": "drop",
    "ship.after_append": "ship",
    "ship.after_sync": "ship",
    "steps.before_info": "ship",
    "steps.after_info": "ship",
}


@pytest.mark.fault(13)
@pytest.mark.parametrize("point", ORCHESTRATOR)
def test_the_node_of_the_orchestrator_is_lost(nodes: Nodes, point: str) -> None:
    act = ORCHESTRATOR[point]
    env, trn = nodes.on_b.env(), nodes.on_b.trn()
    orc = nodes.on_a.orc(fail=f"{point}=pause{':2' if act == 'take' else ''}")
    ids = orc.call("take", env.call("reply", "q1", [1, 2, 3]))
    if act == "take":
        stand_still(orc, "take", env.call("reply", "q2", [4]))
    elif act == "drop":
        stand_still(orc, "drop", ids[:1])
    else:
        stand_still(orc, "ship", 0)
    nodes.lose_a()
    nodes.on_b.dead(orc)
    visible = nodes.on_b.published_steps()
    assert visible == ([0] if point == "steps.after_info" else [])
    again = nodes.on_b.orc()
    if visible:
        nodes.on_b.trained(trn, 0)  # W2: what can be seen is on record, so its arrays were left alone
    again.call("take", env.call("reply", "q3", [5]))
    again.call("ship", 1)
    nodes.on_b.trained(trn, 1)
    ended(nodes)


TRAINER = {
    "taken.after_append": "train",
    "used.after_append": "train",
    "checkpoint.after": "checkpoint_and_commit",
    "drop_steps.after_append": "checkpoint_and_commit",
    "drop_steps.after_sync": "checkpoint_and_commit",
    "leader.after_delete": "checkpoint_and_commit",
    "done_steps.before_append": "checkpoint_and_commit",
    "done_steps.after_append": "checkpoint_and_commit",
}


@pytest.mark.fault(13)
@pytest.mark.parametrize("point", TRAINER)
def test_the_node_of_the_trainer_is_lost(nodes: Nodes, point: str) -> None:
    env, orc = nodes.on_b.env(), nodes.on_b.orc()
    orc.call("take", env.call("reply", "q1", [1, 2, 3]))
    orc.call("ship", 0)
    orc.call("take", env.call("reply", "q2", [4, 5]))
    orc.call("ship", 1)
    trn = nodes.on_a.trn(fail=f"{point}=pause")
    if TRAINER[point] == "train":
        stand_still_at = "train"
    else:
        eventually(lambda: trn.call("train", 0))
        stand_still_at = "checkpoint_and_commit"
    eventually(lambda: read_through(nodes, 0))
    stand_still(trn, stand_still_at, 0)
    nodes.lose_a()
    nodes.on_b.dead(trn)
    again = nodes.on_b.trn()
    with suppress_released() as refused:
        nodes.on_b.trained(again, 0)  # byte for byte, unless its decision to release it was durable
    released = bool(refused)
    assert not (released and TRAINER[point] == "train")
    assert released or point in (*[p for p, act in TRAINER.items() if act == "train"], "checkpoint.after", "drop_steps.after_append")
    nodes.on_b.trained(again, 1)
    ended(nodes)


@contextmanager
def suppress_released() -> Iterator[list[str]]:
    """Collects that a step was released; whatever else is raised passes."""
    refused: list[str] = []
    try:
        yield refused
    except Refused as e:
        if e.kind != "StepReleased":
            raise
        refused.append(e.text)


def read_through(nodes: Nodes, step: int) -> None:
    """Node a sees the whole step."""
    info = wait(nodes.on_a.store, step, deadline_s=60)
    for rank in range(info.data_ranks):
        read_rank(nodes.on_a.store, info, rank)


@pytest.mark.fault(13)
@pytest.mark.payload("G10")
def test_what_one_client_publishes_another_one_reads_although_it_looked_too_early(nodes: Nodes) -> None:
    """Its cache says that the name is not there; the reader asks again until its deadline."""
    here, there = nodes.on_a.store, nodes.on_b.store
    run_schema, numbers = schema(), Numbers()
    writer = Writer(here, run_schema, numbers)
    rng = np.random.default_rng(0)
    with Reader(there, run_schema, retries_max=8, retry_s=60.0) as reader:
        for seq in range(20):
            with pytest.raises(ObjectMissing):
                there.open(object_name(f"{numbers.inc}/{seq}"))
            arrays = payload(rng, run_schema, 50)
            ref = writer.put(arrays)
            got = reader.read(ref)
            assert {n: _bytes(d) for n, d in got.items()}.keys() == arrays.fields.keys()
            with Reader(here, run_schema) as own:
                assert {n: _bytes(d) for n, d in got.items()} == {n: _bytes(d) for n, d in own.read(ref).items()}


def _bytes(data: object) -> bytes:
    return b"".join(v.tobytes() for v in vars_of(data))


def vars_of(data: object) -> list[np.ndarray[tuple[int, ...], np.dtype[np.generic]]]:
    found = [getattr(data, "rows", None), getattr(data, "counts", None), *dict(getattr(data, "columns", {})).values()]
    return [v for v in found if isinstance(v, np.ndarray)]


@pytest.mark.fault(13)
@pytest.mark.payload("G10")
def test_a_step_that_is_waited_for_on_another_client_is_seen_whole(nodes: Nodes) -> None:
    here, there = nodes.on_a.store, nodes.on_b.store
    for step in range(10):
        data = os.urandom(200_000)
        info = StepInfo(
            v=1, run=nodes.on_a.name, run_uuid=nodes.on_a.run.run_uuid, step=step, data_ranks=1, micro_batches=0, samples=0, tokens=0,
            n=0, bytes=0, sum=0, version=0, schema=nodes.on_a.run.schema, digests=(digest(data),),
        )  # fmt: skip
        seen: list[StepInfo] = []
        waiter = threading.Thread(target=lambda step=step, seen=seen: seen.append(wait(there, step, deadline_s=60, poll_s=0.001)))
        waiter.start()
        publish(here, info, [data])
        waiter.join(90)
        assert seen == [info]
        name = f"steps/step_{step:06d}/rank_0.msgpack"
        names = [e.name for e in there.list(f"steps/step_{step:06d}")]
        assert len(names) == 2, names
        assert there.read(next(n for n in names if "STEP" not in n), bytes_max=1 << 20) == data, name


@pytest.mark.fault(13)
def test_names_are_exclusive_across_clients(nodes: Nodes) -> None:
    """Markers are: they are linked. That is what a filesystem must give."""
    make_folder(nodes.on_a.ledger)
    eventually(nodes.on_b.ledger.stat)
    for number in range(10):
        inc = f"env.x.{number:016x}"
        write_adopted(nodes.on_a.place, inc, by="rec.main.00000000000000aa")
        with pytest.raises(Fenced):
            write_adopted(nodes.on_b.place, inc, by="rec.main.00000000000000bb")
        assert read_adopted(nodes.on_b.place, inc) == "rec.main.00000000000000aa"
    assert acquire_lock(nodes.on_a.place, "rec.main.00000000000000aa") is None
    assert acquire_lock(nodes.on_b.place, "rec.main.00000000000000bb") == "rec.main.00000000000000aa"


@pytest.mark.fault(13)
def test_a_dead_mount_is_a_store_that_may_come_back(nodes: Nodes) -> None:
    """And never one in which nothing is."""
    with open_root(str(nodes.a.folder), run=nodes.on_a.name) as store:
        store.put("obj/x/0", [b"x"])
        nodes.a.lose()
        for call in (lambda: store.open("obj/x/0"), lambda: list(store.list("obj")), lambda: store.put("obj/x/1", [b"x"])):
            with pytest.raises(StoreUnavailable):
                call()
        assert isinstance(store.delete(["obj/x/0"])["obj/x/0"], StoreUnavailable)
    assert nodes.on_b.store.read("obj/x/0", bytes_max=10) == b"x"
