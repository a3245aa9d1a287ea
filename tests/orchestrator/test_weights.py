"""New weights: which folder counts, what inference is told, who waits."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fsref.errors import ConfigError, RoleFailed
from fsref.orchestrator.weights import ATTEMPTS_MAX, InferenceControl, Version, newest, watch


def folder(root: Path, version: int, *, stable: bool = True) -> Path:
    path = root / f"step_{version:06d}"
    path.mkdir(parents=True)
    if stable:
        (path / "STABLE").touch()
    return path


class Server(ThreadingHTTPServer):
    """Records calls and answers with ``status``."""

    daemon_threads = True

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.status = 200
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                server.calls.append((self.path, json.loads(body)))
                self.send_response(server.status)
                self.end_headers()
                self.wfile.write(b"a reason")

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def test_the_newest_complete_folder_counts(tmp_path: Path) -> None:
    assert newest(tmp_path / "weights") is None
    folder(tmp_path, 2)
    folder(tmp_path, 10)
    folder(tmp_path, 11, stable=False)
    (tmp_path / "step_x").mkdir()
    found = newest(tmp_path)
    assert found is not None
    assert (found.version, found.path.name) == (10, "step_000010")


def test_inference_loads_the_folder_and_then_forgets_prefixes(tmp_path: Path, server: Server) -> None:
    InferenceControl(server.address).load(tmp_path / "step_000003")
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "step_000003")}}
    assert server.calls == [("/collective_rpc", reload), ("/reset_prefix_cache", {})]


def test_a_proxy_of_the_environment_is_not_used(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    InferenceControl(server.address).load(tmp_path)
    assert len(server.calls) == 2


def test_a_refusal_says_what_was_answered(tmp_path: Path, server: Server) -> None:
    server.status = 500
    with pytest.raises(OSError, match="/collective_rpc answered 500: a reason"):
        InferenceControl(server.address).load(tmp_path)
    assert len(server.calls) == 1


def test_an_address_without_a_scheme_is_refused() -> None:
    with pytest.raises(ConfigError, match="http://host:port"):
        InferenceControl("127.0.0.1:8000")


def test_watching_brings_each_version_once_and_skips_to_the_newest(tmp_path: Path) -> None:
    loaded: list[str] = []

    async def work() -> int:
        version = Version()
        folder(tmp_path, 1)
        folder(tmp_path, 2)
        task = asyncio.create_task(watch(tmp_path, lambda path: loaded.append(path.name), version, poll_s=0.001))
        await version.at_least(2, deadline_s=30)
        folder(tmp_path, 3)
        await version.at_least(3, deadline_s=30)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return version.current

    assert asyncio.run(work()) == 3
    assert loaded == ["step_000002", "step_000003"]


def test_a_version_counts_only_after_inference_has_it(tmp_path: Path) -> None:
    seen: list[int] = []

    async def work() -> None:
        version = Version()
        folder(tmp_path, 1)
        task = asyncio.create_task(watch(tmp_path, lambda _: seen.append(version.current), version, poll_s=0.001))
        await version.at_least(1, deadline_s=30)
        task.cancel()

    asyncio.run(work())
    assert seen == [0]


def test_a_load_that_fails_is_tried_again_and_then_ends_the_run(tmp_path: Path) -> None:
    tries: list[str] = []

    def load(path: Path) -> None:
        tries.append(path.name)
        raise ConnectionRefusedError("connection refused")

    folder(tmp_path, 1)
    with pytest.raises(RoleFailed, match=rf"step_000001 in {ATTEMPTS_MAX} attempts: connection refused"):
        asyncio.run(watch(tmp_path, load, Version(), poll_s=0.001))
    assert tries == ["step_000001"] * ATTEMPTS_MAX


def test_a_load_that_fails_once_finds_the_folder_that_came_meanwhile(tmp_path: Path) -> None:
    tries: list[str] = []

    def load(path: Path) -> None:
        tries.append(path.name)
        if len(tries) == 1:
            folder(tmp_path, 2)
            raise OSError("no such folder: it was pruned")

    async def work() -> None:
        version = Version()
        task = asyncio.create_task(watch(tmp_path, load, version, poll_s=0.001))
        await version.at_least(2, deadline_s=30)
        task.cancel()

    folder(tmp_path, 1)
    asyncio.run(work())
    assert tries == ["step_000001", "step_000002"]


def test_waiting_for_weights_has_an_end() -> None:
    with pytest.raises(RoleFailed, match=r"weights of version 3 did not come.*version 1 is the newest"):
        asyncio.run(Version(1).at_least(3, deadline_s=0.01))


def test_a_version_that_is_there_needs_no_wait() -> None:
    asyncio.run(Version(1).at_least(-1, deadline_s=0.01))
    asyncio.run(Version(1).at_least(1, deadline_s=0.01))
