"""Who writes a journal: minting incarnations and naming the process, and whether that process still exists.

Owns the facts of this host (boot id, process start times). Refuses to guess: what cannot be read is unknown, never dead.
"""

import getpass
import os
import re
import socket
from pathlib import Path
from typing import NamedTuple

from fsref.errors import BadRef
from fsref.refs import ROLES, check_incarnation


class Identity(NamedTuple):
    """One process on one boot of one host."""

    host: str
    boot_id: str
    pid: int
    pstart: int
    user: str


def mint(role: str, label: str) -> str:
    """A fresh incarnation ``role.label.boot``; 64 random bits, never reused. Raises ``BadRef`` for a bad role or label."""
    if role not in ROLES:
        raise BadRef(f"role {role!r} is not one of {ROLES}")
    return check_incarnation(f"{role}.{label}.{os.urandom(8).hex()}")


def label_of(text: str) -> str:
    """``text`` as an incarnation's label: lower case, ``[a-z0-9-]``, 1 to 40 characters."""
    return re.sub(r"[^a-z0-9-]+", "-", text.lower())[:40].strip("-") or "x"


def this_process() -> Identity:
    """The identity of the calling process."""
    return Identity(socket.gethostname()[:200], boot_id(), os.getpid(), process_start(os.getpid()) or 0, _user())


def boot_id() -> str:
    """The kernel's boot id; empty where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def process_start(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None if there is no such process (or it is a zombie that was not reaped)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _user() -> str:
    try:
        return getpass.getuser()[:64]
    except (KeyError, OSError):
        return str(os.getuid())
