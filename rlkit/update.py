"""The update: epochs of minibatches, losses reduced for each member, one guarded optimiser step each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rlkit.buffer import Batch
from rlkit.distributions import Distribution
from rlkit.gradient import Differentiated, Gradient
from rlkit.link import Chain
from rlkit.losses import exact_kl
from rlkit.optimizer import Adam, StepResult
from rlkit.policy import Out, Policy
from rlkit.second_core import SecondCore

KL_STOP_FACTOR = 1.5  # an update stops at this multiple of `target_kl`, as Stable-Baselines3 and Spinning Up do


@dataclass
class Minibatch:
    """What one step of an update saw and did, kept by reference: statistics are computed only when they are logged."""

    epoch: int
    batch: Batch
    found: Differentiated
    active: Tensor  # bool [M]: the member took part
    step: StepResult

    @property
    def out(self) -> Out:
        """The policy evaluated before the step."""
        return self.found.out


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
        for mini in shuffled.slices(width):
            yield epoch, mini


@np.errstate(all="ignore")  # what is not finite is seen by the optimiser, and told of
def update(
    policy: Policy,
    optimizer: Adam,
    chain: Chain,
    batch: Batch,
    *,
    learning_rate: Tensor,
    active: Tensor,
    num_epochs: int,
    num_minibatches: int,
    rngs: list[np.random.Generator],
    target_kl: float | None = None,
    second: SecondCore | None = None,
) -> UpdateRecord:
    """Improve the policy on a batch and return the record of every step.

    Args:
        learning_rate: [M].
        active: bool [M], the members that learn; the others keep weights, moments and step count.
        rngs: one generator for each member, for the order of minibatches.
        target_kl: a member whose KL(pi_old || pi) on a minibatch exceeds 1.5 times this takes no further step in this
            update; the check comes before the step, on the exact KL, which is never negative.
        second: goes through the critic, if it is given.
    """
    record = UpdateRecord()
    gradient = Gradient(policy, chain, optimizer, second)
    for epoch, mini in minibatches(gradient.prepared(batch), num_epochs, num_minibatches, rngs):
        found = gradient(mini)
        if target_kl is not None:
            active = active & (mean_kl(mini, found.out) <= KL_STOP_FACTOR * target_kl)
            if not bool(active.any()):
                break
        taking = active & (mini.weight > 0).any(1) if mini.padded else active  # a zero gradient still moves Adam
        step = optimizer.step([found.flat], learning_rate, taking)
        record.minibatches.append(Minibatch(epoch, mini, found, taking, step))
    return record


def behaviour(batch: Batch, dist: Distribution) -> Distribution:
    """The distribution that took the batch's actions, from its `old_*` columns."""
    return dist.with_params(batch.starting_with("old_"))


def mean_kl(batch: Batch, out: Out) -> Tensor:
    """Weighted mean of the exact KL(pi_old || pi) over a batch, [M] nats."""
    kl = exact_kl(behaviour(batch, out.dist), out.dist)
    return (kl * batch.weight).sum(1) / batch.weight.sum(1).clamp(min=1e-12)


# --- statistics ----------------------------------------------------------------------------------------------------


@dataclass
class UpdateRows:
    """All rows of all steps of an update side by side: [M, R], R the rows of every minibatch of every epoch."""

    weight: Tensor  # 0 for padding and where a member did not take part
    log_ratio: Tensor  # log pi - log pi_old of the action taken
    kl: Tensor  # exact KL(pi_old || pi), nats
    dist: Distribution  # pi
    epochs: list[int]  # where each epoch begins, and the end

    @classmethod
    @torch.no_grad()
    def of(cls, record: UpdateRecord) -> UpdateRows:
        """Gather the rows of a record of at least one step."""
        minis = record.minibatches
        dist, old, weight = _side_by_side_of(minis)
        log_prob = torch.cat([mini.out.log_prob for mini in minis], 1)
        old_log_prob = torch.cat([mini.batch.log_prob for mini in minis], 1)
        epochs, end = [], 0
        for k, mini in enumerate(minis):
            if k == 0 or mini.epoch != minis[k - 1].epoch:
                epochs.append(end)
            end += mini.batch.height
        return cls(weight, log_prob - old_log_prob, exact_kl(old, dist), dist, [*epochs, end])

    def entropy(self) -> Tensor:
        """Mean entropy over the rows of all steps, [M] nats, nan where there are none."""
        return Kept(self.weight > 0).mean(self.dist.entropy())

    def kl_by_epoch(self) -> list[Tensor]:
        """Mean KL of each epoch over the rows a member trained on, [M] nats, nan where it did not."""
        parts = zip(self.epochs, self.epochs[1:], strict=False)
        return [_mean(self.kl[:, a:b], self.weight[:, a:b]) for a, b in parts]


def _side_by_side_of(minis: list[Minibatch]) -> tuple[Distribution, Distribution, Tensor]:
    """pi, pi_old and weights of the rows of some minibatches."""
    first = minis[0].out.dist
    dist = first.with_params(_side_by_side([mini.out.dist.params for mini in minis]))
    old = first.with_params(_side_by_side([mini.batch.starting_with("old_") for mini in minis]))
    return dist, old, torch.cat([mini.batch.weight * mini.active[:, None] for mini in minis], 1)


