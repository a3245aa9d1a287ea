"""What each role's end means, and that everything is stopped in order on every path."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fsref.config import Config, EnvSection, InferenceSection, LauncherSection, OrchestratorSection
from fsref.errors import ReplicaDown, RoleFailed
from fsref.pipeline.layout import Part, RoleCommand
from fsref.pipeline.processes import Child, Command, Family
from fsref.pipeline.supervise import Signals, Stopped, Supervisor, answers
from tests.pipeline.conftest import Script

Make = Callable[..., Supervisor]

SERVER = """
    import pathlib, signal, sys, time
    name = sys.argv[1]
    def stop(*_):
        with open(sys.argv[2], "a") as f: print(name, file=f)
        sys.exit(0)
    signal.signal(signal.SIGTERM, stop)
    for path in sys.argv[3:]:
        pathlib.Path(path).touch()
    while True: time.sleep(60)
"""
WAITS_FOR = """
    import pathlib, sys, time
    while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)
    {then}
"""


class Watched:
    """Collects what the supervisor tells."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.dead: list[str] = []
        self.on_tick: Callable[[], None] = lambda: None

    def say(self, text: str) -> None:
        self.said.append(text)

    def tick(self) -> None:
        self.on_tick()

    def reaped(self, role: RoleCommand, child: Child, code: int) -> None:
        assert child.reaped_pids
        self.dead.append(f"{role.command.name} {code}")


@pytest.fixture
def watched() -> Watched:
    return Watched()


@pytest.fixture
def supervisor(watched: Watched) -> Iterator[Supervisor]:
    config = Config(
        env=(EnvSection(name="demo", replicas=2),),
        inference=InferenceSection(address="http://127.0.0.1:1", start_s=30.0),
        orchestrator=OrchestratorSection(replica_wait_s=30.0),
        launcher=LauncherSection(restarts_max=1, stop_s=30.0),
    )
    with Signals() as signals, Family(grace_s=1.0) as family:
        yield Supervisor(config=config, family=family, signals=signals, watcher=watched, healthy=lambda _: True)


def role(part: Part, command: Command, *, replica: int = -1, address: Path | None = None) -> RoleCommand:
    return RoleCommand(part, command, env="demo" if part is Part.ENV else "", replica=replica, address=address)


def run(supervisor: Supervisor, roles: list[RoleCommand]) -> None:
    supervisor.start(roles)
    supervisor.watch()


def servers(script: Script, tmp_path: Path, *, replicas: int = 2) -> list[RoleCommand]:
    """Inference and replicas that serve until they are told to stop; the order of their ends is in ``stopped``."""
    stopped = str(tmp_path / "stopped")
    out = [role(Part.INFERENCE, script(SERVER, "inference", stopped, str(tmp_path / "inference.up"), name="inference"))]
    for n in range(replicas):
        address = tmp_path / f"demo.local-{n}.address"
        out.append(role(Part.ENV, script(SERVER, f"env-{n}", stopped, str(address), name=f"env-{n}"), replica=n, address=address))
    return out


def test_a_run_ends_when_orchestrator_and_trainers_have_ended_well(
    script: Script, tmp_path: Path, supervisor: Supervisor, watched: Watched
) -> None:
    roles = servers(script, tmp_path)
    roles += [role(Part.TRAINER, script("", name=f"trainer/rank_{n}")) for n in range(2)]
    roles.append(role(Part.ORCHESTRATOR, script("", name="orchestrator")))
    run(supervisor, roles)
    supervisor.stop()
    assert (tmp_path / "stopped").read_text().split()[-1] == "inference"
    assert sorted(watched.dead) == ["env-0 0", "env-1 0", "inference 0", "orchestrator 0", "trainer/rank_0 0", "trainer/rank_1 0"]


