"""Failpoints: each has a place and a line in the docs, does nothing unless armed, and does what it is told where it is."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import fsref
from fsref import failpoints
from fsref.errors import ConfigError
from fsref.failpoints import POINTS, VARIABLE, parse

ROOT = Path(fsref.__file__).resolve().parent
HIT_TWICE = "from fsref.failpoints import failpoint\nfor n in (1, 2):\n    failpoint('keep.after_append')\n    print(n, flush=True)\n"


def run(rules: str, code: str = HIT_TWICE) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, VARIABLE: rules}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False)


def test_every_name_has_a_place_and_every_place_a_name() -> None:
    sources = [path.read_text(encoding="utf-8") for path in ROOT.rglob("*.py") if path.name != "failpoints.py"]
    assert {name for text in sources for name in re.findall(r'failpoint\("([^"]*)"\)', text)} == {*POINTS}


def test_every_failpoint_is_in_the_docs_with_its_meaning() -> None:
    text = (ROOT.parent / "docs" / "ledger.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([a-z_.]+)` \| (.+) \|$", text, re.MULTILINE) == list(POINTS.items())


def test_nothing_is_armed_here() -> None:
    assert failpoints.failpoint is failpoints._off
    assert fsref._fp is failpoints.failpoint
    assert not failpoints.ARMED
    assert not any(map(failpoints.armed, POINTS))
    failpoints.failpoint("keep.after_append")


@pytest.mark.parametrize(
    ("rule", "code", "printed"),
    [
        ("keep.after_append=kill", -signal.SIGKILL, ""),
        ("keep.after_append=kill:2", -signal.SIGKILL, "1\n"),
        ("keep.after_append=kill:3", 0, "1\n2\n"),
        ("keep.before_append=kill", 0, "1\n2\n"),
        ("keep.after_append=exit:2", 70, "1\n"),
        ("keep.after_append=sleep(0.001)", 0, "1\n2\n"),
        ("keep.before_append=kill;keep.after_append=exit", 70, ""),
    ],
)
def test_a_place_acts_as_told_and_when_told(rule: str, code: int, printed: str) -> None:
    done = run(rule)
    assert (done.returncode, done.stdout) == (code, printed), done.stderr


def test_an_error_is_the_one_that_was_named() -> None:
    done = run("keep.after_append=raise(ENOSPC):2+")
    assert (done.returncode, done.stdout) == (1, "1\n")
    assert "OSError: [Errno 28]" in done.stderr


def test_from_the_nth_time_on_every_time() -> None:
    point = parse("keep.after_append=raise(EIO):2+")["keep.after_append"]
    point.hit()
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output error"):
            point.hit()


def test_a_paused_process_can_be_seen_and_goes_on() -> None:
    env = {**os.environ, VARIABLE: "keep.after_append=pause:2"}
    child = subprocess.Popen([sys.executable, "-c", HIT_TWICE], env=env, stdout=subprocess.PIPE, text=True)
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    assert (os.WIFSTOPPED(status), os.WSTOPSIG(status)) == (True, signal.SIGSTOP)
    child.send_signal(signal.SIGCONT)
    out, _ = child.communicate(timeout=60)
    assert (child.returncode, out) == (0, "1\n2\n")


@pytest.mark.parametrize(
    "text",
    ["keep.after_append", "no.such=kill", "keep.after_append=boom", "keep.after_append=kill:x", "keep.after_append=raise(ENOTHING)"],
)
def test_a_rule_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=VARIABLE):
        parse(text)


def test_a_process_with_a_wrong_rule_does_not_start() -> None:
    done = run("no.such=kill")
    assert done.returncode == 1
    assert "there is no failpoint" in done.stderr
