"""The logged scalars of a run as series, and where its returns stand: what the rules of a diagnosis look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

RETURN, EVALUATION = "episode/return_recent", "eval/return"
READ = frozenset(
    {
        RETURN,
        EVALUATION,
        "advantage/mean",
        "advantage/std",
        "entropy/mean",
        "grad_norm/before",
        "grad_norm/after",
        "group/degenerate",
        "kl/old",
        "ratio/clipped",
        "ratio/std",
        "run/progress",
        "update/nonfinite",
        "value/error",
        "value/explained_variance",
    }
)
WINDOW, WINDOW_SHARE = 8, 4  # a window is the last quarter of the entries, and no fewer than eight
FALL = 0.1  # of the rise from the start to the peak
SLIGHT = 0.1  # of the return at the start: less is no rise, however quiet the curve
CLEAR = 6.0  # a rise is clear from so many times the usual change between two entries on; noise alone makes three
EVALUATIONS = 4  # from so many on they judge the return: they are of the policy that one gets in the end


class Series:
    """The scalars of a run of M members that rules read; they may grow while it runs.

    Args:
        members: M.
        curves: scalar -> steps [L] and values [L, M], nan where a member did not measure it.
        diverged: members that were given up, bool [M].
        settings: of the run, full key -> value, which what helps depends on; empty where they are not known.
    """

    def __init__(
        self,
        members: int,
        curves: Mapping[str, tuple[np.ndarray, np.ndarray]] | None = None,
        diverged: np.ndarray | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.members, self.settings = members, settings or {}
        self.diverged = np.zeros(members, dtype=bool) if diverged is None else diverged
        self._rows: dict[str, np.ndarray] = {}  # [capacity, 1 + M]: the step and the values
        self._length: dict[str, int] = {}
        for name in READ & (curves or {}).keys():
            steps, values = (curves or {})[name]
            self._rows[name] = np.column_stack([steps, values]).astype(np.float64)
            self._length[name] = len(steps)

    def append(self, step: float, scalars: Mapping[str, np.ndarray]) -> None:
        """Take in those scalars [M] of a log entry that a rule reads."""
        for name in READ & scalars.keys():
            length, rows = self._length.get(name, 0), self._rows.get(name)
            if rows is None or length == len(rows):  # twice as long: an entry costs the same however many there are
                grown = np.empty((max(2 * length, 64), 1 + self.members))
                grown[:length] = 0 if rows is None else rows
                rows = self._rows[name] = grown
            rows[length, 0], rows[length, 1:] = step, scalars[name]
            self._length[name] = length + 1
        for stale in ("returns", "evaluations"):
            self.__dict__.pop(stale, None)

    def state_dict(self) -> dict[str, Any]:
        """The scalars so far: name -> float64 [L, 1 + M]."""
        import torch  # which a diagnosis of files does without

        return {name: torch.from_numpy(self._table(name).copy()) for name in self._rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self._rows = {name: rows.numpy().copy() for name, rows in state.items()}
        self._length = {name: len(rows) for name, rows in self._rows.items()}

    def steps(self, name: str) -> np.ndarray:
        """The steps [L] of a scalar, the mean over members."""
        return self._table(name)[:, 0]

    def values(self, name: str) -> np.ndarray:
        """The values [L, M] of a scalar; L is 0 where it was never measured."""
        return self._table(name)[:, 1:]

    def recent(self, name: str) -> np.ndarray:
        """The last window [W, M] of a scalar; W is 0 while there are too few entries for one.

        A member that learns no more is judged by the window that ends with what it measured last.
        """
        values = self.values(name)
        length = len(values)
        if length < WINDOW:
            return values[:0]
        width = max(WINDOW, length // WINDOW_SHARE)
        if not np.isnan(values[-1]).any():
            return values[-width:]
        last = length - 1 - (~np.isnan(values))[::-1].argmax(0)
        rows = last - np.arange(width)[::-1, None]
        return np.where(rows >= 0, np.take_along_axis(values, np.maximum(rows, 0), 0), np.nan)

    @property
    def progress(self) -> float:
        """Share of the planned steps that the mean member has made; 1 where the run did not log it."""
        values = self.values("run/progress")
        return float(np.nanmean(values[-1])) if len(values) and not np.isnan(values[-1]).all() else 1.0

    @cached_property
    def returns(self) -> Standing:
        """Where the moving averages of the returns stand."""
        return Standing.of(self.values(RETURN), width=3, clear=CLEAR)

    @cached_property
    def evaluations(self) -> Standing:
        """Where the evaluations stand; no member has risen while there are few."""
        values = self.values(EVALUATION)
        few = len(values) < EVALUATIONS
        return Standing.of(values[:0] if few else values, width=2, clear=4.0, before=self.returns)

    @property
    def risen(self) -> np.ndarray:
        """Members whose return was clearly above its start, bool [M]."""
        return np.asarray(self.returns.risen | self.evaluations.risen)

    @property
    def drop(self) -> np.ndarray:
        """Share of its rise that a member's return has lost, [M]: of evaluations where they have risen."""
        return np.where(self.evaluations.risen, self.evaluations.drop, self.returns.drop)

    @property
    def well(self) -> np.ndarray:
        """Members whose return has risen and not fallen since, bool [M]."""
        return np.asarray(self.risen & (self.drop <= FALL))

    def _table(self, name: str) -> np.ndarray:
        return self._rows[name][: self._length[name]] if name in self._rows else np.empty((0, 1 + self.members))


