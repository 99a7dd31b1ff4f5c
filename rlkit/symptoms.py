"""What is wrong with a run, read off the scalars it logged: a rule for each way in which training goes wrong.

A rule is a pure function of the run's `Series`. Some numbers that look bad are usual in a run that does well: the
critic of CartPole explains nothing once every return is 500, and Acrobot's value loss is clipped from first to last.
They are *symptoms*, told only of a member whose return has not risen after `PATIENCE` entries, or has fallen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rlkit.console import number
from rlkit.series import FALL, RETURN, WINDOW, Series, mean, share

PATIENCE = 2 * WINDOW  # entries before a return that stands still is told of
HALF = 0.5  # of the planned steps: some tuned runs of MountainCar and Acrobot stand still until then
MOST = 0.8  # of a window's entries: "most of the time"
CLIPPED = 0.3  # share of ratios outside the clip range: 0.01 to 0.15 in tuned runs, no window above 0.3
STILL = 1e-3  # deviation of the ratio: 0.03 to 0.15 where something is learned
GRADIENT_LOW, GRADIENT_HIGH = 0.1, 1.0  # norm before clipping, as methods for PPO and GRPO aim at
KL_HIGH = 0.1  # nats: targets are 0.01 to 0.02, and tuned runs stay below 0.04
KL_ENTRIES, KL_RISE = 6, 3.0  # KL has risen at so many entries in a row, to this multiple and a third of KL_HIGH
ADVANTAGE_MEAN = 1.0  # in deviations: beyond, hardly an action of the batch counts as worse than expected
ADVANTAGE_LOW, ADVANTAGE_HIGH = 1e-3, 1e3  # deviation: below it Adam's epsilon is felt, above it the critic's error
ENTROPY = 0.1  # of the start's: of two actions one is then taken with 0.99
ERROR_GROWTH = 4.0  # of the value error from one window to the next: errors of the value twice as large


@dataclass(frozen=True)
class Finding:
    """What a rule found: of which members, how bad it is, in what words, and what helps."""

    holds: np.ndarray  # bool [M]
    severity: np.ndarray  # [M], the larger the worse
    sentence: Callable[[int], str]  # of a member, with its number
    knob: str  # keys that help


Rule = Callable[[Series], Finding]


def findings(run: Series) -> dict[str, Finding]:
    """What every rule has to say of a run, by the rule's name."""
    doubtful = ~run.well & (len(run.values(RETURN)) >= PATIENCE)
    found = {rule.__name__: rule(run) for rule in FAULTS}
    for rule in SYMPTOMS:
        one = rule(run)
        found[rule.__name__] = Finding(one.holds & doubtful, one.severity, one.sentence, one.knob)
    return found


# --- faults: told of any member --------------------------------------------------------------------------------------


def nonfinite(run: Series) -> Finding:
    """Gradients were not finite, so that their steps were skipped; three in a row end a member's training."""
    counts = np.nan_to_num(run.values("update/nonfinite")).sum(0)

    def sentence(m: int) -> str:
        if run.diverged[m]:
            return "three gradients in a row were not finite, so it learns no more"
        return f"{counts[m]:.0f} gradients of the updates logged were not finite, so their steps were skipped"

    knob = "a lower algo.learning_rate, or env.normalize_reward=true, helps"
    return Finding((counts > 0) | run.diverged, counts + 1e9 * run.diverged, sentence, knob)


def fell(run: Series) -> Finding:
    """The return fell from its peak by more than a tenth of its rise."""
    name, s = run.judged

    def sentence(m: int) -> str:
        lost = f"{100 * s.drop[m]:.0f} % of its rise"
        step = run.steps(name)[s.peak[m]]
        return f"return fell from {number(s.best[m])} to {number(s.now[m])} ({lost}) after step {step:,.0f}"

    return Finding(s.drop > FALL, s.drop, sentence, "stabilizer=[rollback], or a lower algo.learning_rate, helps")


