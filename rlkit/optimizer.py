"""Adam for M members at once, with a learning rate, a step count and a guard for each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class StepResult:
    """What one optimiser step did, for each member: [M]."""

    norm: Tensor  # global L2 norm of the gradient, before clipping
    scale: Tensor  # what clipping multiplied it by
    stepped: Tensor  # bool: the weights moved
    finite: Tensor  # bool: the gradient was finite


def bias_corrections(betas: tuple[float, float], epsilon: float) -> Tensor:
    """What bias correction makes of the step size and of epsilon at step t, [L, 2], computed in double precision.

        c_t = sqrt(1 - b2^t) / (1 - b1^t),   e_t = epsilon sqrt(1 - b2^t)

    The last entry serves all later steps: L is chosen so that both are then constant in single precision. A table,
    since a few operations on [M] numbers cost as much as Adam itself on small networks.
    """
    slowest = max(*betas, 0.5)
    length = min(int(math.log(1e-9) / math.log(slowest)) + 2, 1 << 20)
    t = torch.arange(length, dtype=torch.float64).clamp(min=1.0)
    root = (1 - betas[1] ** t).sqrt()
    return torch.stack([root / (1 - betas[0] ** t), epsilon * root], 1).float()


def adam_(
    weight: Tensor,
    m: Tensor,
    v: Tensor,
    t: Tensor,
    g: Tensor,
    learning_rate: Tensor,
    betas: tuple[float, float],
    table: Tensor,
) -> None:
    """One step of Adam in place, on vectors [M, P] with a step count (int64) and a learning rate [M] each.

        m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2,  w -= lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    Source: Kingma & Ba 2015, algorithm 1. Numerator and denominator are both taken times sqrt(1 - b2^t); `table` holds
    what that makes of the rest (`bias_corrections`).
    """
    b1, b2 = betas
    t += 1
    size, epsilon = table[t.clamp(max=len(table) - 1)][..., None].unbind(1)  # [M, 1] each
    m.lerp_(g, 1 - b1)
    v.mul_(b2).addcmul_(g, g, value=1 - b2)
    weight.addcdiv_(m * (learning_rate[:, None] * size), v.sqrt().add_(epsilon), value=-1.0)


class Adam:
    """Adam on flat vectors [M, P] of stacked parameters, with everything of a member its own.

    Learning rate, step count, gradient-norm clip and the decision whether to step at all belong to the member. One
    that does not step keeps weights, moments and step count: a zero gradient would still move Adam. A non-finite
    gradient never reaches the weights; three in a row mark the member `diverged`, and it does not step again.

    The parameters of `module` become views of one vector for each member, so that a step is a handful of operations.
    """

    PATIENCE = 3  # non-finite gradients in a row before a member counts as diverged

    def __init__(
        self,
        module: nn.Module,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-5,
        max_grad_norm: float | None = 0.5,
    ) -> None:
        self.params = [p for p in module.parameters() if p.requires_grad]
        self.betas, self.max_grad_norm = betas, max_grad_norm
        self.members = members = self.params[0].shape[0]
        self.flat = torch.cat([p.detach().reshape(members, -1) for p in self.params], 1)  # [M, P]
        start = 0
        for p in self.params:
            size = p.numel() // members
            p.data = self.flat[:, start : start + size].view(p.shape)
            start += size
        self.m = torch.zeros_like(self.flat)
        self.v = torch.zeros_like(self.flat)
        self.t = torch.zeros(members, dtype=torch.int64, device=self.flat.device)
        self.table = bias_corrections(betas, epsilon).to(self.flat.device)
        self.nonfinite = torch.zeros(members, dtype=torch.int64, device=self.flat.device)  # in a row
        self._sound = True  # no member has a non-finite gradient behind it

    @property
    def diverged(self) -> Tensor:
        """Members given up after `PATIENCE` non-finite gradients in a row, bool [M]."""
        return self.nonfinite >= self.PATIENCE

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor], learning_rate: Tensor, active: Tensor) -> StepResult:
        """Make one step for the active members.

        Args:
            grads: one gradient for each parameter, [M, ...].
            learning_rate: [M].
            active: bool [M].
        """
        g = torch.cat([grad.reshape(self.members, -1) for grad in grads], 1)  # [M, P]
        norm = torch.linalg.vector_norm(g, dim=1)
        finite = norm.isfinite()
        stepped = active & finite
        if self.max_grad_norm is None:
            scale = torch.ones_like(norm)
        else:
            scale = (self.max_grad_norm / (norm + 1e-6)).clamp_(max=1.0)  # as torch.nn.utils.clip_grad_norm_
            g.mul_(scale[:, None])
        if self._sound and bool(stepped.all()):
            adam_(self.flat, self.m, self.v, self.t, g, learning_rate, self.betas, self.table)
        else:  # on copies of the rows that step; the others are not touched
            stepped = self._guard(active, finite)
            state = (self.flat, self.m, self.v, self.t)
            rows = flat, m, v, t = tuple(x[stepped] for x in state)
            adam_(flat, m, v, t, g[stepped], learning_rate[stepped], self.betas, self.table)
            for whole, part in zip(state, rows, strict=True):
                whole[stepped] = part
        return StepResult(norm, scale, stepped, finite)

    def _guard(self, active: Tensor, finite: Tensor) -> Tensor:
        """Count non-finite gradients in a row and return the members that may step, bool [M]."""
        counted = active & ~self.diverged
        self.nonfinite = torch.where(counted, (self.nonfinite + 1) * ~finite, self.nonfinite)
        self._sound = not bool(self.nonfinite.any())
        return counted & finite

    def state_dict(self) -> dict[str, Any]:
        return {"m": self.m, "v": self.v, "t": self.t, "nonfinite": self.nonfinite}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in ("m", "v", "t", "nonfinite"):
            getattr(self, name).copy_(state[name])
        self._sound = not bool(self.nonfinite.any())
