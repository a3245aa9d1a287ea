"""Holders, recovery and audit on filesystems that fail for real."""

import errno
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsref.errors import FsrefError, JournalCorrupt, JournalPoisoned, StoreDenied, StoreFull, StoreUnavailable
from fsref.journal.place import Ledger
from fsref.journal.read import LedgerReader
from fsref.reaper import Verdict, close_run, delete_objects, deleter, recover
from fsref.refs import object_name
from fsref.writer import Writer
from tests.reaper.stage import Stage
from tests.support import disks
from tests.support.payloads import payload


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[disks.Ext4]:
    with disks.ext4(tmp_path / "disk") as made:
        yield made


def closed(stage: Stage) -> None:
    """The run's close proves that nothing is left, by audit and by a raw look."""
    found = close_run(stage.store, stage.ledger, run=stage.run)
    assert (found.verdict, found.violations) == (Verdict.PROVED, ()), found.render()
    assert stage.objects() == []
    stage.store.close()


@pytest.mark.fault(31)
def test_an_object_that_finds_no_space_gets_no_receipt_and_its_number_is_void(tmp_path: Path) -> None:
    with disks.tmpfs(tmp_path / "disk", size="512k") as root:
        stage = Stage(root)
        env = stage.env()
        writer = Writer(stage.store, stage.run.schema, env)
        arrays = payload(np.random.default_rng(0), stage.run.schema, 5000)
        ballast = disks.fill(root, leave=40_000)
        with pytest.raises(StoreFull, match="No space left on device"):
            writer.put(arrays)
        assert stage.objects() == []
        ballast.unlink()
        ref = writer.put(arrays)
        assert stage.objects() == [object_name(ref.object_ids[0])]
        assert env.counters["kept"] == 1
        env.close()
        assert stage.audit().totals.void == 1
        closed(stage)


@pytest.mark.fault(32)
def test_an_orchestrator_whose_disk_is_full_stops_taking_shipping_and_removing(tmp_path: Path) -> None:
    with disks.tmpfs(tmp_path / "disk", size="2m") as root:
        stage = Stage(root)
        env, orc = stage.env(), stage.orc()
        held = stage.reply(env, orc, 3)
        kept = stage.put(env, 200)
        ballast = disks.fill(root)
        taken = 0
        with pytest.raises(JournalPoisoned):  # noqa: PT012 - how many fit depends on the page size
            for taken in range(200):
                orc.take(f"late-{taken}", {kept[taken]: 100})
        stage.store.deletes.clear()
        for call in (lambda: orc.drop(held[:1], "filtered"), lambda: orc.ship(0, {held[1]: 100})):
            with pytest.raises(JournalPoisoned):
                call()
        with pytest.raises(JournalPoisoned):
            orc.close()
        assert stage.store.deletes == [], "nothing is removed that may not be on record"
        found = LedgerReader(Ledger(stage.ledger)).read_one(orc.inc)
        assert found is not None
        assert found.lines.torn_bytes > 0
        assert len(found.fold.taken[env.inc]) == 3 + taken
        ballast.unlink()
        stage.kill(env)
        stage.kill(orc)
        closed(stage)


@pytest.mark.fault(32)
def test_a_worker_whose_disk_is_full_stops_keeping_and_removing(tmp_path: Path) -> None:
    with disks.tmpfs(tmp_path / "disk", size="512k") as root:
        stage = Stage(root)
        env = stage.env()
        held = stage.put(env, 2)
        numbers = [env.next_seq() for _ in range(200)]
        ballast = disks.fill(root)
        with pytest.raises(JournalPoisoned):  # noqa: PT012 - how many fit depends on the page size
            for seq in numbers:
                env.keep(seq, byte_count=100, checksum=7, token_count=10, fields=1)
        stage.store.deletes.clear()
        with pytest.raises(JournalPoisoned):
            env.discard(held)
        with pytest.raises(JournalPoisoned):
            env.close()
        assert stage.store.deletes == []
        assert len(stage.objects()) == 2
        ballast.unlink()
        found = close_run(stage.store, stage.ledger, run=stage.run)
        # Its receipts name objects that were never written: the audit must say so and not forget it.
        assert {v.predicate for v in found.violations} == {"I10"}
        assert stage.objects() == []


