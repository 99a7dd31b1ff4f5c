"""Finished runs as they lie on disk: found, read, and grouped by what was trained."""

from __future__ import annotations

import csv
import json
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlkit.conf.schema import ConfigError, shown
from rlkit.saved import SETTINGS, read_overrides, read_settings

NEEDED = ("env", "algo", "seed", "members", "env_steps", "eval_return", "solved_at_steps", "status")  # in summary.json
HEADER = ["step", "wall_seconds", "name", "value"]
NEUTRAL = (
    "seed",
    "members",
    "log.every",
    "checkpoint.every",
    "checkpoint.best",
    "checkpoint.keep",
    "stop_at",
)  # settings that change nothing a seed learns
Curve = tuple[np.ndarray, np.ndarray]  # steps [L], values [L, M]


class ReportError(ValueError):
    """What keeps runs from being compared; the message is one sentence."""


@dataclass(frozen=True)
class Record:
    """A finished run.

    Attributes:
        folder: the run directory.
        summary: what `summary.json` holds.
        settings: full key -> value of every leaf of the configuration.
        overrides: what the command line set.
        curves: scalar -> (steps [L], members' values [L, M]); the steps are the mean over members, nan is not measured.
    """

    folder: Path
    summary: dict[str, Any]
    settings: dict[str, Any]
    overrides: list[str]
    curves: dict[str, Curve]

    @property
    def seeds(self) -> range:
        """Seeds of the members."""
        return range(self.summary["seed"], self.summary["seed"] + self.summary["members"])

    @property
    def command(self) -> str:
        """The command that trains the run again."""
        return "python -m rlkit.train " + shlex.join(self.overrides)


@dataclass(frozen=True)
class Group:
    """Runs of one environment, algorithm and settings, seen as S seeds; `label` names settings where others differ."""

    label: str
    records: list[Record]

    @property
    def env(self) -> str:
        return str(self.records[0].summary["env"])

    @property
    def algo(self) -> str:
        return str(self.records[0].summary["algo"])

    @property
    def settings(self) -> dict[str, Any]:
        return self.records[0].settings

    def column(self, name: str) -> list[Any]:
        """What the summaries say of each seed, [S]."""
        return [value for record in self.records for value in record.summary[name]]

    def curve(self, name: str) -> Curve | None:
        """Steps [L] and values [L, S] of a scalar, or None where no run has it.

        Several runs are brought, by linear interpolation, to the steps of the one with most entries that lie within
        the span of all.
        """
        curves = [record.curves[name] for record in self.records if name in record.curves]
        if len(curves) < 2:
            return curves[0] if curves else None
        first, last = max(steps[0] for steps, _ in curves), min(steps[-1] for steps, _ in curves)
        grid = max((steps for steps, _ in curves), key=len)
        grid = grid[(grid >= first) & (grid <= last)]
        return grid, np.column_stack([_at(grid, steps, column) for steps, values in curves for column in values.T])


def _at(grid: np.ndarray, steps: np.ndarray, column: np.ndarray) -> np.ndarray:
    """A seed's values at other steps; nan outside those where it was measured."""
    known = ~np.isnan(column)
    if not known.any():
        return np.full(len(grid), np.nan)
    return np.asarray(np.interp(grid, steps[known], column[known], left=np.nan, right=np.nan))


def find(paths: str | Path | Iterable[str | Path]) -> tuple[list[Group], list[str]]:
    """Read the finished runs in `paths` and group them, in the order found; also say what was passed over and why.

    Args:
        paths: run directories, or folders above some.

    Raises:
        ReportError: a path does not exist, no finished run is found, or the `metrics.csv` of one is damaged.
    """
    places = [Path(path) for path in ([paths] if isinstance(paths, (str, Path)) else paths)]
    records: dict[Path, Record] = {}
    notes: list[str] = []
    for path in places:
        if not path.is_dir():
            raise ReportError(f"{path} is not a folder; name a run directory or a folder above some")
        marks = [*path.rglob("summary.json"), *path.rglob("metrics.csv")]
        for folder in sorted({mark.parent for mark in marks}):
            if folder.resolve() not in records:
                fault, record = _read(folder)
                notes += [f"skipped {folder}: {fault}"] if fault else []
                if record is not None:
                    records[folder.resolve()] = record
    groups = _grouped(_without_repeats(list(records.values()), notes))
    if not groups:
        where = f"no finished run in {', '.join(map(str, places))}" if places else "no run was named"
        raise ReportError("\n".join([*notes, where]))
    return groups, notes


def _read(folder: Path) -> tuple[str, Record | None]:
    """Read a run; or say why it cannot count."""
    if not (folder / "summary.json").exists():
        return "it has no summary.json, so it has not finished", None
    try:
        summary = read_summary(folder)
    except ReportError as error:
        return str(error), None
    missing = [name for name in NEEDED if name not in summary]
    if missing:
        return f"its summary.json has no {missing[0]}", None
    for unfinished in {"interrupted", "stopped"} & set(summary["status"]):
        return f"it was {unfinished} at {sum(summary['env_steps']) / len(summary['env_steps']):,.0f} steps", None
    try:
        settings, overrides = settings_of(folder), read_overrides(folder)
    except (FileNotFoundError, ConfigError) as error:
        return str(error), None
    curves = read_metrics(folder / "metrics.csv", summary["members"])
    if "eval/return" not in curves:
        return "its metrics.csv has no eval/return", None
    return "", Record(folder, summary, settings, overrides, curves)


