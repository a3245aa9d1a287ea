"""Command lines of a pool's servers and what is made of a master's answers; no server runs here."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fsref.errors import ConfigError, StoreUnavailable
from fsref.pool import Host, Ports, check, gateway_argv, head_argv, server_argv, volume_argv, volumes_on_disk
from fsref.pool.commands import REPLICATIONS, address_of


def host(folder: str = "/data/pool", **values: object) -> Host:
    return Host(**{"address": "10.0.0.1", "folder": Path(folder), "ports": Ports.at(9333), **values})  # type: ignore[arg-type]


def test_every_server_binds_the_nodes_own_address_and_stores_below_its_folder() -> None:
    lines = [
        head_argv("weed", host(), replication="001", volume_mb=512),
        volume_argv("weed", host(), master="10.0.0.2:9333"),
        gateway_argv("weed", host(), filer="10.0.0.2:9335"),
        server_argv("weed", host(), volume_mb=512),
    ]
    for line in lines:
        flags = dict(a.removeprefix("-").split("=", 1) for a in line[2:])
        assert (flags["ip"], flags["ip.bind"]) == ("10.0.0.1", "10.0.0.1")
        assert all(v.startswith("/data/pool/") for k, v in flags.items() if k == "dir" or k.endswith("Socket"))
        assert not any("key" in name.lower() for name in flags), "keys are passed by environment"


def test_the_placement_is_the_masters_and_the_filers() -> None:
    line = head_argv("weed", host(), replication="010", volume_mb=512)
    assert {"-master.defaultReplication=010", "-filer.defaultReplicaPlacement=010", "-master.volumeSizeLimitMB=512"} <= set(line)


def test_ports_follow_from_the_first_and_others_are_named_with_both() -> None:
    ports = Ports.at(9333)
    assert (ports.s3, ports.master_grpc, ports.s3_grpc) == (9336, 19333, 19336)
    assert address_of("h", ports.master, ports.master_grpc) == "h:9333"
    assert address_of("h", 4000, 4001) == "h:4000.4001"
    for first in (80, 60_000):
        with pytest.raises(ConfigError, match="first port"):
            Ports.at(first)


def test_placements_say_how_many_copies_they_make() -> None:
    assert {name: 1 + sum(map(int, name)) for name in REPLICATIONS} == REPLICATIONS


def test_volumes_of_a_folder_are_known_by_their_index_files(tmp_path: Path) -> None:
    for name in ("7.idx", "bucket_12.idx", "a_b_3.idx", "x.idx", "9.dat"):
        (tmp_path / name).touch()
    assert volumes_on_disk(tmp_path) == {7, 12, 3}


class Answers(BaseHTTPRequestHandler):
    """A master and one of its two volume servers; the other one is gone."""

    def do_GET(self) -> None:
        here = self.headers["Host"]
        gone = "127.0.0.1:9"
        copy = {"ReplicaPlacement": {"node": 1}}
        answers = {
            "/dir/status": {
                "Topology": {
                    "DataCenters": [
                        {"Racks": [{"Id": "a", "DataNodes": [{"Url": here, "Volumes": 2}, {"Url": gone, "Volumes": 1}]}, {"Id": "b"}]}
                    ]
                }
            },
            "/vol/status": {
                "Volumes": {"DataCenters": {"dc": {"a": {here: [{"Id": 1, **copy}, {"Id": 2}], gone: [{"Id": 1, **copy}], "old:1": None}}}}
            },
            "/status": {"DiskStatuses": [{"all": 1000, "free": 400}, {"all": 1000, "free": 500}]},
        }
        body = json.dumps(answers.get(self.path, [])).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def master() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield "{}:{}".format(*server.server_address)
        server.shutdown()
        thread.join()


def test_health_counts_the_room_of_who_answers_and_names_what_is_wrong(master: str) -> None:
    found = check(master)
    assert (found.bytes_total, found.bytes_free) == (2000, 900)
    assert [(d.answers, d.volumes, d.rack) for d in found.disks if d.address == master] == [(True, 2, "a")]
    assert found.volumes_short == (1,)
    assert found.problems(nodes=2) == ("127.0.0.1:9 does not answer", "1 of 2 nodes answer", "1 volumes lack copies: 1")


def test_a_master_that_does_not_answer_or_not_sensibly_is_unavailable(master: str) -> None:
    with pytest.raises(StoreUnavailable, match="no answer"):
        check("127.0.0.1:9")
    from fsref.pool.health import get_json

    with pytest.raises(StoreUnavailable, match="status 200"):
        get_json(master, "/other")
