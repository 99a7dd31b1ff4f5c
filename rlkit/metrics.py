"""The log of a run: TensorBoard events, `metrics.csv` and the console."""

from __future__ import annotations

import csv
import io
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlkit.conf.schema import ConfigError
from rlkit.console import make_console
from rlkit.events import EVENT_FILE, Board, charts
from rlkit.files import append, make_folder, rewind, sizes, write_text
from rlkit.interquartile import interquartile_mean
from rlkit.recorded import HEADER

__all__ = ["Logger", "MetricsFile", "interquartile_mean"]

BY_MEMBER = ("eval/", "episode/")  # scalars with a curve for each member
HPARAMS_FOLDER = "hparams"


class Logger:
    """Writes what a run of M members measures to TensorBoard, to `metrics.csv` and to the console.

    The run's folder gets the interquartile mean over members of every scalar (the value itself if M = 1), at
    the mean of the members' steps. With several members `member_00`, `member_01` ... get the `eval/` and
    `episode/` scalars of each, at its own steps. When `log` returns all is on disk, and no file stays open.

    Args:
        folder: the run directory; it is made if need be. A `metrics.csv` in it is continued.
        resumed: the `state_dict` that a checkpoint holds: entries after it are taken out of the folder, and the log
            goes on as if they had never been; {} takes out all, None nothing.
        members: number of members, M.
        total_steps: environment steps planned for each member.
        title: what is trained, for the console.
        show: console output, "auto", "rich", "plain" or "off".

    Raises:
        ValueError: `show` is none of these, or the folder's `metrics.csv` has another number of members.
    """

    def __init__(
        self,
        folder: Path,
        *,
        members: int,
        total_steps: int,
        title: str,
        show: str = "auto",
        resumed: Mapping[str, Any] | None = None,
    ) -> None:
        self.members = members
        self._folder = Path(folder)
        self._names = _member_names(members)
        self._console = make_console(show, members, total_steps, title)
        kept = {} if resumed is None else resumed.get("files", {})
        now = sizes(self._folder, self._files())
        if resumed is not None:
            rewind(self._folder, self._files(), kept)
        before = resumed or {"steps": [0] * members, "tags": []}
        self._csv = MetricsFile(self._folder / "metrics.csv", self._names if members > 1 else [])
        self._board: Board | None = None
        self._steps: list[int] = list(before["steps"])  # of each member at the last log entry
        self._tags = set(before["tags"])  # logged so far
        self._charts = charts(sorted(self._tags))  # of the health page as it stands
        self._starts = dict(zip(self._folders(), [self._step, *self._steps], strict=False)) if resumed else {}
        self._waiting: list[tuple[float, str]] = []  # (time, text) of messages before the first log entry
        self._tell_of_losses([name for name, size in kept.items() if now.get(name, 0) < size])

    def _tell_of_losses(self, lost: Sequence[str]) -> None:
        """Tell which entries of before a checkpoint are gone, from files that were deleted or cut short since."""
        if "metrics.csv" in lost and self._step:
            first = f"after {self._csv.last:,} steps" if self._csv.last else "from the beginning"
            self.message(
                f"metrics.csv was deleted or cut short: entries {first} up to {self._step:,} are missing in it"
            )
        if other := len([name for name in lost if name != "metrics.csv"]):
            files = "an event file was" if other == 1 else f"{other} event files were"
            self.message(f"{files} deleted or cut short: TensorBoard lacks entries of before {self._step:,} steps")

    def log(
        self,
        steps: np.ndarray,
        scalars: dict[str, np.ndarray],
        histograms: dict[str, np.ndarray] | None = None,
    ) -> None:
        """Write one entry.

        Args:
            steps: environment steps of each member, int [M].
            scalars: "area/name" -> [M]; nan where a member did not measure it.
            histograms: name -> values of all members together. Values that are not finite are left out; their
                share, if there are any, is the scalar `<name>/nonfinite`.

        Raises:
            ValueError: a scalar does not have one value for each member.
        """
        steps = np.asarray(steps)
        finite: dict[str, np.ndarray] = {}
        for name, sample in (histograms or {}).items():
            finite[name] = flat = _float32(sample).ravel()
            good = np.isfinite(flat)
            if not good.all():
                finite[name] = flat[good]
                scalars = scalars | {f"{name}/nonfinite": np.full(self.members, 1.0 - good.mean())}
        values = self._matrix(scalars)  # [K, M]
        middle = interquartile_mean(values).astype(np.float32)  # [K]
        self._steps = steps.tolist()

        self._arrange(scalars)
        self._open_board().write(self._folder, self._step, zip(scalars, middle.tolist(), strict=True), finite)
        if self.members > 1:
            self._log_members(steps, scalars, values)
        self._csv.append(self._step, list(scalars), middle, values)
        self._console.logged(steps, scalars)

    def progress(self, steps: np.ndarray, scalars: dict[str, np.ndarray]) -> None:
        """Move the console only; costs next to nothing unless a refresh is due."""
        self._console.progress(steps, scalars)

    def busy(self, text: str) -> None:
        """Let the console say what goes on while no step is made; as cheap as `progress`."""
        self._console.busy(text)

    def message(self, text: str) -> None:
        """Tell of an event: a line on the console, and one of the text `events` in TensorBoard."""
        self._console.message(text)
        if self._board is None:  # TensorBoard takes a moment to load: not before the first entry
            self._waiting.append((time.time(), text))
        else:
            self._board.write_text(self._folder, self._step, text)

    def hparams(self, hparams: Mapping[str, str | int | float | bool], metrics: Mapping[str, float]) -> None:
        """Write hyperparameters and final metrics (the finite ones) for TensorBoard's HPARAMS tab."""
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        self._open_board().write_hparams(self._folder / HPARAMS_FOLDER, self._step, hparams, finite)

    def state_dict(self) -> dict[str, Any]:
        """Where the log stands: the sizes of its files, the steps of its last entry and the scalars it has."""
        return {"files": sizes(self._folder, self._files()), "steps": self._steps, "tags": sorted(self._tags)}

    def close(self) -> None:
        """Write what still waits and give the terminal back as it was. A second call does nothing."""
        self._console.close()
        if self._waiting:
            self._open_board()

    @property
    def _step(self) -> int:
        """Mean over members of the steps at the last log entry."""
        return round(sum(self._steps) / self.members)

    def _folders(self) -> list[Path]:
        """Those that hold event files: the run's, and with several members theirs."""
        return [self._folder, *(self._folder / name for name in self._names if self.members > 1)]

    def _files(self) -> list[str]:
        """Patterns of all files that only grow, and of those of a finished run."""
        inside = [*self._names, HPARAMS_FOLDER]
        return ["metrics.csv", f"{EVENT_FILE}.*", *(f"{name}/{EVENT_FILE}.*" for name in inside)]

    def _matrix(self, scalars: dict[str, np.ndarray]) -> np.ndarray:
        """The scalars as float32 [K, M]."""
        shape = (self.members,)
        for name, value in scalars.items():
            if np.shape(value) != shape:
                raise ValueError(f"scalar {name!r} has shape {np.shape(value)}, expected {shape}")
        return _float32(list(scalars.values())).reshape(len(scalars), self.members)

    def _log_members(self, steps: np.ndarray, scalars: dict[str, np.ndarray], values: np.ndarray) -> None:
        """Write the curves of each member; `values` [K, M] are those of `scalars`."""
        own = [k for k, name in enumerate(scalars) if name.startswith(BY_MEMBER)]
        names = [name for name in scalars if name.startswith(BY_MEMBER)]
        board = self._open_board()
        for folder, step, column in zip(self._names, steps.tolist(), values[own].T.tolist(), strict=True):
            board.write(self._folder / folder, step, zip(names, column, strict=True))

    def _arrange(self, scalars: Mapping[str, np.ndarray]) -> None:
        """Let the health page have the charts that there are scalars for: an empty chart tells nothing."""
        if scalars.keys() <= self._tags:
            return
        self._tags |= scalars.keys()
        titles = charts(self._tags)
        if titles != self._charts:
            self._charts = titles
            self._open_board().write_layout(self._folder, self._step, titles)

    def _open_board(self) -> Board:
        if self._board is None:
            self._board = Board({folder: step + 1 for folder, step in self._starts.items()})
            for when, text in self._waiting:
                self._board.write_text(self._folder, self._starts.get(self._folder, 0), text, when)
            self._waiting.clear()
        return self._board


