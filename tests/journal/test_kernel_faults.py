"""Journals and markers on filesystems that fail for real, or that answer as network filesystems do."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fsref.errors import JournalPoisoned, StoreDenied, StoreError, StoreFull, StoreUnavailable
from fsref.journal import write_dead
from fsref.journal.death import how_ended
from fsref.journal.file import Journal, make_folder
from fsref.journal.folder_marks import adopted_path
from fsref.journal.markers import acquire_lock, is_adopted, read_adopted, release_lock, write_adopted
from fsref.journal.place import Ledger
from fsref.journal.read import LedgerReader
from fsref.ledger.records import Keep
from tests.support import disks

INC = "env.a.0000000000000001"
REC = "rec.main.0000000000000002"
UUID = "0" * 32


def keep(seq: int) -> Keep:
    return Keep(1, seq, 100, 7, 10, 1)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[disks.Ext4]:
    with disks.ext4(tmp_path / "disk") as made:
        yield made


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name != "ballast")


@pytest.mark.fault(32)
def test_a_disk_that_fills_tears_a_record_and_all_before_it_can_be_read(tmp_path: Path) -> None:
    with disks.tmpfs(tmp_path / "disk") as folder:
        with Journal(Ledger(folder), INC, run_uuid=UUID) as journal:
            disks.fill(folder)
            kept = 0
            with pytest.raises(JournalPoisoned, match=r"was short \(\d+ of \d+ bytes\): a full disk or a limit"):  # noqa: PT012
                for kept in range(1000):
                    journal.append(keep(kept))
            assert kept > 10
            for call in (lambda: journal.append(keep(2000)), journal.sync):
                with pytest.raises(JournalPoisoned):
                    call()
        found = LedgerReader(Ledger(folder)).read_one(INC)
        assert found is not None
        assert (set(found.fold.kept), found.problem) == (set(range(kept)), "")
        assert found.lines.torn_bytes > 0


@pytest.mark.fault(32)
def test_a_journal_that_finds_no_space_is_not_created_at_all(tmp_path: Path) -> None:
    with disks.tmpfs(tmp_path / "disk") as folder:
        disks.fill(folder)
        with pytest.raises(StoreFull, match=r"cannot create the journal .*No space left on device"):
            Journal(Ledger(folder), INC, run_uuid=UUID)
        assert names(folder) == []


@pytest.mark.fault(32)
@pytest.mark.parametrize("what", ["journal", "marker"])
def test_a_short_write_at_the_start_leaves_neither_a_journal_nor_a_torn_marker(tmp_path: Path, what: str) -> None:
    code = """
import sys
from pathlib import Path
from fsref.journal.file import Journal
from fsref.journal.markers import write_adopted
from fsref.journal.place import Ledger
folder, inc, by, what = sys.argv[1:]
try:
    if what == "journal":
        Journal(Ledger(Path(folder)), inc, run_uuid="0" * 32)
    else:
        write_adopted(Ledger(Path(folder)), inc, by=by)
except OSError as e:
    print(type(e).__name__)
