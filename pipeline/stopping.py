"""Stopping on a signal: once to finish cleanly, twice to be gone at once."""

import os
import signal
import time
from types import FrameType, TracebackType
from typing import Self

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class GraceOver(BaseException):
    """The time to finish is used up. Not an Exception: no document's error boundary may swallow it."""


class StopSwitch:
    """While entered, the first SIGTERM or SIGINT is noted and the second ends the process.

    `grace` seconds after the first, `GraceOver` is raised wherever the main thread is (on systems without timers: by
    `check`). Only for the main thread.
    """

    def __init__(self, grace: float) -> None:
        self.signal: int | None = None
        self._grace = grace
        self._deadline = 0.0

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._stop) for number in _SIGNALS}
        if hasattr(signal, "SIGALRM"):
            self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._over)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def requested(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """130 for SIGINT, 143 for SIGTERM."""
        return 128 + (self.signal or 0)

    def check(self) -> None:
        """Raises GraceOver when the time is up."""
        if self.requested and time.monotonic() >= self._deadline:
            raise GraceOver

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            os._exit(128 + number)
        self.signal = number
        self._deadline = time.monotonic() + self._grace
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, max(self._grace, 0.001))

    def _over(self, number: int, frame: FrameType | None) -> None:
        raise GraceOver