def crashed_run(root: Path) -> Stage:
    """Killed processes, and so many separate ranges of ids that a recovery writes some pages."""
    stage = Stage(root)
    env, orc, trn = stage.env(), stage.orc(), stage.trn()
    trn.taken(stage.ship(orc, 0, stage.reply(env, orc, 2)))
    found = stage.reply(env, orc, 1400)
    orc._deleter.put = lambda *_, **__: None  # type: ignore[method-assign]
    orc.drop(found[::2], "filtered")
    for holder in (env, orc, trn):
        stage.kill(holder)
    return stage


@pytest.mark.slow
@pytest.mark.fault(33)
def test_a_recovery_whose_disk_fills_at_any_page_fails_and_the_next_one_converges(tmp_path: Path) -> None:
    for pages in itertools.count():
        with disks.tmpfs(tmp_path / "disk", size="8m") as root:
            stage = crashed_run(root)
            ballast = disks.fill(root, leave=4096 * pages)
            full = True
            try:
                recover(stage.store, stage.ledger, run=stage.run, resume_step=None)
                full = False
            except (StoreFull, JournalPoisoned) as e:
                told = str(e)
                assert "No space left on device" in told or "a full disk or a limit" in told
            assert stage.audit().violations == (), pages
            ballast.unlink()
            closed(stage)
        if not full:
            assert pages > 4, "the disk was never full: the test shows nothing"
            return


@pytest.mark.fault(35)
@pytest.mark.parametrize("who", ["orc", "trn", "rec"])
def test_nobody_opens_or_recovers_on_a_ledger_that_cannot_be_listed(stage: Stage, monkeypatch: pytest.MonkeyPatch, who: str) -> None:
    env, orc, trn = stage.env(), stage.orc(), stage.trn()
    stage.reply(env, orc)
    before = stage.objects()
    for holder in (env, orc, trn):
        stage.kill(holder)

    def fail(_: Path) -> Iterator[Path]:
        raise OSError(errno.EIO, "Input/output error")

    whole: dict[str, Any] = {"store": stage.store, "ledger_dir": stage.ledger, "run": stage.run, "resume_step": None}
    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", fail)
        starts: dict[str, Callable[[], object]] = {
            "orc": stage.orc,
            "trn": stage.trn,
            "rec": partial(recover, accept_corrupt=True, **whole),
        }
        with pytest.raises(StoreUnavailable, match="Input/output error"):
            starts[who]()
    assert stage.objects() == before
    closed(stage)


