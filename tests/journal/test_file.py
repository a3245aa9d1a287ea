"""One journal file: appends, syncs, poison, locks, forks."""

import fcntl
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from fsref.errors import JournalPoisoned, StoreDenied, StoreError
from fsref.journal.file import Journal, make_folder
from fsref.journal.place import Ledger
from fsref.journal.read import LedgerReader
from fsref.ledger.records import LINE_BYTES_MAX, Close, Keep, Take, decode_line

INC = "env.a.0000000000000001"
UUID = "0" * 32
KEEP = Keep(1, 0, 100, 7, 10, 1)


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    folder = tmp_path / "ledger"
    make_folder(folder)
    return folder


def test_the_first_line_names_the_process(ledger: Path) -> None:
    with Journal(Ledger(ledger), INC, run_uuid=UUID) as journal:
        first = decode_line(journal.path.read_bytes().splitlines()[0])
    assert (first.inc, first.run_uuid, first.pid) == (INC, UUID, os.getpid())  # type: ignore[union-attr]


def test_a_record_is_one_write_at_the_end(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Journal(Ledger(ledger), INC, run_uuid=UUID) as journal:
        writes: list[int] = []
        write = os.write
        monkeypatch.setattr(os, "write", lambda fd, data: (writes.append(len(data)), write(fd, data))[1])  # type: ignore[func-returns-value]
        at = journal.append(KEEP)
        monkeypatch.undo()
        assert len(writes) == 1
        assert journal.path.read_bytes()[at:].startswith(b"%08x" % int(journal.path.read_bytes()[at : at + 8], 16))
        assert fcntl.fcntl(journal._fd, fcntl.F_GETFL) & os.O_APPEND
        assert fcntl.fcntl(journal._fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def test_a_set_of_records_is_appended_in_order_or_not_at_all(ledger: Path) -> None:
    with Journal(Ledger(ledger), INC, run_uuid=UUID) as journal:
        before = journal.size
        with pytest.raises(ValueError, match="does not fit a line"):
            journal.append_all([KEEP, Take(1, "q", {INC: "," * LINE_BYTES_MAX})])
        assert journal.size == journal.path.stat().st_size == before
        parts = [Take(1, "q", {INC: str(k)}, part=(k, 3)) for k in (1, 2, 3)]
        journal.append_all(parts)
        assert [decode_line(line) for line in journal.path.read_bytes()[before:].splitlines()] == parts
        assert journal.size == journal.path.stat().st_size


@pytest.mark.payload("F8")
def test_a_name_is_used_once(ledger: Path) -> None:
    with Journal(Ledger(ledger), INC, run_uuid=UUID):
        pass
    (ledger / f".{INC}.jnl.tmp").touch()
    with pytest.raises(StoreError):
        Journal(Ledger(ledger), INC, run_uuid=UUID)


def test_a_failed_append_poisons_the_journal_for_good(ledger: Path) -> None:
    journal = Journal(Ledger(ledger), INC, run_uuid=UUID)
    fd, journal._fd = journal._fd, os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(JournalPoisoned, match="No space left"):
        journal.append(KEEP)
    os.close(journal._fd)
    journal._fd = fd
    for call in (lambda: journal.append(KEEP), journal.sync):
        with pytest.raises(JournalPoisoned):
            call()
    assert journal.poisoned
    journal.close()


TORN = """
import resource, sys
from pathlib import Path
from fsref.errors import JournalPoisoned
from fsref.journal.file import Journal
from fsref.journal.place import Ledger
from fsref.ledger.records import Keep
journal = Journal(Ledger(Path(sys.argv[1])), sys.argv[2], run_uuid="0" * 32)
journal.append(Keep(1, 0, 100, 7, 10, 1))
size = journal.path.stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, size + 20))
import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
    journal.append(Keep(1, 1, 100, 7, 10, 1))
except JournalPoisoned as e:
    print("poisoned" if "short" in str(e) else e)
"""


def test_a_short_write_tears_the_record_and_readers_stop_before_it(ledger: Path) -> None:
    out = subprocess.run([sys.executable, "-c", TORN, str(ledger), INC], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "poisoned"
    reader = LedgerReader(Ledger(ledger))
    reader.refresh()
    journal = reader.journals[INC]
    assert (journal.problem, set(journal.fold.kept), journal.lines.torn_bytes) == ("", {0}, 20)
    assert resource.RLIMIT_FSIZE >= 0


def test_a_failed_sync_is_final(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(Ledger(ledger), INC, run_uuid=UUID)
    journal.append(KEEP)

    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(JournalPoisoned, match="sync of"):
        journal.sync()
    monkeypatch.undo()
    with pytest.raises(JournalPoisoned):
        journal.append(KEEP)
    journal.close()


def test_a_sync_without_new_records_costs_nothing(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Journal(Ledger(ledger), INC, run_uuid=UUID) as journal:
        journal.append(KEEP)
        journal.sync()
        monkeypatch.setattr(os, "fdatasync", lambda fd: pytest.fail(f"synced {fd} again"))
        journal.sync()


@pytest.mark.fault(39)
def test_a_journal_that_is_removed_under_a_live_run_is_loud(ledger: Path) -> None:
    with Journal(Ledger(ledger), INC, run_uuid=UUID) as journal:
        journal.append(KEEP)
        journal.path.unlink()
        with pytest.raises(JournalPoisoned, match="removed under a live run"):
            journal.sync()


def test_the_lock_is_held_for_life(ledger: Path) -> None:
    journal = Journal(Ledger(ledger), INC, run_uuid=UUID)
    with journal.path.open("rb") as other:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        journal.close()
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)


FORK = """
import fcntl, os, sys
from pathlib import Path
from fsref.errors import JournalPoisoned
from fsref.journal.file import Journal
from fsref.journal.place import Ledger
from fsref.ledger.records import Keep
journal = Journal(Ledger(Path(sys.argv[1])), sys.argv[2], run_uuid="0" * 32)
record = Keep(1, 0, 100, 7, 10, 1)
pid = os.fork()
if pid == 0:
    try:
        journal.append(record)
    except JournalPoisoned as e:
        os._exit(7 if "fork" in str(e) else 8)
    os._exit(9)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
journal.append(record)
with journal.path.open("rb") as other:
    try:
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        print("locked")
"""


@pytest.mark.fault(16)
def test_a_forked_child_cannot_write_and_leaves_the_parents_lock_alone(ledger: Path) -> None:
    out = subprocess.run([sys.executable, "-c", FORK, str(ledger), INC], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["7", "locked"]
    reader = LedgerReader(Ledger(ledger))
    reader.refresh()
    assert set(reader.journals[INC].fold.kept) == {0}


def test_a_ledger_folder_behind_a_symlink_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "ledger").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreDenied, match="symbolic link"):
        make_folder(tmp_path / "ledger")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_files_are_for_the_group_only(ledger: Path) -> None:
    with Journal(Ledger(ledger), INC, run_uuid=UUID) as journal:
        assert stat.S_IMODE(journal.path.stat().st_mode) & ~0o640 == 0


def test_a_journal_behind_a_symlink_is_a_problem_and_is_not_read(ledger: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"root:x\n")
    (ledger / f"{INC}.jnl").symlink_to(secret)
    reader = LedgerReader(Ledger(ledger))
    reader.refresh()
    assert INC not in reader.journals
    assert "cannot be opened" in reader.problems[0]


def test_a_file_of_another_name_is_a_problem(ledger: Path) -> None:
    (ledger / "notes.jnl").touch()
    reader = LedgerReader(Ledger(ledger))
    reader.refresh()
    assert "not named after an incarnation" in reader.problems[0]


def test_a_reader_goes_on_where_it_stopped(ledger: Path) -> None:
    with Journal(Ledger(ledger), INC, run_uuid=UUID) as journal:
        reader = LedgerReader(Ledger(ledger))
        first = reader.refresh()
        journal.append(KEEP)
        second = reader.refresh()
        assert first[INC] < second[INC] == journal.path.stat().st_size
        assert set(reader.journals[INC].fold.kept) == {0}


def test_a_journal_that_shrinks_is_damaged(ledger: Path) -> None:
    with Journal(Ledger(ledger), INC, run_uuid=UUID) as journal:
        journal.append(KEEP)
        journal.append(Close(1, 1))
        reader = LedgerReader(Ledger(ledger))
        reader.refresh()
        os.truncate(journal.path, 50)
        reader.refresh()
        assert "truncated" in reader.journals[INC].problem
