"""``fsref bench ledger``: the ledger's cost per object on the hot path, an audit of a closed run, a recovery of one whose workers died.

Everything happens in a temporary folder (``TMPDIR`` says where). Figures depend on the machine; tests assert counts, never these.
"""

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final

from fsref.bench.measure import machine, rss_peak_bytes
from fsref.config import LedgerSection
from fsref.errors import StoreError
from fsref.journal import create_run, write_dead
from fsref.journal.place import Ledger
from fsref.ledger.ids import pack, sum_of
from fsref.ledger.records import AnyRecord, Close, Done, Drop, Keep, Open, Ship, StepRecord, Take, encode_line
from fsref.reaper import ConsumerHolder, EnvHolder, StepHolder, audit, delete_objects, recover
from fsref.refs import Schema, object_name, top_logprobs
from fsref.steps import StepInfo
from fsref.store import open_root
from fsref.store.base import Deletion
from fsref.store.posix import PosixStore

RUN: Final = "cost"
PATH_OBJECTS: Final = 20_000
STEP_OBJECTS: Final = 500
AUDIT_OBJECTS: Final = 1_000_000
RECOVERY_OBJECTS: Final = 100_000
PRODUCERS: Final = 64


class NullStore(PosixStore):
    """Deletes nothing, at once: what is left is the ledger's own work."""

    def delete(self, names: Sequence[str]) -> dict[str, Deletion | StoreError]:
        return dict.fromkeys(names, Deletion.DONE)


def path(*, disk: bool, trained: bool, objects: int = PATH_OBJECTS) -> dict[str, float]:
    """Cost per object from ``keep`` to ``done``; every reply carries one object. Seconds are microseconds in the result.

    ``disk``: with the syncs and unlinks. ``trained``: shipped, taken, used and committed by step; else dropped one by one.
    """
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / RUN
        store = PosixStore(root, create=True) if disk else NullStore(root, create=True)
        run = create_run(store, RUN, Schema((top_logprobs(),)))
        section = LedgerSection(adopt_poll_s=3600.0)
        ledger = root / "ledger"
        env = EnvHolder(store, ledger, run=run, label="math-0-0", section=section)
        orc = ConsumerHolder(store, ledger, run=run, section=section)
        trn = StepHolder(store, ledger, run=run, section=section)
        if disk:
            for seq in range(objects):
                store.put(object_name(f"{env.inc}/{seq}"), [b"x"], durability="process")
        sync = os.fdatasync
        if not disk:
            os.fdatasync = lambda fd: None  # noqa: ARG005
        try:
            return _timed(env, orc, trn, store, objects, trained=trained)
        finally:
            os.fdatasync = sync
            for holder in (env, orc, trn):
                holder.close()


def _timed(env: EnvHolder, orc: ConsumerHolder, trn: StepHolder, store: PosixStore, objects: int, *, trained: bool) -> dict[str, float]:
    each: list[float] = []
    batch: list[str] = []
    step = 0
    clock = time.perf_counter
    cpu, start = time.process_time(), clock()
    for n in range(objects):
        begin = clock()
        seq = env.next_seq()
        object_id = f"{env.inc}/{seq}"
        env.keep(seq, byte_count=100_000, checksum=123_456_789, token_count=4_096, fields=3)
        request = f"request-{n}"
        env.sent(request, (object_id,))
        orc.take(request, {object_id: 100_000})
        if not trained:
            orc.drop((object_id,), "filtered")
        each.append(clock() - begin)
        if trained:
            batch.append(object_id)
            if len(batch) == STEP_OBJECTS:
                begin = clock()
                _train(orc, trn, store, step, batch)
                share = (clock() - begin) / STEP_OBJECTS
                each[-STEP_OBJECTS:] = [e + share for e in each[-STEP_OBJECTS:]]
                batch, step = [], step + 1
    assert orc.flush(deadline_s=120.0) == 0
    wall, cpu = clock() - start, time.process_time() - cpu
    each.sort()
    return {
        "mean_us": 1e6 * wall / objects,
        "cpu_us": 1e6 * cpu / objects,
        "call_mean_us": 1e6 * statistics.fmean(each),
        "call_p99_us": 1e6 * each[int(0.99 * objects)],
    }