def test_roles_are_stopped_in_order(script: Script, tmp_path: Path, supervisor: Supervisor) -> None:
    stopped, up = str(tmp_path / "stopped"), tmp_path / "up"
    roles = servers(script, tmp_path, replicas=1)
    roles.append(role(Part.TRAINER, script(SERVER, "trainer", stopped, str(tmp_path / "trainer.up"), name="trainer/rank_0")))
    roles.append(role(Part.ORCHESTRATOR, script(SERVER, "orchestrator", stopped, str(up), name="orchestrator")))
    supervisor.start(roles)
    while not all(p.exists() for p in (up, tmp_path / "trainer.up", tmp_path / "inference.up")):
        supervisor._pause()
    supervisor.stop()
    assert (tmp_path / "stopped").read_text().split() == ["orchestrator", "trainer", "env-0", "inference"]


@pytest.mark.parametrize("part", [Part.ORCHESTRATOR, Part.TRAINER, Part.INFERENCE])
def test_another_roles_death_ends_the_run_with_its_reason(script: Script, tmp_path: Path, supervisor: Supervisor, part: Part) -> None:
    up = tmp_path / "demo.local-0.address"
    dying = script(WAITS_FOR.format(then="sys.exit('error: the disk is full')"), str(up), name=f"the-{part.value}")
    roles = [role(part, dying), *servers(script, tmp_path, replicas=1)[1:]]
    if part is Part.INFERENCE:
        roles.append(role(Part.ORCHESTRATOR, script("import time; time.sleep(600)", name="orchestrator")))
    with pytest.raises(RoleFailed) as raised:
        run(supervisor, roles)
    assert str(raised.value) == f"the-{part.value} exited with code 1: error: the disk is full; log: {dying.log}"
    supervisor.stop()


def test_a_server_that_ends_with_0_before_the_run_does_is_a_failure(script: Script, supervisor: Supervisor) -> None:
    roles = [
        role(Part.INFERENCE, script("", name="inference")),
        role(Part.ORCHESTRATOR, script("import time; time.sleep(600)", name="orchestrator")),
    ]
    with pytest.raises(RoleFailed, match=r"^inference exited with code 0; log: "):
        run(supervisor, roles)


def test_a_dead_replica_is_reaped_and_restarted(script: Script, tmp_path: Path, supervisor: Supervisor, watched: Watched) -> None:
    address, second = tmp_path / "demo.local-0.address", tmp_path / "second"
    source = """
        import os, pathlib, signal, sys, time
        address, second = map(pathlib.Path, sys.argv[1:3])
        mark = pathlib.Path(sys.argv[3])
        if mark.exists():
            second.touch()
        mark.touch()
        address.touch()
        if not second.exists():
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    """
    replica = script(source, str(address), str(second), str(tmp_path / "mark"), name="env-0")
    orchestrator = script(WAITS_FOR.format(then=""), str(second), name="orchestrator")
    supervisor.start([role(Part.ENV, replica, replica=0, address=address), role(Part.ORCHESTRATOR, orchestrator)])
    supervisor.watch()
    assert f"env-0 was killed by SIGKILL (by someone, or for lack of memory); log: {replica.log}; restart 1 of 1" in watched.said
    assert watched.dead[0] == "env-0 -9"


def test_a_stale_address_is_gone_before_a_replica_starts(script: Script, tmp_path: Path, supervisor: Supervisor) -> None:
    address, other = tmp_path / "demo.local-0.address", tmp_path / "seen"
    address.write_text("of an earlier life")
    source = """
        import pathlib, sys, time
        address, seen = map(pathlib.Path, sys.argv[1:])
        seen.write_text(str(address.exists()))
        address.touch()
        time.sleep(600)
    """
    replica = script(source, str(address), str(other), name="env-0")
    supervisor.start([role(Part.ENV, replica, replica=0, address=address), role(Part.ORCHESTRATOR, script("", name="orchestrator"))])
    supervisor.watch()
    assert other.read_text() == "False"