def _side_by_side(params: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    # rows last in memory: what is done with the few numbers of each is then done with long vectors
    return {name: torch.cat([p[name].mT for p in params], 2).mT.detach() for name in params[0]}


def _mean(x: Tensor, weight: Tensor) -> Tensor:
    return (x * weight).sum(1) / weight.sum(1)  # 0 / 0 is nan: not measured


def kl_by_epoch(record: UpdateRecord) -> list[Tensor]:
    """Exact KL(pi_old || pi) of each epoch of an update, [M] nats; nan where a member took no part."""
    return UpdateRows.of(record).kl_by_epoch() if record.minibatches else []


@torch.no_grad()
def last_kl(record: UpdateRecord) -> Tensor | None:
    """KL of the last epoch each member took part in, [M] nats, nan where it took part in none; None without a step."""
    result: Tensor | None = None
    for epoch in sorted({mini.epoch for mini in record.minibatches}, reverse=True):
        minis = [mini for mini in record.minibatches if mini.epoch == epoch]
        dist, old, weight = _side_by_side_of(minis)
        kl = _mean(exact_kl(old, dist), weight)
        result = kl if result is None else torch.where(result.isnan(), kl, result)
        if not bool(result.isnan().any()):
            break
    return result


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
    real = Kept(batch.real)
    advantage = batch.advantage
    scalars["advantage/mean"], scalars["advantage/std"] = real.moments(advantage)
    histograms = {"advantage": real.picked(advantage)}
    if batch.get("value") is not None:
        error = batch.ret - batch.value
        spread = real.moments(batch.ret)[1]
        scalars["value/error"] = real.mean(error.square())
        unexplained = (real.moments(error)[1] / spread) ** 2
        scalars["value/explained_variance"] = torch.where(spread > 0, 1 - unexplained, torch.nan)
    if not minis:
        return scalars, histograms
    of_rows, of_steps = _of_rows(UpdateRows.of(record), clip_low, clip_high), _of_steps(record)
    return scalars | of_rows[0] | of_steps[0], histograms | of_rows[1] | of_steps[1]


def _of_rows(rows: UpdateRows, clip_low: Tensor, clip_high: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Ratios, entropy and KL over the rows of all steps."""
    weighed = Kept(rows.weight > 0)
    ratio = rows.log_ratio.exp()
    nothing = weighed.count == 0
    outside = (ratio < 1 - clip_low[:, None]) | (ratio > 1 + clip_high[:, None])
    mean, std = weighed.moments(ratio)
    scalars = {
        "ratio/mean": mean,
        "ratio/std": std,
        "ratio/min": weighed.filled(ratio, torch.inf).amin(1).masked_fill(nothing, torch.nan),
        "ratio/max": weighed.filled(ratio, -torch.inf).amax(1).masked_fill(nothing, torch.nan),
        "ratio/clipped": weighed.mean(outside.to(ratio.dtype)),
        "entropy/mean": weighed.mean(rows.dist.entropy()),
        **{f"kl/epoch_{epoch}": kl for epoch, kl in enumerate(rows.kl_by_epoch())},
    }
    last = slice(rows.epochs[-2], None)
    return scalars, {"ratio": weighed.picked(ratio), "kl": Kept(rows.weight[:, last] > 0).picked(rows.kl[:, last])}


def _of_steps(record: UpdateRecord) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Losses, KL to the reference, and gradient norms of the steps."""
    minis, last = record.minibatches, record.minibatches[-1]
    scalars: dict[str, Tensor] = {}
    weighed = Kept(torch.cat([(mini.batch.weight > 0) & mini.active[:, None] for mini in minis], 1))
    terms: dict[str, list[Tensor]] = {}
    for mini in minis:
        for name, term in {**mini.found.closed(), **mini.found.terms}.items():
            terms.setdefault(name, []).append(term.reshape(len(term), -1).expand_as(mini.out.log_prob))
    for name, parts in terms.items():
        scalars[f"loss/{name.removesuffix('/loss')}"] = weighed.mean(torch.cat(parts, 1))
    histograms: dict[str, Tensor] = {}
    reference = last.batch.starting_with("ref_")
    if reference:
        kl = exact_kl(last.out.dist, last.out.dist.with_params(reference))
        states = Kept((last.batch.weight > 0) & last.active[:, None])
        scalars["kl/ref"] = states.mean(kl)
        histograms["kl_ref"] = states.picked(kl)
    active = torch.stack([mini.active for mini in minis])  # [steps, M]
    finite = torch.stack([mini.step.finite for mini in minis])
    before = torch.stack([mini.step.norm for mini in minis])
    after = before * torch.stack([mini.step.scale for mini in minis])
    for name, norms in (("before", before), ("after", after)):
        scalars[f"grad_norm/{name}"] = Kept((active & finite).T).mean(norms.T)
        histograms[f"grad_norm_{name}"] = norms[active & finite]
    scalars["update/nonfinite"] = (active & ~finite).sum(0).float()
    return scalars, histograms


class Kept:
    """Which rows of [M, B] count, by a mask; where it is all of them, as mostly, none need be filled or picked."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = None if bool(mask.all()) else mask
        self.count = torch.full(mask.shape[:1], mask.shape[1]) if self.mask is None else mask.sum(1)  # [M]

    def filled(self, x: Tensor, value: float = 0.0) -> Tensor:
        """x [M, B] with a value where rows do not count."""
        return x if self.mask is None else x.masked_fill(~self.mask, value)

    def picked(self, x: Tensor) -> Tensor:
        """The values of the rows that count, 1-D."""
        return x.flatten() if self.mask is None else x[self.mask]

    def mean(self, x: Tensor) -> Tensor:
        """Mean over the rows that count, [M]; nan where none does."""
        return self.filled(x).sum(1) / self.count

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation (ddof 0) over the rows that count, [M] each; nan where none does."""
        mean = self.mean(x)
        return mean, (self.filled(x - mean[:, None]).square().sum(1) / self.count).sqrt()