def _train(orc: ConsumerHolder, trn: StepHolder, store: PosixStore, step: int, batch: list[str]) -> None:
    n, checksum = orc.ship(step, dict.fromkeys(batch, 100_000))
    info = StepInfo(
        v=1, run=RUN, run_uuid="0" * 32, step=step, data_ranks=1, micro_batches=1, samples=n, tokens=n, n=n, bytes=n * 100_000,
        sum=checksum, version=0, schema=Schema((top_logprobs(),)), digests=("0" * 32,),
    )  # fmt: skip
    trn.taken(info)
    trn.used(step)
    trn.drop_steps(step, step)
    outcome = delete_objects(store, batch)
    trn.done_steps(step, step, outcome.absent)


def write_run(ledger: Path, *, objects: int, run_uuid: str) -> None:
    """The journals of a closed run: a quarter filtered one by one, the rest trained in steps of 1,024; replies of four objects."""
    incs = [f"env.math-{k}-0.{k:016x}" for k in range(PRODUCERS)]
    orc, trn = "orc.main.00000000000000aa", "trn.main.00000000000000bb"
    each = objects // PRODUCERS

    def write(inc: str, records: list[AnyRecord]) -> None:
        opened = Open(0, 1, run_uuid, inc, "host", "boot", 1, 1, "user", "fsref")
        (ledger / f"{inc}.jnl").write_bytes(b"".join(map(encode_line, [opened, *records])))

    for inc in incs:
        keeps: list[AnyRecord] = [Keep(0, s, 100_000, 1_234_567_890, 4_096, 3) for s in range(each)]
        write(inc, [*keeps, Close(0, each, {"kept": each, "kept_bytes": 100_000 * each})])
    taken: list[AnyRecord] = []
    trained: list[AnyRecord] = []
    waiting: list[str] = []
    dropped: list[str] = []
    steps = shipped = dropped_count = 0
    for at in range(0, each, 4):
        for inc in incs:
            found = [f"{inc}/{s}" for s in range(at, min(each, at + 4))]
            taken.append(Take(0, f"{inc[-4:]}{at}", pack(found)))
            taken.append(Drop(0, "filtered", pack(found[:1])))
            dropped.append(found[0])
            waiting += found[1:]
        if len(dropped) >= 1_000 or at + 4 >= each:
            taken.append(Done(0, pack(dropped)))
            dropped_count, dropped = dropped_count + len(dropped), []
        while len(waiting) >= 1_024 or (waiting and at + 4 >= each):
            batch, waiting = waiting[:1_024], waiting[1_024:]
            checksum = sum_of(batch)
            taken.append(Ship(0, steps, len(batch), 100_000 * len(batch), checksum, pack(batch)))
            trained += [StepRecord(0, steps, st, len(batch), checksum) for st in ("taken", "used")]
            trained += [Drop(0, "trained", steps=(steps, steps)), Done(0, steps=(steps, steps))]
            steps, shipped = steps + 1, shipped + len(batch)
    counters = {"taken": each * PRODUCERS, "dropped": dropped_count, "shipped": shipped, "shipped_bytes": 100_000 * shipped}
    write(orc, [*taken, Close(0, counters=counters)])
    write(trn, [*trained, Close(0, counters={"steps_taken": steps, "steps_dropped": steps})])


