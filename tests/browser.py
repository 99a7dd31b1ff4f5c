"""A headless Chromium for tests, spoken to in its DevTools protocol through a pair of pipes."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
# fmt: off
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1500,2200",
    "--remote-debugging-pipe",
]
# fmt: on


def chromium() -> str | None:
    """The path of a Chromium, or None."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """A page of a Chromium of its own, which reads commands, JSON ended by a zero byte, at descriptor 3; answers: 4.

    Args:
        program: the path of the Chromium.
        profile: a folder for what it keeps.
    """

    def __init__(self, program: str, profile: Path) -> None:
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        pair = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs_in, theirs_out)]  # clear of 3 and 4

        def place() -> None:
            os.dup2(pair[0], 3)
            os.dup2(pair[1], 4)

        self._process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=place,
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (theirs_in, theirs_out, *pair):
            os.close(fd)
        self._buffer, self._number, self._session = b"", 0, {}
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        attached = self.command("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}

    def command(self, method: str, timeout: float = 60.0, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; events that come in between are passed over."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters, **self._session}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + timeout
        while True:
            text, zero, rest = self._buffer.partition(b"\0")
            if not zero:
                if not select.select([self._in], [], [], max(until - time.monotonic(), 0.0))[0]:
                    raise TimeoutError(f"no answer to {method} within {timeout} s")
                data = os.read(self._in, 1 << 20)
                if not data:
                    raise ConnectionError(f"Chromium ended, status {self._process.wait()}, before it answered {method}")
                self._buffer += data
                continue
            self._buffer = rest
            answer = json.loads(text)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.command("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"].get("description", script))
        return answer["result"].get("value")

    def close(self) -> None:
        os.close(self._out)  # it ends when nobody can command it
        os.close(self._in)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
