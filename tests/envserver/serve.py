"""Runs one replica with faults that a test sets by files in a control folder. usage: serve.py CONFIG ENV REPLICA CONTROL"""

import asyncio
import faulthandler
import functools
import logging
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fsref.config import Config, load
from fsref.envserver import install, resources, worker
from fsref.envserver.main import serve
from fsref.errors import FsrefError, StoreFull
from fsref.store import Buffer, Entry, ObjectFile, Store

DEADLINE_S = 60.0


class ControlledStore(Store):
    """A store whose puts of objects can be held (``hold-put``) or refused (``fail-put``: how many more succeed)."""

    def __init__(self, inner: Store, control: Path) -> None:
        self.inner, self.control = inner, control
        self.url, self.posix_path = inner.url, inner.posix_path

    def _spend(self, name: str) -> None:
        limit = self.control / "fail-put"
        if limit.exists():
            left = int(limit.read_text())
            if left == 0:
                raise StoreFull(f"no space for {name}")
            limit.write_text(str(left - 1))

    def put(self, name: str, buffers: Sequence[Buffer], *, durability: Any = "node") -> None:
        if name.endswith(".zip"):
            self._spend(name)
            if (self.control / "hold-put").exists():
                (self.control / "in-put").touch()
                end = time.monotonic() + DEADLINE_S
                while (self.control / "hold-put").exists() and time.monotonic() < end:
                    time.sleep(0.005)
        self.inner.put(name, buffers, durability=durability)

    def replace(self, name: str, data: bytes) -> None:
        self.inner.replace(name, data)

    def open(self, name: str, *, byte_count: int | None = None) -> ObjectFile:
        return self.inner.open(name, byte_count=byte_count)

    def delete(self, names: Sequence[str]) -> Any:
        return self.inner.delete(names)

    def list(self, prefix: str) -> Iterator[Entry]:
        return self.inner.list(prefix)

    def close(self) -> None:
        self.inner.close()


def controlled(control: Path, settings: resources.Settings) -> None:
    """The setup of every process: fsref's own, a controlled store, a last delta that can be held
    (``hold-flush``), and a reply that no codec holds (``break-reply``)."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # so that a test that hangs can be asked why
    install.install(settings)
    opened = resources.open_store
    if not isinstance(opened, functools.partial):
        resources.open_store = functools.partial(_open, opened, control)
        setattr(worker.KeepingServer, "_send", _held_send(control, worker.KeepingServer._send))  # noqa: B010
        setattr(worker.KeepingServer, "_run", _broken_reply(control, worker.KeepingServer._run))  # noqa: B010


def _open(inner: Any, control: Path, config: Config) -> Store:
    return ControlledStore(inner(config), control)


def _held_send(control: Path, inner: Any) -> Any:
    async def send(self: Any, wrapped: Any, frames: list[Any], *args: Any, **kwargs: Any) -> Any:
        if bytes(frames[2]) == b"delta" and b"fsref" in bytes(frames[3]) and (control / "hold-flush").exists():
            (control / "in-flush").touch()
            while (control / "hold-flush").exists():
                await asyncio.sleep(0.005)
        return await inner(self, wrapped, frames, *args, **kwargs)

    return send


def _broken_reply(control: Path, inner: Any) -> Any:
    async def run(self: Any, *args: Any) -> Any:
        response = await inner(self, *args)
        if (control / "break-reply").exists():
            response.head = {**(response.head or {}), "no-codec-holds": 1 << 80}
        return response

    return run


def main() -> int:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(process)d %(levelname)s %(name)s: %(message)s")
    config, env, replica, control = sys.argv[1:]
    try:
        serve(load(config), env=env, replica=int(replica), setup=functools.partial(controlled, Path(control)))
    except FsrefError as e:
        sys.stderr.write(f"error: {e}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
