"""Ctrl-C and SIGTERM as requests to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Terminated(KeyboardInterrupt):
    """SIGTERM, by which clusters end a job; it ends a run as Ctrl-C does."""


class Interrupt:
    """Turns the first Ctrl-C or SIGTERM into a request to stop after this iteration; the second interrupts at once.

    A program that has a handler for SIGTERM of its own keeps it.

    Args:
        tell: called with a line of text at the first one.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.requested = False
        self.cause: KeyboardInterrupt | None = None  # what a run that ended so is to raise
        self._tell = tell
        self._before: dict[int, Any] = {}  # signal -> its handler

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._handle)
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        ended = Terminated() if number == signal.SIGTERM else KeyboardInterrupt()
        if self.requested:
            raise ended
        self.requested, self.cause = True, ended
        name = "SIGTERM" if number == signal.SIGTERM else "Ctrl-C"
        self._tell(
            f"{name}: this iteration is finished, so that the checkpoint is exact, then the run is saved and "
            "evaluated; once more ends it at once, with the last checkpoint it has"
        )
