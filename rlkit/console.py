"""What a run shows on the console while it trains."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from rlkit.decimals import number
from rlkit.interquartile import interquartile_mean

if TYPE_CHECKING:
    from rich.text import Text

SHOWS = ("auto", "rich", "plain", "off")
SHOWN = {"return": "episode/return", "KL": "kl/old", "entropy": "entropy/mean"}
SPEED = "speed/steps_per_second"
PLAIN_SECONDS = 5.0  # between two plain lines
RICH_SECONDS = 0.2  # between two refreshes of the progress line
SPEED_SECONDS = 10.0  # the speed shown is the mean over this time
LEAST_BAR = 12  # columns; with fewer the numbers get a line of their own


class Console:
    """Shows nothing: the console that is off, and what the others have in common.

    Args:
        members: number of members, M.
        total_steps: environment steps planned for each.
        title: what is trained.
    """

    def __init__(self, members: int, total_steps: int, title: str) -> None:
        self.members, self.total_steps, self.title = members, total_steps, title
        self._due = math.inf  # on the monotonic clock, seconds
        self._steps = np.zeros(members, dtype=np.int64)
        self._latest: dict[str, np.ndarray] = {}  # label -> [M], the last value each member measured
        self._window: deque[tuple[float, np.ndarray]] = deque()  # (seconds, steps [M])
        self._unseen: tuple[np.ndarray, dict[str, np.ndarray]] | None = None  # of the last call of `progress`

    def progress(self, steps: np.ndarray, scalars: dict[str, np.ndarray]) -> None:
        """Show where the run stands if it is time to; costs next to nothing if not."""
        self._unseen = (steps, scalars)
        if time.monotonic() >= self._due:
            self.note(steps, scalars)
            self.refresh()

    def logged(self, steps: np.ndarray, scalars: dict[str, np.ndarray]) -> None:
        """Take in numbers that were logged."""
        self.note(steps, scalars)

    def busy(self, text: str) -> None:
        """Show what goes on while no step is made, if it is time to."""

    def message(self, text: str) -> None:
        """Show an event."""

    def close(self) -> None:
        """Show the last state and give the terminal back as it was."""
        if self._unseen is not None:
            self.note(*self._unseen)
        self._due = math.inf

    def refresh(self) -> None:
        """Show where the run stands."""

    def note(self, steps: np.ndarray, scalars: dict[str, np.ndarray]) -> None:
        """Remember numbers; a member that did not measure one (nan) keeps its last."""
        self._unseen = None
        now = time.monotonic()
        self._steps = np.array(steps, dtype=np.int64)
        self._window.append((now, self._steps))
        while len(self._window) > 2 and self._window[1][0] < now - SPEED_SECONDS:
            self._window.popleft()
        for label, name in (*SHOWN.items(), (SPEED, SPEED)):
            if name in scalars:
                new = np.array(scalars[name], dtype=np.float64)
                self._latest[label] = np.where(np.isnan(new), self._latest.get(label, np.nan), new)

    def speed(self) -> float:
        """Steps per second of all members together, over the last seconds; nan if not known yet."""
        seconds, gained = self._span()
        if seconds > 0 and gained.any():
            return float(gained.sum() / seconds)
        return float(np.max(self._latest.get(SPEED, np.nan)))

    def seconds_left(self) -> float:
        """Time until the slowest member that still moves has made its steps; nan if not known yet."""
        left = np.maximum(self.total_steps - self._steps, 0)
        seconds, gained = self._span()
        if not left.any():
            return 0.0
        if seconds > 0 and gained.any():
            return float((left[gained > 0] / gained[gained > 0]).max() * seconds)
        return float(left.sum() / self.speed()) if self.speed() > 0 else math.nan

    def numbers(self) -> list[str]:
        """The parts of the progress line between the bar and the time left."""
        speed = self.speed()
        together = f" (all {self.members})" if self.members > 1 else ""  # all other steps count for one member
        parts = [] if math.isnan(speed) else [f"{speed:,.0f} steps/s{together}"]
        for label, form in (("return", number), ("KL", "{:.4f}".format), ("entropy", "{:.3f}".format)):
            if label in self._latest:
                value = float(interquartile_mean(self._latest[label]))
                parts.append(f"{label} {'-' if math.isnan(value) else form(value)}")
                if label == "return" and self.members > 1:
                    parts[-1] += f" (IQM of {self.members})"
        return parts

    def share(self) -> float:
        """Share of the planned steps made, over all members, in [0, 1]."""
        return min(float(self._steps.mean()) / self.total_steps, 1.0) if self.total_steps > 0 else 1.0

    def steps(self) -> str:
        """Steps of the mean member, and the steps planned."""
        return f"{self._steps.mean():,.0f}/{self.total_steps:,} steps"

    def _span(self) -> tuple[float, np.ndarray]:
        """Seconds and steps [M] between the window's ends."""
        if len(self._window) < 2:
            return 0.0, np.zeros(self.members)
        (start, before), (end, after) = self._window[0], self._window[-1]
        return end - start, after - before


