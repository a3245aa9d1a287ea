"""Two clients of one network filesystem: two FUSE mounts with caches of their own, as two nodes have, of one server on loopback."""

import contextlib
import itertools
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from tests.support import disks, needs
from tests.support.ports import free_ports
from tests.support.s3servers import weed_program

DEADLINE_S: Final = 120.0
_numbers = itertools.count()


def _until(found: Callable[[], bool], what: str, *, process: "subprocess.Popen[bytes]", log: Path) -> None:
    end = time.monotonic() + DEADLINE_S
    while not found():
        assert process.poll() is None, f"{what}: the program ended:\n{log.read_text(errors='replace')[-2000:]}"
        assert time.monotonic() < end, f"{what} within {DEADLINE_S} s:\n{log.read_text(errors='replace')[-2000:]}"
        time.sleep(0.02)


class Node:
    """One mount: what a node sees of the filesystem."""

    def __init__(self, name: str, folder: Path, *, filer: str, scratch: Path) -> None:
        self.name, self.folder = name, folder
        folder.mkdir()
        cache = scratch / f"cache-{name}"
        cache.mkdir()
        self._log = scratch / f"{name}.log"
        self._socket = Path(f"/tmp/fsref-mount-{os.getpid()}-{next(_numbers)}.sock")
        with self._log.open("wb") as log:
            self._mount = subprocess.Popen(
                [weed_program(), "mount", f"-filer={filer}", f"-dir={folder}", f"-cacheDir={cache}", f"-localSocket={self._socket}"],
                stdout=log,
                stderr=log,
            )
        _until(lambda: os.path.ismount(folder), f"the mount of {name}", process=self._mount, log=self._log)

    @property
    def prefix(self) -> list[str]:
        """Runs a command under the hostname of this node."""
        return ["unshare", "--uts", "sh", "-c", f'hostname {self.name}; exec "$@"', "sh"]

    def lose(self) -> None:
        """The node's client is gone, with everything that it had not sent. Its programs find a dead mount; kill them next."""
        self._mount.kill()
        self._mount.wait(DEADLINE_S)
        subprocess.run(["umount", "--lazy", str(self.folder)], check=False, capture_output=True)
        self._socket.unlink(missing_ok=True)


class Server:
    """A filer with its volumes."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        master, master_grpc, volume, volume_grpc, filer, filer_grpc = free_ports(6)
        self._url, self.filer = f"http://127.0.0.1:{filer}/", f"127.0.0.1:{filer}.{filer_grpc}"
        data = scratch / "data"
        data.mkdir(parents=True)
        options = {
            "dir": data, "ip": "127.0.0.1", "ip.bind": "127.0.0.1", "filer": "true", "filer.localSocket": scratch / "filer.sock",
            "master.port": master, "master.port.grpc": master_grpc, "master.volumeSizeLimitMB": 128, "master.telemetry": "false",
            "master.electionTimeout": "1s",
            "volume.port": volume, "volume.port.grpc": volume_grpc, "volume.max": 16, "volume.preStopSeconds": 0,
            "filer.port": filer, "filer.port.grpc": filer_grpc,
        }  # fmt: skip
        log_path = scratch / "server.log"
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [weed_program(), "server", *(f"-{k}={v}" for k, v in options.items())], stdout=log, stderr=log, cwd=scratch
            )
        _until(self._answers, "the filer", process=self._process, log=log_path)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self._url, timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def node(self, name: str) -> Node:
        """One more client."""
        number = next(_numbers)
        return Node(name, self._scratch / f"{name}-{number}", filer=self.filer, scratch=self._made(number))

    def _made(self, number: int) -> Path:
        folder = self._scratch / f"node-{number}"
        folder.mkdir()
        return folder

    def stop(self) -> None:
        """Kills it: an orderly end takes long, and its data is thrown away."""
        self._process.kill()
        self._process.wait(DEADLINE_S)


@contextlib.contextmanager
def server(scratch: Path) -> Iterator[Server]:
    """A filer on loopback; skips on a machine without FUSE or the program."""
    needs.fuse()
    scratch.mkdir(parents=True, exist_ok=True)
    disks.own_mounts()
    made = Server(scratch)
    try:
        yield made
    finally:
        made.stop()
