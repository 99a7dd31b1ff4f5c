"""What is wrong with a run, read off the scalars it logged: a rule for each way in which training goes wrong.

A rule is a pure function of the run's `Series`. Some numbers that look bad are usual in a run that does well: the
critic of CartPole explains nothing once every return is 500, and Acrobot's value loss is clipped from first to last.
They are *symptoms*, told only of a member whose return, `PATIENCE` entries long, has not risen, or has fallen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from rlkit import advice
from rlkit.advice import advise
from rlkit.decimals import number
from rlkit.series import EVALUATION, FALL, RETURN, WINDOW, Series, mean, share

# "Tuned" are the ten runs of twenty members in experiments/classic_control; a level holds for the mean of a window.
PATIENCE = 2 * WINDOW  # entries before a return that stands still is told of
HALF = 0.5  # of the planned steps: some tuned members of MountainCar and Pendulum stand still for a fifth of them
BEHIND = 0.5  # of the way that the best member has come
MOST = 0.8  # of a window's entries: "most of the time"
CLIPPED = 0.3  # share of ratios outside the clip range: usually 0.01 to 0.15 when tuned, at most 0.27
STILL = 1e-3  # deviation of the ratio: 0.03 to 0.15 when tuned, until the learning rate has come near zero
GRADIENT_LOW, GRADIENT_HIGH = 0.1, 1.0  # norm before clipping: the range that the clip at 0.5 is made for
KL_HIGH = 0.1  # nats: targets are 0.01 to 0.02, and tuned runs stay below 0.04
KL_ENTRIES, KL_RISE = 6, 3.0  # KL has risen so many times in a row, to this multiple and a third of KL_HIGH
ONE_SIDED = 1.0  # deviations from zero to the mean: further, nearly all actions count as better, or as worse
ADVANTAGE_LOW, ADVANTAGE_HIGH = 1e-3, 1e3  # deviation: 0.002 to 37 when tuned
ENTROPY = 0.1  # of that at the start: of two actions one is then taken with a probability of 0.99
ERROR_GROWTH = 4.0  # of the value error from one window to the next: the value is wrong by twice as much


@dataclass(frozen=True)
class Finding:
    """What a rule found: of which members, how bad it is, in what words, and what helps."""

    holds: np.ndarray  # bool [M]
    severity: np.ndarray  # [M], the larger the worse; nan counts for nothing
    sentence: Callable[[int], str]  # of a member, with its number
    knob: str  # what helps, in a clause that names keys and values


Rule = Callable[[Series], Finding]


def findings(run: Series) -> dict[str, Finding]:
    """What every rule has to say of a run, by the rule's name."""
    found = {rule.__name__: rule(run) for rule in FAULTS}
    doubtful = ~run.well & (len(run.values(RETURN)) >= PATIENCE)
    if doubtful.any():
        for rule in SYMPTOMS:
            finding = rule(run)
            found[rule.__name__] = replace(finding, holds=finding.holds & doubtful)
    return found


# --- faults: told of any member --------------------------------------------------------------------------------------


def nonfinite(run: Series) -> Finding:
    """Gradients were not finite, so that their steps were skipped; three in a row end a member's training."""
    counts = np.nan_to_num(run.values("update/nonfinite")).sum(0)

    def sentence(m: int) -> str:
        if run.diverged[m]:
            return "three gradients in a row were not finite, so it learns no more"
        return f"{counts[m]:.0f} gradients of the updates logged were not finite, so their steps were skipped"

    knob = advise(run.settings, advice.lower_rate, advice.on("env.normalize_reward"))
    return Finding((counts > 0) | run.diverged, counts + 1e9 * run.diverged, sentence, knob)


def fell(run: Series) -> Finding:
    """The return fell from its peak by more than a tenth of its rise."""

    def sentence(m: int) -> str:
        judged = run.evaluations.risen[m]
        name, s = (EVALUATION, run.evaluations) if judged else (RETURN, run.returns)
        lost = f"{100 * s.drop[m]:.0f} % of its rise"
        step = run.steps(name)[s.peak[m]]
        return f"return fell from {number(s.best[m])} to {number(s.now[m])} ({lost}) after step {step:,.0f}"

    moves = advice.rollback, advice.patience, advice.end_drop, advice.lower_rate
    return Finding(run.drop > FALL, run.drop, sentence, advise(run.settings, *moves))


def flat(run: Series) -> Finding:
    """Half of the run is over, and the return is no higher than at the start."""
    s = run.returns
    late = len(run.values(RETURN)) >= PATIENCE and run.progress >= HALF
    return Finding(
        late & ~run.risen,
        s.start - s.now,
        lambda m: f"return has not risen: {number(s.start[m])} at the start, {number(s.now[m])} now",
        advise(run.settings, advice.exploration, advice.entropy, advice.another_rate, verb="may help"),
    )


