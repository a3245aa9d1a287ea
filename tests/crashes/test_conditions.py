"""What is wrong around the processes: clocks, and a folder that goes away."""

import ast
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import fsref
from tests.support.roles import Child, Play, Refused

DAY_S = 86_400.0
LEDGER_PATHS = ("ledger", "journal", "reaper", "refs", "steps.py", "writer.py", "failpoints.py")


@pytest.mark.fault(41)
@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["env behind", "env ahead"])
def test_clocks_that_are_days_apart_change_nothing(play: Play, sign: float) -> None:
    env, orc, trn = play.env(clock_s=-sign * DAY_S), play.orc(clock_s=sign * DAY_S), play.trn(clock_s=3 * sign * DAY_S)
    ids = play.taken(env, orc, 6)
    orc.call("drop", ids[:2])
    orc.call("ship", 0, ids[2:4])
    play.trained(trn, 0)
    trn.call("checkpoint_and_commit", 0)
    play.reply(env, 1)
    assert play.audit().violations == ()
    env.kill()
    play.dead(env)
    assert orc.call("adopt", env.inc)["orphans"] == 1
    orc.kill()
    heir = play.orc(clock_s=-5 * sign * DAY_S)
    heir.end()
    trn.end()
    rec = play.rec(clock_s=-7 * sign * DAY_S)
    assert rec.call("close_run") == "PROVED"
    rec.stop()
    play.assert_proved({"stale": 2, "trained": 2, "orphan": 1, "recovered": 2})


@pytest.mark.fault(41)
def test_the_wall_clock_is_read_for_people_only() -> None:
    """In all that the ledger rests on, two functions read it, for ``ms`` alone; waits are measured by the monotonic clock."""
    root = Path(fsref.__file__).parent
    files = [f for part in LEDGER_PATHS for f in ([root / part] if part.endswith(".py") else sorted((root / part).rglob("*.py")))]
    found = {(path.relative_to(root).as_posix(), name) for path in files for name in clocks(ast.parse(path.read_text(encoding="utf-8")))}
    assert {f for f in found if f[1] not in ("monotonic", "sleep")} == {("journal/file.py", "time_ns"), ("journal/run.py", "time_ns")}


def clocks(tree: ast.Module) -> Iterator[str]:
    """What a module uses of ``time`` and ``datetime``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("time", "datetime", "date"):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
            yield from (alias.name for alias in node.names)


@pytest.mark.fault(41)
def test_the_time_of_a_record_is_in_no_decision() -> None:
    """``ms`` is written by ``now_ms`` and read where people look."""
    root = Path(fsref.__file__).parent
    readers = set()
    for path in [*(root / "ledger").rglob("*.py"), *(root / "journal").rglob("*.py"), *(root / "reaper").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr == "ms":
                readers.add(path.relative_to(root).as_posix())
    assert readers <= {"ledger/records.py", "reaper/histories.py"}


def fails(child: Child, do: str, *args: object) -> str:
    """The error that a command ends with."""
    with pytest.raises(Refused) as refused:
        child.call(do, *args)
    return refused.value.kind


@pytest.mark.fault(39)
def test_a_run_folder_that_is_removed_under_a_live_run_ends_everyone_and_does_not_come_back(play: Play) -> None:
    env, orc, trn = play.env(), play.orc(), play.trn()
    held = play.taken(env, orc, 4)
    orc.call("ship", 0, held[:2])
    shutil.rmtree(play.root / play.name)
    assert fails(env, "put", play.numbers(1)) == "ObjectMissing"
    assert fails(trn, "take", 0) == "ObjectMissing"
    assert fails(orc, "ship", 1, held[2:]) == "JournalPoisoned"
    assert fails(orc, "take", {"request": "q", "samples": [{"id": f"{env.inc}/9", "bytes": 1}]}) == "JournalPoisoned"
    for child in (env, orc, trn):
        assert fails(child, "close") == "JournalPoisoned"
        child.stop()
    assert not (play.root / play.name).exists()
    with pytest.raises(Refused, match="ObjectMissing"):
        play.env()
    assert not (play.root / play.name).exists()


@pytest.mark.fault(39)
def test_a_drop_after_that_is_not_carried_out_and_the_next_call_says_so(play: Play) -> None:
    env, orc = play.env(), play.orc()
    held = play.taken(env, orc, 4)
    shutil.rmtree(play.root / play.name)
    orc.call("drop", held[:2])
    assert fails(orc, "flush_then_check") == "JournalPoisoned"
    assert fails(orc, "drop", held[2:]) == "JournalPoisoned"
    assert fails(env, "close") == "JournalPoisoned"
    assert not (play.root / play.name).exists()
