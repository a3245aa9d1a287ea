"""The POSIX store on filesystems that fail for real. Each test looks at the files with its own eyes."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fsref.errors import ObjectMissing, StoreDenied, StoreError, StoreFull, StoreUnavailable
from fsref.store import Deletion
from fsref.store.base import Durability
from fsref.store.posix import PosixStore
from tests.support import disks, needs

NAME = "obj/env.a.0000000000000001/0000000000.zip"
OTHER = NAME.replace("0.zip", "1.zip")


def files(root: Path) -> list[str]:
    """Every file but the ballast of a full disk."""
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file() and p.name != "ballast")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[disks.Ext4]:
    with disks.ext4(tmp_path / "disk") as made:
        yield made


@pytest.mark.fault(31)
def test_a_full_disk_is_a_typed_error_that_leaves_no_file(tmp_path: Path) -> None:
    with disks.tmpfs(tmp_path / "disk") as root, PosixStore(root) as store:
        durabilities: tuple[Durability, ...] = ("node", "process")
        for durability in durabilities:
            with pytest.raises(StoreFull, match="No space left on device; free space or inodes"):
                store.put(NAME, [b"x" * 50_000] * 6, durability=durability)
            assert files(root) == []
        with pytest.raises(StoreFull):
            store.replace("steps/step_000000/STEP.json", b"x" * 300_000)
        assert files(root) == []
        store.put(NAME, [b"x" * 50_000])
        assert files(root) == [NAME]


@pytest.mark.fault(31)
def test_a_limit_on_file_sizes_is_a_full_disk(tmp_path: Path) -> None:
    code = """
import sys
from fsref.store.posix import PosixStore
try:
    PosixStore(sys.argv[1]).put(sys.argv[2], [b"x" * 4000] * 3)
except OSError as e:
    print(type(e).__name__, e)
"""
    done = disks.python(code, tmp_path, NAME, file_bytes_max=10_000)
    assert done.stdout.startswith("StoreFull publishing "), done.stderr
    assert "File too large" in done.stdout
    assert files(tmp_path) == []


@pytest.mark.slow
@pytest.mark.fault(34)
def test_a_disk_without_inodes_is_a_full_disk(tmp_path: Path) -> None:
    with disks.tmpfs(tmp_path / "disk", inodes=6) as root, PosixStore(root) as store:
        store.put(NAME, [b"x"])  # with its two folders and the root: four
        store.put(OTHER, [b"x"])
        (root / "last").touch()
        for name in (f"{NAME}9", "obj/b/0"):
            with pytest.raises(StoreFull, match="free space or inodes"):
                store.put(name, [b"x"])
        with pytest.raises(StoreFull, match="free space or inodes"):
            store.replace("x", b"")
        assert files(root) == ["last", NAME, OTHER]
        assert store.delete([NAME]) == {NAME: Deletion.DONE}
        store.put(f"{NAME}9", [b"x"])


@pytest.mark.fault(35)
def test_a_dead_disk_may_come_back_and_is_no_proof_of_absence(disk: disks.Ext4) -> None:
    with PosixStore(disk.folder) as store:
        store.put(NAME, [b"x"])
        with store.open(NAME):
            pass
        disk.shut_down()
        for call in (
            lambda: store.put(OTHER, [b"x"]),
            lambda: store.replace("run.json", b"{}"),
            lambda: store.open(NAME),
        ):
            with pytest.raises(StoreUnavailable, match="Input/output error"):
                call()
        assert isinstance(store.delete([NAME])[NAME], StoreUnavailable)
    disk.restart()
    assert files(disk.folder) == [NAME]


def failing(name: str, code: int, *, after: bool = False, times: int = 1) -> Callable[..., Any]:
    """``os.<name>`` that fails: before it does anything, or after it did, as an answer that was lost."""
    real, left = getattr(os, name), [times]

    def call(*args: Any, **kwargs: Any) -> Any:
        if left[0] == 0:
            return real(*args, **kwargs)
        left[0] -= 1
        if after:
            real(*args, **kwargs)
        raise OSError(code, os.strerror(code))

    return call


@pytest.mark.fault(35)
@pytest.mark.parametrize("what", ["writev", "fsync", "close", "stat", "rename"])
def test_an_io_error_at_any_step_of_publishing_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    with PosixStore(tmp_path) as store:
        store.put(OTHER, [b"x"])
        with monkeypatch.context() as patch:
            patch.setattr(os, what, failing(what, errno.EIO, after=what == "close"))
            with pytest.raises(StoreUnavailable):
                store.put(NAME, [b"x"])
        assert files(tmp_path) == [OTHER]


@pytest.mark.fault(35)
def test_an_object_whose_name_cannot_be_made_durable_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with PosixStore(tmp_path) as store:
        real, calls = os.fsync, []

        def second_fails(fd: int) -> None:
            calls.append(fd)
            if len(calls) == 2:
                raise OSError(errno.EIO, "Input/output error")
            real(fd)

        monkeypatch.setattr(os, "fsync", second_fails)
        with pytest.raises(StoreUnavailable):
            store.put(NAME, [b"x"])
        assert len(calls) == 2
        assert files(tmp_path) == []


@pytest.mark.fault(35)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_listing_that_breaks_off_anywhere_is_an_error_of_its_own_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    with PosixStore(tmp_path) as store:
        for inc in ("a", "b"):
            store.put(f"obj/{inc}/inner/0", [b"x"])
        real, seen = os.scandir, []

        def scandir(fd: int) -> Any:
            seen.append(fd)
            if len(seen) == depth + 1:
                raise OSError(errno.EIO, "Input/output error")
            return real(fd)

        monkeypatch.setattr(os, "scandir", scandir)
        with pytest.raises(StoreUnavailable, match=r"listing .*obj.*Input/output error"):
            list(store.list("obj"))


@pytest.mark.fault(37)
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOENT, errno.ESTALE, errno.ETIMEDOUT])
def test_a_rename_that_reports_a_failure_and_happened_is_a_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    with PosixStore(tmp_path) as store:
        monkeypatch.setattr(os, "rename", failing("rename", code, after=True, times=2))
        store.put(NAME, [b"right"])
        store.replace("run.json", b"{}")
        assert files(tmp_path) == [NAME, "run.json"]
        assert store.read(NAME, bytes_max=10) == b"right"


@pytest.mark.fault(37)
def test_a_rename_that_failed_is_not_taken_for_a_success_because_an_older_file_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PosixStore(tmp_path) as store:
        store.replace("run.json", b"old")
        monkeypatch.setattr(os, "rename", failing("rename", errno.EIO))
        with pytest.raises(StoreUnavailable):
            store.replace("run.json", b"new")
        assert store.read("run.json", bytes_max=10) == b"old"
        assert files(tmp_path) == ["run.json"]


@pytest.mark.fault(38)
def test_what_may_not_be_removed_is_denied_and_stays(disk: disks.Ext4) -> None:
    with PosixStore(disk.folder) as store:
        store.put(NAME, [b"x"])
        store.put(OTHER, [b"x"])
        with disks.immutable(disk.folder / NAME):
            outcome = store.delete([NAME, OTHER])
            assert isinstance(outcome[NAME], StoreDenied)
            assert "Operation not permitted; check owner, mode and mount" in str(outcome[NAME])
            assert outcome[OTHER] is Deletion.DONE
        assert store.delete([NAME]) == {NAME: Deletion.DONE}


@pytest.mark.fault(38)
def test_a_read_only_mount_is_denied(tmp_path: Path) -> None:
    with PosixStore(tmp_path) as store:
        store.put(NAME, [b"x"])
    with disks.read_only(tmp_path), PosixStore(tmp_path) as store:
        assert "Read-only file system" in str(store.delete([NAME])[NAME])
        with pytest.raises(StoreDenied, match="Read-only file system"):
            store.put(OTHER, [b"x"])
    assert files(tmp_path) == [NAME]


AS_NOBODY = f"""
import sys
from fsref.store.posix import PosixStore
{disks.BECOME_NOBODY}
with PosixStore(sys.argv[1]) as store:
    print(*(type(o).__name__ for o in store.delete([sys.argv[2]]).values()))
