"""Checks a machine before a run does: the root, the clock, the packages, the limits.

Owns what is checked and what counts as a failure. Refuses to repair, and to leave anything behind: what it creates it removes.
Packages are looked up, never imported.
"""

import contextlib
import fcntl
import os
import re
import resource
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Final, Literal

import msgspec

from fsref.config import StoreSection
from fsref.errors import FsrefError, StoreError
from fsref.journal.file import sync_folder
from fsref.objects.native import ABOUT, KERNELS
from fsref.store import Store, open_root, probe
from fsref.store.open import posix_root
from fsref.store.posix import raise_mapped, share

Status = Literal["ok", "absent", "failed"]
BYTES_TRIED: Final = 1 << 20
SKEW_S_MAX: Final = 300.0
"""S3 refuses requests beyond 15 minutes; nothing else depends on clocks."""
FILES_MIN: Final = 1024
MEMORY_MIN: Final = 2 << 30
OTHER_USER: Final = 65534
"""nobody"""
PYTHON: Final = ((3, 11), (3, 14))


class Check(msgspec.Struct, frozen=True):
    """One line of the report."""

    name: str
    status: Status
    detail: str
    seconds: float | None = None
    """How long the operation took, where one was timed."""


def examine(root: str, *, settings: StoreSection | None = None) -> list[Check]:
    """Every check, in the order of the report. Never raises for what it checks."""
    return [python(), *packages(), kernels(), *limits(), loopback(), *root_checks(root, settings=settings)]


def python() -> Check:
    """The interpreter's version and how much it may use."""
    low, high = PYTHON
    fits = low <= sys.version_info[:2] < high
    text = f"{sys.version.split()[0]} at {sys.executable}"
    return Check("python", "ok" if fits else "failed", text if fits else f"{text}; 3.{low[1]} to 3.{high[1] - 1} are supported")


def kernels() -> Check:
    """Whether chunks are checked and decoded by the compiled kernels. Without them everything works, more slowly."""
    if KERNELS is None:
        return Check("kernels", "absent", f"{ABOUT}: chunks are decoded by numcodecs, a half to a third as fast")
    return Check("kernels", "ok", ABOUT)


def packages() -> Iterator[Check]:
    """One line for the base dependencies and one for each extra, with versions."""
    wanted = required()
    for extra in ("", *sorted(set(wanted) - {""})):
        found = {name: version(name) for name in wanted.get(extra, [])}
        lacking = sorted(n for n, v in found.items() if v is None)
        text = ", ".join(f"{n} {v}" for n, v in sorted(found.items()) if v is not None)
        if not lacking:
            yield Check(f"extra {extra}" if extra else "packages", "ok", text)
        elif extra:
            yield Check(f"extra {extra}", "absent", f"lacks {', '.join(lacking)}: pip install 'fsref[{extra}]'")
        else:
            yield Check("packages", "failed", f"lacks {', '.join(lacking)}: install fsref again")


def required() -> dict[str, list[str]]:
    """Package names by extra (``""``: the base), from the installed metadata; an extra that names others includes theirs."""
    direct: dict[str, list[str]] = {"": []}
    try:
        lines = metadata.requires("fsref") or []
    except metadata.PackageNotFoundError:
        lines = []
    for line in lines:
        spec, _, marker = line.partition(";")
        extra = re.search(r"extra\s*==\s*[\"']([^\"']+)[\"']", marker)
        direct.setdefault(extra.group(1) if extra else "", []).append(spec.strip())
    return {extra: sorted(_names(extra, direct)) for extra in direct}


def _names(extra: str, direct: dict[str, list[str]]) -> set[str]:
    out: set[str] = set()
    for spec in direct.get(extra, []):
        match = re.match(r"([A-Za-z0-9._-]+)(?:\[([^\]]*)\])?", spec)
        assert match is not None, spec
        if match.group(1) != "fsref":
            out.add(match.group(1))
        elif match.group(2):
            for inner in match.group(2).split(","):
                out |= _names(inner.strip(), direct)
    return out


