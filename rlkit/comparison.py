"""Statistics over seeds: what each algorithm reaches on each environment, how surely, and which is the better one.

Interquartile mean, stratified bootstrap and probability of improvement are those of Agarwal et al. 2021, "Deep RL at
the Edge of the Statistical Precipice".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations
from pathlib import Path

import numpy as np

from rlkit.interquartile import interquartile_mean
from rlkit.recorded import Group, find

RESAMPLES = 10_000  # of a number in the table
BAND_RESAMPLES = 2_000  # of each point of a band
FALL = 0.1  # of the peak: a seed that ends further below it has fallen
TAILS = (2.5, 97.5)  # percentiles that bound a 95 % interval


@dataclass(frozen=True)
class Estimate:
    """A statistic and its 95 % bootstrap interval; the ends are nan where a single seed leaves nothing to resample."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """What one algorithm reached on one environment, over its seeds.

    Attributes:
        env: Gymnasium id.
        algo: the recipe.
        label: the recipe, and the settings in which runs of it on this environment differ.
        seeds: number of seeds, S.
        env_steps: training steps executed by the seed that made most; every step is charged.
        final_return: interquartile mean of the final return, deterministic policy.
        area: interquartile mean of the mean return over the run, `area_under_curve`.
        threshold: the return at which Gymnasium calls the environment solved; None: it names none.
        steps_to_threshold: median over seeds of the steps at which the threshold was first held for two evaluations;
            a seed that never held it counts as inf. nan without a threshold.
        never: seeds that never held it.
        solved: share of seeds that held it, nan without a threshold.
        above: share of seeds whose final return is at or above it, nan without a threshold.
        worst_drop: interquartile mean of the largest drop, `worst_drop`.
        worst_drop_max: that of the worst seed.
        fallen: share of seeds that end more than 10 % below their peak, `fallen`; nan without evaluations on the way.
        volatility: interquartile mean of `volatility`.
        diverged: seeds whose gradient stayed non-finite.
        improvement: label of another algorithm -> probability that a seed of this one ends above a seed of that one.
    """

    env: str
    algo: str
    label: str
    seeds: int
    env_steps: int
    final_return: Estimate
    area: Estimate
    threshold: float | None
    steps_to_threshold: float
    never: int
    solved: float
    above: float
    worst_drop: float
    worst_drop_max: float
    fallen: float
    volatility: float
    diverged: int
    improvement: dict[str, Estimate] = field(default_factory=dict)


def bootstrap(
    strata: Sequence[np.ndarray],
    statistic: Callable[[np.ndarray], np.ndarray] = interquartile_mean,
    resamples: int = RESAMPLES,
) -> Estimate:
    """Return a statistic of all values together and its stratified percentile bootstrap interval (95 %).

    Each stratum is resampled with replacement by itself, so that each environment keeps its number of seeds. The random
    numbers are the same at every call: equal data give equal intervals.

    Args:
        strata: the seeds' values of each environment, [S] each.
        statistic: maps [.., S] to [..].
        resamples: number of resamples.
    """
    value = float(statistic(np.concatenate(strata)))
    if min(len(stratum) for stratum in strata) < 2:
        return Estimate(value, np.nan, np.nan)
    rng = np.random.default_rng(0)
    draws = [stratum[rng.integers(len(stratum), size=(resamples, len(stratum)))] for stratum in strata]
    low, high = np.percentile(statistic(np.concatenate(draws, axis=-1)), TAILS)
    return Estimate(value, float(low), float(high))


def band(values: np.ndarray) -> np.ndarray:
    """Return the ends of the interquartile mean's 95 % bootstrap interval at each point of a curve, [L, 2].

    Args:
        values: [L, S]; a resample draws whole seeds. nan is left out.
    """
    seeds = values.shape[1]
    draws = np.random.default_rng(0).integers(seeds, size=(BAND_RESAMPLES, seeds))
    ends = np.full((len(values), 2), np.nan)
    for point, row in enumerate(values):
        known = interquartile_mean(row[draws])
        known = known[~np.isnan(known)]
        if known.size and seeds > 1:
            ends[point] = np.percentile(known, TAILS)
    return ends


def probability_of_improvement(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> Estimate:
    """Return P(X > Y) and its stratified bootstrap interval.

    The mean over environments of U / (n m) = 1 / (n m) sum_ij [x_i > y_j] + [x_i = y_j] / 2, U the Mann-Whitney
    statistic of X. Source: Agarwal et al. 2021, section 4.3. X and Y are resampled each by itself.

    Args:
        pairs: for each environment the seeds' values of X [n] and of Y [m].
    """
    value, draws = 0.0, np.zeros(RESAMPLES)
    for k, (x, y) in enumerate(pairs):
        wins = (x[:, None] > y) + 0.5 * (x[:, None] == y)  # [n, m]
        value += float(wins.mean()) / len(pairs)
        draws += ((_shares(len(x), 2 * k) @ wins) * _shares(len(y), 2 * k + 1)).sum(1) / len(pairs)
    if min(len(values) for pair in pairs for values in pair) < 2:
        return Estimate(value, np.nan, np.nan)
    low, high = np.percentile(draws, TAILS)
    return Estimate(value, float(low), float(high))


@lru_cache(maxsize=64)  # a sweep compares hundreds of pairs of equal size
def _shares(size: int, stream: int) -> np.ndarray:
    """The share that each of `size` seeds has in each resample, [R, size]; other streams are independent."""
    return np.random.default_rng([stream, size]).multinomial(size, np.full(size, 1 / size), size=RESAMPLES) / size


def area_under_curve(steps: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return each seed's trapezoidal area between the first and the last evaluation over their distance, [S].

    It is a mean return. nan with fewer than two evaluations.

    Args:
        steps: [L], increasing.
        values: [L, S].
    """
    if len(steps) < 2:
        return np.full(values.shape[1], np.nan)
    return np.asarray(np.diff(steps) @ (values[1:] + values[:-1]) / (2 * (steps[-1] - steps[0])))


