"""Standard output and error of a process go to its own log, whatever its step does with them."""

import os
import sys
from pathlib import Path

from fsref.store.posix import raise_mapped


def send_output_to(log: Path) -> None:
    """Appends from here on; also what later programs in this process write. Raises ``StoreError``."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
    except OSError as e:
        raise_mapped(e, f"opening {log}")
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