def _audit(folder: str, run_uuid: str) -> dict[str, Any]:
    """In a process of its own, for its peak memory."""
    store = open_root(folder, run=RUN)
    before = rss_peak_bytes() / 2**20
    start, cpu = time.perf_counter(), time.process_time()
    found = audit(store, Path(folder) / RUN / "ledger", run=RUN, run_uuid=run_uuid)
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    assert found.verdict == "PROVED", found.render()[:8]
    return {
        "objects": found.totals.kept,
        "records": found.totals.records,
        "seconds": wall,
        "cpu_seconds": cpu,
        "records_per_s": found.totals.records / wall,
        "peak_mib": rss_peak_bytes() / 2**20,
        "start_mib": before,
    }


def audit_cost(objects: int = AUDIT_OBJECTS) -> dict[str, Any]:
    """``fsref audit`` of a closed run."""
    with tempfile.TemporaryDirectory() as folder:
        store = PosixStore(Path(folder) / RUN, create=True)
        run = create_run(store, RUN, Schema((top_logprobs(),)))
        ledger = Path(folder) / RUN / "ledger"
        ledger.mkdir(exist_ok=True)
        write_run(ledger, objects=objects, run_uuid=run.run_uuid)
        journals = sum(f.stat().st_size for f in ledger.iterdir())
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return {**pool.submit(_audit, folder, run.run_uuid).result(), "journal_mib": journals / 2**20}


def recovery_cost(objects: int = RECOVERY_OBJECTS) -> dict[str, Any]:
    """``fsref recover`` of a run whose workers died with everything kept and nothing taken."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / RUN
        store = PosixStore(root, create=True)
        run = create_run(store, RUN, Schema((top_logprobs(),)))
        ledger = root / "ledger"
        for k in range(8):
            env = EnvHolder(store, ledger, run=run, label=f"math-{k}-0")
            for _ in range(objects // 8):
                seq = env.next_seq()
                store.put(object_name(f"{env.inc}/{seq}"), [b"x"], durability="process")
                env.keep(seq, byte_count=1, checksum=1, token_count=1, fields=1)
            env._journal.close()  # noqa: SLF001 - as a kill would
            write_dead(Ledger.of(store, ledger), env.inc, by="launcher")
        start = time.perf_counter()
        found = recover(store, ledger, run=run, resume_step=None)
        seconds = time.perf_counter() - start
        assert found.recovered == objects, found
        return {"objects": objects, "seconds": seconds, "objects_per_s": objects / seconds}


PATHS: Final[dict[str, dict[str, bool]]] = {
    "dropped, without syncs and unlinks": {"disk": False, "trained": False},
    "trained, without syncs and unlinks": {"disk": False, "trained": True},
    "dropped, local disk": {"disk": True, "trained": False},
    "trained, local disk": {"disk": True, "trained": True},
}


def paths(objects: int = PATH_OBJECTS) -> dict[str, dict[str, float]]:
    """All forms of the path."""
    path(disk=False, trained=False, objects=min(objects, 2_000))  # warm
    return {name: path(**options, objects=objects) for name, options in PATHS.items()}


def ledger(*, objects: int = PATH_OBJECTS, audited: int = AUDIT_OBJECTS) -> dict[str, Any]:
    """All forms of the path with ``objects`` objects each, and an audit of ``audited``."""
    found = paths(objects)
    audit_found = audit_cost(audited)
    free = [p for name, p in found.items() if "without" in name]
    return {
        "bench": "ledger",
        "machine": machine(),
        "objects": objects,
        "rows": [{"way": name, **{k: round(v, 1) for k, v in p.items()}} for name, p in found.items()],
        "audit": {k: round(v, 2) for k, v in audit_found.items()},
        "ratios": [
            _at_most("microseconds per object, mean", max(p["cpu_us"] for p in free), 15.0),
            _at_most("microseconds of a call, p99", max(p["call_p99_us"] for p in free), 100.0),
        ],
    }


def _at_most(label: str, value: float, reach: float) -> dict[str, Any]:
    value = round(value, 1)
    return {"ratio": label, "median": value, "least": value, "most": value, "reach": reach, "at_least": False}
