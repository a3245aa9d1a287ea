"""The launcher's side of the ledger: creating the run, declaring the dead, the audit at the end."""

from collections.abc import Callable, Sequence

from fsref.config import Config
from fsref.journal.run import create_run
from fsref.pipeline.layout import RoleCommand

create = create_run


def declare_dead(config: Config, role: RoleCommand, pids: Sequence[int]) -> None:
    del config, role, pids


def settle(config: Config, say: Callable[[str], None]) -> int:
    del config, say
    return 0
