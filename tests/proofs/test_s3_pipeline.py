"""The main job, small, with its objects in a bucket: on SeaweedFS through obstore and through s3fs, and on moto's server."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from fsref.store import Credentials, Store, open_root
from tests.proofs import test_pipeline as proofs
from tests.proofs.pipeline import ROOT, Watched
from tests.support.faultproxy import FaultProxy
from tests.support.s3servers import ACCESS_KEY, BUCKET, CREDENTIALS, SECRET_KEY, S3Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
CASES = {"seaweedfs obstore": ("weed", "auto"), "seaweedfs s3fs": ("weed", "fsspec"), "moto obstore": ("moto", "auto")}
CLIENT = CREDENTIALS | {"AWS_EC2_METADATA_DISABLED": "true"}


class Run(NamedTuple):
    """A finished run in a bucket."""

    watched: Watched
    server: S3Server
    proxy: FaultProxy
    prefix: str


@pytest.fixture(scope="module", params=CASES)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """The roles go through a proxy that counts; the copies that the proofs compare with are taken past it."""
    name, driver = CASES[request.param]
    server: S3Server = request.getfixturevalue(name)
    prefix = f"main-{os.urandom(4).hex()}"
    root = f"s3://{BUCKET}/{prefix}"

    def opened() -> Store:
        return open_root(root, run="proof", settings=server.settings(), credentials=Credentials(ACCESS_KEY, SECRET_KEY))

    with FaultProxy(server) as proxy:
        options = ["--run.root", root, "--store.endpoint", proxy.endpoint, "--store.driver", driver]
        watched = proofs.proved(tmp_path_factory.mktemp("s3"), options=options, env=CLIENT, opened=opened)
        yield Run(watched, server, proxy, prefix)


def test_the_run_ends_proved_and_leaves_nothing_in_the_bucket(run: Run) -> None:
    assert "PROVED" in run.watched.output
    assert run.server.keys(f"{run.prefix}/proof/obj/") == []
    assert sum(i.n for i in run.watched.infos) == len(proofs.references(run.watched)) > 0
    assert run.server.keys(f"{run.prefix}/proof/probe/") == []


def test_packed_tensors_are_byte_for_byte_those_of_inline_transport(run: Run) -> None:
    proofs.test_packed_tensors_are_byte_for_byte_those_of_inline_transport(run.watched)


def test_with_replay_no_row_routes_differently(run: Run) -> None:
    proofs.test_with_replay_no_row_routes_differently_from_what_the_server_logged(run.watched)


def test_requests_are_what_is_promised(run: Run) -> None:
    """Two data ranks; the last step's checkpoint removes everything that was trained."""
    audit = json.loads(command(run, "audit", "proof", "--json").stdout)
    requests, ranks, workers = run.proxy.requests, 2, 2
    puts = Counter(r.key for r in requests if r.kind == "PUT" and re.search(r"/obj/[^/]+/[0-9]{10}\.zip$", r.key))
    assert len(puts) == audit["kept"]
    assert puts.total() <= audit["kept"] + 8  # a server that makes its first volumes says 500 for a moment, and is asked again
    objects, steps = run.proxy.counts(r"/obj/.*\.zip"), run.proxy.counts("/steps/")
    shipped = sum(i.n for i in run.watched.infos)
    assert shipped <= objects["GET"] <= 2 * shipped  # a range a sample, and one for the routing rows of a padding dummy
    assert objects["HEAD"] == 0
    assert steps["PUT"] == proofs.STEPS * (ranks + 1)
    assert run.proxy.counts(r"/steps/.*\.msgpack")["GET"] == proofs.STEPS * ranks
    processes = workers + 2
    # each one's ledger is opened and closed; drops may go apart from their step
    assert run.proxy.counts("/ledger/")["PUT"] <= 2 * proofs.STEPS + 2 * processes + 3
    # the ranks' shares, what the orchestrator dropped, and what each process tries when it opens the root
    assert run.proxy.counts()["DELETE_MANY"] <= ranks + proofs.STEPS + 2 * processes


def command(run: Run, *args: str) -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, **CLIENT, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    where = run.watched.run_dir.parent.parent
    return subprocess.run(
        [sys.executable, "-m", "fsref", *args], cwd=where, env=env, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_commands_look_into_it_and_clear_it_away(run: Run) -> None:
    looked = command(run, "inspect", "step_000001", "--run", "proof", "--json")
    assert looked.returncode == 0, looked.stderr
    assert json.loads(looked.stdout)["states"] == {"removed": run.watched.infos[1].n}
    assert command(run, "inspect", "--run", "proof").returncode == 0
    for name in ("audit", "recover", "close"):
        done = command(run, name, "proof", "--json")
        assert (done.returncode, json.loads(done.stdout)["verdict"]) == (0, "PROVED"), done.stderr
    config = run.watched.run_dir / "config.json"
    doctor = command(run, "doctor", "--config", str(config), "--json")
    assert json.loads(doctor.stdout)["ok"], doctor.stdout
    purged = command(run, "purge", "proof", "--run-dir")
    assert purged.returncode == 0, purged.stderr
    assert run.server.keys(f"{run.prefix}/proof/") == []
    left = {p.name for p in Path(run.watched.run_dir).iterdir()} if run.watched.run_dir.exists() else set()
    assert left <= {"routes"}
