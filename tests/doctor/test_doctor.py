"""What the doctor finds, says and leaves behind."""

import fcntl
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from fsref import doctor
from fsref.cli.check import line, main
from fsref.doctor import Check, clock, examine, failed, filesystem, packages, required, root_checks
from tests.support import disks, needs

POSIX = ["create", "fsync", "lock", "clock", "link", "rename", "folder fsync", "shared removal"]


def test_a_good_folder_passes_every_operation_and_is_left_as_it_was(tmp_path: Path) -> None:
    checks = list(root_checks(str(tmp_path)))
    assert [c.name for c in checks] == ["root", "publish", "read", "list", "delete", *POSIX]
    assert not failed(checks), checks
    assert all(c.seconds is not None for c in checks if c.name != "clock")
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_was_not_there_is_gone_again(tmp_path: Path) -> None:
    assert not failed(list(root_checks(str(tmp_path / "a/b/runs"))))
    assert list(tmp_path.iterdir()) == []


def test_other_stores_are_tried_through_the_same_seam() -> None:
    checks = list(root_checks("memory://fsref-doctor-test"))
    assert [c.name for c in checks] == ["root", "publish", "read", "list", "delete", "capabilities"]
    assert not failed(checks), checks


@pytest.mark.parametrize(("root", "said"), [("{}/file/runs", "Not a directory"), ("/proc/sys/fsref", "opening the root")])
def test_a_root_that_cannot_be_used_is_one_failed_line(tmp_path: Path, root: str, said: str) -> None:
    (tmp_path / "file").touch()
    checks = list(root_checks(root.format(tmp_path)))
    assert [c.status for c in checks] == ["failed"]
    assert said in checks[0].detail
    assert "\n" not in checks[0].detail


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with disks.tmpfs(tmp_path / "small") as folder:
        yield folder


def test_a_full_disk_is_named_and_nothing_is_left(small_disk: Path) -> None:
    checks = list(root_checks(str(small_disk)))
    publish = next(c for c in checks if c.name == "publish")
    assert publish.status == "failed"
    assert "No space left on device" in publish.detail
    assert list(small_disk.iterdir()) == []


def test_a_read_only_disk_is_named(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    checks = list(root_checks(str(small_disk)))
    assert [(c.name, c.status) for c in checks] == [("root", "failed")]
    assert "Read-only file system" in checks[0].detail


def promise_nothing(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """A filesystem that says yes and does not do it."""
    if what == "lock":
        monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    elif what == "link":
        monkeypatch.setattr(os, "link", lambda a, b: Path(b).write_bytes(Path(a).read_bytes()))
    elif what == "create":
        real = os.open
        monkeypatch.setattr(os, "open", lambda path, flags, *a, **k: real(path, flags & ~os.O_EXCL, *a, **k))
    else:
        monkeypatch.setattr(Path, "rename", lambda a, b: Path(b).write_bytes(a.read_bytes()))


@pytest.mark.parametrize(
    ("what", "said"),
    [("lock", "locks do nothing here"), ("link", "linked twice"), ("create", "created twice"), ("rename", "changed what a reader")],
)
def test_a_filesystem_that_does_not_keep_its_word_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, said: str) -> None:
    promise_nothing(monkeypatch, what)
    check = next(c for c in doctor._posix_checks(tmp_path) if c.name == what)
    monkeypatch.undo()
    assert check.status == "failed"
    assert said in check.detail


def test_a_group_that_may_not_remove_is_named_and_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs.root()
    assert doctor.shared(tmp_path).detail == "another user of the same group removes what this one wrote"
    monkeypatch.setattr(doctor, "share", lambda _: None)
    before = os.umask(0o077)
    try:
        check = doctor.shared(tmp_path)
    finally:
        os.umask(before)
    assert check == Check("shared removal", "absent", check.detail)
    assert "run all roles as one user" in check.detail
    assert list(tmp_path.iterdir()) == []


def test_packages_are_read_from_the_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["numpy>=2", 'torch>=2.8; extra == "torch"', 'fsref[torch]; extra == "demo"', "uvicorn>=0.3; extra == 'demo'"]
    monkeypatch.setattr(metadata, "requires", lambda _: lines)
    assert required() == {"": ["numpy"], "torch": ["torch"], "demo": ["torch", "uvicorn"]}


def test_a_missing_extra_is_no_failure_and_a_missing_base_package_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "required", lambda: {"": ["numpy"], "s3": ["no-such-package"]})
    base, extra = packages()
    assert base == Check("packages", "ok", f"numpy {metadata.version('numpy')}")
    assert extra == Check("extra s3", "absent", "lacks no-such-package: pip install 'fsref[s3]'")
    monkeypatch.setattr(doctor, "required", lambda: {"": ["no-such-package"]})
    assert next(iter(packages())).status == "failed"


def test_packages_are_not_imported() -> None:
    code = "import sys; from fsref.doctor import packages; list(packages()); assert not {'torch', 'verifiers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_low_limit_of_open_files_fails_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    check = next(c for c in doctor.limits() if c.name == "open files")
    assert check == Check("open files", "failed", "limit 256, hard 4096; raise it: ulimit -n 1024")


def test_too_little_memory_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "memory", lambda: (1 << 30, 1 << 29))
    check = next(c for c in doctor.limits() if c.name == "memory")
    assert check == Check("memory", "failed", "0.5 GiB available of 1.0; a local run needs 2 GiB")


def test_a_clock_that_is_far_off_fails() -> None:
    assert clock(0.0).status == "failed"


def test_the_deepest_mount_names_the_filesystem() -> None:
    assert filesystem(Path("/proc/self")) == "proc"


def test_the_report_is_one_line_for_each_check_and_the_code_tells_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(str(tmp_path), json=False)
    assert len(capsys.readouterr().out.splitlines()) == len(examine(str(tmp_path)))
    (tmp_path / "file").touch()
    assert main(str(tmp_path / "file"), json=True) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False
    assert [c["status"] for c in told["checks"] if c["name"] == "root"] == ["failed"]
    assert code == int(failed(examine(str(tmp_path))))


def test_a_line_has_status_name_detail_and_time() -> None:
    assert line(Check("list", "ok", "the object is listed", 0.0012)).plain == "ok      list             the object is listed  1.20 ms"
