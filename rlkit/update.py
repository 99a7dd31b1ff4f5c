"""The update: epochs of minibatches, losses reduced for each member, one guarded optimiser step each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rlkit.buffer import Batch
from rlkit.distributions import Distribution
from rlkit.link import Link
from rlkit.losses import exact_kl
from rlkit.optimizer import Adam, StepResult
from rlkit.policy import Out, Policy

KL_STOP_FACTOR = 1.5  # an update stops at this multiple of `target_kl`, as Stable-Baselines3 and Spinning Up do


@dataclass
class Minibatch:
    """What one step of an update saw and did, kept by reference: statistics are computed only when they are logged."""

    epoch: int
    batch: Batch
    out: Out
    terms: dict[str, Tensor]  # name -> [M, b] or [M]
    active: Tensor  # bool [M]: the member took part
    step: StepResult


@dataclass
class UpdateRecord:
    """All steps of one update."""

    minibatches: list[Minibatch] = field(default_factory=list)


def minibatches(
    batch: Batch, num_epochs: int, num_minibatches: int, rngs: list[np.random.Generator]
) -> Iterator[tuple[int, Batch]]:
    """Yield (epoch, minibatch [M, b]) pairs: every real row of every member once an epoch, in an order of its own.

    Each member's rows are cut into `num_minibatches` parts whose sizes differ by at most one, whatever the other
    members hold; a shorter part is padded with rows of weight zero. One minibatch is the whole batch as it lies.
    """
    if num_minibatches == 1:
        for epoch in range(num_epochs):
            yield epoch, batch
        return
    counts = batch.count.tolist()
    bounds = np.array([[k * count // num_minibatches for k in range(num_minibatches + 1)] for count in counts])
    width = max(int(np.diff(bounds).max()), 1)
    slot = bounds[:, :-1, None] + np.arange(width)  # [M, n, b]: position in the member's shuffled rows
    real = slot < bounds[:, 1:, None]
    padded = batch.padded or not real.all()
    for epoch in range(num_epochs):
        rows = np.zeros(slot.shape, dtype=np.int64)
        for m, (rng, count) in enumerate(zip(rngs, counts, strict=True)):
            rows[m][real[m]] = rng.permutation(count)
        shuffled = batch.take(torch.from_numpy(rows.reshape(len(counts), -1)).to(batch.weight.device))
        if padded:
            shuffled = shuffled.masked(torch.from_numpy(real.reshape(len(counts), -1)).to(batch.weight.device))
        for k in range(num_minibatches):
            yield epoch, shuffled.slice(k * width, (k + 1) * width)


def reduce(terms: dict[str, Tensor], batch: Batch, column_of: Callable[[str], str] = lambda term: "weight") -> Tensor:
    """Return each member's loss, [M]: for each weight column, sum(weight * terms) over the rows that have a weight.

    Weights average to one over a batch (`rlkit.aggregation`), so the mean over a minibatch's rows estimates the loss of
    the batch without bias, for every aggregation. Terms of shape [M] are added as they are.
    """
    parts = [term for term in terms.values() if term.dim() == 1]
    totals: dict[str, Tensor] = {}
    for name, term in terms.items():
        if term.dim() == 2:
            column = column_of(name)
            totals[column] = totals[column] + term if column in totals else term
    for column, total in totals.items():
        weight = batch[column]
        plain = column == "weight" and not batch.padded
        rows = batch.height if plain else (weight > 0).sum(1).clamp(min=1)
        parts.append((total * weight).sum(1) / rows)
    return functools.reduce(torch.add, parts)


def update(
    policy: Policy,
    optimizer: Adam,
    chain: Link,
    batch: Batch,
    *,
    learning_rate: Tensor,
    active: Tensor,
    num_epochs: int,
    num_minibatches: int,
    rngs: list[np.random.Generator],
    target_kl: float | None = None,
) -> UpdateRecord:
    """Improve the policy on a batch and return the record of every step.

    Args:
        learning_rate: [M].
        active: bool [M], the members that learn; the others keep weights, moments and step count.
        rngs: one generator for each member, for the order of minibatches.
        target_kl: a member whose KL(pi_old || pi) on a minibatch exceeds 1.5 times this takes no further step in this
            update; the check comes before the step, on the exact KL, which is never negative.
    """
    record = UpdateRecord()
    for epoch, mini in minibatches(batch, num_epochs, num_minibatches, rngs):
        out = policy.evaluate(mini)
        if target_kl is not None:
            with torch.no_grad():
                active = active & (mean_kl(mini, out) <= KL_STOP_FACTOR * target_kl)
            if not bool(active.any()):
                break
        taking = active & (mini.weight > 0).any(1) if mini.padded else active  # a zero gradient still moves Adam
        terms = chain.losses(out, mini, policy)
        loss = reduce(terms, mini, chain.column)
        grads = torch.autograd.grad(loss.sum(), optimizer.params, materialize_grads=True)
        step = optimizer.step(grads, learning_rate, taking)
        record.minibatches.append(Minibatch(epoch, mini, out, terms, taking, step))
    return record


def behaviour(batch: Batch, dist: Distribution) -> Distribution:
    """The distribution that took the batch's actions, from its `old_*` columns."""
    return dist.with_params(batch.starting_with("old_"))


