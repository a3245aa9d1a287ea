"""Children are reaped whole, and nothing survives the launcher."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from fsref.errors import RoleFailed
from fsref.pipeline.processes import Command, Family
from tests.pipeline.conftest import Script

Until = Callable[[Callable[[], bool]], None]

FORKING = """
    import os, signal, sys, time
    pids = open(sys.argv[1], "w")
    for n in range(2):
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True: time.sleep(60)
        print(pid, file=pids)
    pids.close()
    os.rename(sys.argv[1], sys.argv[2])
    {then}
"""


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False


def test_a_dead_childs_orphans_are_killed_and_waited_for(script: Script, tmp_path: Path, until: Until) -> None:
    pids = tmp_path / "pids"
    with Family(grace_s=5) as family:
        child = family.start(script(FORKING.format(then="sys.exit(7)"), str(tmp_path / "p"), str(pids)))
        until(child.ended)
        code = family.reap(child)
        orphans = [int(p) for p in pids.read_text().split()]
    assert code == 7
    assert {child.pid, *orphans} == set(child.reaped_pids)
    assert not any(map(alive, orphans))


def test_the_end_of_a_child_is_seen_before_its_pid_can_be_reused(script: Script, until: Until) -> None:
    with Family(grace_s=5) as family:
        child = family.start(script("raise SystemExit(3)"))
        until(child.ended)
        assert Path(f"/proc/{child.pid}").exists()
        assert family.reap(child) == 3
        assert not Path(f"/proc/{child.pid}").exists()


def test_stop_lets_a_child_end_by_itself(script: Script, tmp_path: Path, until: Until) -> None:
    source = """
        import signal, sys, time, pathlib
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
        pathlib.Path(sys.argv[1]).touch()
        while True: time.sleep(60)
    """
    ready = tmp_path / "ready"
    with Family(grace_s=5) as family:
        child = family.start(script(source, str(ready)))
        until(ready.exists)
        assert family.stop([child], grace_s=30) == {"role": 5}


def test_stop_kills_a_child_that_does_not_end_in_time(script: Script, tmp_path: Path, until: Until) -> None:
    pids = tmp_path / "pids"
    then = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    with Family(grace_s=5) as family:
        child = family.start(script(FORKING.format(then=then), str(tmp_path / "p"), str(pids)))
        until(pids.exists)
        assert family.stop([child], grace_s=0.1) == {"role": -signal.SIGKILL}
        assert not any(alive(int(p)) for p in pids.read_text().split())


def test_leaving_the_block_by_an_error_stops_everything(script: Script, tmp_path: Path, until: Until) -> None:
    pids = tmp_path / "pids"
    then = "time.sleep(600)"
    command = script(FORKING.format(then=then), str(tmp_path / "p"), str(pids))
    with pytest.raises(ZeroDivisionError), Family(grace_s=5) as family:  # noqa: PT012  the error has to come from within the block
        child = family.start(command)
        until(pids.exists)
        raise ZeroDivisionError
    assert not any(map(alive, [child.pid, *map(int, pids.read_text().split())]))


def test_a_process_that_left_its_session_is_stopped_too(script: Script, tmp_path: Path, until: Until) -> None:
    pids = tmp_path / "pids"
    with Family(grace_s=5) as family:
        source = FORKING.replace("signal.signal(signal.SIGTERM, signal.SIG_IGN)", "os.setsid()")
        family.start(script(source.format(then="time.sleep(600)"), str(tmp_path / "p"), str(pids)))
        until(pids.exists)
    until(lambda: not any(alive(int(p)) for p in pids.read_text().split()))


LAUNCHER = """
import sys, time
from pathlib import Path
from fsref.pipeline.processes import Command, Family
with Family(grace_s=0.2) as family:
    child = family.start(Command(name="role", argv=tuple(sys.argv[2:]), log=Path(sys.argv[1])))
    while True: time.sleep(60)
