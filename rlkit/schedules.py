"""Schedules: coefficients that change over a run, one value for each member."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlkit.link import Metrics


class Schedule(ABC):
    """Called once an iteration with each member's progress; `value` [M] holds until the next call.

    It is what the rule gives times a scale, which is one unless a keeper has changed it.
    """

    reads: ClassVar[str | None] = None  # the metric that the rule needs of every iteration

    def __init__(self, initial: float, members: int) -> None:
        self.initial = initial
        self.value = self.given = torch.full((members,), float(initial))
        self.scale = torch.ones(members)

    def __call__(self, progress: Tensor, metrics: Metrics) -> Tensor:
        """Return the values [M] of this iteration.

        Args:
            progress: share of its planned steps each member has made, [M] in [0, 1].
            metrics: those of the iteration before, "area/name" -> [M]; empty in the first.
        """
        self.given = self.compute(progress, metrics)
        self.value = self.given * self.scale
        return self.value

    @abstractmethod
    def compute(self, progress: Tensor, metrics: Metrics) -> Tensor:
        """The rule itself."""

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given, "scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given, self.scale = state["given"].clone(), state["scale"].clone()
        self.value = self.given * self.scale


class Constant(Schedule):
    """v = initial."""

    def compute(self, progress: Tensor, metrics: Metrics) -> Tensor:
        return torch.full_like(progress, self.initial)


class Linear(Schedule):
    """v = initial + (final - initial) min(t / until, 1), t the progress, until in (0, 1]."""

    def __init__(self, initial: float, members: int, final: float = 0.0, until: float = 1.0) -> None:
        super().__init__(initial, members)
        self.final, self.until = final, until

    def compute(self, progress: Tensor, metrics: Metrics) -> Tensor:
        return self.initial + (self.final - self.initial) * (progress / self.until).clamp(0.0, 1.0)


class Exponential(Schedule):
    """v = final + (initial - final) exp(-rate t), t the progress."""

    def __init__(self, initial: float, members: int, final: float = 0.0, rate: float = 3.0) -> None:
        super().__init__(initial, members)
        self.final, self.rate = final, rate

    def compute(self, progress: Tensor, metrics: Metrics) -> Tensor:
        return self.final + (self.initial - self.final) * torch.exp(-self.rate * progress.clamp(0.0, 1.0))


class KLDriven(Schedule):
    """v = min(initial, sqrt(KL / target)), not below `floor`: KL is that to the old policy in the last iteration.

    At KL 0 the rule gives 0, which would freeze learning; hence the floor. The first iteration uses `initial`.
    """

    reads = "kl/old"

    def __init__(self, initial: float, members: int, target: float, floor: float) -> None:
        super().__init__(initial, members)
        self.target, self.floor = target, floor

    def compute(self, progress: Tensor, metrics: Metrics) -> Tensor:
        if self.reads not in metrics:
            return torch.full_like(progress, self.initial)
        value = (metrics[self.reads].clamp(min=0.0) / self.target).sqrt().clamp(max=self.initial)
        # a member that made no update has no KL: it keeps the value it had
        return torch.where(value.isnan(), self.given, value.clamp(min=self.floor))


class Driven(Schedule):
    """v times a factor that a metric of the last iteration decides, within bounds; the first iteration uses `initial`.

    Args:
        target: what the metric is to be.
        min_factor, max_factor: bounds of v as multiples of `initial`.
    """

    def __init__(
        self, initial: float, members: int, target: float, min_factor: float = 0.01, max_factor: float = 10.0
    ) -> None:
        super().__init__(initial, members)
        self.target, self.low, self.high = target, min_factor * initial, max_factor * initial

    @abstractmethod
    def factor(self, x: Tensor) -> Tensor:
        """What multiplies v [M] where the metric is x [M]."""

    def compute(self, progress: Tensor, metrics: Metrics) -> Tensor:
        if self.reads not in metrics:
            return torch.full_like(progress, self.initial)
        x = metrics[self.reads]  # type: ignore[index]
        moved = (self.given * self.factor(x)).clamp(self.low, self.high)
        return torch.where(x.isnan(), self.given, moved)  # one that made no update has no such metric


class KLAdaptive(Driven):
    """A learning rate that keeps the KL to the old policy near a target.

        KL > 2 target: v / 1.5;   KL < target / 2: 1.5 v

    Source: the adaptive schedule of rsl_rl and Isaac Gym's rl_games; the idea is in Schulman et al. 2017, section 4.
    """

    reads = "kl/old"

    def factor(self, x: Tensor) -> Tensor:
        factor = torch.ones_like(x)
        factor[x > 2 * self.target] = 1 / 1.5
        factor[x < self.target / 2] = 1.5
        return factor


class TargetEntropy(Driven):
    """An entropy coefficient that keeps the entropy near a target: v exp(rate (target - H)), H in nats.

    Gradient descent on log v, as for the temperature of soft actor-critic (Haarnoja et al. 2018b, section 5).
    """

    reads = "entropy/mean"

    def __init__(
        self,
        initial: float,
        members: int,
        target: float,
        rate: float = 1.0,
        min_factor: float = 0.01,
        max_factor: float = 10.0,
    ) -> None:
        super().__init__(initial, members, target, min_factor, max_factor)
        self.rate = rate

    def factor(self, x: Tensor) -> Tensor:
        return torch.exp(self.rate * (self.target - x))


SCHEDULES: dict[str, type[Schedule]] = {
    "constant": Constant,
    "linear": Linear,
    "exponential": Exponential,
    "kl_driven": KLDriven,
    "kl_adaptive": KLAdaptive,
    "target_entropy": TargetEntropy,
}