class PlainConsole(Console):
    """A plain line every few seconds, the first after the first log entry."""

    def __init__(self, members: int, total_steps: int, title: str) -> None:
        super().__init__(members, total_steps, title)
        self._due = time.monotonic() + PLAIN_SECONDS
        self._shown = -1.0  # mean of the steps in the last line

    def logged(self, steps: np.ndarray, scalars: dict[str, np.ndarray]) -> None:
        super().logged(steps, scalars)
        if self._shown < 0:
            self.refresh()

    def refresh(self) -> None:
        self._due = time.monotonic() + PLAIN_SECONDS
        self._shown = float(self._steps.mean())
        progress = f"{self.steps()} ({self.share():.0%})"
        left = f"{clock(self.seconds_left())} left"
        self.message("  ".join([self.title, progress, *self.numbers(), left]))

    def busy(self, text: str) -> None:
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + PLAIN_SECONDS
            self.message(f"{self.title}  {text}")

    def message(self, text: str) -> None:
        print(text, flush=True)

    def close(self) -> None:
        super().close()
        if self._steps.mean() > max(self._shown, 0.0):
            self.refresh()
            self._due = math.inf


class RichConsole(Console):
    """A progress line that stays at the bottom of the terminal; other output scrolls above it."""

    def __init__(self, members: int, total_steps: int, title: str) -> None:
        from rich.live import Live

        super().__init__(members, total_steps, title)
        self._console = rich_console()
        self._live = Live(console=self._console, auto_refresh=False)
        self._due = 0.0
        self._busy = ""  # what goes on, if it is not training

    def note(self, steps: np.ndarray, scalars: dict[str, np.ndarray]) -> None:
        super().note(steps, scalars)
        self._busy = ""

    def busy(self, text: str) -> None:
        self._busy = text
        if time.monotonic() >= self._due:
            self.refresh()

    def refresh(self) -> None:
        if not self._live.is_started:
            self._live.start()
        self._live.update(self.line(self._console.width), refresh=True)
        self._due = time.monotonic() + RICH_SECONDS

    def line(self, width: int) -> Text:
        """The progress line for `width` columns; two lines if one leaves no room for the bar."""
        from rich.text import Text

        end = f"  {self.steps()}"
        left = f"  {clock(self.seconds_left())} left"
        numbers = self._busy or "  ".join(self.numbers())
        one = len(self.title) + 1 + LEAST_BAR + len(end) + 2 + len(numbers) + len(left) < width
        tail = f"{end}  {numbers}{left}" if one else f"{end}{left}"
        columns = max(min(width - len(self.title) - len(tail) - 2, 60), 0)
        done = round(self.share() * columns)
        full, empty = ("━", "─") if self._console.encoding.startswith("utf") else ("#", "-")
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append(f"{self.title} ", "bold")
        line.append(full * done, "green" if self.share() >= 1 else "cyan")
        line.append(empty * (columns - done), "dim")
        line.append(tail)
        return line if one else line.append(f"\n  {numbers}")

    def message(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        super().close()
        self._busy = ""
        if self._live.is_started:
            self.refresh()
            self._live.stop()
            self._due = math.inf


def make_console(show: str, members: int, total_steps: int, title: str) -> Console:
    """Return the console for `show`: "rich", "plain", "off", or "auto": rich on a terminal, plain elsewhere.

    Raises:
        ValueError: `show` is none of these.
    """
    if show not in SHOWS:
        raise ValueError(f"show={show!r}: expected one of {', '.join(SHOWS)}")
    if show == "auto":
        show = "rich" if on_terminal() else "plain"
    kinds: dict[str, type[Console]] = {"rich": RichConsole, "plain": PlainConsole, "off": Console}
    return kinds[show](members, total_steps, title)


def on_terminal() -> bool:
    """Whether standard output is a terminal that can move its cursor."""
    return sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def rich_console(terminal: bool = True) -> Any:
    """A rich console on standard output; one that is no terminal gets no control codes."""
    from rich.console import Console as RichOutput

    class Output(RichOutput):
        def on_broken_pipe(self) -> None:
            raise  # the entry point says how a command ends; rich would end it here with status 1

    return Output(force_terminal=True) if terminal else Output(color_system=None)


def clock(seconds: float) -> str:
    """Hours, minutes and seconds as 0:05, 12:34 or 1:02:03."""
    if not math.isfinite(seconds):
        return "-:--"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
