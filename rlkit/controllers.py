"""Controllers of a KL penalty's coefficient, one value for each member, moved after each update."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from rlkit.link import Link, Metrics

RULES = ("fixed", "adaptive", "stepped", "proportional", "linear")


class Controller:
    """The coefficient beta [M] of a KL penalty, and the rule that moves it to where KL meets a target.

        fixed         beta stays (the twin of the others that does nothing)
        adaptive      KL > 1.5 target: 2 beta;  KL < target / 1.5: beta / 2  (Schulman et al. 2017, section 4)
        stepped       KL > 1.5 target: 2 beta;  KL < target / 2: beta / 2
        proportional  beta (1 + clip(KL / target - 1, -0.2, 0.2) rows / horizon)  (Ziegler et al. 2019, section 2.2)
        linear        from the first value to `final` over the run, whatever KL does

    A coefficient of zero stays zero, and a member whose KL was not measured keeps its coefficient.

    Args:
        coef: first value.
        rule: one of the names above.
        target: nats.
        horizon: rows in which a KL 20 % or more off its target moves the coefficient by 20 % (proportional).
        final: last value (linear).
        low, high: bounds of a coefficient that a rule moves.
    """

    def __init__(
        self, coef: float, members: int, rule: str, target: float, horizon: int, final: float, low: float, high: float
    ) -> None:
        if low > high:
            raise ValueError(f"min_coef is {low} and max_coef is {high}; the first must not be above the second")
        self.initial, self.rule, self.target, self.horizon, self.final = coef, rule, target, horizon, final
        self.low, self.high = low, high
        self.coef = torch.full((members,), float(coef))

    def move(self, kl: Tensor, rows: Tensor, progress: Tensor) -> None:
        """Move the coefficient after an update.

        Args:
            kl: mean KL of each member after the update, [M] nats; nan where none was made.
            rows: that the update saw, [M].
            progress: share of the planned steps that were made, [M].
        """
        if self.rule == "fixed":
            return
        if self.rule == "linear":
            self.coef = self.initial + (self.final - self.initial) * progress.clamp(0.0, 1.0)
            return
        ratio = kl / self.target
        if self.rule == "proportional":
            factor = 1.0 + (ratio - 1.0).clamp(-0.2, 0.2) * rows / self.horizon
        else:
            factor = torch.ones_like(kl)
            factor[ratio > 1.5] = 2.0
            factor[ratio < (1 / 1.5 if self.rule == "adaptive" else 0.5)] = 0.5
        moved = (self.coef * factor).clamp(self.low, self.high)
        self.coef = torch.where((self.coef > 0) & kl.isfinite(), moved, self.coef)


class Controlled(Link):
    """A link with a loss coef KL, whose coefficient a `Controller` moves.

    Args:
        coef: multiplies the KL (nats) at first; 0 changes nothing.
        controller: the rule, one of fixed, adaptive, stepped, proportional, linear.
        target: KL that the rule aims at, nats.
        horizon: rows in which a KL 20 % or more off its target moves the coefficient by 20 % (proportional).
        final: last value (linear).
        min_coef, max_coef: bounds of a coefficient that a rule moves.
    """

    bounds: ClassVar = {
        "coef": {"ge": 0},
        "controller": {"choices": RULES},
        "target": {"gt": 0},
        "horizon": {"ge": 1},
        "final": {"ge": 0},
        "min_coef": {"gt": 0},
        "max_coef": {"gt": 0},
    }

    def __init__(
        self,
        members: int,
        coef: float,
        controller: str = "fixed",
        target: float = 0.01,
        horizon: int = 10_000,
        final: float = 0.01,
        min_coef: float = 1e-4,
        max_coef: float = 100.0,
    ) -> None:
        self.controller = Controller(coef, members, controller, target, horizon, final, min_coef, max_coef)

    @property
    def coef(self) -> Tensor:
        """The coefficient now, [M, 1]."""
        return self.controller.coef[:, None]

    def control(self, kl: Tensor, count: Tensor, metrics: Metrics) -> None:
        """Move the coefficient after an update with mean KL `kl` [M] over `count` [M] rows."""
        self.controller.move(kl, count, metrics["run/progress"])

    def report(self) -> dict[str, Tensor]:
        return {"coef": self.controller.coef}

    def state_dict(self) -> dict[str, Any]:
        return {"coef": self.controller.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.controller.coef = state["coef"].clone()
