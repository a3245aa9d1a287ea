"""The test's side: starts and kills roles, carries their messages, and judges what is left.

``Play.assert_proved`` is the oracle of every crash test: what died is recovered, the run closed, the audit read, storage listed by hand.
"""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsref.journal import create_run, write_dead
from fsref.journal.place import Ledger
from fsref.reaper import Audit, Recovery, Verdict, audit, close_run, recover
from fsref.refs import object_name
from fsref.store import open_root
from tests.support.roles import actors
from tests.support.roles.actors import SCHEMA, digest_of_sample
from tests.support.roles.wire import Stream
from tests.support.roles.zygote_client import Zygote


class Died(AssertionError):
    """The process ended instead of answering."""


class Refused(Exception):
    """The process raised; ``kind`` is the name of the error's class."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.text = text


class Child:
    """One role's process."""

    def __init__(self, zygote: Zygote, pid: int, stream: Stream) -> None:
        self._zygote, self.pid, self.stream = zygote, pid, stream
        self.inc = ""
        self.code: int | None = None

    def post(self, do: str, *args: Any, **rest: Any) -> None:
        """Sends a command without waiting for its answer."""
        role = rest.pop("_role", "")
        self.stream.write({"do": do, "args": args, "with": rest, "role": role})

    def answer(self) -> Any:
        """The answer to the oldest command that has none. Raises ``Died`` or ``Refused``."""
        found = self.stream.read()
        if found is None:
            raise Died(f"process {self.pid} ({self.inc}) ended")
        if "error" in found:
            raise Refused(found["error"], found["text"])
        return found["ok"]

    def call(self, do: str, *args: Any, **rest: Any) -> Any:
        self.post(do, *args, **rest)
        return self.answer()

    def dies(self, do: str, *args: Any, **rest: Any) -> None:
        """Carries out a command on which it dies; or, at the latest, on waiting for its background work."""
        try:
            self.call(do, *args, **rest)
            self.call("flush")
        except (Died, BrokenPipeError):
            assert self.wait() == -signal.SIGKILL
            return
        raise AssertionError(f"{self.inc} should have died in {do}")

    def wait(self) -> int:
        """Blocks until it dies or stops (see ``Zygote.wait``)."""
        if self.code is None:
            code = self._zygote.wait(self.pid)
            if code >= 1000:
                return code
            self.code = code
            self.stream.close()
        return self.code

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        if self.code is None:
            self.signal(signal.SIGKILL)
            self.wait()

    def end(self) -> None:
        """Closes the holder and ends the process."""
        self.call("close")
        self.stop()

    def stop(self) -> None:
        """Ends the process as it is, without a close."""
        self.post("end")
        self.wait()


class Play:
    """One run under a folder."""

    def __init__(self, zygote: Zygote, root: Path, run: str = "r1") -> None:
        self.zygote, self.root, self.name = zygote, root, run
        self.store = open_root(str(root), run=run, create=True)
        self.ledger = root / run / "ledger"
        self.place = Ledger(self.ledger)
        self.run = create_run(self.store, run, SCHEMA)
        self.children: list[Child] = []
        self._requests = 0
        self._samples = 0

    # Roles.

    def spawn(self, role: str, *, fail: str = "", **rest: Any) -> Child:
        """Starts a process, and the role in it."""
        child = self.spawn_closed(role, fail=fail, **rest)
        child.inc = child.answer()
        return child

    def spawn_closed(self, role: str, *, fail: str = "", **rest: Any) -> Child:
        """Starts a process that is told to open its role; ``answer`` says what came of it."""
        child = Child(self.zygote, *self.zygote.spawn(fail))
        self.children.append(child)
        child.post("open", str(self.root), self.name, _role=role, **rest)
        return child

    def env(self, label: str = "math-0-0", **rest: Any) -> Child:
        return self.spawn("env", label=label, **rest)

    def orc(self, **rest: Any) -> Child:
        return self.spawn("orc", **rest)

    def trn(self, **rest: Any) -> Child:
        return self.spawn("trn", **rest)

    def rec(self, **rest: Any) -> Child:
        return self.spawn("rec", **rest)

    def kill_all(self) -> None:
        """SIGKILL to everyone at once, then waits for them."""
        self.kill_only(self.children)

    def kill_only(self, children: Sequence[Child]) -> None:
        """As ``kill_all``, for some."""
        alive = [c for c in children if c.code is None]
        for child in alive:
            child.signal(signal.SIGKILL)
        for child in alive:
            child.wait()

    # Short cuts.

    def request(self) -> str:
        self._requests += 1
        return f"q{self._requests}"

    def numbers(self, count: int) -> list[int]:
        """Samples that were not used yet."""
        self._samples += count
        return list(range(self._samples - count, self._samples))

    def put(self, env: Child, count: int = 2) -> list[dict[str, Any]]:
        return env.call("put", self.numbers(count))  # type: ignore[no-any-return]

    def reply(self, env: Child, count: int = 2) -> dict[str, Any]:
        """Kept and sent; the message is the caller's to deliver."""
        return env.call("reply", self.request(), self.numbers(count))  # type: ignore[no-any-return]

    def taken(self, env: Child, orc: Child, count: int = 2) -> list[str]:
        """A reply that arrived."""
        return orc.call("take", self.reply(env, count))  # type: ignore[no-any-return]

    def trained(self, trn: Child, step: int) -> None:
        """Trains a step and checks every byte that it read."""
        self.check_arrays(trn.call("train", step))

    def check_arrays(self, found: dict[str, str]) -> None:
        """Each sample's arrays are those that were put."""
        assert found
        assert found == {sample: digest_of_sample(int(sample)) for sample in found}

    # Judging.

    def dead(self, child: Child) -> None:
        """What the launcher does when it has reaped a process."""
        assert child.code is not None
        write_dead(self.place, child.inc, by="launcher", why="waitpid")

    def audit(self) -> Audit:
        return audit(self.store, self.ledger, run=self.name, run_uuid=self.run.run_uuid)

    def objects(self) -> list[str]:
        """Every file under obj/, by hand."""
        return sorted(str(p.relative_to(self.root / self.name)) for p in (self.root / self.name / "obj").rglob("*") if p.is_file())

    def remove_by_hand(self, object_id: str) -> None:
        """What an outsider does."""
        (self.root / self.name / object_name(object_id)).unlink()

    def recover(self, resume_step: int | None, **how: Any) -> Recovery:
        return recover(self.store, self.ledger, run=self.run, resume_step=resume_step, **how)

    def checkpoint(self) -> int:
        """The last step that a durable checkpoint covers; -1: none."""
        return actors.last_checkpoint(self.root, self.name)

    def published_steps(self) -> list[int]:
        """Steps whose file can be seen."""
        return sorted(int(p.parent.name.removeprefix("step_")) for p in (self.root / self.name).glob("steps/step_*/STEP.json"))

    def assert_proved(self, dropped_by: dict[str, int] | None = None) -> Audit:
        """Everyone is dead or closed: the run's close proves it, with these drops and nothing left anywhere."""
        found = close_run(self.store, self.ledger, run=self.run)
        assert found.verdict is Verdict.PROVED, "\n".join(found.render())
        totals = found.totals
        assert (totals.live, totals.pending, totals.present, totals.staging) == (0, 0, 0, 0)
        assert self.objects() == []
        assert dropped_by is None or totals.dropped_by == dropped_by
        return found

    def close(self) -> None:
        for child in self.children:
            child.kill()
        self.store.close()
