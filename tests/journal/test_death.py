"""Proof of death, and the markers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsref.errors import BadRef, Fenced, JournalCorrupt
from fsref.journal import identity, write_dead
from fsref.journal.death import how_ended
from fsref.journal.file import Journal, make_folder
from fsref.journal.folder_marks import LOCK_NAME, adopted_path
from fsref.journal.markers import acquire_lock, is_adopted, read_adopted, release_lock, write_adopted
from fsref.journal.place import Ledger
from fsref.journal.read import LedgerReader, OpenJournal
from fsref.ledger.records import Close

INC = "env.a.0000000000000001"
REC = "rec.main.0000000000000002"
OPEN_AND_EXIT = """
import sys
from pathlib import Path
from fsref.journal.file import Journal
from fsref.journal.place import Ledger
Journal(Ledger(Path(sys.argv[1])), sys.argv[2], run_uuid="0" * 32)
"""


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    make_folder(tmp_path / "ledger")
    return Ledger(tmp_path / "ledger")


def read(ledger: Ledger) -> OpenJournal:
    found = LedgerReader(ledger).read_one(INC)
    assert found is not None
    return found


def test_a_live_process_is_alive(ledger: Ledger) -> None:
    with Journal(ledger, INC, run_uuid="0" * 32):
        assert how_ended(ledger, read(ledger)) is None
        assert how_ended(ledger, read(ledger), forced=[INC]) == "forced"


def test_a_close_record_is_proof(ledger: Ledger) -> None:
    with Journal(ledger, INC, run_uuid="0" * 32) as journal:
        journal.append(Close(1, 0))
        assert how_ended(ledger, read(ledger)) == "closed"


def test_the_launchers_marker_is_proof(ledger: Ledger) -> None:
    with Journal(ledger, INC, run_uuid="0" * 32):
        write_dead(ledger, INC, by="launcher")
        write_dead(ledger, INC, by="launcher")
        assert how_ended(ledger, read(ledger)) == "dead"


def test_a_free_lock_on_this_boot_is_proof(ledger: Ledger) -> None:
    Journal(ledger, INC, run_uuid="0" * 32).close()
    assert how_ended(ledger, read(ledger)) == "flock"


def test_a_free_lock_seen_from_another_host_or_boot_proves_nothing(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    Journal(ledger, INC, run_uuid="0" * 32).close()
    journal = read(ledger)
    here = identity.this_process()
    for other in (here._replace(boot_id="another"), here._replace(host="another"), here._replace(boot_id="")):
        with monkeypatch.context() as patch:
            patch.setattr(identity, "this_process", lambda other=other: other)
            assert how_ended(ledger, journal) is None


def test_the_lock_of_a_process_is_free_once_it_is_gone(ledger: Ledger) -> None:
    subprocess.run([sys.executable, "-c", OPEN_AND_EXIT, str(ledger.folder), INC], check=True)
    assert how_ended(ledger, read(ledger)) == "flock"


def test_process_start_tells_processes_with_the_same_number_apart() -> None:
    assert identity.process_start(os.getpid()) == identity.this_process().pstart
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = identity.process_start(child.pid)
    child.communicate(b"\n")
    assert start is not None
    assert identity.process_start(child.pid) != start


def test_a_fence_has_one_owner(ledger: Ledger) -> None:
    assert not is_adopted(ledger, INC)
    write_adopted(ledger, INC, by=REC)
    write_adopted(ledger, INC, by=REC)
    assert (is_adopted(ledger, INC), read_adopted(ledger, INC)) == (True, REC)
    with pytest.raises(Fenced, match=REC):
        write_adopted(ledger, INC, by="rec.main.0000000000000003")
    assert [p.name for p in ledger.here.iterdir()] == [f"{INC}.adopted"]


def test_a_fence_with_a_foreign_content_is_refused(ledger: Ledger) -> None:
    for content in (b"", b"{}", b'{"by":"../../etc"}', b"x" * 10_000):
        adopted_path(ledger.here, INC).write_bytes(content)
        with pytest.raises(JournalCorrupt):
            read_adopted(ledger, INC)


def test_only_its_owner_releases_the_lock_of_recovery(ledger: Ledger) -> None:
    assert acquire_lock(ledger, REC) is None
    assert acquire_lock(ledger, INC) == REC
    release_lock(ledger, INC)
    assert (ledger.here / LOCK_NAME).exists()
    release_lock(ledger, REC)
    assert acquire_lock(ledger, INC) is None


@pytest.mark.parametrize(("role", "label"), [("boss", "a"), ("env", "A"), ("env", ""), ("env", "a" * 41), ("env", "a.b")])
def test_an_incarnation_outside_the_grammar_is_not_minted(role: str, label: str) -> None:
    with pytest.raises(BadRef):
        identity.mint(role, label)


def test_labels_are_made_to_fit_the_grammar() -> None:
    assert identity.label_of("Math_env/0 (eval)") == "math-env-0-eval"
    assert identity.label_of("___") == "x"
    assert len(identity.label_of("a" * 99)) == 40
