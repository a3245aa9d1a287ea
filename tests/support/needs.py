"""What a test needs beyond the base package. A bare machine skips; where ``FSREF_SKIP_NOTHING`` is set (CI), what lacks is a failure.

Call ``needs.root()`` first thing in the test or fixture, ``needs.extra(...)`` also at the head of a module.
"""

import importlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, NoReturn

import pytest


def _lacks(what: str) -> NoReturn:
    if os.environ.get("FSREF_SKIP_NOTHING"):
        pytest.fail(f"this machine lacks {what}, and nothing may be skipped here")
    pytest.skip(f"needs {what}", allow_module_level=True)


def extra(package: str, name: str) -> Any:
    """A module of a package that the extra ``name`` brings."""
    try:
        return importlib.import_module(package)
    except ImportError:
        _lacks(f"{package}: install the extra {name}")


def root() -> None:
    """Effective uid 0 with the right to mount."""
    if os.geteuid() != 0:
        _lacks("root")
    probe = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
    if probe.returncode:
        _lacks("the right to mount")


def program(name: str) -> str:
    """An executable on the PATH; returns its path."""
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    if found is None:
        _lacks(f"the program {name}")
    return str(found)


def fuse() -> None:
    """FUSE mounts as root."""
    root()
    program("fusermount3")
    if not Path("/dev/fuse").exists():
        _lacks("/dev/fuse")


def loop_device() -> None:
    """A loop device and ext4."""
    root()
    program("mkfs.ext4")
    if not Path("/dev/loop-control").exists():
        _lacks("/dev/loop-control")