def _float32(values: Any) -> np.ndarray:
    """Values in TensorBoard's precision; what it cannot hold is inf."""
    with np.errstate(over="ignore"):
        return np.asarray(values, dtype=np.float32)


def _member_names(members: int) -> list[str]:
    """Names of the members' columns and folders."""
    return [f"member_{m:0{max(2, len(str(members - 1)))}}" for m in range(members)]


def _header(columns: Sequence[str]) -> str:
    """The first line of a `metrics.csv`."""
    return ",".join([*HEADER, *columns]) + "\n"


def _whole_lines(path: Path, header: str) -> tuple[str, str]:
    """The text of a `metrics.csv`, and its lines that are whole; both empty where there is none.

    Raises:
        ValueError: its first line is another than the header, or it is no text.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole and not whole.startswith(header):
        raise ValueError(f"its first line must be {header.rstrip()}")
    return text, whole


def check_metrics(path: Path, members: int) -> None:
    """Refuse a `metrics.csv` that a run cannot go on writing to.

    Raises:
        ConfigError: it is damaged; a last line that is not whole is not.
    """
    header = _header(_member_names(members) if members > 1 else [])
    try:
        _, whole = _whole_lines(path, header)
        for number, line in enumerate(whole.splitlines()[1:], 2):
            cells = line.split(",")
            if len(cells) != header.count(",") + 1 or not cells[0].isdigit() or not math.isfinite(float(cells[1])):
                raise ValueError(f"line {number} is {line[:60]!r}")
    except ValueError as error:
        remedy = "without the file the run goes on, with the entries that are still to come"
        raise ConfigError(f"{path} is damaged: {error}; {remedy}") from error


class MetricsFile:
    """`metrics.csv`: a row for each scalar of each log entry; the cell of a nan is empty.

    Args:
        path: a file that exists is continued, its seconds too; a last row torn by a crash is removed.
        columns: names of the members' columns; none for a single member.

    Attributes:
        last: steps of the last entry that was there; 0 for none.

    Raises:
        ValueError: the file that exists has other columns, or is no text.
    """

    def __init__(self, path: Path, columns: list[str]) -> None:
        self._path, self._columns = path, columns
        self._start = time.monotonic()
        header = _header(columns)
        make_folder(path.parent)
        text, whole = _whole_lines(path, header)
        if text != whole or not whole:
            write_text(path, whole or header)
        last = whole.splitlines()[-1:]
        self.last = 0
        if last and last != [header.rstrip()]:
            steps, seconds, *_ = last[0].split(",")
            self.last = int(steps)
            self._start -= float(seconds)

    def append(self, step: int, names: list[str], middle: np.ndarray, values: np.ndarray) -> None:
        """Add rows: `middle` [K] is the column `value`, `values` [K, M] are the members' columns."""
        cells = np.column_stack([middle, values]) if self._columns else middle[:, None]
        texts = np.where(np.isnan(cells), "", cells.astype(str)).tolist()  # shortest text of the same float32
        seconds = f"{time.monotonic() - self._start:.3f}"
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerows([step, seconds, name, *row] for name, row in zip(names, texts, strict=True))
        append(self._path, text.getvalue().encode())