"""
    done = disks.python(code, tmp_path, INC, REC, what, file_bytes_max=20)
    assert done.stdout.strip() == "StoreFull", done.stderr
    assert names(tmp_path) == [], "a torn fence would be there for ever"


@pytest.mark.slow
@pytest.mark.fault(34)
def test_without_inodes_neither_journal_nor_marker_is_left_in_part(tmp_path: Path) -> None:
    with disks.tmpfs(tmp_path / "disk", inodes=3) as folder:
        (folder / "one").touch()
        (folder / "two").touch()
        for call in (lambda: Journal(Ledger(folder), INC, run_uuid=UUID), lambda: write_dead(Ledger(folder), INC)):
            with pytest.raises(StoreFull):
                call()
        assert names(folder) == ["one", "two"]


@pytest.mark.fault(35)
def test_a_sync_on_a_dead_disk_is_final_for_its_journal_and_the_tail_may_be_gone(disk: disks.Ext4) -> None:
    with Journal(Ledger(disk.folder), INC, run_uuid=UUID) as journal:
        journal.append(keep(0))
        journal.sync()
        journal.append(keep(1))
        disk.shut_down()
        with pytest.raises(JournalPoisoned, match=r"sync of .* failed: Input/output error"):
            journal.sync()
        with pytest.raises(JournalPoisoned, match="sync of"):
            journal.append(keep(2))
    disk.restart()
    found = LedgerReader(Ledger(disk.folder)).read_one(INC)
    assert found is not None
    assert (set(found.fold.kept), found.problem) == ({0}, "")


@pytest.mark.fault(35)
def test_an_append_on_a_dead_disk_is_final_too(disk: disks.Ext4) -> None:
    with Journal(Ledger(disk.folder), INC, run_uuid=UUID) as journal:
        disk.shut_down()
        with pytest.raises(JournalPoisoned, match=r"append to .* failed: Input/output error"):
            journal.append(keep(0))
    for call in (lambda: write_dead(Ledger(disk.folder), INC), lambda: Journal(Ledger(disk.folder), REC, run_uuid=UUID)):
        with pytest.raises(StoreUnavailable, match="Input/output error"):
            call()


@pytest.mark.fault(35)
def test_a_marker_that_cannot_be_looked_for_proves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Journal(Ledger(tmp_path), INC, run_uuid=UUID):
        found = LedgerReader(Ledger(tmp_path)).read_one(INC)

        def fail(_: Path) -> None:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(Path, "lstat", fail)
        assert found is not None
        for call in (lambda: is_adopted(Ledger(tmp_path), INC), lambda: how_ended(Ledger(tmp_path), found)):
            with pytest.raises(StoreUnavailable, match="cannot look for"):
                call()


@pytest.mark.fault(35)
def test_a_ledger_folder_that_cannot_be_listed_is_no_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Path) -> Iterator[Path]:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "iterdir", fail)
    reader = LedgerReader(Ledger(tmp_path))
    reader.refresh()
    assert not reader.listed
    with pytest.raises(StoreUnavailable, match="nothing is decided while the ledger cannot be read as a whole"):
        reader.refresh_all()


def lost_answer(name: str, code: int) -> Callable[..., Any]:
    """``os.<name>`` that does its work and says that it failed."""
    real = getattr(os, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        real(*args, **kwargs)
        raise OSError(code, os.strerror(code))

    return call


@pytest.mark.fault(37)
def test_a_journal_whose_rename_reports_a_failure_and_happened_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "rename", lost_answer("rename", errno.ENOENT))
    with Journal(Ledger(tmp_path), INC, run_uuid=UUID) as journal:
        journal.append(keep(0))
        assert names(tmp_path) == [f"{INC}.jnl"]


@pytest.mark.fault(37)
def test_a_journal_whose_rename_failed_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(StoreUnavailable):
        Journal(Ledger(tmp_path), INC, run_uuid=UUID)
    assert names(tmp_path) == []


@pytest.mark.fault(37)
@pytest.mark.parametrize("code", [errno.EEXIST, errno.EIO])
def test_a_marker_whose_link_reports_a_failure_and_happened_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(os, "link", lost_answer("link", code))
    write_adopted(Ledger(tmp_path), INC, by=REC)
    assert acquire_lock(Ledger(tmp_path), REC) is None, "a recovery must not take itself for another one"
    monkeypatch.undo()
    assert read_adopted(Ledger(tmp_path), INC) == REC
    assert names(tmp_path) == [f"{INC}.adopted", "recover.lock"]
    release_lock(Ledger(tmp_path), REC)


@pytest.mark.fault(38)
def test_a_lock_that_may_not_be_removed_is_a_typed_error(disk: disks.Ext4) -> None:
    assert acquire_lock(Ledger(disk.folder), REC) is None
    with disks.immutable(disk.folder / "recover.lock"), pytest.raises(StoreDenied, match=r"cannot remove .*recover.lock"):
        release_lock(Ledger(disk.folder), REC)
    release_lock(Ledger(disk.folder), REC)
    assert names(disk.folder) == ["lost+found"]


@pytest.mark.fault(55)
def test_markers_and_journals_behind_symbolic_links_are_refused(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.write_bytes(b'{"by":"rec.main.0000000000000009"}')
    ledger = tmp_path / "ledger"
    make_folder(ledger)
    adopted_path(ledger, INC).symlink_to(canary)
    (ledger / "recover.lock").symlink_to(canary)
    (ledger / f"{INC}.jnl").symlink_to(canary)
    (ledger / f".{REC}.jnl.tmp").symlink_to(canary)
    for call in (
        lambda: read_adopted(Ledger(ledger), INC),
        lambda: acquire_lock(Ledger(ledger), REC),
        lambda: release_lock(Ledger(ledger), REC),
        lambda: Journal(Ledger(ledger), REC, run_uuid=UUID),
    ):
        with pytest.raises(StoreError):
            call()
    reader = LedgerReader(Ledger(ledger))
    reader.refresh()
    assert (list(reader.journals), len(reader.problems)) == ([], 1)
    assert canary.read_bytes() == b'{"by":"rec.main.0000000000000009"}'


@pytest.mark.fault(55)
def test_a_ledger_folder_that_is_a_symbolic_link_is_neither_made_nor_read(tmp_path: Path) -> None:
    real = tmp_path / "elsewhere"
    make_folder(real)
    with Journal(Ledger(real), INC, run_uuid=UUID):
        pass
    link = tmp_path / "ledger"
    link.symlink_to(real)
    with pytest.raises(StoreDenied, match="symbolic link"):
        make_folder(link)
    reader = LedgerReader(Ledger(link))
    reader.refresh()
    assert not reader.listed
    assert "symbolic link: refused" in reader.problems[0]


def test_a_new_ledger_folder_is_open_to_the_group_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        make_folder(tmp_path / "ledger")
    finally:
        os.umask(before)
    assert (tmp_path / "ledger").stat().st_mode & 0o7777 == 0o2770
