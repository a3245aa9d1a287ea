"""Published folders are complete or absent."""

import errno
from pathlib import Path

import pytest

from fsref.errors import StoreDenied, StoreError, StoreFull
from fsref.folders import MARKER, mapped, prune, publish, published, remove


def write_file(folder: Path) -> None:
    (folder / "inner").mkdir()
    (folder / "inner" / "a.bin").write_bytes(b"abc")


def test_a_published_folder_holds_its_files_and_the_marker(tmp_path: Path) -> None:
    folder = publish(tmp_path / "weights", 12, write_file)
    assert folder == tmp_path / "weights" / "step_000012"
    assert (folder / "inner" / "a.bin").read_bytes() == b"abc"
    assert published(tmp_path / "weights") == {12: folder}
    assert [p.name for p in folder.parent.iterdir()] == ["step_000012"]


def test_a_write_that_fails_publishes_nothing_and_the_next_one_succeeds(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        write_file(folder)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(StoreFull, match="step_000001"):
        publish(tmp_path, 1, fail)
    assert published(tmp_path) == {}
    publish(tmp_path, 1, write_file)
    assert list(published(tmp_path)) == [1]


def test_a_folder_without_its_marker_is_not_published_and_is_replaced(tmp_path: Path) -> None:
    torn = tmp_path / "step_000003"
    torn.mkdir()
    (torn / "half").write_bytes(b"x")
    assert published(tmp_path) == {}
    publish(tmp_path, 3, write_file)
    assert not (torn / "half").exists()


def test_a_published_folder_is_never_replaced(tmp_path: Path) -> None:
    publish(tmp_path, 3, write_file)
    with pytest.raises(StoreError):
        publish(tmp_path, 3, write_file)


def test_pruning_keeps_the_newest(tmp_path: Path) -> None:
    for version in (3, 1, 2, 10):
        publish(tmp_path, version, write_file)
    prune(tmp_path, keep=2)
    assert list(published(tmp_path)) == [3, 10]


def test_a_removed_folder_loses_its_marker_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = publish(tmp_path, 1, write_file)
    seen: list[bool] = []
    monkeypatch.setattr("shutil.rmtree", lambda path: seen.append((Path(path) / MARKER).exists()))
    remove(folder)
    assert seen == [False]


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, StoreFull), (errno.EACCES, StoreDenied), (errno.EIO, StoreError)])
def test_filesystem_errors_become_the_nearest_store_error(number: int, kind: type[StoreError]) -> None:
    with pytest.raises(StoreError, match="writing here") as caught, mapped("writing here"):
        raise OSError(number, "said the system")
    assert type(caught.value) is kind