def worst_drop(values: np.ndarray) -> np.ndarray:
    """Return how far each seed's return [L, S] fell below the best one before it, at the worst, [S] and >= 0."""
    return np.asarray((np.maximum.accumulate(values) - values).max(0))


def fallen(peak: np.ndarray, final: np.ndarray) -> np.ndarray:
    """Whether each seed's final return is below its best evaluation by more than 10 % of that one's size, bool [S]."""
    return np.asarray(final < peak - FALL * np.abs(peak))


def volatility(steps: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the standard deviation (ddof 0) of each seed's evaluations [L, S] in the last half of its steps, [S].

    nan with fewer than two evaluations there.
    """
    late = values[steps >= steps[-1] / 2]
    return np.asarray(late.std(0)) if len(late) > 1 else np.full(values.shape[1], np.nan)


def compare(paths: str | Path | Iterable[str | Path]) -> list[Row]:
    """Compare finished runs: a row for each environment, algorithm and difference of settings.

    Args:
        paths: run directories, or folders above some. A run that cannot count is passed over with a warning.

    Raises:
        rlkit.recorded.ReportError: no finished run is found, or the `metrics.csv` of one is damaged.
    """
    import warnings

    groups, notes = find(paths)
    for note in notes:
        warnings.warn(note, stacklevel=3)
    return rows(groups)


def rows(groups: Sequence[Group]) -> list[Row]:
    """A row for each group, in their order."""
    made = [_row(group) for group in groups]
    for (a, group_a), (b, group_b) in combinations(zip(made, groups, strict=True), 2):
        if a.env == b.env:
            better = probability_of_improvement([(finals(group_a), finals(group_b))])
            a.improvement[b.label] = better
            b.improvement[a.label] = Estimate(1 - better.value, 1 - better.high, 1 - better.low)
    return made


def improvement_across(groups: Sequence[Group]) -> dict[tuple[str, str], tuple[int, Estimate]]:
    """For two labels that share two environments or more: how many, and the mean probability of improvement there."""
    by_label: dict[str, dict[str, np.ndarray]] = {}
    for group in groups:
        by_label.setdefault(group.label, {})[group.env] = finals(group)
    found = {}
    for a, b in combinations(by_label, 2):
        shared = [env for env in by_label[a] if env in by_label[b]]
        if len(shared) > 1:
            pairs = [(by_label[a][env], by_label[b][env]) for env in shared]
            found[a, b] = (len(shared), probability_of_improvement(pairs))
    return found


def finals(group: Group) -> np.ndarray:
    """Each seed's final return, deterministic policy, [S]."""
    return np.array(group.column("eval_return"), dtype=np.float64)


def _row(group: Group) -> Row:
    final, solved_at = finals(group), group.column("solved_at_steps")
    evaluations = [record.curves["eval/return"] for record in group.records]
    drops = np.concatenate([worst_drop(values) for _, values in evaluations])
    peaks = np.concatenate([values.max(0) for _, values in evaluations])
    threshold = reward_threshold(group.env)
    never = solved_at.count(None)
    watched = all(len(steps) > 1 for steps, _ in evaluations)  # evaluated during training, not only at the end
    judged = watched and (threshold is not None or never < len(solved_at))
    steps = np.median([np.inf if at is None else at for at in solved_at])
    return Row(
        env=group.env,
        algo=group.algo,
        label=group.label,
        seeds=len(final),
        env_steps=max(group.column("env_steps")),
        final_return=bootstrap([final]),
        area=bootstrap([np.concatenate([area_under_curve(*evaluation) for evaluation in evaluations])]),
        threshold=threshold,
        steps_to_threshold=float(steps) if judged else np.nan,
        never=never,
        solved=1 - never / len(final) if judged else np.nan,
        above=float((final >= threshold).mean()) if threshold is not None else np.nan,
        worst_drop=float(interquartile_mean(drops)) if watched else np.nan,
        worst_drop_max=float(drops.max()) if watched else np.nan,
        fallen=float(fallen(peaks, final).mean()) if watched else np.nan,
        volatility=float(interquartile_mean(np.concatenate([volatility(*evaluation) for evaluation in evaluations]))),
        diverged=group.column("status").count("diverged"),
    )


def reward_threshold(env: str) -> float | None:
    """The return at which Gymnasium calls an environment solved; None where it names none or does not know it here."""
    from rlkit.envs import spec_of

    try:
        return spec_of(env).reward_threshold
    except ValueError:  # an environment of someone's own, whose module is not at hand
        return None