"""


@pytest.mark.parametrize("escape", ["pass", "os.setsid()", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"])
def test_nothing_survives_a_launcher_that_was_killed(script: Script, tmp_path: Path, until: Until, escape: str) -> None:
    pids = tmp_path / "pids"
    source = FORKING.replace("signal.signal(signal.SIGTERM, signal.SIG_IGN)", escape)
    role = script(source.format(then="time.sleep(600)"), str(tmp_path / "p"), str(pids))
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(role.log), *role.argv])
    try:
        until(pids.exists)
    finally:
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.wait()
    until(lambda: not any(alive(int(p)) for p in pids.read_text().split()))


def test_a_process_that_overwrote_its_environment_is_found_by_its_session(script: Script, tmp_path: Path, until: Until) -> None:
    ready = tmp_path / "ready"
    source = """
        import os, sys, time
        if os.environ.pop("FSREF_LAUNCH", None):
            os.execve(sys.executable, [sys.executable, *sys.argv], {})
        open(sys.argv[1] + "~", "w").write(str(os.getpid()))
        os.rename(sys.argv[1] + "~", sys.argv[1])
        time.sleep(600)
    """
    role = script(source, str(ready))
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(role.log), *role.argv])
    try:
        until(ready.exists)
    finally:
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.wait()
    until(lambda: not alive(int(ready.read_text())))


def test_a_server_that_others_need_is_stopped_after_them_when_the_launcher_was_killed(script: Script, tmp_path: Path, until: Until) -> None:
    """The role ends slowly, and looks once more whether the server is there; the server would end at once."""
    waiting = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(600)"
    ending = """
        import os, pathlib, signal, sys, time
        def end(*_):
            time.sleep(0.5)
            os.kill(int(pathlib.Path(sys.argv[1]).read_text()), 0)
            pathlib.Path(sys.argv[2]).write_text("the server was there")
            sys.exit(0)
        signal.signal(signal.SIGTERM, end)
        pathlib.Path(sys.argv[3]).touch()
        while True: time.sleep(60)
    """
    up, told, ready = tmp_path / "up", tmp_path / "told", tmp_path / "ready"
    server = script(waiting, str(up), name="server")
    role = script(ending, str(up), str(told), str(ready), name="role")
    code = (
        "import pathlib, sys, time\nfrom fsref.pipeline.processes import Command, Family\n"
        f"family = Family(grace_s=60)\nfamily.start(Command('server', {server.argv!r}, pathlib.Path({str(server.log)!r}), server=True))\n"
        f"while not pathlib.Path({str(up)!r}).exists(): time.sleep(0.01)\n"
        f"family.start(Command('role', {role.argv!r}, pathlib.Path({str(role.log)!r})))\ntime.sleep(600)\n"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code])
    try:
        until(ready.exists)
    finally:
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.wait()
    until(told.exists)
    until(lambda: not alive(int(up.read_text())))


def test_a_command_that_cannot_be_started_names_role_and_file(tmp_path: Path) -> None:
    with Family(grace_s=5) as family, pytest.raises(RoleFailed, match=r"inference cannot be started: No such file or directory: .*no-such"):
        family.start(Command(name="inference", argv=(str(tmp_path / "no-such"),), log=tmp_path / "log"))


def test_output_and_errors_go_to_the_log(script: Script, until: Until) -> None:
    with Family(grace_s=5) as family:
        command = script("import sys; print('out', flush=True); print('err', file=sys.stderr)")
        command.log.parent.mkdir()
        command.log.write_text("earlier\n")
        child = family.start(command)
        until(child.ended)
        family.reap(child)
    assert command.log.read_text() == textwrap.dedent("""\
        earlier
        out
        err
        """)
    assert child.log_start == len("earlier\n")


def test_a_signal_for_the_whole_task_reaches_the_launcher_alone(script: Script, until: Callable[[Callable[[], bool]], None]) -> None:
    """As srun sends SIGUSR1 to every process of a task."""
    source = """
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        print("up", flush=True)
        while True: time.sleep(60)
    """
    with Family(grace_s=5.0) as family:
        child = family.start(script(source))
        until(lambda: "up" in child.command.log.read_text())
        os.kill(child.pid, signal.SIGUSR1)
        assert family.stop([child], grace_s=30.0) == {"role": 0}
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
