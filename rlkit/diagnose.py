"""What is wrong with runs, and the setting that helps: `python -m rlkit.diagnose runs/...`.

python -m rlkit.diagnose runs/CartPole/grpo/2026-01-31_12-00-00-000000    one run, finished or not
python -m rlkit.diagnose runs                                             all runs under a folder

The same lines are told while a run trains, and at its end (log.diagnose=false: not).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlkit.conf.schema import ConfigError
from rlkit.recorded import ReportError, read_metrics, read_summary, settings_of
from rlkit.series import EVALUATION, RETURN, WINDOW, Series
from rlkit.symptoms import Finding, findings
from rlkit.train import EXIT_CONFIG, complain, quiet_pipe

STRIDE = WINDOW // 2  # log entries from one look at a run to the next
NAMED = 8  # more members than this are not all named


class Diagnosis:
    """The diagnosis of a run that is going on.

    Args:
        members: number of members, M.
        settings: of the run, full key -> value: what helps depends on what is set already.
    """

    def __init__(self, members: int, settings: Mapping[str, Any] | None = None) -> None:
        self.series = Series(members, settings=settings)
        self._told: dict[str, np.ndarray] = {}  # rule -> bool [M]
        self._entries = 0

    def note(self, steps: np.ndarray, scalars: Mapping[str, np.ndarray]) -> list[str]:
        """Take in a log entry; return a line for each rule that holds for some members for the first time.

        The rules look after every fourth entry and after every evaluation: they cost more than an entry does.

        Args:
            steps: environment steps of each member, int [M].
            scalars: "area/name" -> [M], as logged.
        """
        self.series.append(float(np.mean(steps)), scalars)
        if EVALUATION not in scalars:
            self._entries += 1
            if self._entries % STRIDE:
                return []
        lines = []
        for name, finding in findings(self.series).items():
            new = finding.holds & ~self._told.get(name, False)
            if new.any():
                self._told[name] = self._told.get(name, False) | new
                lines.append(line(finding, new))
        return lines

    def state_dict(self) -> dict[str, Any]:
        """What was seen and told of so far."""
        import torch  # which a diagnosis of files does without

        told = {name: torch.from_numpy(members) for name, members in self._told.items()}
        return {"series": self.series.state_dict(), "told": told, "entries": self._entries}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.series.load_state_dict(state["series"])
        self._told = {name: members.numpy().copy() for name, members in state["told"].items()}
        self._entries = state["entries"]

    def lines(self, diverged: np.ndarray) -> dict[str, str]:
        """What holds now, by rule; `diverged` [M] are members given up, which the session has told of by itself."""
        self.series.diverged = diverged
        return diagnose(self.series)


def diagnose(run: Series) -> dict[str, str]:
    """A line for each rule that holds for some members, by the rule's name."""
    return {name: line(finding, finding.holds) for name, finding in findings(run).items() if finding.holds.any()}


def line(finding: Finding, which: np.ndarray) -> str:
    """A finding in one sentence for some members (bool [M], at least one), with the number of the worst of them."""
    members = np.flatnonzero(which).tolist()
    worst = max(members, key=lambda m: float(np.nan_to_num(finding.severity[m], nan=-np.inf)))
    if len(members) == 1:
        who = f"member {worst}"
    elif len(members) <= NAMED:
        who = f"members {', '.join(map(str, members))} (worst: {worst})"
    else:
        who = f"{len(members)} of {len(which)} members (worst: {worst})"
    return f"{who}: {finding.sentence(worst)}; {finding.knob}"


def read(folder: Path) -> tuple[str, Series]:
    """What a run is, in words, and its series.

    Raises:
        ReportError: its files are damaged.
    """
    try:
        summary = read_summary(folder)
    except FileNotFoundError:
        summary = {}
    except ReportError as error:
        raise ReportError(f"{folder}: {error}") from error
    with (folder / "metrics.csv").open(errors="replace") as file:
        members = max(file.readline().count(",") - 3, 1)
    try:
        settings = settings_of(folder)
    except FileNotFoundError:
        settings = {}
    except ConfigError as error:
        raise ReportError(str(error)) from error
    diverged = np.array([status == "diverged" for status in summary.get("status", [])] or [False] * members)
    series = Series(members, read_metrics(folder / "metrics.csv", members), diverged, settings)
    about = [f"{summary['env']} {summary['algo']}"] if "env" in summary and "algo" in summary else ["not finished"]
    return ", ".join([*about, f"{members} member{'s' * (members > 1)}"]), series


def run_folders(paths: Sequence[Path]) -> list[Path]:
    """The folders in or under some paths that hold a run, each once.

    Raises:
        ReportError: a path holds none.
    """
    folders: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            raise ReportError(f"{path} is not a folder; name a run directory or a folder above some")
        found = sorted(file.parent for file in path.rglob("metrics.csv"))
        if not found:
            raise ReportError(f"no run in {path}: no metrics.csv in it or below")
        for folder in found:
            folders.setdefault(folder.resolve(), folder)
    return list(folders.values())


def page(folder: Path) -> Iterator[str]:
    """The lines that are printed of a run."""
    about, series = read(folder)
    yield f"{folder} ({about})"
    entries = len(series.values(RETURN))
    lines = list(diagnose(series).values())
    yield from (f"  {text}" for text in lines)
    if not lines:
        few = f": with {entries} log entries most rules have nothing to go by" if entries < 2 * WINDOW else ""
        yield f"  nothing found{few}"


@quiet_pipe
def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `python -m rlkit.diagnose`; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m rlkit.diagnose",
        description=__doc__,
        epilog="Exit status: 0 done, 2 there is no run, one is damaged or an option is wrong, 141 nobody reads the\n"
        "output.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="RUN", help="a run directory, or a folder above several")
    options = parser.parse_args(arguments)
    try:
        for folder in run_folders(options.paths):
            print("\n".join(page(folder)), flush=True)
    except ReportError as error:
        return complain(str(error), EXIT_CONFIG)
    return 0


if __name__ == "__main__":
    sys.exit(main())
