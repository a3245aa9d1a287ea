"""What the ledger writes and syncs per object, per reply and per step: counts, because a test cannot assert a time."""

import os
from collections import Counter
from pathlib import Path

import pytest

from fsref.journal.file import Journal
from fsref.ledger.records import AnyRecord
from fsref.reaper.deleter import Deleter
from tests.reaper.stage import Stage


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Appended records by type, syncs of journals, looks at the own fence."""
    found: Counter[str] = Counter()
    append, append_all, fdatasync, fence = Journal.append, Journal.append_all, os.fdatasync, Deleter.fence

    def counted_append(self: Journal, record: AnyRecord) -> int:
        found[type(record).__name__] += 1
        return append(self, record)

    def counted_append_all(self: Journal, parts: list[AnyRecord]) -> None:
        found.update(type(r).__name__ for r in parts)
        append_all(self, parts)

    def counted_sync(fd: int) -> None:
        found["sync"] += 1
        fdatasync(fd)

    def counted_look(self: Deleter) -> None:
        found["fence"] += 1
        fence(self)

    monkeypatch.setattr(Journal, "append", counted_append)
    monkeypatch.setattr(Journal, "append_all", counted_append_all)
    monkeypatch.setattr(os, "fdatasync", counted_sync)
    monkeypatch.setattr(Deleter, "fence", counted_look)
    return found


def test_an_object_costs_one_record_each_for_keep_and_drop_and_a_reply_one_for_all_of_its_objects(
    tmp_path: Path, counts: Counter[str]
) -> None:
    stage = Stage(tmp_path)
    env, orc = stage.env(), stage.orc()
    counts.clear()
    found = [stage.reply(env, orc, 8) for _ in range(5)]
    assert counts == {"Keep": 40, "Take": 5}, "neither keep nor take waits for a disk"
    for ids in found:
        orc.drop(ids, "filtered")
    assert orc.flush(deadline_s=60.0) == 0
    assert counts["Drop"] == 5
    assert counts["Done"] == counts["sync"] == counts["fence"] <= 5, "one record, one sync and one look at the fence for each batch"
    env.close()
    orc.close()
    stage.store.close()


def test_ids_that_wait_together_are_removed_by_one_batch(tmp_path: Path, counts: Counter[str]) -> None:
    stage = Stage(tmp_path)
    env, orc = stage.env(), stage.orc()
    first = stage.reply(env, orc)
    rest = [stage.reply(env, orc, 4) for _ in range(20)]
    stage.store.gate.clear()
    orc.drop(first, "filtered")  # the deleter is at work on this one while the others come
    counts.clear()
    for ids in rest:
        orc.drop(ids, "filtered")
    stage.store.gate.set()
    assert orc.flush(deadline_s=60.0) == 0
    assert counts["Drop"] == 20
    assert counts["Done"] <= 3, "the one at work, and all that waited meanwhile"
    assert counts["sync"] <= 3
    env.close()
    orc.close()
    stage.store.close()


def test_a_step_costs_one_sync_of_the_orchestrator_and_one_of_the_trainer(tmp_path: Path, counts: Counter[str]) -> None:
    stage = Stage(tmp_path)
    env, orc, trn = stage.env(), stage.orc(), stage.trn()
    for step in range(3):
        found = stage.reply(env, orc, 200)
        counts.clear()
        info = stage.ship(orc, step, found)
        assert counts == {"Ship": 1, "sync": 1, "fence": 1}
        counts.clear()
        trn.taken(info)
        trn.used(step)
        assert counts == {"StepRecord": 2}, "taking a step waits for no disk"
        counts.clear()
        stage.commit(trn, step, step)
        assert (counts["Drop"], counts["Done"], counts["sync"]) == (1, 1, 1)
    for holder in (env, orc, trn):
        holder.close()
    stage.store.close()
