"""Object storage from the nodes' own disks: one command on each node."""

from pathlib import Path
from typing import Annotated

import typer

from fsref.cli.commands.options import Json, body

pool = typer.Typer(
    help="Object storage from the disks of a run's own nodes: SeaweedFS servers, one command on each node (docs/nvme-pool.md).",
    no_args_is_help=True,
)

Folder = Annotated[
    Path, typer.Option("--folder", help="Folder on this node's disk: data, logs and pid file of its servers.", show_default=False)
]
Address = Annotated[
    str, typer.Option("--address", help="This node's address: what its servers bind and the others reach.", show_default=False)
]
FirstPort = Annotated[
    int, typer.Option("--first-port", help="Master, volume, filer and S3 ports from here on, and 10,000 higher; the same on every node.")
]
Rack = Annotated[str, typer.Option("--rack", help="Nodes that fail together have the same.")]
VolumesMax = Annotated[int, typer.Option("--volumes-max", help="Volumes that this node holds; 0: what its disk takes.", min=0)]
WaitS = Annotated[float, typer.Option("--wait-s", help="How long the servers may take to be ready.", min=1)]


@pool.command("start")
def pool_start(
    folder: Folder,
    address: Address,
    *,
    replication: Annotated[
        str,
        typer.Option(
            "--replication",
            help="000: one copy, a lost node's objects are lost; 001: two, on different nodes; 010: two, in different racks.",
            show_default=False,
        ),
    ],
    bucket: Annotated[str, typer.Option("--bucket", help="Bucket that is made if it is not there.")] = "fsref",
    volume_mb: Annotated[int, typer.Option("--volume-mb", help="Size of a volume, the file that objects lie in.", min=1)] = 1024,
    first_port: FirstPort = 9333,
    rack: Rack = "rack",
    volumes_max: VolumesMax = 0,
    wait_s: WaitS = 120.0,
) -> None:
    """Start a pool on its first node: master, filer, the node's own disk and gateway. The keys come from AWS_ACCESS_KEY_ID and
    AWS_SECRET_ACCESS_KEY.
    """
    body("fsref.cli.pool", "start_main")(
        folder,
        address=address,
        replication=replication,
        bucket=bucket,
        first_port=first_port,
        rack=rack,
        volume_mb=volume_mb,
        volumes_max=volumes_max,
        wait_s=wait_s,
    )


@pool.command("join")
def pool_join(
    folder: Folder,
    address: Address,
    *,
    head: Annotated[str, typer.Option("--head", help="Address of the node that started the pool.", show_default=False)],
    first_port: FirstPort = 9333,
    rack: Rack = "rack",
    volumes_max: VolumesMax = 0,
    wait_s: WaitS = 120.0,
) -> None:
    """Add this node's disk to a pool, and start a gateway here. The same two keys in the environment as on the head."""
    body("fsref.cli.pool", "join_main")(
        folder, address=address, head=head, first_port=first_port, rack=rack, volumes_max=volumes_max, wait_s=wait_s
    )


@pool.command("health")
def pool_health(
    *,
    folder: Annotated[Path | None, typer.Option("--folder", help="Of this node's servers.", show_default=False)] = None,
    master: Annotated[str, typer.Option("--master", help="HOST:PORT of the pool's master.", show_default=False)] = "",
    nodes: Annotated[int, typer.Option("--nodes", help="How many there should be; 0: not known.", min=0)] = 0,
    json: Json = False,
) -> None:
    """Show nodes, room and missing copies of a pool; exit code 1 if something is wrong."""
    raise typer.Exit(body("fsref.cli.pool", "health_main")(folder, master=master, nodes=nodes, json=json))


@pool.command("stop")
def pool_stop(
    folder: Folder,
    grace_s: Annotated[float, typer.Option("--grace-s", help="Seconds between SIGTERM and SIGKILL.", min=0)] = 20.0,
) -> None:
    """Stop this node's servers, by their pids. Its data stays."""
    body("fsref.cli.pool", "stop_main")(folder, grace_s=grace_s)