def behind(run: Series) -> Finding:
    """Half of the run is over, and a member was never half as far as the best was a window ago."""
    s, width = run.returns, len(run.recent(RETURN))
    holds, best = np.zeros(run.members, dtype=bool), np.nan
    if len(run.values(RETURN)) >= PATIENCE and run.progress >= HALF and s.risen.any():
        best = float(np.where(s.risen, s.level[-width], -np.inf).max())
        half = s.start + BEHIND * (best - s.start)
        holds = run.risen & (best > s.start) & (s.best < half) & (s.level[-width:] < half).all(0)
    groups = len(run.values("group/degenerate")) > 0
    first = (advice.return_to_go,) if groups else (advice.entropy,)
    return Finding(
        holds,
        -s.best,
        lambda m: f"return stays at {number(s.now[m])}, its best {number(s.best[m])}, while others had {number(best)}",
        advise(run.settings, *first, advice.exploration, advice.more_envs, verb="may help"),
    )


def clipped(run: Series) -> Finding:
    """So many ratios are outside the clip range that much of the batch has no gradient."""
    level = mean(run.recent("ratio/clipped"))
    return Finding(
        level > CLIPPED,
        level,
        lambda m: f"{100 * level[m]:.0f} % of the ratios are clipped (usual: 1 to 15 %)",
        advise(run.settings, advice.lower_rate, advice.fewer("algo.num_epochs"), advice.target_kl),
    )


KL_MOVES = advice.target_kl, advice.lower_rate, advice.fewer("algo.num_epochs")


def kl_high(run: Series) -> Finding:
    """KL(pi_old || pi) at the end of an update is far above usual targets."""
    level = mean(run.recent("kl/old"))

    def sentence(m: int) -> str:
        return f"an update moves the policy by a KL of {short(level[m])} nats (usual: 0.001 to 0.03)"

    return Finding(level > KL_HIGH, level, sentence, advise(run.settings, *KL_MOVES))


def kl_rising(run: Series) -> Finding:
    """KL(pi_old || pi) at the end of an update has risen entry after entry."""
    last = run.values("kl/old")[-KL_ENTRIES - 1 :]
    if len(last) <= KL_ENTRIES:
        return nothing(run)
    rising = (np.diff(last, axis=0) > 0).all(0) & (last[-1] > KL_RISE * last[0]) & (last[-1] > KL_HIGH / 3)

    def sentence(m: int) -> str:
        return f"KL rose {KL_ENTRIES} entries in a row, from {short(last[0, m])} to {short(last[-1, m])} nats"

    return Finding(rising, last[-1], sentence, advise(run.settings, *KL_MOVES))


# --- symptoms: told of a member that does not do well -----------------------------------------------------------------


def still(run: Series) -> Finding:
    """The ratio does not move although there are advantages, and actions to choose from: nothing is learned."""
    moved, spread = run.recent("ratio/std"), mean(run.recent("advantage/std"))
    first, now = entropies(run)
    return Finding(
        (share(moved < STILL, moved) > MOST) & (spread > 0) & (now > ENTROPY * first),
        -mean(moved),
        lambda m: f"the policy hardly moves: the deviation of its ratio is {middle(moved, m)} (usual: 0.03 to 0.15)",
        advise(run.settings, advice.higher_rate, advice.more("algo.num_epochs")),
    )


def degenerate(run: Series) -> Finding:
    """All groups had equal returns, so all advantages are zero: nothing can be learned."""
    window, s = run.recent("group/degenerate"), run.returns
    return Finding(
        share(window >= 1, window) >= 1,
        -s.now,
        lambda m: f"in each of the last {len(window)} entries all groups had equal returns (mean: {number(s.now[m])})",
        advise(run.settings, advice.exploration, advice.larger_groups),
    )


def advantage_sign(run: Series) -> Finding:
    """The advantages have nearly all one sign: they do not tell better actions from worse ones."""
    centre, deviation = run.recent("advantage/mean"), run.recent("advantage/std")
    with np.errstate(divide="ignore", invalid="ignore"):
        off = centre / deviation
    return Finding(
        share(np.abs(off) > ONE_SIDED, off) > MOST,
        np.abs(mean(off)),
        lambda m: f"the advantages' mean is {middle(off, m)} of their deviations from zero (usual: -0.3 to 0.3)",
        advise(
            run.settings,
            advice.on("algo.normalize_advantage"),
            advice.more("algo.num_epochs"),
            advice.more("algo.value_coef", "a larger"),
        ),
    )


