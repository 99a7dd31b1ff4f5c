"""Schedules: coefficients that change over a run, one value for each member."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from rlkit.link import Metrics


class Schedule(ABC):
    """Called once an iteration with each member's progress; `value` [M] holds until the next call."""

    def __init__(self, initial: float, members: int) -> None:
        self.initial = initial
        self.value = torch.full((members,), float(initial))
        self.scale = torch.ones(members)  # what a keeper multiplied it by

    def __call__(self, progress: Tensor, metrics: Metrics) -> Tensor:
        """Return the values [M] of this iteration.

        Args:
            progress: share of its planned steps each member has made, [M] in [0, 1].
            metrics: those of the iteration before, "area/name" -> [M]; empty in the first.
        """
        self.value = self.compute(progress, metrics) * self.scale
        return self.value

    @abstractmethod
    def compute(self, progress: Tensor, metrics: Metrics) -> Tensor:
        """The rule itself."""

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.scale = state["value"].clone(), state["scale"].clone()


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

    def __init__(self, initial: float, members: int, target: float, floor: float) -> None:
        super().__init__(initial, members)
        self.target, self.floor = target, floor

    def compute(self, progress: Tensor, metrics: Metrics) -> Tensor:
        if "kl/old" not in metrics:
            return torch.full_like(progress, self.initial)
        value = (metrics["kl/old"].clamp(min=0.0) / self.target).sqrt().clamp(max=self.initial)
        # a member that made no update has no KL: it keeps the value it had
        return torch.where(value.isnan(), self.value, value.clamp(min=self.floor))


SCHEDULES: dict[str, type[Schedule]] = {
    "constant": Constant,
    "linear": Linear,
    "exponential": Exponential,
    "kl_driven": KLDriven,
}
