"""One day of a run, in which a role is killed before or after any single operation: whatever that leaves, the run's close proves it."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.roles import Child, Died, Play, Zygote

OPERATIONS = ("journal.append", "journal.sync", "store.put", "store.delete", "marker.create", "drop", "deleter")
MOMENTS = {
    "store.put": ("before", "mid", "written", "renamed"),
    "drop": ("before_append", "after_append"),
    "deleter": ("before_sync", "after_sync", "after_delete", "after_done"),
}


class Day:
    """What everyone does, as far as they and those before them live."""

    def __init__(self, play: Play, role: str, rule: str) -> None:
        self.play = play
        self.roles = {r: play.spawn_closed(r, fail=rule if r == role else "") for r in ("env", "orc", "trn")}
        for child in self.roles.values():
            self.answer(child)

    def answer(self, child: Child) -> Any:
        try:
            return child.answer()
        except Died:
            child.wait()
            return None

    def do(self, role: str, command: str, *args: Any) -> Any:
        """What came of it; None from the dead."""
        child = self.roles[role]
        if child.code is not None:
            return None
        try:
            child.post(command, *args)
        except BrokenPipeError:
            child.wait()
            return None
        return self.answer(child)

    def pass_by(self) -> None:
        play = self.play
        ids: list[str] = []
        for _ in range(3):
            reply = self.do("env", "reply", play.request(), play.numbers(2))
            ids += (self.do("orc", "take", reply) or []) if reply else []
        self.do("env", "put_and_discard", play.numbers(1))
        self.do("env", "reply_and_nack", play.request(), play.numbers(1))
        if len(ids) == 6:
            self.do("orc", "drop", ids[:1])
            for step, some in enumerate((ids[1:3], ids[3:5])):
                if self.do("orc", "ship", step, some) and (read := self.do("trn", "train", step)):
                    play.check_arrays(read)
                    self.do("trn", "checkpoint_and_commit", step)
        for role in ("env", "orc", "trn"):
            self.do(role, "flush")
        for role in ("trn", "orc", "env"):
            self.do(role, "close")


@pytest.mark.slow
@pytest.mark.fault(12)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("role", ["env", "orc", "trn"])
def test_a_role_killed_before_or_after_any_single_operation(tmp_path: Path, zygote: Zygote, role: str, operation: str) -> None:
    for moment in MOMENTS.get(operation, ("before", "after")):
        killed = True
        number = 0
        while killed:
            number += 1
            play = Play(zygote, tmp_path / f"{moment}{number}")
            day = Day(play, role, f"{operation}.{moment}=kill:{number}")
            day.pass_by()
            killed = day.roles[role].code is not None
            play.kill_all()
            play.assert_proved()
            play.close()