def advantage_scale(run: Series) -> Finding:
    """The advantages' scale is one that coefficients, and the critic's losses, are not made for."""
    deviation = run.recent("advantage/std")
    wrong = (deviation > 0) & ((deviation < ADVANTAGE_LOW) | (deviation > ADVANTAGE_HIGH))
    return Finding(
        share(wrong, deviation) > MOST,
        np.abs(np.log(np.maximum(mean(deviation), 1e-30))),
        lambda m: f"the advantages' deviation is {middle(deviation, m)} (usual: 0.002 to 40)",
        advise(run.settings, advice.on("env.normalize_reward"), advice.on("algo.normalize_advantage"), advice.popart),
    )


def gradient_high(run: Series) -> Finding:
    """The gradient's norm is so large that it is clipped all the time."""
    before, after = run.recent("grad_norm/before"), run.recent("grad_norm/after")
    usual = f"usual: {GRADIENT_LOW} to {GRADIENT_HIGH:g}"
    critic = len(run.values("value/error")) > 0
    own = (advice.on("env.normalize_reward"), advice.lower("algo.value_coef"), advice.popart)
    moves = own if critic else (advice.on("algo.normalize_advantage"), advice.lower_rate)
    return Finding(
        share(before > GRADIENT_HIGH, before) > MOST,
        mean(before),
        lambda m: f"the gradient's norm is {middle(before, m)} before clipping and {middle(after, m)} after ({usual})",
        advise(run.settings, *moves),
    )


def gradient_low(run: Series) -> Finding:
    """The gradient vanishes."""
    before = run.recent("grad_norm/before")
    return Finding(
        share((before > 0) & (before < GRADIENT_LOW), before) > MOST,
        -mean(before),
        lambda m: f"the gradient's norm is {middle(before, m)} (usual: {GRADIENT_LOW} to {GRADIENT_HIGH:g})",
        advise(run.settings, advice.on("algo.normalize_advantage"), advice.more_envs, advice.entropy),
    )


def entropy(run: Series) -> Finding:
    """The entropy has collapsed before the return was good: the policy no longer tries anything."""
    first, now = entropies(run)
    return Finding(
        now < ENTROPY * first,
        first - now,
        lambda m: f"entropy fell from {short(first[m])} to {short(now[m])} nats, and the return is not at its best",
        advise(run.settings, advice.entropy, advice.exploration, advice.lower_rate),
    )


def value_error(run: Series) -> Finding:
    """The critic's error grows."""
    errors, width = run.values("value/error"), len(run.recent("value/error"))
    if not 0 < 2 * width <= len(errors):
        return nothing(run)
    earlier, now = mean(errors[-2 * width : -width]), mean(errors[-width:])
    return Finding(
        now > ERROR_GROWTH * earlier,
        now / earlier,
        lambda m: f"the value error grew from {short(earlier[m])} to {short(now[m])} within {2 * width} entries",
        advise(run.settings, advice.on("env.normalize_reward"), advice.popart, advice.lower_rate),
    )


def unexplained(run: Series) -> Finding:
    """The critic explains none of the returns' variance: advantages are no better than returns."""
    explained = run.recent("value/explained_variance")
    return Finding(
        share(explained <= 0, explained) > MOST,
        -mean(explained),
        lambda m: f"the critic explains none of the returns' variance (share explained: {middle(explained, m)})",
        advise(
            run.settings,
            advice.larger_critic,
            advice.more("algo.num_epochs"),
            advice.on("env.normalize_reward"),
        ),
    )


FAULTS: tuple[Rule, ...] = (nonfinite, fell, flat, behind, clipped, kl_high, kl_rising)
SYMPTOMS: tuple[Rule, ...] = (
    still,
    degenerate,
    advantage_sign,
    advantage_scale,
    gradient_high,
    gradient_low,
    entropy,
    value_error,
    unexplained,
)


def nothing(run: Series) -> Finding:
    """The finding of a rule that has too little to go by."""
    return Finding(np.zeros(run.members, dtype=bool), np.zeros(run.members), str, "")


def entropies(run: Series) -> tuple[np.ndarray, np.ndarray]:
    """Entropy at the start (of a Gaussian, where that is not positive, nan) and in the last window, [M] nats."""
    values = run.values("entropy/mean")
    if len(values) < WINDOW:
        return np.full((2, run.members), np.nan)[0], np.full(run.members, np.nan)
    first = values[:WINDOW].max(0)
    return np.where(first > 0, first, np.nan), mean(run.recent("entropy/mean"))


def middle(values: np.ndarray, member: int) -> str:
    """The median of a member's window as text."""
    return short(float(np.nanmedian(values[:, member])))


def short(value: float) -> str:
    """A number to three digits as text: 0.0123, 28.2 or 1,234."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"