def version(name: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def limits() -> Iterator[Check]:
    """CPU, memory and open files that this process may use."""
    yield Check("cpu", "ok", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} usable")
    total, available = memory()
    enough = total >= MEMORY_MIN
    hint = "" if enough else f"; a local run needs {MEMORY_MIN >> 30} GiB"
    yield Check("memory", "ok" if enough else "failed", f"{available / 2**30:.1f} GiB available of {total / 2**30:.1f}{hint}")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft == resource.RLIM_INFINITY or soft >= FILES_MIN
    hint = "" if enough else f"; raise it: ulimit -n {FILES_MIN}"
    yield Check("open files", "ok" if enough else "failed", f"limit {soft}, hard {hard}{hint}")


def memory() -> tuple[int, int]:
    """Total and available bytes: the machine's, or the control group's where that is less."""
    values = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE))
    total, available = int(values["MemTotal"]) << 10, int(values["MemAvailable"]) << 10
    with contextlib.suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        total, available = min(total, limit), min(available, max(0, limit - used))
    return total, available


def loopback() -> Check:
    """Whether a loopback port can be bound, as the local launcher does."""
    try:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            return Check("loopback", "ok", f"port {s.getsockname()[1]} on 127.0.0.1 could be bound")
    except OSError as e:
        return Check("loopback", "failed", f"127.0.0.1 cannot be bound: {e.strerror}")


def root_checks(root: str, *, settings: StoreSection | None = None) -> Iterator[Check]:
    """Reaches the root and tries every operation that a run needs on it, under a name of its own that is removed again."""
    probe = f"fsref-doctor-{secrets.token_hex(8)}"
    folder = posix_root(root)
    missing = [] if folder is None else [p for p in (folder, *folder.parents) if not p.exists()]
    try:
        start = time.perf_counter()
        with open_root(root, run=probe, settings=settings, create=True) as store:
            yield Check("root", "ok", f"{root} reached{f' ({filesystem(folder)})' if folder else ''}", time.perf_counter() - start)
            yield from _store_checks(store)
            if store.posix_path is None:
                yield capabilities(store)
            if folder is not None:
                yield from _posix_checks(folder / probe)
    except FsrefError as e:
        yield Check("root", "failed", str(e))
    finally:
        if folder is not None:
            for made in (folder / probe / "probe", folder / probe, *missing):
                with contextlib.suppress(OSError):
                    made.rmdir()


def _timed(name: str, done: str, work: Callable[[], object]) -> Check:
    start = time.perf_counter()
    try:
        work()
    except FsrefError as e:
        return Check(name, "failed", str(e))
    return Check(name, "ok", done, time.perf_counter() - start)


def _store_checks(store: Store) -> Iterator[Check]:
    data = os.urandom(BYTES_TRIED)
    name = "probe/object"
    write = _timed("publish", f"{BYTES_TRIED >> 20} MiB written and published, durably", lambda: store.put(name, [data]))
    yield write
    if write.status == "failed":
        return

    def read() -> None:
        if store.read(name, bytes_max=BYTES_TRIED) != data:
            raise StoreError(f"{store.url}/{name} reads back other bytes than were written")

    def find() -> None:
        if list(store.list("probe")) != [(name, BYTES_TRIED)]:
            raise StoreError(f"listing {store.url}/probe does not give the object that was just written")

    def remove() -> None:
        outcome = store.delete([name])[name]
        if isinstance(outcome, StoreError):
            raise outcome

    yield _timed("read", "the same bytes read back", read)
    yield _timed("list", "the object is listed", find)
    yield _timed("delete", "the object is removed", remove)


def capabilities(store: Store) -> Check:
    """What an object store or other filesystem really does; what is missing is named with what follows from it."""
    start = time.perf_counter()
    try:
        found = probe(store)
    except FsrefError as e:
        return Check("capabilities", "failed", str(e))
    done = f"create-only put, listing after write, removal of {found.bulk_delete_max} at a time, versioning {found.versioning}"
    lacking = found.shortcomings()
    return Check("capabilities", "ok" if found.usable else "failed", "; ".join(lacking) or done, time.perf_counter() - start)


