"""What overrules a check stands in the ledger before it acts: who, where, which process, what (point 8)."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fsref.journal.identity import this_process
from fsref.journal.place import Ledger
from fsref.journal.read import LedgerReader
from fsref.reaper import Recovery, recover
from tests.reaper.stage import RUN, Stage


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.store.close()


def said(stage: Stage, done: Recovery) -> str:
    """The ``why`` of a recovery's ``open``, once its other fields were checked."""
    reader = LedgerReader(Ledger(stage.ledger))
    reader.refresh()
    opened = reader.journals[done.inc].fold.open
    assert opened is not None
    here = this_process()
    assert (opened.user, opened.host, opened.pid, opened.boot_id) == (here.user, here.host, here.pid, here.boot_id)
    return opened.why


def test_a_recovery_without_overriding_options_says_nothing(stage: Stage) -> None:
    stage.env().close()
    assert said(stage, recover(stage.store, stage.ledger, run=stage.run, resume_step=None)) == ""


def test_a_forced_death_is_recorded_with_its_incarnation(stage: Stage) -> None:
    env = stage.env()
    done = recover(stage.store, stage.ledger, run=stage.run, resume_step=None, force_dead=[env.inc])
    assert said(stage, done) == f"force-dead 1: {env.inc}"
    assert done.adopted[env.inc] == "forced"
    stage.kill(env, reaped=False)


def test_the_other_overriding_options_are_recorded(stage: Stage) -> None:
    stage.env().close()
    (stage.root / RUN / "obj" / "foreign").write_text("x")
    done = recover(stage.store, stage.ledger, run=stage.run, resume_step=None, accept_corrupt=True, remove_unexpected=True)
    assert said(stage, done) == "accept-corrupt, remove-unexpected"
    assert stage.objects() == []


def test_many_or_hostile_names_fit_the_record(stage: Stage) -> None:
    done = recover(stage.store, stage.ledger, run=stage.run, resume_step=None, force_dead=["\x1b\udcff" * 400])
    assert len(said(stage, done)) <= 256
    assert said(stage, done).isprintable()