"""


@pytest.mark.fault(38)
def test_another_user_is_denied_unless_the_group_is_shared() -> None:
    needs.root()
    with disks.open_folder() as root:
        with PosixStore(root) as store:
            store.put(NAME, [b"x"])
        assert disks.python(AS_NOBODY, root, NAME).stdout.strip() == "StoreDenied"
        assert files(root) == [NAME]
        for folder in (root / "obj", (root / NAME).parent):
            assert folder.stat().st_mode & 0o7777 == 0o2770, "whatever the umask"
            os.chown(folder, -1, disks.NOBODY)
        assert disks.python(AS_NOBODY, root, NAME).stdout.strip() == "Deletion"
        assert files(root) == []


@pytest.mark.fault(55)
@pytest.mark.parametrize("level", ["obj", "obj/env.a.0000000000000001"])
def test_a_symbolic_link_in_a_folders_place_is_refused_and_is_no_empty_folder(tmp_path: Path, level: str) -> None:
    canary = tmp_path / "canary"
    inside = canary / NAME.removeprefix(f"{level}/")
    inside.parent.mkdir(parents=True)
    inside.write_bytes(b"canary")
    root = tmp_path / "run"
    (root / level).parent.mkdir(parents=True)
    (root / level).symlink_to(canary)
    with PosixStore(root) as store:
        for call in (lambda: store.put(OTHER, [b"x"]), lambda: store.open(NAME), lambda: list(store.list(level))):
            with pytest.raises(StoreDenied, match="symbolic links in a folder's place are refused"):
                call()
        assert isinstance(store.delete([NAME])[NAME], StoreDenied), "absent would be recorded as done"
    assert files(canary) == [str(inside.relative_to(canary))]


@pytest.mark.fault(55)
def test_a_symbolic_link_in_an_objects_place_is_not_read_and_its_target_survives(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.write_bytes(b"canary")
    root = tmp_path / "run"
    with PosixStore(root, create=True) as store:
        store.put(OTHER, [b"x"])
        (root / NAME).symlink_to(canary)
        with pytest.raises(StoreDenied, match="refused"):
            store.open(NAME)
        assert store.delete([NAME]) == {NAME: Deletion.DONE}
        assert not (root / NAME).is_symlink()
    assert canary.read_bytes() == b"canary"


@pytest.mark.fault(39)
def test_a_root_that_was_removed_is_an_error_not_an_empty_listing_and_is_not_made_again(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with PosixStore(root, create=True) as store:
        store.put(NAME, [b"x"])
        (root / "obj").rename(root / "steps")
        assert list(store.list("obj")) == []
        (root / "steps" / NAME.removeprefix("obj/")).unlink()
        for folder in (root / "steps" / "env.a.0000000000000001", root / "steps", root):
            folder.rmdir()
        with pytest.raises(StoreError, match="was removed while it was in use"):
            list(store.list("obj"))
        with pytest.raises(ObjectMissing):
            store.put(OTHER, [b"x"])
    assert list(tmp_path.iterdir()) == []