@dataclass(frozen=True)
class Standing:
    """Where each member's returns stand, [M] each but the first; `start` is nan while there are too few."""

    level: np.ndarray  # [L, M], the curve; where a member measured nothing it stays where it was
    start: np.ndarray
    best: np.ndarray  # mean of the best entries that follow each other
    now: np.ndarray  # mean of the last ones
    peak: np.ndarray  # entry at which the best are complete
    risen: np.ndarray  # bool: at its best it was clearly above the start
    drop: np.ndarray  # share of the rise that is lost since; 0 where that is no more than noise

    @classmethod
    def of(cls, returns: np.ndarray, width: int, clear: float, before: Standing | None = None) -> Standing:
        """Judge a curve [L, M].

        Args:
            width: entries in a mean; what is lost now is lost in each of the last so many.
            clear: a rise counts from so many times the median change of an entry on, a drop from so many times the
                mean decline of an entry before the best ones.
            before: of a curve that begins sooner; where it has risen, this one starts where it did, and has risen too.
        """
        length, members = returns.shape
        if length <= width:
            nan, nothing = np.full(members, np.nan), np.zeros(members, dtype=bool)
            return cls(returns, nan, nan, nan, np.zeros(members, dtype=int), nothing, np.zeros(members))
        known = ~np.isnan(returns)
        first = _pick(returns, known.argmax(0))
        rows = np.maximum.accumulate(np.where(known, np.arange(length)[:, None], 0), 0)
        level = np.take_along_axis(returns, rows, 0)
        level = np.where(np.isnan(level), first, level)  # before its first episode ends
        smooth = np.asarray(sum(level[k : length - width + 1 + k] for k in range(width))) / width
        peak = smooth.argmax(0)
        best, now = _pick(smooth, peak), smooth[-1]
        peak += width - 1
        known_risen = np.zeros(members, dtype=bool) if before is None else before.risen
        start = first if before is None else np.where(known_risen, before.start, first)
        change = np.diff(level, axis=0)
        rise, lost = best - start, best - level[-width:].max(0)
        risen = (rise > clear * np.median(np.abs(change), 0)) | known_risen
        risen &= rise > SLIGHT * np.abs(start)
        until = peak - width + 1  # within the best entries a decline may be the drop itself
        earlier = np.arange(1, length)[:, None] <= until
        decline = np.where(earlier, np.maximum(-change, 0.0), 0.0).sum(0) / np.maximum(until, 1)
        drop = np.where(risen & (lost > clear * decline), lost / np.where(risen, rise, 1.0), 0.0)
        return cls(level, start, best, now, peak, risen, drop)


def _pick(values: np.ndarray, entry: np.ndarray) -> np.ndarray:
    """The value of each member at an entry of its own."""
    return np.asarray(np.take_along_axis(values, entry[None], 0)[0])


def share(condition: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Share of a window's entries [W, M] that meet a condition, [M]; 0 where more than a quarter of them is missing."""
    known = ~np.isnan(values)
    count = known.sum(0)
    return np.where(count >= 0.75 * len(values), (condition & known).sum(0) / np.maximum(count, 1), 0.0)


def mean(values: np.ndarray) -> np.ndarray:
    """Mean of a window [W, M], [M]; nan where more than a quarter of it is missing, which no comparison holds for."""
    known = ~np.isnan(values)
    count = known.sum(0)
    enough = (count > 0) & (count >= 0.75 * len(values))
    return np.where(enough, np.where(known, values, 0.0).sum(0) / np.maximum(count, 1), np.nan)
