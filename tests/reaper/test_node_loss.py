"""A node loses power between the look at a dead process's journal and the adoption: nobody may build on what that took.

The loss comes right after the journals were read, and takes every record that no ``fsync`` had covered by then.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fsref.journal.read import LedgerReader
from fsref.ledger.merge import RunFold
from fsref.reaper import ConsumerHolder, EnvHolder, StepHolder, Verdict, close_run, recover
from tests.reaper.stage import Stage


class Power:
    """Knows what of each file is durable, and takes the rest once when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.durable: dict[int, int] = {}
        self.lost = -1
        self._victim: Path | None = None
        sync, merge = os.fsync, LedgerReader.merge

        def synced(fd: int) -> None:
            sync(fd)
            found = os.fstat(fd)
            self.durable[found.st_ino] = found.st_size

        def merged(reader: LedgerReader, *, accept_corrupt: bool = False) -> RunFold:
            found = merge(reader, accept_corrupt=accept_corrupt)
            if self._victim is not None:
                self._lose(self._victim)
                self._victim = None
            return found

        monkeypatch.setattr(os, "fsync", synced)
        monkeypatch.setattr(os, "fdatasync", synced)
        monkeypatch.setattr(LedgerReader, "merge", merged)

    def fails_after_the_look(self, journal: Path) -> None:
        """At the next merge of journals, whoever does it."""
        found = journal.stat()
        assert self.durable[found.st_ino] < found.st_size, "there is something to lose"
        self._victim = journal

    def _lose(self, journal: Path) -> None:
        found = journal.stat()
        self.lost = found.st_size - self.durable[found.st_ino]
        os.truncate(journal, self.durable[found.st_ino])


def dead_worker(stage: Stage) -> EnvHolder:
    env = stage.env()
    stage.put(env, 2)
    stage.kill(env)
    return env


def dead_orchestrator(stage: Stage) -> ConsumerHolder:
    env, orc = stage.env(), stage.orc()
    stage.reply(env, orc, 2)
    env.close()
    stage.kill(orc)
    return orc


def dead_trainer(stage: Stage) -> StepHolder:
    env, orc, trn = stage.env(), stage.orc(), stage.trn()
    info = stage.ship(orc, 0, stage.reply(env, orc, 2))
    for holder in (orc, env):
        holder.close()
    trn.taken(info)
    stage.kill(trn)
    return trn


def by_recovery(stage: Stage) -> None:
    recover(stage.store, stage.ledger, run=stage.run, resume_step=-1)


def by_an_orchestrator(stage: Stage) -> None:
    stage.orc().close()


def by_a_trainer(stage: Stage) -> None:
    stage.trn().close()


@pytest.mark.fault(14)
@pytest.mark.parametrize(
    ("dead", "adopt"),
    [(dead_worker, by_recovery), (dead_orchestrator, by_recovery), (dead_orchestrator, by_an_orchestrator), (dead_trainer, by_a_trainer)],
)
def test_what_an_adopter_has_read_cannot_be_lost_any_more(
    stage: Stage,
    monkeypatch: pytest.MonkeyPatch,
    dead: Callable[[Stage], EnvHolder | ConsumerHolder | StepHolder],
    adopt: Callable[[Stage], None],
) -> None:
    power = Power(monkeypatch)
    victim = dead(stage)
    power.fails_after_the_look(stage.ledger / f"{victim.inc}.jnl")
    adopt(stage)
    assert power.lost == 0, "the adopter had read records that were not durable"
    found = close_run(stage.store, stage.ledger, run=stage.run)
    assert (found.verdict, found.violations) == (Verdict.PROVED, ()), found.render()
    assert stage.objects() == []