def stuck(run: Series) -> Finding:
    """Half of the run is over, and the return has not left a poor level, which other members did, or nobody."""
    s, window = run.returns, run.recent(RETURN)
    behind = np.zeros(run.members, dtype=bool)
    ahead, late = np.nan, len(run.values(RETURN)) >= PATIENCE and run.progress >= HALF
    if late and s.risen.any():  # behind is who stayed, through a window, below a quarter of the best one's way before it
        ahead = float(np.where(s.risen, window[0], -np.inf).max())
        quarter = s.start + 0.25 * (ahead - s.start)
        behind = (window < quarter).all(0) & (s.best < quarter) & (ahead > s.start)

    def sentence(m: int) -> str:
        others = f", while others had {number(ahead)}" if behind[m] else ""
        where = f"from {number(s.start[m])} at the start to {number(s.now[m])} now"
        return f"return went {where}, and was never above {number(max(s.best[m], s.start[m]))}{others}"

    critic = len(run.values("value/error")) > 0
    other = "algo.entropy_coef=0.01" if critic else "algo.advantage=return_to_go"
    knob = f"exploration.name=linear, {other} or another algo.learning_rate may help"
    return Finding(late & ~run.judged[1].risen & ~s.risen | behind, -s.best, sentence, knob)


def clipped(run: Series) -> Finding:
    """More than 30 % of the ratios are outside the clip range: the batch gives no more gradient to most of its rows."""
    level = mean(run.recent("ratio/clipped"))
    return Finding(
        level > CLIPPED,
        level,
        lambda m: f"{100 * level[m]:.0f} % of the ratios are clipped (usual: below {100 * CLIPPED:.0f} %)",
        "a lower algo.learning_rate, fewer algo.num_epochs or algo.target_kl=0.02 helps",
    )


def kl(run: Series) -> Finding:
    """KL(pi_old || pi) at the end of an update is far above usual targets, or has risen entry after entry."""
    values, window = run.values("kl/old"), run.recent("kl/old")
    level = mean(window)
    rising, first = np.zeros(run.members, dtype=bool), level
    if len(values) > KL_ENTRIES:
        first, last = values[-KL_ENTRIES - 1], values[-1]
        rising = (np.diff(values[-KL_ENTRIES - 1 :], axis=0) > 0).all(0)
        rising &= (last > KL_RISE * first) & (last > KL_HIGH / 3)

    def sentence(m: int) -> str:
        if level[m] > KL_HIGH:
            return f"an update moves the policy by a KL of {short(level[m])} nats (usual: 0.01 to 0.03)"
        return f"KL rose {KL_ENTRIES} entries in a row, from {short(first[m])} to {short(values[-1, m])} nats"

    knob = "algo.target_kl=0.02, a lower algo.learning_rate or fewer algo.num_epochs helps"
    return Finding(rising | (level > KL_HIGH), np.nan_to_num(level), sentence, knob)


# --- symptoms: told of a member that does not do well -----------------------------------------------------------------


def still(run: Series) -> Finding:
    """The ratio does not move although there are advantages: nothing is learned."""
    moved, advantage = run.recent("ratio/std"), mean(run.recent("advantage/std"))
    level = mean(moved)
    return Finding(
        (share(moved < STILL, moved) > MOST) & (advantage > 0),
        -level,
        lambda m: f"the policy hardly moves in an update: the ratio's deviation is {short(level[m])} (usual: 0.03 to 0.15)",
        "a higher algo.learning_rate, or more algo.num_epochs, helps",
    )


def degenerate(run: Series) -> Finding:
    """All groups had equal returns, so all advantages are zero: nothing can be learned."""
    window, s = run.recent("group/degenerate"), run.returns
    return Finding(
        share(window >= 1, window) >= 1,
        -s.now,
        lambda m: f"every group of the last {len(window)} entries had equal returns ({number(s.now[m])} on the mean)",
        "exploration.name=linear, or a larger algo.group_size, helps",
    )


