"""A pool of several hosts, each a network namespace with a folder as its disk: what a host that is cut off costs, and what is left."""

import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from fsref.journal.identity import process_start
from tests.support import needs
from tests.support.hosts import Host, hosts
from tests.support.s3servers import CREDENTIALS, weed_program

COUNT = 60
"""Objects: enough that none of three hosts has no share of them."""
ENV = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")} | CREDENTIALS | {"AWS_EC2_METADATA_DISABLED": "true"}
DEADLINE_S = 240.0


class Pool:
    """The hosts of a pool and their folders."""

    def __init__(self, hosts: list[Host], scratch: Path) -> None:
        self.hosts = hosts
        self.folders = {h.name: scratch / h.name for h in hosts}

    def run(self, host: Host, *args: str) -> "subprocess.CompletedProcess[str]":
        command = [*host.command, sys.executable, "-m", "fsref", "pool", *args]
        return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, env=ENV)

    def start(self, replication: str) -> None:
        head, *members = self.hosts
        sizes = ("--volumes-max", "40")
        first = ("start", "--folder", str(self.folders[head.name]), "--address", head.address, "--replication", replication)
        done = self.run(head, *first, "--volume-mb", "64", *sizes)
        assert done.returncode == 0, done.stderr + done.stdout
        for host in members:
            done = self.run(
                host, "join", "--folder", str(self.folders[host.name]), "--address", host.address, "--head", head.address, *sizes
            )
            assert done.returncode == 0, done.stderr + done.stdout

    def health(self) -> dict[str, Any]:
        head = self.hosts[0]
        done = self.run(head, "health", "--folder", str(self.folders[head.name]), "--nodes", str(len(self.hosts)), "--json")
        found: dict[str, Any] = json.loads(done.stdout)
        assert done.returncode == int(not found["ok"])
        return found

    def pids(self) -> list[int]:
        states = [json.loads(f.read_bytes()) for folder in self.folders.values() if (f := folder / "pool.json").exists()]
        return [p["pid"] for s in states for p in s["programs"]]

    def stop(self) -> None:
        for host in reversed(self.hosts):
            if self.folders[host.name].is_dir():
                done = self.run(host, "stop", "--folder", str(self.folders[host.name]), "--grace-s", "1")
                assert done.returncode == 0, done.stderr


class Client:
    """``tests.pool.client`` on a host."""

    def __init__(self, host: Host) -> None:
        command = [*host.command, sys.executable, "-m", "tests.pool.client", str(COUNT)]
        env = ENV | {"AWS_ENDPOINT_URL_S3": f"http://{host.address}:9336"}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def answer(self, command: str = "") -> dict[str, Any]:
        asked, said = self.process.stdin, self.process.stdout
        assert asked is not None
        assert said is not None
        if command:
            asked.write(command + "\n")
            asked.flush()
        line = said.readline()
        assert line, "the client ended"
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        pipes: list[IO[str] | None] = [self.process.stdin, self.process.stdout]
        for pipe in pipes:
            assert pipe is not None
            pipe.close()
        self.process.wait(DEADLINE_S)


@contextlib.contextmanager
def pool_of(scratch: Path, replication: str) -> Iterator[tuple[Pool, Client]]:
    weed_program()
    needs.root()
    with hosts(3) as found:
        pool = Pool(found, scratch)
        try:
            pool.start(replication)
            client = Client(found[0])
            try:
                yield pool, client
            finally:
                client.close()
        finally:
            pids = pool.pids()
            pool.stop()
            assert pids
            assert [pid for pid in pids if process_start(pid) is not None] == []
            assert pool.pids() == []


def loaded(pool: Pool) -> Host:
    """The member with the most volumes."""
    volumes = {d["address"].partition(":")[0]: d["volumes"] for d in pool.health()["disks"]}
    return max(pool.hosts[1:], key=lambda h: int(volumes[h.address]))


@pytest.mark.slow
def test_without_copies_what_lies_on_a_host_that_is_cut_off_is_unavailable_and_never_zeros(tmp_path: Path) -> None:
    with pool_of(tmp_path, "000") as (pool, client):
        assert client.answer() == {"put": COUNT}
        assert Counter(client.answer("read")["found"]) == {"equal": COUNT}
        health = pool.health()
        assert health["ok"], health
        assert len(health["disks"]) == 3
        assert all(d["bytes_total"] >= d["bytes_free"] > 0 for d in health["disks"])
        lost = loaded(pool)
        lost.cut_off()
        found = Counter(client.answer("read")["found"])
        assert set(found) == {"equal", "StoreUnavailable"}, found
        assert found.total() == COUNT
        health = pool.health()
        assert not health["ok"], health
        assert any("2 of 3 nodes answer" in p for p in health["problems"]), health
        lost.plug_in()
        back = client.answer("read")["found"]
        end = 20
        while set(back) != {"equal"} and end:
            back, end = client.answer("read")["found"], end - 1
        assert Counter(back) == {"equal": COUNT}, "the disk is back and its objects are not"


@pytest.mark.slow
def test_with_a_copy_on_another_host_every_object_is_read_while_one_is_stopped_and_the_others_go_on(tmp_path: Path) -> None:
    with pool_of(tmp_path, "001") as (pool, client):
        assert client.answer() == {"put": COUNT}
        lost = loaded(pool)
        done = pool.run(lost, "stop", "--folder", str(pool.folders[lost.name]), "--grace-s", "1")
        assert done.returncode == 0, done.stderr
        assert Counter(client.answer("read")["found"]) == {"equal": COUNT}
        assert client.answer("put")["put"] == COUNT + 1
        health = pool.health()
        assert any("lack copies" in p for p in health["problems"]), health
