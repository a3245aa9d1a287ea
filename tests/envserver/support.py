"""A run with its engine and replicas, as the tests of the env server use them."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from fsref.addresses import read
from fsref.config import Config, EnvSection, ModelSection, RunSection, StoreSection, dump
from fsref.episodes import EpisodeClient, Target, Task
from fsref.journal.run import RunInfo, create_run
from fsref.refs import Schema, routed_experts, sampling_mask, top_logprobs
from fsref.store import Store, open_root
from tests.envserver import model_folder

ROOT = Path(__file__).parents[2]
DEADLINE_S = 120.0
"""Generous: machines that run tests are often busy. Nothing waits this long unless it fails."""
EVL = "evl.tests.00000000000000e1"
"""A session that leaves the workers' incarnations alone."""
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 8, "min_p": 0.0, "max_tokens": 6, "logprobs": 3}
SCHEMA = Schema(
    (
        routed_experts(layer_ids=model_folder.MOE_LAYERS, top_k=model_folder.TOP_K, expert_count=model_folder.EXPERTS),
        top_logprobs(),
        sampling_mask(),
    )
)


def until(found: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """Polls until ``found`` gives something true, and returns that."""
    end = time.monotonic() + deadline_s
    while not (value := found()):
        assert time.monotonic() < end, f"{what} within {deadline_s} s"
        time.sleep(0.01)
    return value


async def until_async(found: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """As ``until``, without blocking the event loop."""
    end = time.monotonic() + deadline_s
    while not (value := found()):
        assert time.monotonic() < end, f"{what} within {deadline_s} s"
        await asyncio.sleep(0.01)
    return value


@dataclass
class Replica:
    """One env-server process and its control folder."""

    run: "Run"
    env: str
    number: int
    process: "subprocess.Popen[bytes]"
    control: Path

    def set(self, name: str, text: str = "") -> None:
        (self.control / name).write_text(text)

    def clear(self, *names: str) -> None:
        for name in names:
            (self.control / name).unlink(missing_ok=True)

    def reached(self, name: str) -> bool:
        return (self.control / name).exists()

    @property
    def address(self) -> str:
        record = read(self.run.folder / "envs" / "train" / f"{self.env}.local-{self.number}.address")
        assert record is not None
        return record.address

    @property
    def workers(self) -> list[int]:
        """Pids of its worker processes."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
                command = (stat.parent / "cmdline").read_bytes()
            except OSError:
                continue
            if int(fields[1]) == self.process.pid and b"spawn_main" in command:
                found.append(int(stat.parent.name))
        return found

    @property
    def stopped(self) -> bool:
        """Whether every thread of the process is stopped by a signal."""
        stats = [p.read_text() for p in Path(f"/proc/{self.process.pid}/task").glob("*/stat")]
        return all(s.rpartition(")")[2].split()[0] == "T" for s in stats)

    def stop(self, deadline_s: float = DEADLINE_S) -> int:
        """SIGTERM, and its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(deadline_s)

    @property
    def log(self) -> str:
        return (self.control / "log").read_text(errors="replace")


class HasUrl(Protocol):
    """An engine: where it is."""

    @property
    def url(self) -> str: ...


@dataclass
class Run:
    """A run folder with objects and ledger."""

    folder: Path
    config: Config
    info: RunInfo
    store: Store
    engine: HasUrl
    replicas: list[Replica] = field(default_factory=list)

    def start(self, env: str, number: int = 0) -> Replica:
        """Starts a replica and waits for its address file."""
        control = self.folder / f"control-{env}-{number}-{len(self.replicas)}"
        control.mkdir()
        with (control / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.envserver.serve", str(self.folder / "config.json"), env, str(number), str(control)],
                cwd=ROOT,
                stderr=log,
                stdout=log,
                env={**os.environ, "PYTHONPATH": str(ROOT), "NO_PROXY": "*"},
            )
        replica = Replica(self, env, number, process, control)
        self.replicas.append(replica)
        path = self.folder / "envs" / "train" / f"{env}.local-{number}.address"

        def published() -> bool:
            assert process.poll() is None, f"the env server ended at once:\n{replica.log}"
            record = read(path)
            return record is not None and record.pid == process.pid

        until(published, f"{path.name} of {process.pid}")
        return replica

    def stop(self) -> None:
        for replica in self.replicas:
            if replica.process.poll() is None:
                replica.process.kill()
            replica.process.wait(DEADLINE_S)
        self.store.close()

    def objects(self) -> set[str]:
        """Ids of all objects on disk."""
        return {f"{p.parent.name}/{int(p.stem)}" for p in (self.folder / "obj").glob("*/*.zip")}

    def staging(self) -> list[Path]:
        """Files under ``obj/`` that are no objects."""
        return [p for p in (self.folder / "obj").glob("*/*") if p.suffix != ".zip"]

    def ledger(self, *labels: str) -> Counter[str]:
        """How many objects the journals of env servers with these labels (all, if none) kept, and dropped by reason."""
        counts: Counter[str] = Counter()
        for path in (self.folder / "ledger").glob("env.*.jnl"):
            if labels and not any(path.name.startswith(f"env.{label}-") for label in labels):
                continue
            for line in path.read_bytes().splitlines():
                record = json.loads(line[9:])
                if record["t"] == "keep":
                    counts["kept"] += 1
                elif record["t"] == "drop":
                    counts[record["r"]] += sum(_count(spans) for spans in record["i"].values())
        return counts

    def settled(self, expected: set[str]) -> bool:
        """Whether exactly these objects are left, and no staging file."""
        return self.objects() == expected and not self.staging()

    @property
    def target(self) -> Target:
        return Target(base_url=self.engine.url, model="policy", tokenizer=self.config.model.path)


def server_connections(address: str) -> int:
    """TCP connections that a server on this host holds open at its address."""
    return len(_tcp(address))


def received(address: str) -> int:
    """Bytes that lie at a server's connections, unread by its process."""
    return sum(int(fields[4].partition(":")[2], 16) for fields in _tcp(address))


def _tcp(address: str) -> list[list[str]]:
    port = f"{int(address.rpartition(':')[2]):04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [f for f in lines if f[1].endswith(f":{port}") and f[3] not in ("0A", "06")]  # neither LISTEN nor TIME_WAIT


def _count(spans: str) -> int:
    total = 0
    for span in spans.split(","):
        low, _, high = span.partition("-")
        total += int(high or low) - int(low) + 1
    return total


def make_run(folder: Path, engine: HasUrl, *, envs: tuple[EnvSection, ...], schema: Schema = SCHEMA, model: Path | None = None) -> Run:
    """Creates run.json, a model folder unless one is given, and config.json."""
    model = model or model_folder.make(folder / "model")
    config = Config(
        run=RunSection(id="r1", root=str(folder), run_dir=str(folder / "r1"), fields=tuple(f.name for f in schema.fields)),
        model=ModelSection(path=str(model)),
        store=StoreSection(durability="process"),
        env=envs,
    )
    (folder / "r1").mkdir()
    (folder / "r1" / "config.json").write_bytes(dump(config))
    store = open_root(str(folder), run="r1", create=True)
    return Run(folder / "r1", config, create_run(store, "r1", schema), store, engine)


def source(name: str, **kwargs: Any) -> EnvSection:
    return msgspec.convert({"name": name, "taskset": "tests.envserver.tasks", "health_s": 10.0, **kwargs}, EnvSection)


def task(**data: Any) -> Task:
    """One task of the taskset in ``tasks.py``."""
    return Task(index=0, key="k", data={"prompt": "please write only vowels: hello", **data})


Abandoned = list[tuple[str, dict[str, int]]]


def with_client(
    run: Run, env: str, body: Callable[[EpisodeClient], Coroutine[Any, Any, Any]], *, abandoned: Abandoned | None = None, session: str = EVL
) -> Any:
    """Runs ``body`` with a started client of a source; what the client abandons is appended to ``abandoned``."""
    seen: Abandoned = abandoned if abandoned is not None else []

    def note(request_id: str, objects: Mapping[str, int]) -> None:
        seen.append((request_id, dict(objects)))

    async def go() -> Any:
        table = next(e for e in run.config.env if e.name == env)
        async with EpisodeClient(
            env=table, envs_dir=run.folder / "envs", run=run.info.run, run_uuid=run.info.run_uuid, session=session, abandoned=note
        ) as client:
            await client.start(deadline_s=DEADLINE_S)
            async with asyncio.timeout(DEADLINE_S):
                return await body(client)

    return asyncio.run(go())
