"""``fsref run`` on one machine: makes the run, starts the roles, waits for the end, stops everything, audits.

Owns the order of these; the parts are ``layout`` (config and command lines), ``objectserver`` (an S3 server of the run's own), ``prepare``
(the run on disk), ``supervise`` (processes), ``board`` (what a person sees) and ``settle`` (the ledger's side). Refuses to import torch or
verifiers: whatever needs them is a process of its own.
"""

import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fsref.config import Config
from fsref.errors import ConfigError, FsrefError, RoleFailed, StoreError
from fsref.pipeline import objectserver, settle
from fsref.pipeline.board import Board
from fsref.pipeline.layout import RoleCommand, mint_run_id, resolve, role_commands
from fsref.pipeline.metrics import Follower
from fsref.pipeline.objectserver import ObjectServer
from fsref.pipeline.ports import free_ports
from fsref.pipeline.prepare import claim, make_model, make_run_file
from fsref.pipeline.processes import Child, Command, Family
from fsref.pipeline.resume import resume
from fsref.pipeline.schema import check_names
from fsref.pipeline.supervise import Signals, Stopped, Supervisor, answers
from fsref.reaper import Verdict
from fsref.store import open_root, probe


@dataclass(frozen=True)
class Plan:
    """A run before anything of it exists."""

    config: Config
    """Resolved: what the roles get."""
    roles: tuple[RoleCommand, ...]
    model: Callable[[Config, Callable[[Command], None]], None] = make_model
    """Makes or checks the model folder."""
    healthy: Callable[[str], bool] = answers
    """Whether the inference server serves."""
    before: Callable[[Config, Callable[[str], None]], None] | None = None
    """What comes first under the run's lock, before anything is settled."""
    ended: Callable[[Config, RoleCommand, Child], object] | None = None
    """What is noted about a role whose processes have ended; None: ``settle.declare_dead`` of those that were waited for."""


def make_plan(config: Config, *, now: dt.datetime, verbose: bool = False) -> Plan:
    """Resolves the config and lays out the commands; touches nothing but three free ports. Raises ``ConfigError``."""
    inference_port, master_port, store_port = free_ports(3)
    resolved = resolve(config, run_id=config.run.id or mint_run_id(now), ports=[inference_port, store_port])
    roles = role_commands(resolved, serve=not config.inference.address, master_port=master_port, verbose=verbose)
    return Plan(config=resolved, roles=tuple(roles))


class Watcher:
    """Passes on what the supervisor tells: to the board, and deaths to the ledger. Looks after the object server."""

    def __init__(
        self,
        config: Config,
        board: Board,
        follower: Follower,
        *,
        server: ObjectServer | None = None,
        ended: Callable[[Config, RoleCommand, Child], object] | None = None,
    ) -> None:
        self._config = config
        self._ended = ended or _reaped
        self._board = board
        self._follower = follower
        self._server = server

    def say(self, text: str) -> None:
        self._board.say(text)

    def tick(self) -> None:
        if self._server is not None:
            self._server.check()
        self._board.refresh(self._follower)

    def reaped(self, role: RoleCommand, child: Child, code: int) -> None:
        del code  # a clean end wrote a close record; declare_dead leaves those alone
        try:
            self._ended(self._config, role, child)
        except (StoreError, RoleFailed) as e:
            # the marker only spares others their own proof of the death; everything must still be stopped
            self._board.say(f"{child.name}: its death could not be noted: {e}")


def _reaped(config: Config, role: RoleCommand, child: Child) -> object:
    return settle.declare_dead(config, role, child.reaped_pids)


def launch(plan: Plan, board: Board) -> int:
    """Runs the plan to its end; returns the exit code: the audit's, or 128 plus the signal that stopped the run.

    A run that exists goes on (``resume``); one that is finished is only settled. Raises ``RoleFailed`` and the errors of ``prepare`` and
    ``resume``, after every process has been stopped and the state of the ledger has been told.
    """
    config = plan.config
    if config.store.server == "none":
        lock, existed = claim(config)
        with lock, Family(grace_s=config.launcher.stop_s) as family, Signals() as signals:
            return _launch(plan, board, _Stage(family, signals), existed=existed)
    check_names(config)
    with Family(grace_s=config.launcher.stop_s) as family, Signals() as signals:
        board.say(f"starting the object server of run {config.run.id}")
        try:
            server = objectserver.start(config.store, objectserver.Home.of(config), family=family, pause=signals.check)
        except Stopped as e:
            return 128 + e.number
        with server:
            lock, existed = claim(config)
            with lock:
                return _launch(plan, board, _Stage(family, signals, server), existed=existed)


@dataclass(frozen=True)
class _Stage:
    """What a launch works with."""

    family: Family
    signals: Signals
    server: ObjectServer | None = None


def _launch(plan: Plan, board: Board, stage: _Stage, *, existed: bool) -> int:
    config = plan.config
    run_dir = Path(config.run.run_dir)
    follower = Follower(run_dir / "metrics.jsonl")
    with board:
        watcher = Watcher(config, board, follower, server=stage.server, ended=plan.ended)
        supervisor = Supervisor(config=config, family=stage.family, signals=stage.signals, watcher=watcher, healthy=plan.healthy)
        board.say(f"run {config.run.id} in {run_dir}")
        if plan.before is not None:
            plan.before(config, board.say)
        resumed = resume(config, board.say) if existed else None
        if resumed is not None:
            board.say(resumed.told())
            follower.skip()
            if resumed.finished:
                return _settle(config, board, ended=True)
        code = 0
        failure: FsrefError | None = None
        try:
            if not existed:
                _prepare(plan, supervisor, board)
            supervisor.start(plan.roles)
            supervisor.watch()
        except Stopped as e:
            board.say(f"stopped by signal {e.number}; a second one kills")
            code = 128 + e.number
        except FsrefError as e:
            failure = e
        finally:
            supervisor.stop()
        board.refresh(follower)
        verdict = _settle(config, board, ended=failure is None and not code)
    if failure is not None:
        raise failure
    return code or verdict


def _settle(config: Config, board: Board, *, ended: bool) -> int:
    """The audit's exit code; after a failure an audit that is not possible must not hide the failure."""
    try:
        found = settle.settle(config, board.say, ended=ended)
    except FsrefError as e:
        if ended:
            raise
        board.say(f"no audit: {e}")
        return 1
    if found is not None and found.verdict is not Verdict.PROVED and not ended:
        board.say(f"to go on: the same command with --run.id {config.run.id}; to end the run: fsref close {config.run.run_dir}")
    return found.exit_code if found is not None else 1


def check_root(config: Config, say: Callable[[str], None]) -> None:
    """Tries what a root that is no folder does, and says what is missing; raises ``ConfigError`` if a run cannot live there."""
    with open_root(config.run.root, run=config.run.id, settings=config.store) as store:
        if store.posix_path is not None:
            return
        found = probe(store)
    for text in found.shortcomings():
        say(f"{config.run.root}: {text}")
    if not found.usable:
        raise ConfigError(f"run.root {config.run.root!r} cannot hold a run: {'; '.join(found.shortcomings())}")


def _prepare(plan: Plan, supervisor: Supervisor, board: Board) -> None:
    check_root(plan.config, board.say)
    if plan.config.model.path == str(Path(plan.config.run.run_dir) / "model"):
        board.say("making the model")
    plan.model(plan.config, supervisor.run_to_end)
    make_run_file(plan.config, settle.create)