def _posix_checks(folder: Path) -> Iterator[Check]:
    first, second, third = folder / "probe-1", folder / "probe-2", folder / "probe-3"

    def mapped(name: str, done: str, work: Callable[[], object]) -> Check:
        def tried() -> None:
            try:
                work()
            except OSError as e:
                raise_mapped(e, f"{name} in {folder}")

        return _timed(name, done, tried)

    fd = -1
    try:
        fd = os.open(first, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o640)
        os.write(fd, b"\0" * 4096)
        yield mapped("create", "a name that is there is not created again", lambda: _create_again(first))
        yield mapped("fsync", "file made durable", lambda: os.fsync(fd))
        yield mapped("lock", "flock works and keeps others out, as journals need it", lambda: _lock(fd, first))
        yield clock(os.fstat(fd).st_mtime)
        yield mapped("link", "exclusive names by hard link", lambda: _link_twice(first, second))
        yield mapped("rename", "atomic rename, over a file too", lambda: _rename_over(second, third))
        yield mapped("folder fsync", "names made durable", lambda: sync_folder(folder))
        yield shared(folder)
    except OSError as e:
        yield Check("write", "failed", f"{folder}: {e.strerror}")
    finally:
        if fd >= 0:
            os.close(fd)
        for path in (first, second, third):
            path.unlink(missing_ok=True)


def _create_again(path: Path) -> None:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    raise StoreError(f"{path} was created twice: exclusive creation does not work here")


def _lock(fd: int, path: Path) -> None:
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    other = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    finally:
        os.close(other)
    raise StoreError(
        f"two descriptors of {path} were locked at once: locks do nothing here, and a live process would be taken for a dead one"
    )


def _link_twice(first: Path, second: Path) -> None:
    os.link(first, second)
    try:
        os.link(first, second)
    except FileExistsError:
        return
    raise StoreError(f"{second} was linked twice: two processes could adopt the same one")


def _rename_over(source: Path, target: Path) -> None:
    target.write_bytes(b"older")
    with target.open("rb") as reader:
        source.rename(target)
        if reader.read() != b"older" or target.stat().st_size != 4096:
            raise StoreError(f"renaming over {target} changed what a reader of the older file sees, or did not replace it")


def shared(folder: Path) -> Check:
    """Whether another user of the same group may remove what this one wrote. Only root can try; a run of one user does not need it."""
    name, start = "shared removal", time.perf_counter()
    inner = folder / "probe-shared"
    program = shutil.which("rm")
    if os.geteuid() or program is None:
        return Check(name, "ok", "not tried: only root can act as another user; a run whose roles are one user does not need it")
    inner.mkdir()
    try:
        fd = os.open(inner, os.O_RDONLY | os.O_DIRECTORY)
        try:
            share(fd)
        finally:
            os.close(fd)
        (inner / "file").touch(0o640)
        command = [program, "-f", "file"]
        subprocess.run(command, cwd=inner, user=OTHER_USER, group=inner.stat().st_gid, extra_groups=[], capture_output=True, check=False)
        if not (inner / "file").exists():
            return Check(name, "ok", "another user of the same group removes what this one wrote", time.perf_counter() - start)
    except (OSError, subprocess.SubprocessError) as e:
        return Check(name, "absent", f"cannot be tried: {e}")
    finally:
        (inner / "file").unlink(missing_ok=True)
        inner.rmdir()
    return Check(name, "absent", "another user of the same group may not remove what this one wrote: run all roles as one user")


def clock(written: float) -> Check:
    """Compares this machine's clock with the root's, by a file's modification time."""
    skew = written - time.time()
    good = abs(skew) <= SKEW_S_MAX
    hint = "" if good else "; set the clocks"
    return Check("clock", "ok" if good else "failed", f"{skew:+.2f} s between this machine and the root{hint}")


def filesystem(folder: Path) -> str:
    """The type of the filesystem that holds a folder, from the kernel's mount table; ``unknown`` if it does not say."""
    found, best = "unknown", -1
    where = str(folder.absolute())
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines():
            _, mount, kind = line.split(" ")[:3]
            mount = mount.replace("\\040", " ")
            if (where == mount or where.startswith(mount.rstrip("/") + "/")) and len(mount) >= best:
                found, best = kind, len(mount)
    return found


def failed(checks: list[Check]) -> bool:
    """Whether a run would not work here; a missing extra is no failure."""
    return any(c.status == "failed" for c in checks)