def mean_kl(batch: Batch, out: Out) -> Tensor:
    """Weighted mean of the exact KL(pi_old || pi) over a batch, [M] nats."""
    kl = exact_kl(behaviour(batch, out.dist), out.dist)
    return (kl * batch.weight).sum(1) / batch.weight.sum(1).clamp(min=1e-12)


# --- statistics ----------------------------------------------------------------------------------------------------


def kl_by_epoch(record: UpdateRecord) -> list[Tensor]:
    """Exact KL(pi_old || pi) of each epoch, [M] nats: the mean over the rows a member trained on, nan without one."""
    sums: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for mini in record.minibatches:
            weight = mini.batch.weight * mini.active[:, None]
            kl = exact_kl(behaviour(mini.batch, mini.out.dist), mini.out.dist)
            now = ((kl * weight).sum(1), weight.sum(1))
            if len(sums) > mini.epoch:
                now = (now[0] + sums[-1][0], now[1] + sums[-1][1])
                sums.pop()
            sums.append(now)
    return [total / weight for total, weight in sums]  # 0 / 0 is nan: not measured


@torch.no_grad()
def statistics(
    record: UpdateRecord, batch: Batch, clip_low: Tensor, clip_high: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Summarise an update.

    Args:
        record: what `update` returned.
        batch: the whole batch it was given.
        clip_low, clip_high: [M], for the share of clipped ratios.

    Returns:
        scalars: "area/name" -> [M], nan where a member made no step.
        histograms: name -> 1-D values of all members together.
    """
    minis = record.minibatches
    steps = torch.stack([mini.step.stepped for mini in minis]).sum(0) if minis else torch.zeros(batch.members)
    scalars: dict[str, Tensor] = {"update/steps": steps.float()}
    real = batch.real
    advantage = batch.advantage
    scalars["advantage/mean"], scalars["advantage/std"] = moments(advantage, real)
    histograms = {"advantage": advantage[real]}
    if batch.get("value") is not None:
        error = batch.ret - batch.value
        spread = moments(batch.ret, real)[1]
        scalars["value/error"] = (error**2 * real).sum(1) / real.sum(1)
        unexplained = (moments(error, real)[1] / spread) ** 2
        scalars["value/explained_variance"] = torch.where(spread > 0, 1 - unexplained, torch.nan)
    if not minis:
        return scalars, histograms
    weight = torch.cat([(mini.batch.weight > 0) & mini.active[:, None] for mini in minis], 1)
    log_ratio = torch.cat([mini.out.log_prob - mini.batch.log_prob for mini in minis], 1)
    ratio = log_ratio.exp()
    scalars["ratio/mean"], scalars["ratio/std"] = moments(ratio, weight)
    nothing = ~weight.any(1)
    scalars["ratio/min"] = ratio.masked_fill(~weight, torch.inf).amin(1).masked_fill(nothing, torch.nan)
    scalars["ratio/max"] = ratio.masked_fill(~weight, -torch.inf).amax(1).masked_fill(nothing, torch.nan)
    outside = (ratio < 1 - clip_low[:, None]) | (ratio > 1 + clip_high[:, None])
    scalars["ratio/clipped"] = (outside & weight).sum(1) / weight.sum(1)
    entropy = torch.cat([mini.out.dist.entropy() for mini in minis], 1)
    scalars["entropy/mean"] = moments(entropy, weight)[0]
    for epoch, kl in enumerate(kl_by_epoch(record)):
        scalars[f"kl/epoch_{epoch}"] = kl
    for name in minis[0].terms:
        term = torch.cat(
            [mini.terms[name].reshape(batch.members, -1).expand_as(mini.out.log_prob) for mini in minis], 1
        )
        scalars[f"loss/{name.removesuffix('/loss')}"] = moments(term, weight)[0]
    last = minis[-1]
    states = (last.batch.weight > 0) & last.active[:, None]
    histograms |= {
        "ratio": ratio[weight],
        "kl": exact_kl(behaviour(last.batch, last.out.dist), last.out.dist)[states],
    }
    reference = last.batch.starting_with("ref_")
    if reference:
        kl = exact_kl(last.out.dist, last.out.dist.with_params(reference))
        scalars["kl/ref"] = moments(kl, states)[0]
        histograms["kl_ref"] = kl[states]
    active = torch.stack([mini.active for mini in minis])  # [steps, M]
    finite = torch.stack([mini.step.finite for mini in minis])
    for name, norms in (
        ("before", torch.stack([mini.step.norm for mini in minis])),
        ("after", torch.stack([mini.step.norm * mini.step.scale for mini in minis])),
    ):
        scalars[f"grad_norm/{name}"] = moments(norms.T, (active & finite).T)[0]
        histograms[f"grad_norm_{name}"] = norms[active & finite]
    scalars["update/nonfinite"] = (active & ~finite).sum(0).float()
    return scalars, histograms


def moments(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (ddof 0) of x [M, B] over masked rows, [M] each; nan where there are none."""
    count = mask.sum(1)
    mean = x.masked_fill(~mask, 0.0).sum(1) / count
    deviation = (x - mean[:, None]).masked_fill(~mask, 0.0)
    return mean, ((deviation**2).sum(1) / count).sqrt()