def test_a_run_goes_on_without_a_replica_that_keeps_dying(script: Script, tmp_path: Path, supervisor: Supervisor, watched: Watched) -> None:
    roles = servers(script, tmp_path, replicas=1)
    address, done = tmp_path / "demo.local-1.address", tmp_path / "done"
    dying = script("import pathlib, sys; pathlib.Path(sys.argv[1]).touch(); sys.exit(3)", str(address), name="env-1")
    orchestrator = script(WAITS_FOR.format(then=""), str(done), name="orchestrator")
    roles += [role(Part.ENV, dying, replica=1, address=address), role(Part.ORCHESTRATOR, orchestrator)]
    watched.on_tick = lambda: done.touch() if any("not restarted any more" in s for s in watched.said) else None
    supervisor.start([r for r in roles if r.address != address])
    supervisor._start(roles[-2])
    supervisor.watch()
    assert watched.dead.count("env-1 3") == 2
    assert not address.exists()


def test_the_run_ends_when_no_replica_is_left(script: Script, tmp_path: Path, supervisor: Supervisor) -> None:
    address = tmp_path / "demo.local-0.address"
    source = "import pathlib, sys; pathlib.Path(sys.argv[1]).touch(); sys.exit('error: verifiers is too old')"
    dying = script(source, str(address), name="env-0")
    roles = [
        role(Part.ENV, dying, replica=0, address=address),
        role(Part.ORCHESTRATOR, script("import time; time.sleep(600)", name="orchestrator")),
    ]
    with pytest.raises(ReplicaDown, match=r"no replica of env 'demo' is left after 1 restarts: env-0 exited .* is too old"):
        run(supervisor, roles)


def test_of_two_deaths_the_one_that_explains_itself_is_told(script: Script, supervisor: Supervisor) -> None:
    first = script("raise SystemExit('Connection closed by peer')", name="trainer/rank_0")
    second = script("raise SystemExit('error: no route for token 3')", name="trainer/rank_1")
    for command in (first, second):
        supervisor._start(role(Part.TRAINER, command))
    while not all(r.child.ended() for r in supervisor._running):
        supervisor._pause()
    with pytest.raises(RoleFailed, match=r"rank_1 .* error: no route for token 3"):
        supervisor._look()


def test_a_server_that_does_not_serve_in_time_is_named_with_its_log(script: Script, supervisor: Supervisor) -> None:
    supervisor.config = replace(supervisor.config, inference=replace(supervisor.config.inference, start_s=0.01))
    supervisor.healthy = lambda _: False
    inference = script("import time; time.sleep(600)", name="inference")
    with pytest.raises(RoleFailed, match=f"inference: not ready after 0.01 s; see {inference.log}"):
        supervisor.start([role(Part.INFERENCE, inference)])


def test_a_signal_ends_the_watch_and_a_second_one_the_patience(
    script: Script, tmp_path: Path, supervisor: Supervisor, watched: Watched
) -> None:
    up = tmp_path / "up"
    stubborn = script(
        """
        import pathlib, signal, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pathlib.Path(sys.argv[1]).touch()
        time.sleep(600)
        """,
        str(up),
        name="orchestrator",
    )
    watched.on_tick = lambda: os.kill(os.getpid(), signal.SIGINT) if up.exists() else None
    supervisor.start([role(Part.ORCHESTRATOR, stubborn)])
    with pytest.raises(Stopped) as stopped:
        supervisor.watch()
    assert stopped.value.number == signal.SIGINT
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    supervisor.stop()
    assert watched.dead == ["orchestrator -9"]
    assert watched.said[-1].startswith("while it was stopped, orchestrator was killed by SIGKILL")


def test_signal_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Signals():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_preparing_command_that_fails_is_named(script: Script, supervisor: Supervisor) -> None:
    supervisor.run_to_end(script("", name="good"))
    with pytest.raises(RoleFailed, match="model exited with code 2: error: no space"):
        supervisor.run_to_end(script("import sys; print('error: no space'); sys.exit(2)", name="model"))


class _Health(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  as the base class names it
        pass


def test_health_is_asked_at_the_address_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with HTTPServer(("127.0.0.1", 0), _Health) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"
        try:
            assert answers(address)
            _Health.status = 503
            assert not answers(address)
        finally:
            _Health.status = 200
            server.shutdown()
            thread.join()
    assert not answers(address)
