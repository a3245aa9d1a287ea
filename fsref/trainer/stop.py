"""SIGTERM, SIGINT and SIGUSR1 (which srun passes on) as a flag that the ranks agree on between steps."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Final, Self

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopSignal:
    """Set once a stop was asked for. A context manager that puts the old handlers back; a no-op outside the main thread."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._old: dict[int, Any] = {}

    def is_set(self) -> bool:
        return self._event.is_set()

    def set(self) -> None:
        """What a signal does."""
        self._event.set()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._old = {s: signal.signal(s, self._handle) for s in _SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self._event.set()
