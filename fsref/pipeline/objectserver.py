"""An S3 server of a run's own: SeaweedFS on loopback, with all that it stores in the run's folder.

``fsref run`` starts it before anything else of the run and stops it after the audit; commands that look at the run later start it while
they look. Owns its folder: ``data/``, the lock that it holds while it lives, its endpoint and its keys, which are made for each start and
stand in one file that only the run's user may read. Refuses to start while another one of the same run lives.

It is stopped by SIGKILL: it acknowledges a write only when the kernel has it, so nothing is lost by that, and its own orderly end takes
15 seconds.
"""

import configparser
import contextlib
import fcntl
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from msgspec.structs import replace

from fsref.config import Config, StoreSection
from fsref.errors import RoleFailed, RunBusy, StoreError
from fsref.journal import identity
from fsref.pipeline.layout import KEYS, KEYS_PROFILE, SERVER_FOLDER
from fsref.pipeline.ports import LOOPBACK, free_ports
from fsref.pipeline.processes import Child, Command, Family
from fsref.pipeline.supervise import describe
from fsref.pool import Host, Ports, key_variables, server_argv, volumes, volumes_on_disk, weed_program
from fsref.store import Credentials, open_root
from fsref.store.posix import raise_mapped
from fsref.store.s3bucket import make_bucket

START_S: Final = 120.0
POLL_S: Final = 0.1
VOLUME_MB: Final = 256
VOLUMES_MAX: Final = 4096
"""A terabyte; what the disk holds is the limit before."""
PROBE: Final = "probe/start"
ENDPOINT: Final = "endpoint"
LOCK: Final = "lock"


@dataclass(frozen=True, kw_only=True)
class Home:
    """Whose server it is."""

    root: str
    run: str
    run_dir: Path

    @classmethod
    def of(cls, config: Config) -> Self:
        """Of a resolved config."""
        return cls(root=config.run.root, run=config.run.id, run_dir=Path(config.run.run_dir))

    @property
    def folder(self) -> Path:
        return self.run_dir / SERVER_FOLDER


class ObjectServer:
    """The running server of one run. Stop it; a context manager."""

    def __init__(self, family: Family, child: Child, lock: int) -> None:
        self.child = child
        self._family = family
        self._lock = lock

    def check(self) -> None:
        """Raises ``RoleFailed`` with its last words if it has ended."""
        if self.child in self._family.children and self.child.ended():
            raise RoleFailed(describe(self.child, self._family.reap(self.child)))

    def stop(self) -> None:
        """Nothing of it runs when this returns. Idempotent."""
        if self.child in self._family.children:
            self.child.signal(signal.SIGKILL)
            self._family.reap(self.child)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start(section: StoreSection, home: Home, *, family: Family, pause: Callable[[], None]) -> ObjectServer:
    """Starts the server at ``section.endpoint`` (as ``layout.own_server`` made it) and returns when the run's root can be written.

    ``pause`` is called while it waits and may raise to give up. Raises ``MissingExtra`` without the program, ``RunBusy`` if a server of the
    run lives, ``RoleFailed`` with its last words, ``StoreError`` for a folder that cannot be made; then it does not run.
    """
    program = weed_program()
    folder, ports = home.folder, free_ports(7)
    ports.insert(3, int(section.endpoint.rpartition(":")[2]))
    host = Host(address=LOOPBACK, folder=folder, ports=Ports.of(ports), volumes_max=VOLUMES_MAX)
    lock = _lock(folder, home.run)
    try:
        keys = _make_keys(folder)
        (folder / ENDPOINT).write_text(section.endpoint)
        command = Command(
            name=SERVER_FOLDER,
            argv=server_argv(program, host, volume_mb=VOLUME_MB),
            log=home.run_dir / "logs" / f"{SERVER_FOLDER}.log",
            env=key_variables(keys),
            server=True,
            keep_fds=(lock,),
        )
        server = ObjectServer(family, family.start(command), lock)
        known = volumes_on_disk(folder / "data")
    except OSError as e:
        os.close(lock)
        raise_mapped(e, f"preparing {folder}")
    except BaseException:
        os.close(lock)
        raise
    try:
        _wait(server, pause, lambda: known <= volumes(f"{LOOPBACK}:{host.ports.master}"))
        _wait(server, pause, lambda: _stores(section, home))
    except BaseException:  # a signal too
        server.stop()
        raise
    return server


@contextlib.contextmanager
def reachable(section: StoreSection, home: Home, say: Callable[[str], None]) -> Iterator[StoreSection]:
    """For a command that looks at a run: ``[store]`` with which its objects can be reached, while the block lasts.

    If the run has a server of its own and it lives, that one; else it is started here, and stopped again.
    """
    if section.server == "none":
        yield section
        return
    keys = str(home.folder / KEYS)  # the run's folder may have been moved
    if _lives(home.folder):
        yield replace(section, endpoint=(home.folder / ENDPOINT).read_text(), credentials_file=keys)
        return
    here = replace(section, endpoint=f"http://{LOOPBACK}:{free_ports(1)[0]}", credentials_file=keys)
    say(f"starting the object server of run {home.run} to look")
    with Family(grace_s=0.0) as family, start(here, home, family=family, pause=lambda: None):
        yield here


def _wait(server: ObjectServer, pause: Callable[[], None], ready: Callable[[], bool]) -> None:
    end = time.monotonic() + START_S
    why: StoreError | None = None
    while time.monotonic() < end:
        server.check()
        pause()
        try:
            if ready():
                return
        except StoreError as e:
            why = e
        time.sleep(POLL_S)
    raise RoleFailed(f"{server.child.name} is not ready after {START_S:g} s: {why}; log: {server.child.command.log}")


def _stores(section: StoreSection, home: Home) -> bool:
    """Makes the bucket and an object in it; not before every old volume is known: new ones must not get their numbers."""
    once = replace(section, retries_max=0)
    make_bucket(home.root.removeprefix("s3://").partition("/")[0], settings=once)
    with open_root(home.root, run=home.run, settings=once) as store:
        store.replace(PROBE, b"")
        store.delete([PROBE])
    return True


def _lock(folder: Path, run: str) -> int:
    """A lock that the server inherits: it ends when both are gone, however they end."""
    try:
        (folder / "data").mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as e:
        raise_mapped(e, f"creating {folder}")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        who = os.read(fd, 200).decode(errors="replace")
        os.close(fd)
        raise RunBusy(f"the object server of run {run!r} is running ({who}): wait for its end, or stop it") from None
    me = identity.this_process()
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"started by pid {me.pid} on {me.host}".encode(), 0)
    return fd


def _lives(folder: Path) -> bool:
    try:
        fd = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except OSError as e:
        raise_mapped(e, f"opening {folder / LOCK}")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def _make_keys(folder: Path) -> Credentials:
    """Fresh keys, in a file from which the run's roles read them."""
    keys = Credentials(f"FSREF{secrets.token_hex(8).upper()}", secrets.token_urlsafe(30))
    profile = configparser.ConfigParser()
    profile[KEYS_PROFILE] = {"aws_access_key_id": keys.access_key_id, "aws_secret_access_key": keys.secret_access_key}
    staging = folder / f".{KEYS}.tmp"
    staging.unlink(missing_ok=True)
    fd = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        profile.write(file)
    staging.rename(folder / KEYS)
    return keys
