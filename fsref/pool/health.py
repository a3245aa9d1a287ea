"""What a pool says about itself: its nodes, their disks, and volumes that lack copies.

Asks the master and each volume server over HTTP, straight to the host and never through a proxy. Refuses to judge how many nodes there
should be: a master forgets a node that is gone, so the caller says how many it expects.
"""

import http.client
import json
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from fsref.errors import StoreUnavailable
from fsref.pool.commands import REPLICATIONS

TIMEOUT_S: Final = 5.0
REPLY_BYTES_MAX: Final = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Disk:
    """One volume server of the pool."""

    address: str
    """``host:port``."""
    rack: str
    volumes: int
    bytes_total: int
    """Of the file system that its folder lies on; 0 where the server did not answer."""
    bytes_free: int
    answers: bool
    """Whether it answered; the master may still list one that is gone."""


@dataclass(frozen=True, kw_only=True)
class Health:
    """A pool at one moment."""

    master: str
    disks: tuple[Disk, ...]
    volumes_short: tuple[int, ...]
    """Ids of volumes of which fewer copies are reachable than their placement asks for: some, not none; of what is wholly gone the master
    knows nothing."""

    @property
    def bytes_total(self) -> int:
        return sum(d.bytes_total for d in self.disks)

    @property
    def bytes_free(self) -> int:
        return sum(d.bytes_free for d in self.disks)

    def problems(self, *, nodes: int = 0) -> tuple[str, ...]:
        """What is wrong, one line each; ``nodes`` is how many there should be, 0: not known."""
        up = sum(d.answers for d in self.disks)
        return (
            *(f"{d.address} does not answer" for d in self.disks if not d.answers),
            *([f"{up} of {nodes} nodes answer"] if up < nodes else []),
            *([f"{len(self.volumes_short)} volumes lack copies: {_few(self.volumes_short)}"] if self.volumes_short else []),
        )


def check(master: str) -> Health:
    """Asks the master at ``host:port`` and every volume server that it knows. Raises ``StoreUnavailable`` if the master does not answer."""
    nodes = list(_nodes(get_json(master, "/dir/status")))
    reachable = _volumes(get_json(master, "/vol/status"), {url for url, _, _ in nodes})
    disks = tuple(sorted((_disk(*node) for node in nodes), key=lambda d: d.address))
    down = {d.address for d in disks if not d.answers}
    copies = Counter(volume for node, volume, _ in reachable if node not in down)
    wanted = {volume: REPLICATIONS.get(placement, 1) for _, volume, placement in reachable}
    short = tuple(sorted(v for v, n in wanted.items() if 0 < copies[v] < n))
    return Health(master=master, disks=disks, volumes_short=short)


def volumes(master: str) -> frozenset[int]:
    """Ids of the volumes that the master knows. Raises ``StoreUnavailable`` if it does not answer."""
    nodes = {address for address, _, _ in _nodes(get_json(master, "/dir/status"))}
    return frozenset(volume for _, volume, _ in _volumes(get_json(master, "/vol/status"), nodes))


def volumes_on_disk(folder: Path) -> frozenset[int]:
    """Ids of the volumes in a volume server's folder: ``7.idx``, or ``bucket_7.idx``."""
    names = (path.stem.rpartition("_")[2] for path in folder.glob("*.idx"))
    return frozenset(int(name) for name in names if name.isdecimal())


def _nodes(status: dict[str, Any]) -> list[tuple[str, str, int]]:
    """(address, rack, volumes) of every volume server in the master's topology."""
    centers = (status.get("Topology") or {}).get("DataCenters") or ()
    return [
        (str(node["Url"]), str(rack.get("Id", "")), int(node.get("Volumes") or 0))
        for center in centers
        for rack in center.get("Racks") or ()
        for node in rack.get("DataNodes") or ()
    ]


def _volumes(status: dict[str, Any], known: set[str]) -> list[tuple[str, int, str]]:
    """(address, volume, placement) of every copy that the master lists."""
    out = []
    for center in ((status.get("Volumes") or {}).get("DataCenters") or {}).values():
        for rack in center.values():
            for address, volumes in rack.items():
                if address in known:
                    out += [(address, int(v["Id"]), _placement(v.get("ReplicaPlacement"))) for v in volumes or ()]
    return out


def _placement(found: Any) -> str:
    """``010`` from the three counts that the master gives by name."""
    if not isinstance(found, dict):
        return "000"
    return f"{found.get('dc', 0)}{found.get('rack', 0)}{found.get('node', 0)}"


def _disk(address: str, rack: str, volumes: int) -> Disk:
    try:
        status = get_json(address, "/status")
    except StoreUnavailable:
        return Disk(address=address, rack=rack, volumes=volumes, bytes_total=0, bytes_free=0, answers=False)
    disks = status.get("DiskStatuses") or ()
    total, free = (sum(int(d.get(key) or 0) for d in disks) for key in ("all", "free"))
    return Disk(address=address, rack=rack, volumes=volumes, bytes_total=total, bytes_free=free, answers=True)


def get_json(address: str, path: str) -> dict[str, Any]:
    """The JSON object at ``http://<address><path>``. Raises ``StoreUnavailable`` without an answer that is one."""
    asked = f"asking {address} for {path}"
    host, _, port = address.partition(":")
    with closing(http.client.HTTPConnection(host, int(port), timeout=TIMEOUT_S)) as connection:
        try:
            connection.request("GET", path, headers={"Accept": "application/json"})
            reply = connection.getresponse()
            data = reply.read(REPLY_BYTES_MAX)
            found = json.loads(data) if reply.status == HTTPStatus.OK else None
        except (OSError, http.client.HTTPException, ValueError) as e:
            raise StoreUnavailable(f"{asked}: no answer ({type(e).__name__})") from e
    if not isinstance(found, dict):
        raise StoreUnavailable(f"{asked}: status {reply.status}")
    return found


def answers(address: str, path: str) -> bool:
    """Whether ``GET`` there says 200."""
    host, _, port = address.partition(":")
    with closing(http.client.HTTPConnection(host, int(port), timeout=TIMEOUT_S)) as connection:
        try:
            connection.request("GET", path)
            return connection.getresponse().status == HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False


def _few(volumes: tuple[int, ...]) -> str:
    return ", ".join(map(str, volumes[:10])) + (", ..." if len(volumes) > 10 else "")
