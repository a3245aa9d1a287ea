"""Which inference servers a run has."""

import asyncio
import threading
from pathlib import Path

import pytest

from fsref.addresses import Address, here, inference_path, publish
from fsref.config import Config, InferenceSection, OrchestratorSection, RunSection
from fsref.errors import RoleFailed
from fsref.journal import RunInfo, create_run
from fsref.orchestrator.servers import find_servers
from fsref.orchestrator.weights import InferenceControl, everywhere
from fsref.refs import Schema, top_logprobs
from fsref.store import open_root


@pytest.fixture
def info(tmp_path: Path) -> RunInfo:
    with open_root(str(tmp_path), run="r1", create=True) as store:
        return create_run(store, "r1", Schema((top_logprobs(),)))


def config(tmp_path: Path, *, servers: int, wait_s: float = 60.0) -> Config:
    return Config(
        run=RunSection(id="r1", root=str(tmp_path), run_dir=str(tmp_path / "r1"), attempt="7.1"),
        inference=InferenceSection(address="http://10.0.0.9:8000", servers=servers),
        orchestrator=OrchestratorSection(replica_wait_s=wait_s),
    )


def server(info: RunInfo, node: str, attempt: str = "7.1") -> Address:
    return here(run="r1", run_uuid=info.run_uuid, address=f"http://{node}:8000", label="inference-0", node=node, attempt=attempt)


def test_one_server_is_the_one_that_the_config_names(tmp_path: Path, info: RunInfo) -> None:
    found = asyncio.run(find_servers(config(tmp_path, servers=0), info))
    assert (found.addresses, dict(found.by_node)) == (("http://10.0.0.9:8000",), {})


def test_the_servers_of_a_job_are_waited_for_and_known_by_node(tmp_path: Path, info: RunInfo) -> None:
    run_dir = tmp_path / "r1"
    publish(inference_path(run_dir, "n1"), server(info, "n1"))
    publish(inference_path(run_dir, "n2"), server(info, "n2", attempt="7.0"))  # of the start before

    async def go() -> object:
        waiting = asyncio.create_task(find_servers(config(tmp_path, servers=2), info))
        await asyncio.sleep(0)
        assert not waiting.done()
        publish(inference_path(run_dir, "n2"), server(info, "n2"))
        return await waiting

    found = asyncio.run(go())
    assert getattr(found, "by_node", None) == {"n1": "http://n1:8000", "n2": "http://n2:8000"}


def test_a_server_that_does_not_publish_is_named(tmp_path: Path, info: RunInfo) -> None:
    publish(inference_path(tmp_path / "r1", "n1"), server(info, "n1"))
    with pytest.raises(RoleFailed, match=r"2 inference servers needed within 0\.3 s, 1 are published in .*/r1/inference \(n1\)"):
        asyncio.run(find_servers(config(tmp_path, servers=2, wait_s=0.3), info))


class Control(InferenceControl):
    """Loads by meeting the others: alone it would wait for ever."""

    def __init__(self, meeting: threading.Barrier, *, fails: bool = False) -> None:
        super().__init__("http://127.0.0.1:1")
        self._meeting, self._fails = meeting, fails

    def load(self, folder: Path) -> None:
        self._meeting.wait(60)
        if self._fails:
            raise OSError(f"{folder} was refused")


def test_weights_are_loaded_by_all_servers_side_by_side(tmp_path: Path) -> None:
    meeting = threading.Barrier(3)
    everywhere([Control(meeting) for _ in range(3)])(tmp_path)
    with pytest.raises(OSError, match="was refused"):
        everywhere([Control(meeting), Control(meeting, fails=True), Control(meeting)])(tmp_path)