@pytest.mark.fault(35)
def test_a_fence_that_cannot_be_looked_for_delays_removals_and_does_not_end_them(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    env, orc = stage.env(), stage.orc()
    found = stage.reply(env, orc, 2)
    looks: list[int] = []

    def is_adopted(*_: object) -> bool:
        looks.append(1)
        if len(looks) < 3:
            raise StoreUnavailable("cannot look for the fence")
        return False

    monkeypatch.setattr(deleter, "is_adopted", is_adopted)
    orc.drop(found, "filtered")
    assert orc.flush(deadline_s=60) == 0
    assert (orc.counters["done"], orc.counters["retried"], len(looks)) == (2, 4, 3)
    orc.close()
    env.close()
    closed(stage)


@pytest.mark.fault(35)
def test_a_dead_disk_ends_its_holders_and_removes_nothing_that_is_not_on_record(disk: disks.Ext4) -> None:
    stage = Stage(disk.folder)
    env, orc = stage.env(), stage.orc()
    found = stage.reply(env, orc, 2)
    for holder in (env, orc):
        holder._journal.sync()
    os.sync()
    disk.shut_down()
    with pytest.raises(FsrefError):
        orc.drop(found, "filtered")
    for holder in (env, orc):
        with pytest.raises(JournalPoisoned, match="Input/output error"):
            holder.close()
    stage.store.close()
    disk.restart()
    again = Stage(disk.folder)
    assert len(again.objects()) == 2
    closed(again)


TAILS = {
    "torn": lambda data: data[:-9],
    "zeros": lambda data: data + b"\0" * 4096,
    "zeros and a line's end": lambda data: data + b"\0" * 100 + b"\n",
    "noise": lambda data: data + b"\xff" * 70,
    "torn and zeros": lambda data: data[:-9] + b"\0" * 4096,
}


@pytest.mark.fault(36)
@pytest.mark.parametrize("tail", TAILS)
def test_a_damaged_tail_is_the_end_of_the_journal(stage: Stage, tail: str) -> None:
    env, orc = stage.env(), stage.orc()
    stage.reply(env, orc)
    stage.put(env)
    for holder in (env, orc):
        stage.kill(holder)
        path = stage.ledger / f"{holder.inc}.jnl"
        path.write_bytes(TAILS[tail](path.read_bytes()))
    assert stage.audit().verdict is Verdict.BALANCED
    closed(stage)


@pytest.mark.fault(36)
@pytest.mark.parametrize("damage", ["bit", "zeros", "cut"])
def test_damage_in_the_middle_is_named_refused_and_never_ok(stage: Stage, damage: str) -> None:
    env, orc = stage.env(), stage.orc()
    for _ in range(3):
        stage.reply(env, orc)
    for holder in (env, orc):
        stage.kill(holder)
    path = stage.ledger / f"{env.inc}.jnl"
    lines = path.read_bytes().splitlines(keepends=True)
    at = len(lines[0])
    whole = lines[1]
    lines[1] = {"bit": bytes([whole[0] ^ 1]) + whole[1:], "zeros": b"\0" * len(whole), "cut": whole[:20]}[damage]
    path.write_bytes(b"".join(lines))
    before = stage.objects()
    found = stage.audit()
    assert found.verdict is Verdict.UNPROVABLE
    assert f"{env.inc}.jnl is damaged: the line at {at}" in found.problems[0]
    with pytest.raises(JournalCorrupt, match="--accept-corrupt"):
        recover(stage.store, stage.ledger, run=stage.run, resume_step=None)
    assert stage.objects() == before
    recover(stage.store, stage.ledger, run=stage.run, resume_step=None, accept_corrupt=True)
    assert stage.audit().verdict is Verdict.UNPROVABLE
    assert stage.objects() == []


@pytest.mark.fault(37)
def test_an_absence_at_our_own_second_attempt_is_our_own_doing(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to an unlink was lost: the first attempt says that it failed, the second one finds nothing."""
    env, orc = stage.env(), stage.orc()
    found = stage.reply(env, orc, 2)
    real, lost = os.unlink, [2]

    def unlink(*args: object, **kwargs: object) -> None:
        real(*args, **kwargs)  # type: ignore[arg-type]
        if lost[0]:
            lost[0] -= 1
            raise OSError(errno.ETIMEDOUT, "Connection timed out")

    monkeypatch.setattr(os, "unlink", unlink)
    orc.drop(found, "filtered")
    assert orc.flush(deadline_s=60) == 0
    assert orc.counters["retried"] == 2
    orc.close()
    env.close()
    audit = stage.audit()
    assert (audit.violations, audit.totals.done_retry) == ((), 2)
    closed(stage)


@pytest.mark.fault(38)
def test_what_may_not_be_removed_stays_pending_is_named_and_is_removed_later(disk: disks.Ext4) -> None:
    stage = Stage(disk.folder)
    env, orc = stage.env(), stage.orc()
    found = stage.reply(env, orc, 3)
    with disks.immutable(stage.root / "r1" / object_name(found[1])):
        orc.drop(found, "filtered")
        stage.store.wait_until(lambda: stage.store.deletes.count(object_name(found[1])) > 1)
        assert orc.pending_delete == 1
        assert orc.counters["pending_delete"] == 1
        assert "Operation not permitted" in orc.pending_why
        audit = stage.audit()
        assert (audit.verdict, audit.pending_ids) == (Verdict.BALANCED, (found[1],))
        assert f"pending   {env.inc}/1" in audit.render()
    assert orc.flush(deadline_s=60) == 0
    assert orc.pending_why == ""
    orc.close()
    env.close()
    totals = stage.audit().totals
    assert (totals.dropped, totals.done, totals.done_retry) == (3, 3, 1)
    closed(stage)


@pytest.mark.fault(38)
@pytest.mark.parametrize("what", ["object", "staging"])
def test_a_recovery_that_may_not_remove_something_says_so_and_the_next_one_does_it(disk: disks.Ext4, what: str) -> None:
    stage = Stage(disk.folder)
    env, orc = stage.env(), stage.orc()
    found = stage.reply(env, orc)
    staging = f"obj/{env.inc}/.0000000007.tmp"
    stage.store.put(staging, [b"half"])
    stage.kill(env)
    stage.kill(orc)
    name = object_name(found[0]) if what == "object" else staging
    with disks.immutable(stage.root / "r1" / name):
        told = recover(stage.store, stage.ledger, run=stage.run, resume_step=None, deadline_s=0.0)
        assert told.pending == ((found[0],) if what == "object" else (staging,))
        audit = stage.audit()
        assert (audit.verdict, audit.violations) == (Verdict.BALANCED, ())
        assert stage.objects() == [name]
    closed(stage)


@pytest.mark.fault(38)
def test_a_leader_on_a_read_only_mount_reports_what_it_could_not_remove(stage: Stage) -> None:
    env = stage.env()
    found = stage.put(env, 2)
    with disks.read_only(stage.root / "r1" / "obj"), stage.other_store() as store:
        outcome = delete_objects(store, found, deadline_s=0.0)
        assert (set(outcome.failed), outcome.done) == (set(found), ())
        assert all(isinstance(e, StoreDenied) for e in outcome.failed.values())
    assert delete_objects(stage.store, found).done == tuple(found)


@pytest.mark.fault(55)
@pytest.mark.parametrize("place", ["obj", "inc", "object", "journal", "ledger"])
def test_a_recovery_as_root_follows_no_symbolic_link_out_of_the_run(tmp_path: Path, place: str) -> None:
    stage = Stage(tmp_path / "root")
    env, orc = stage.env(), stage.orc()
    found = stage.reply(env, orc, 2)
    orc._deleter.put = lambda *_, **__: None  # type: ignore[method-assign]
    orc.drop(found[:1], "filtered")
    stage.kill(env)
    stage.kill(orc)
    run = stage.root / "r1"
    real = {
        "obj": run / "obj",
        "inc": run / "obj" / env.inc,
        "object": run / object_name(found[0]),
        "journal": stage.ledger / f"{env.inc}.jnl",
        "ledger": stage.ledger,
    }[place]
    canary = tmp_path / "canary"
    real.rename(canary)
    real.symlink_to(canary)
    before = sorted((str(p), p.read_bytes() if p.is_file() else b"") for p in [canary, *canary.rglob("*")])
    with stage.other_store() as store, suppress(FsrefError):  # another process, as recovery is
        recover(store, stage.ledger, run=stage.run, resume_step=None, accept_corrupt=True, remove_unexpected=True, deadline_s=0.0)
    assert sorted((str(p), p.read_bytes() if p.is_file() else b"") for p in [canary, *canary.rglob("*")]) == before
    if place != "object":  # a link in an object's place is removed like the object
        assert stage.audit().verdict is not Verdict.PROVED
    stage.store.close()