def advantage(run: Series) -> Finding:
    """The advantages have one sign, or a scale that numbers of 32 bits and Adam are not made for."""
    centre, deviation = run.recent("advantage/mean"), run.recent("advantage/std")
    if len(centre) != len(deviation):
        centre = deviation = np.empty((0, run.members))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.abs(centre) / deviation
    sided = share(ratio > ADVANTAGE_MEAN, centre) > MOST
    scale = mean(deviation)
    wrong = share((deviation > 0) & ~((ADVANTAGE_LOW < deviation) & (deviation < ADVANTAGE_HIGH)), deviation) > MOST

    def sentence(m: int) -> str:
        if wrong[m]:
            return f"the advantages' deviation is {short(scale[m])} (usual: {ADVANTAGE_LOW:g} to {ADVANTAGE_HIGH:,.0f})"
        return f"the advantages' mean is {middle(centre / deviation, m)} of their deviations from zero (usual: below 1)"

    knob = "env.normalize_reward=true, algo.normalize_advantage=true or a smaller algo.gae_lambda helps"
    return Finding(sided | wrong, np.nan_to_num(mean(ratio)), sentence, knob)


def gradient(run: Series) -> Finding:
    """The gradient's norm before clipping is outside 0.1 to 1.0: clipped all the time, or vanishing."""
    before, after = run.recent("grad_norm/before"), mean(run.recent("grad_norm/after"))
    high = share(before > GRADIENT_HIGH, before) > MOST
    low = share((before > 0) & (before < GRADIENT_LOW), before) > MOST

    def sentence(m: int) -> str:
        usual = f"(usual: {GRADIENT_LOW} to {GRADIENT_HIGH})"
        left = f", of which the clip leaves {short(after[m])}" if high[m] else ""
        return f"the gradient's norm is {middle(before, m)}{left} {usual}"

    critic = len(run.values("value/error")) > 0
    knob = "env.normalize_reward=true or a smaller algo.value_coef helps" if critic else "algo.normalize_advantage=true helps"
    knob = f"{knob} where it is large, a higher algo.learning_rate where it is small"
    with np.errstate(divide="ignore"):
        size = np.abs(np.log(mean(before)))
    return Finding(high | low, np.nan_to_num(size), sentence, knob)


def entropy(run: Series) -> Finding:
    """The entropy has collapsed before the return was good: the policy no longer tries anything."""
    values = run.values("entropy/mean")
    if len(values) < WINDOW:
        return Finding(np.zeros(run.members, dtype=bool), np.zeros(run.members), str, "")
    first, now = mean(values[:3]), mean(run.recent("entropy/mean"))
    return Finding(
        (first > 0) & (now < ENTROPY * first),
        np.nan_to_num(first - now),
        lambda m: f"entropy fell from {short(first[m])} to {short(now[m])} nats while the return is not at its best",
        "algo.entropy_coef=0.01, exploration.name=linear or a lower algo.learning_rate helps",
    )


def value(run: Series) -> Finding:
    """The critic's error grows, or it explains none of the returns' variance."""
    errors, explained = run.values("value/error"), run.recent("value/explained_variance")
    now, unexplained = mean(run.recent("value/error")), share(explained <= 0, explained) > MOST
    width = len(run.recent("value/error"))
    earlier = mean(errors[-2 * width : -width]) if 0 < 2 * width <= len(errors) else np.full(run.members, np.nan)
    grown = now > ERROR_GROWTH * earlier

    def sentence(m: int) -> str:
        if grown[m]:
            return f"the value error grew from {short(earlier[m])} to {short(now[m])} within {2 * width} entries"
        return f"the critic explains none of the returns' variance (explained: {middle(explained, m)})"

    knob = "env.normalize_reward=true, more algo.num_epochs or a lower algo.learning_rate helps"
    return Finding(grown | unexplained, np.nan_to_num(now), sentence, knob)


FAULTS: tuple[Rule, ...] = (nonfinite, fell, stuck, clipped, kl)
SYMPTOMS: tuple[Rule, ...] = (still, degenerate, advantage, gradient, entropy, value)


def middle(values: np.ndarray, member: int) -> str:
    """The median of a member's window as text."""
    return short(float(np.nanmedian(values[:, member])))


def short(value: float) -> str:
    """A number to three digits as text: 0.0123, 28.2 or 1,234."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"
