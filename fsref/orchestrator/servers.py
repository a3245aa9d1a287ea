"""Which inference servers a run has: one that the config names, or one per inference node of a job, each of which publishes its address.

Owns the wait for them. Refuses to ask whether they answer: whoever started them did.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fsref.addresses import Address, find_inference, stale
from fsref.config import Config
from fsref.errors import RoleFailed
from fsref.journal import RunInfo

POLL_S: Final = 0.25


@dataclass(frozen=True)
class Servers:
    """The addresses, ``http://host:port``."""

    addresses: tuple[str, ...]
    """At least one."""
    by_node: Mapping[str, str] = field(default_factory=dict)
    """Address by node name; empty where the config names the only one."""


async def _published(run_dir: Path) -> list[Address]:
    try:
        return [r for _, r in await asyncio.to_thread(find_inference, run_dir)]
    except OSError:
        return []  # the next look will do


async def find_servers(config: Config, info: RunInfo) -> Servers:
    """Waits until every inference node has published, up to ``orchestrator.replica_wait_s`` seconds. Raises ``RoleFailed``."""
    wanted, wait_s = config.inference.servers, config.orchestrator.replica_wait_s
    if not wanted:
        return Servers((config.inference.address,))
    run_dir = Path(config.run.run_dir)
    found: dict[str, str] = {}
    try:
        async with asyncio.timeout(wait_s):
            while len(found) < wanted:
                records = await _published(run_dir)
                found = {r.node: r.address for r in records if not stale(r, run_uuid=info.run_uuid, attempt=config.run.attempt)}
                if len(found) < wanted:
                    await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise RoleFailed(
            f"{wanted} inference servers needed within {wait_s:g} s, {len(found)} are published in {run_dir / 'inference'}"
            f" ({', '.join(sorted(found)) or 'none'}): see logs/inference.*.log"
        ) from None
    return Servers(tuple(found.values()), found)
