"""The tables of a report, as text, and what their numbers are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from rlkit.comparison import Estimate, Row, improvement_across, rows
from rlkit.conf.schema import shown
from rlkit.decimals import decimals, number
from rlkit.recorded import NEUTRAL, Group, Record

Table = list[list[str]]  # the first row is the heading
Parts = dict[str, tuple[list[Group], list[Row]]]  # environment -> its groups, and a row for each
FEW = 8  # a matrix of more algorithms has no room for intervals
NONE = "–"  # where there is nothing to tell
PROVENANCE = {"version": "rlkit", "commit": "commit", "machine": "machine"}  # keys of summary.json, where it has them
DEFINITIONS = {
    "Steps": "environment steps of one seed executed for training, of that which made most; every step is charged",
    "Final return": "mean of 100 episodes of the deterministic policy after training, from fixed start states; the "
    "interquartile mean (IQM) over seeds, with its 95 % interval by stratified bootstrap",
    "Area": "area under the curve of evaluations over its span of steps, hence a mean return; IQM over seeds",
    "Steps to threshold": "training steps at which a seed first held the environment's reward threshold for two "
    "evaluations in a row; the median over seeds, in which a seed that never did counts as infinite",
    "Solved": "seeds that held the threshold for two evaluations in a row",
    "At the end": "seeds whose final return is at or above the threshold",
    "Worst drop": "largest fall of a seed's evaluation below the best before it; IQM over seeds, and the worst seed",
    "Fallen": "seeds whose final return is below their best evaluation by more than 10 % of it",
    "Volatility": "standard deviation of a seed's evaluations over the last half of its steps; IQM over seeds",
    "Probability of improvement": "probability that a seed of one algorithm ends above a seed of the other; a tie "
    "counts half",
}


def results_table(results: Sequence[Row]) -> Table:
    """The numbers of one environment."""
    goal = "" if results[0].threshold is None else f" {results[0].threshold:g}"
    reach = f"Steps to{goal}" if goal else "Steps to threshold"
    heading = ["", "Algorithm", "Seeds", "Steps", "Final return", "Area", reach, "Solved", "At the end"]
    table = [[*heading, "Worst drop", "Fallen", "Volatility"]]
    returns = [x for row in results for part in (row.final_return, row.area) for x in (part.value, part.low, part.high)]
    form = partial(plain, digits=decimals(returns))  # of all returns, and differences of returns, of the environment
    for k, row in enumerate(results, 1):
        steps = {True: "never", False: f"{row.steps_to_threshold:,.0f}"}[math.isinf(row.steps_to_threshold)]
        cells = [
            str(k),
            row.label,
            str(row.seeds),
            f"{row.env_steps:,}",
            interval(row.final_return, form),
            interval(row.area, form),
        ]
        cells += [NONE if math.isnan(row.steps_to_threshold) else steps]
        cells += [NONE if math.isnan(share) else of(share, row.seeds) for share in (row.solved, row.above)]
        drop = f"{form(row.worst_drop)} (max {form(row.worst_drop_max)})"
        cells += [NONE if math.isnan(row.worst_drop) else drop]
        cells += [NONE if math.isnan(row.fallen) else of(row.fallen, row.seeds)]
        table.append([*cells, form(row.volatility)])
    return table


def improvement_table(results: Sequence[Row]) -> Table:
    """Probability that the row's algorithm is better than the column's, for one environment."""
    form = _chance if len(results) <= FEW else _chance_alone
    table = [["", "Algorithm", *(f"over {k}" for k in range(1, len(results) + 1))]]
    for k, row in enumerate(results, 1):
        others = (row.improvement.get(other.label) for other in results)
        table.append([str(k), row.label, *(NONE if p is None else form(p) for p in others)])
    return table


def _chance(estimate: Estimate) -> str:
    return interval(estimate, "{:.2f}".format)


def _chance_alone(estimate: Estimate) -> str:
    return f"{estimate.value:.2f}"


def across_table(parts: Parts) -> Table:
    """Probability of improvement in the mean over environments; only a heading where no two labels share some."""
    groups = [group for own, _ in parts.values() for group in own]
    table = [["Algorithm", "over", "Environments", "Probability of improvement"]]
    for (a, b), (count, better) in improvement_across(groups).items():
        table.append([a, b, str(count), _chance(better)])
    return table


def settings_table(groups: Sequence[Group]) -> Table:
    """Settings in which the groups of one environment differ; a key that a group does not have is left blank."""
    names = dict.fromkeys(name for group in groups for name in group.settings if name not in (*NEUTRAL, "algo.name"))
    table = [["Setting", *(group.label if len(groups) <= 4 else str(k) for k, group in enumerate(groups, 1))]]
    for name in names:
        cells = [shown(group.settings[name]) if name in group.settings else "" for group in groups]
        if len(set(cells)) > 1:
            table.append([name, *cells])
    return table


def runs_table(groups: Sequence[Group]) -> Table:
    """Where each run lies, how long it took, and what is known of the program and the machine."""
    known = [key for key in PROVENANCE if any(key in record.summary for record in records(groups))]
    table = [["Run", "Seeds", "Training", "Steps/s, all seeds", *(PROVENANCE[key] for key in known)]]
    for record in records(groups):
        seeds, seconds = record.seeds, record.summary.get("train_seconds", math.nan)
        span = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
        speed = sum(record.summary["env_steps"]) / seconds if seconds > 0 else math.nan
        cells = [str(record.folder), span, f"{plain(seconds)} s", NONE if math.isnan(speed) else f"{speed:,.0f}"]
        table.append(cells + [str(record.summary.get(key, NONE)) for key in known])
    return table


def plain(value: float, digits: int | None = None) -> str:
    """A number as short text, or a dash for nan."""
    return NONE if math.isnan(value) else "0" if value == 0 else number(value, digits)


def interval(estimate: Estimate, form: Any = plain) -> str:
    """A value and its interval: "497.9 [492.4, 499.8]"; without an interval the value alone."""
    if math.isnan(estimate.low):
        return str(plain(estimate.value) if math.isnan(estimate.value) else form(estimate.value))
    return f"{form(estimate.value)} [{form(estimate.low)}, {form(estimate.high)}]"


def of(share: float, seeds: int) -> str:
    """A share of seeds as a count: "18/20"."""
    return f"{round(share * seeds)}/{seeds}"


def remarks(results: Sequence[Row]) -> list[str]:
    """What a reader must know of some rows before trusting them."""
    found = [f"{row.label}: {row.diverged} of {row.seeds} seeds diverged." for row in results if row.diverged]
    few = [row.label for row in results if row.seeds < 10]
    if few:
        found.append(f"Fewer than ten seeds ({', '.join(few)}): a bootstrap interval is then too narrow.")
    return found


def by_environment(groups: Sequence[Group]) -> Parts:
    """Split groups, and their rows, by environment."""
    parts: Parts = {}
    for group, row in zip(groups, rows(groups), strict=True):
        own = parts.setdefault(group.env, ([], []))
        own[0].append(group)
        own[1].append(row)
    return parts


def records(groups: Iterable[Group]) -> list[Record]:
    """All runs of some groups."""
    return [record for group in groups for record in group.records]
