"""A plain verifiers server of the demo tasks, as someone else may run it, without fsref's hooks. Prints its address, serves until killed.

python -m tests.proofs.plain_server
"""

import sys
from typing import Any

from verifiers.v1.serve.pool import serve_env

from fsref.config import EnvSection
from fsref.episodes.source import env_config, plugin_id

TASKSET = "fsref.envserver.demo_tasks"


class Printed:
    """In the place of the queue that gets the bound address."""

    def put(self, address: Any) -> None:
        sys.stdout.write(f"address {address}\n")
        sys.stdout.flush()


def setup() -> None:
    """Runs first in every process: verifiers takes top-level taskset names only."""
    plugin_id(TASKSET)


if __name__ == "__main__":
    serve_env(
        max_workers=1,
        address="tcp://127.0.0.1:0",
        address_queue=Printed(),
        log_setup=setup,
        elastic=False,
        config=env_config(EnvSection(name="plain", taskset=TASKSET)),
    )
