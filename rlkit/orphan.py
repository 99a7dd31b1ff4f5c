"""Processes that end with the one that started them, however that one ended: killed, for example."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from multiprocessing.connection import wait
from typing import Any

LOOK = 0.5  # seconds between two looks at the parent
GRACE = 2.0  # seconds that an orphan has to end by itself


def end_with_parent() -> None:
    """Watch, in a thread, the process that started this one, and end this one `GRACE` seconds after it has gone.

    Until then an orphan that waits for an order reads the end of its pipe, closes what it holds and ends by itself. One
    in the midst of a long step or iteration would come to read only after it.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_watch, args=(parent, os.getppid()), name="watch", daemon=True).start()


def _watch(parent: Any, number: int) -> None:
    # The sentinel knows on every system, but late where a sibling holds a copy of it; the number knows on POSIX alone.
    while not wait([parent.sentinel], LOOK) and os.getppid() == number:
        pass
    time.sleep(GRACE)
    os._exit(1)
