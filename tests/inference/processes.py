"""An inference role in its own process, as the launcher starts it."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from fsref import config as settings

START_S = 240


def write_config(path: Path, model: Path, port: int, **sections: Any) -> Path:
    data: dict[str, Any] = {
        "run": {
            "id": "r",
            "root": str(path.parent),
            "run_dir": str(path.parent),
            "fields": ["routed_experts", "top_logprobs", "sampling_mask"],
        },
        "model": {"path": str(model)},
        "env": [{"name": "count"}],
        "inference": {"address": f"http://127.0.0.1:{port}", "context_max": 256, "concurrent_max": 8},
    }
    for name, values in sections.items():
        data[name] = {**data.get(name, {}), **values}
    path.write_bytes(settings.dump(settings.build(data)))
    return path


class Role:
    """The process and a client of it."""

    def __init__(self, config: Path) -> None:
        self.log = config.with_suffix(".log")
        with self.log.open("wb") as log:
            argv = [sys.executable, "-m", "fsref", "inference", "--config", str(config)]
            self.process = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT)
        self.url = settings.parse(config.read_bytes()).inference.address
        self.client = httpx.Client(base_url=self.url, trust_env=False, timeout=60)

    def wait_healthy(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            with contextlib.suppress(httpx.TransportError):
                if self.client.get("/health").status_code == 200:
                    return
            time.sleep(0.1)  # a poll of another process, not a synchronisation
        raise AssertionError(f"not healthy after {START_S} s: {self.log.read_text()[-4000:]}")

    def stop(self, sig: int = signal.SIGTERM) -> int:
        self.process.send_signal(sig)
        return self.process.wait(60)

    def close(self) -> None:
        """In order, because a vLLM that is killed leaves its engine's processes behind."""
        self.client.close()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait(60)


@contextlib.contextmanager
def role(config: Path, *, wait: bool = True) -> Iterator[Role]:
    running = Role(config)
    try:
        if wait:
            running.wait_healthy()
        yield running
    finally:
        running.close()