def settings_of(folder: Path) -> dict[str, Any]:
    """Return the settings of a run, of whatever version: full key -> value of every leaf.

    Raises:
        FileNotFoundError: they are not there.
        ConfigError: they are damaged.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return dict(leaves(OmegaConf.to_container(read_settings(folder), resolve=True)))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{folder / SETTINGS} is damaged: {str(error).splitlines()[0]}") from error


def read_summary(folder: Path) -> dict[str, Any]:
    """Return what a run's `summary.json` holds.

    Raises:
        FileNotFoundError: there is none.
        ReportError: it is damaged.
    """
    try:
        summary = json.loads((folder / "summary.json").read_text())
    except ValueError as error:
        raise ReportError(f"its summary.json is damaged ({error})") from error
    if not isinstance(summary, dict):
        raise ReportError("its summary.json is damaged (it holds no names)")
    return summary


def read_metrics(path: Path, members: int) -> dict[str, Curve]:
    """Return for each scalar of a `metrics.csv` the steps [L] and the members' values [L, M] of its entries.

    Raises:
        ReportError: the file is missing or damaged; the sentence names the line.
    """
    if not path.exists():
        raise ReportError(f"{path} is missing")
    entries: dict[str, list[tuple[float, list[float]]]] = defaultdict(list)
    line = 1
    try:
        with path.open(newline="") as file:
            rows = csv.reader(file)
            width = len(HEADER) + (members if members > 1 else 0)
            header = next(rows, [])
            if header[: len(HEADER)] != HEADER or len(header) != width:
                raise ReportError(f"{path} is damaged: line 1 must be the header of a run of members={members}")
            for line, row in enumerate(rows, 2):  # noqa: B007 (named in the error)
                if len(row) != width:
                    raise ValueError(f"{len(row)} cells instead of {width}")
                cells = row[len(HEADER) :] or row[3:4]
                entries[row[2]].append((float(row[0]), [float(cell) if cell else np.nan for cell in cells]))
    except ReportError:
        raise
    except (ValueError, csv.Error) as error:
        raise ReportError(f"{path} is damaged in line {line}: {error}") from error
    return {name: (np.array([s for s, _ in rows]), np.array([v for _, v in rows])) for name, rows in entries.items()}


def leaves(node: Any, prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Yield (full key, value) of every leaf of nested dictionaries; a list is a leaf."""
    if isinstance(node, dict):
        for name, value in node.items():
            yield from leaves(value, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, node


def _without_repeats(records: list[Record], notes: list[str]) -> list[Record]:
    """Leave out runs whose seeds a later one has too: the same seed counted twice would feign certainty."""
    kept: list[Record] = []
    for record in reversed(records):
        for other in kept:
            if _kind(record) == _kind(other) and set(record.seeds) & set(other.seeds):
                notes.append(f"skipped {record.folder}: {other.folder} has the same settings and seeds, and is later")
                break
        else:
            kept.append(record)
    return kept[::-1]


def _kind(record: Record) -> str:
    """What two runs must share to differ in their seeds only."""
    varied = {name: value for name, value in record.settings.items() if name not in NEUTRAL}
    return json.dumps([record.summary["env"], record.summary["algo"], varied], sort_keys=True)


def _grouped(records: list[Record]) -> list[Group]:
    """Runs of equal settings together, environments together, each group with a label."""
    kinds: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        kinds[_kind(record)].append(record)
    rivals: dict[tuple[str, str], list[list[Record]]] = defaultdict(list)  # of one environment and algorithm
    for same in kinds.values():
        rivals[same[0].summary["env"], same[0].summary["algo"]].append(same)
    groups = [
        Group(f"{algo.upper()} {suffix}".rstrip(), same)
        for (_, algo), several in rivals.items()
        for same, suffix in zip(several, differences([same[0].settings for same in several]), strict=True)
    ]
    order = list(dict.fromkeys(group.env for group in groups))
    return sorted(groups, key=lambda group: order.index(group.env))


def differences(several: list[dict[str, Any]]) -> list[str]:
    """Name for each of several configurations the settings in which it differs from most, as the command line does.

    Where no value is that of more than half of them, each names its own. Stabilisers are named as a list; a key of one
    counts as a difference only among the configurations that have it.
    """
    several = [settings | {"stabilizer": stabilizers(settings)} for settings in several]
    parts: list[list[str]] = [[] for _ in several]
    for name in dict.fromkeys(name for settings in several for name in settings if name not in NEUTRAL):
        within = [k for k, settings in enumerate(several) if name in settings or not name.startswith("stabilizer.")]
        values = {k: json.dumps(several[k].get(name, ...), default=str) for k in within}
        often = Counter(values.values())
        for k, value in values.items():
            if often[value] < len(within) and often[value] <= len(within) / 2 and name in several[k]:
                parts[k].append(f"{name}={shown(several[k][name])}")
    return [" ".join(part) for part in parts]


def stabilizers(settings: dict[str, Any]) -> list[str]:
    """Names of the stabilisers that a configuration has."""
    return list(dict.fromkeys(name.split(".")[1] for name in settings if name.startswith("stabilizer.")))
