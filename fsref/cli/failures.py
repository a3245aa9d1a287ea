"""How failures read: one line on stderr and an exit code. Tracebacks are for our own bugs, and for the debug log."""

import errno
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from fsref.errors import ConfigError, FsrefError
from fsref.redact import guard_logging, redact, visible

_log: Final = logging.getLogger("fsref.cli")
BROKEN_PIPE: Final = 141


@contextmanager
def report(*, argv: Sequence[str]) -> Iterator[None]:
    """Turns a known error of the block into ``error: ...`` and exit code 1 (2 for the config); anything else passes."""
    try:
        yield
    except FsrefError as e:
        _log.debug("fsref %s failed", " ".join(argv), exc_info=e)
        tell(e)
        raise SystemExit(exit_code(e)) from None
    except BrokenPipeError:
        # the reader of our output (head, less) has gone; silence the interpreter's own flush at exit as well
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(BROKEN_PIPE) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def tell(error: FsrefError) -> None:
    """Prints ``error: ...`` on stderr."""
    sys.stderr.write(f"error: {one_line(error)}\n")
    sys.stderr.flush()


def exit_code(error: FsrefError) -> int:
    """2 where the user changes the command line or the config, else 1."""
    return 2 if isinstance(error, ConfigError) else 1


def one_line(error: BaseException) -> str:
    """The message on one line; the builtin parents of our classes must not turn it into ``[Errno ...]`` or quotes."""
    text = " ".join(str(a) for a in error.args if not isinstance(a, int) or a not in errno.errorcode) or str(error)
    return visible(redact(" ".join(text.split()))) or type(error).__name__


def set_up_logging(*, verbose: bool, level: int = logging.INFO) -> None:
    """Logs on stderr, which the launcher sends to the role's log file."""
    logging.basicConfig(
        level=logging.DEBUG if verbose else level,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    guard_logging()
    if verbose:
        for noisy in ("asyncio", "httpcore", "httpx", "urllib3", "numba", "matplotlib"):
            logging.getLogger(noisy).setLevel(logging.INFO)
