"""New weights: from the trainer's folders to inference, and which version samples now.

Owns the watch over ``<run_dir>/weights``, the reload calls, and the wait for a version. Refuses to write or remove weight folders.

A folder ``step_000012`` holds version 12, that is the weights after 12 optimiser steps; it counts once its empty file ``STABLE`` is
there. Version 0 is the initial model. Calls go straight to the server: no proxy is ever used.
"""

import asyncio
import http.client
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from fsref.errors import ConfigError, RoleFailed

_log = logging.getLogger(__name__)
_FOLDER: Final = re.compile(r"step_([0-9]{6,9})", re.ASCII)
ATTEMPTS_MAX: Final = 4
"""Tries for one version, before the run ends; the first after a failure may find a newer folder."""
ANSWER_BYTES_MAX: Final = 1 << 20


class Stable(NamedTuple):
    """A complete weight folder."""

    version: int
    path: Path


def newest(folder: Path) -> Stable | None:
    """The complete weight folder of the highest version; None if there is none yet."""
    found: Stable | None = None
    try:
        entries = list(folder.iterdir())
    except FileNotFoundError:
        return None
    for entry in entries:
        match = _FOLDER.fullmatch(entry.name)
        if match and (found is None or int(match[1]) > found.version) and (entry / "STABLE").exists():
            found = Stable(int(match[1]), entry)
    return found


class InferenceControl:
    """The two calls that bring new weights into a vLLM server with its development API (and into the demo server). Blocking."""

    def __init__(self, address: str, *, timeout_s: float = 300.0) -> None:
        url = urlsplit(address)
        if url.scheme not in {"http", "https"} or not url.hostname:
            raise ConfigError(f"inference.address {address!r} is not of the form http://host:port")
        self._address = address
        self._url = url
        self._timeout_s = timeout_s

    def load(self, folder: Path) -> None:
        """Loads a weight folder and forgets cached prefixes of the old weights. Raises ``OSError`` for a server that does not answer
        or refuses."""
        self._post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder.absolute())}})
        self._post("/reset_prefix_cache", {})

    def _post(self, path: str, body: Mapping[str, Any]) -> None:
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        assert self._url.hostname
        connection = kind(self._url.hostname, self._url.port, timeout=self._timeout_s)
        try:
            connection.request("POST", f"{self._url.path.rstrip('/')}{path}", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read(ANSWER_BYTES_MAX)
        except http.client.HTTPException as e:
            raise OSError(f"{self._address}{path}: {e!r}") from e
        finally:
            connection.close()
        if answer.status != 200:
            raise OSError(f"{self._address}{path} answered {answer.status}: {text[:200].decode(errors='replace')}")


def everywhere(servers: Sequence[InferenceControl]) -> Callable[[Path], None]:
    """One load for all servers of a run, side by side; done when every one has the weights. It raises the first one's ``OSError``."""

    def load(folder: Path) -> None:
        with ThreadPoolExecutor(len(servers), thread_name_prefix="fsref-weights") as threads:
            loads = [threads.submit(s.load, folder) for s in servers]
        for done in loads:
            done.result()

    return load


class Version:
    """The version that inference samples with; others wait for it. One event loop."""

    def __init__(self, current: int = 0) -> None:
        self.current = current
        """Inference has it: what is dispatched now is sampled by it or a newer one."""
        self.offered = current
        """The newest that inference may have by now."""
        self._changed = asyncio.Condition()

    async def set(self, version: int) -> None:
        """Announces a newer version."""
        async with self._changed:
            self.current = max(version, self.current)
            self.offered = max(version, self.offered)
            self._changed.notify_all()

    async def at_least(self, version: int, *, deadline_s: float) -> None:
        """Waits until samples are of ``version`` or newer. Raises ``RoleFailed`` after ``deadline_s`` seconds."""
        try:
            async with asyncio.timeout(deadline_s), self._changed:
                await self._changed.wait_for(lambda: self.current >= version)
        except TimeoutError as e:
            raise RoleFailed(
                f"weights of version {version} did not come within orchestrator.weights_wait_s = {deadline_s:g} s, version {self.current}"
                " is the newest: see the trainer's log"
            ) from e


async def watch(folder: Path, load: Callable[[Path], None], version: Version, *, poll_s: float) -> None:
    """Brings every new version into inference, until it is cancelled. Skips to the newest where several came at once.

    Raises ``RoleFailed`` if inference refuses a version ``ATTEMPTS_MAX`` times.
    """
    failures = 0
    while True:
        found = await asyncio.to_thread(newest, folder)
        if found is not None and found.version > version.current:
            version.offered = max(version.offered, found.version)
            try:
                await asyncio.to_thread(load, found.path)
            except OSError as e:
                failures += 1
                _log.warning("weights %s were not loaded (attempt %d of %d): %s", found.path.name, failures, ATTEMPTS_MAX, e)
                if failures >= ATTEMPTS_MAX:
                    raise RoleFailed(f"inference did not load {found.path} in {failures} attempts: {e}: see its log") from e
            else:
                failures = 0
                await version.set(found.version)
        await asyncio.sleep(poll_s * 2**failures)
