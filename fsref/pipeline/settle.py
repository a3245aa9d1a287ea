"""The launcher's side of the ledger: declaring the dead, closing a run that came to its end, the audit.

Owns the rule that a replica is declared dead only when the process that wrote its journal was waited for, or is provably gone from this
boot.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from fsref.config import Config
from fsref.errors import JournalCorrupt, RunMismatch
from fsref.journal import identity
from fsref.journal.markers import write_dead
from fsref.journal.place import Ledger
from fsref.journal.run import create_run, read_run
from fsref.ledger.records import LINE_BYTES_MAX, Close, Open, decode_line, line_ok
from fsref.pipeline.layout import Part, RoleCommand
from fsref.reaper import Audit, Verdict, audit, close_run
from fsref.store import open_root

create = create_run

LABELS: Final = {
    Part.ENV: r"env\.{label}-[0-9]+\.[0-9a-f]{{16}}",
    Part.ORCHESTRATOR: r"orc\.[a-z0-9-]+\.[0-9a-f]{{16}}",
    Part.TRAINER: r"trn\.[a-z0-9-]+\.[0-9a-f]{{16}}",
}
"""Incarnations of each part; an env worker's label is ``<env>-<replica>-<worker>``."""


def ledger_dir(config: Config) -> Path:
    """The folder of the run's journals."""
    return Path(config.run.run_dir) / "ledger"


def declare_dead(config: Config, role: RoleCommand, pids: Sequence[int]) -> list[str]:
    """Writes ``.dead`` for the incarnations that a role's reaped processes left open; a closed journal needs none.

    ``pids`` are the processes that were waited for. Returns the incarnations. Raises ``StoreError``.
    """
    dead = [inc for inc, journal in _journals(config, role) if _left_open(journal, set(pids))]
    if dead:
        with open_root(config.run.root, run=config.run.id, settings=config.store) as store:
            for inc in dead:
                why = f"{role.command.name}: {len(pids)} processes were waited for"
                write_dead(Ledger.of(store, ledger_dir(config)), inc, by="launcher", why=why)
    return dead


def _journals(config: Config, role: RoleCommand) -> Iterator[tuple[str, Path]]:
    pattern = LABELS.get(role.part)
    folder = ledger_dir(config)
    if pattern is None or not folder.is_dir():
        return
    wanted = re.compile(pattern.format(label=re.escape(f"{role.env}-{role.replica}")), re.ASCII)
    for path in sorted(folder.glob("*.jnl")):
        if wanted.fullmatch(path.stem):
            yield path.stem, path


def unclosed(journal: Path) -> Open | None:
    """Who writes, or wrote, a journal without a close record. None for a closed one, and for one that cannot be read: recovery says so."""
    with journal.open("rb") as file:
        first = file.readline(LINE_BYTES_MAX)
        file.seek(max(len(first), file.seek(0, 2) - LINE_BYTES_MAX))
        last = file.read().removesuffix(b"\n").rpartition(b"\n")[2]
    try:
        opened = decode_line(first.removesuffix(b"\n")) if line_ok(first.removesuffix(b"\n")) else None
        closed = line_ok(last) and isinstance(decode_line(last), Close)
    except JournalCorrupt:
        return None
    return opened if isinstance(opened, Open) and not closed else None


def _left_open(journal: Path, pids: set[int]) -> bool:
    """Whether the journal has no close record although its writer is gone."""
    opened = unclosed(journal)
    if opened is None or opened.boot_id != identity.boot_id():
        return False
    return opened.pid in pids or identity.process_start(opened.pid) != opened.pstart


def settle(config: Config, say: Callable[[str], None], *, ended: bool) -> Audit | None:
    """The audit of the stopped run, told line by line; None if no run was made. Every process of the run was waited for.

    What is left is removed first, as ``fsref close`` would, if the run ``ended`` as planned (a replica that died late may leave something)
    or if it never published a step, so that there is nothing to go on from. Else it stays, so that the run can be looked into,
    recovered or closed.
    """
    with open_root(config.run.root, run=config.run.id, settings=config.store) as store:
        try:
            info = read_run(store)
        except RunMismatch:
            return None  # it failed before run.json was made
        found = audit(store, ledger_dir(config), run=info.run, run_uuid=info.run_uuid)
        sound = found.verdict is Verdict.BALANCED or not ledger_dir(config).exists()  # no journal yet: nothing was ever kept
        if sound and (ended or next(store.list("steps"), None) is None):
            say("removing what the stopped processes left")
            found = close_run(store, ledger_dir(config), run=info)
    for line in found.render():
        say(line)
    return found
