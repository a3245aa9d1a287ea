"""Every check of the project, in the order of their cost: ruff, ruff format, mypy, the import contract, pytest.

Stops at the first that fails and prints the seconds of each. Arguments go to pytest.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
SOURCES = ("fsref", "tests", "tools")


def main() -> int:
    stages: list[tuple[str, list[str | Path]]] = [
        ("ruff check", [BIN / "ruff", "check", *SOURCES]),
        ("ruff format", [BIN / "ruff", "format", "--check", *SOURCES]),
        ("mypy", [BIN / "mypy"]),
        ("import contract", [BIN / "lint-imports"]),
        ("pytest", [sys.executable, "-m", "pytest", *sys.argv[1:]]),
    ]
    env = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"}
    for name, command in stages:
        print(f"== {name}", flush=True)
        start = time.monotonic()
        done = subprocess.run([str(c) for c in command], cwd=ROOT, check=False, env=env)
        print(f"== {name}: {'ok' if done.returncode == 0 else 'FAILED'} in {time.monotonic() - start:.1f} s", flush=True)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
