"""Stand-in roles: small scripts in place of the real ones, so that the launcher is tested alone."""

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from fsref.pipeline.processes import Command

Script = Callable[..., Command]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Makes a command from Python source; it starts without site packages, in milliseconds."""

    def make(source: str, *args: str, name: str = "role") -> Command:
        file = tmp_path / "scripts" / f"{name.replace('/', '.')}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(textwrap.dedent(source))
        return Command(name=name, argv=(sys.executable, "-I", "-S", str(file), *args), log=tmp_path / "logs" / f"{name}.log")

    return make


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], None]:
    """Waits for a condition with a generous deadline; fails the test after it."""
    import time

    def wait(condition: Callable[[], bool], deadline_s: float = 30.0) -> None:
        end = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < end, "the condition did not come true"
            time.sleep(0.01)

    return wait
