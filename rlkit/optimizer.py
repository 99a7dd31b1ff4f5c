"""Adam for M members at once, with a learning rate, a step count and a guard for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class StepResult:
    """What one optimiser step did, for each member: [M]."""

    norm_before: Tensor  # global L2 norm of the gradient
    norm_after: Tensor  # after clipping
    stepped: Tensor  # bool: the weights moved
    finite: Tensor  # bool: the gradient was finite


class Adam:
    """Adam (Kingma & Ba 2015, algorithm 1) on flat vectors [M, P] of stacked parameters.

        m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2,  w -= lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    with everything of a member its own: lr [M], t [M], the gradient-norm clip, and the decision whether it steps at all. A
    member that does not step keeps weights, moments and step count: a zero gradient would still move Adam. A non-finite
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
        self.betas, self.epsilon, self.max_grad_norm = betas, epsilon, max_grad_norm
        self.members = members = self.params[0].shape[0]
        self.flat = torch.cat([p.detach().reshape(members, -1) for p in self.params], 1)  # [M, P]
        start = 0
        for p in self.params:
            size = p.numel() // members
            p.data = self.flat[:, start : start + size].view(p.shape)
            start += size
        self.m = torch.zeros_like(self.flat)
        self.v = torch.zeros_like(self.flat)
        self.t = torch.zeros(members, device=self.flat.device)
        self.nonfinite = torch.zeros(members, dtype=torch.int64, device=self.flat.device)  # in a row

    @property
    def diverged(self) -> Tensor:
        """Members given up after `PATIENCE` non-finite gradients in a row, bool [M]."""
        return self.nonfinite >= self.PATIENCE

    @torch.no_grad()
    def step(self, grads: list[Tensor], learning_rate: Tensor, active: Tensor) -> StepResult:
        """Make one step for the active members.

        Args:
            grads: one gradient for each parameter, [M, ...].
            learning_rate: [M].
            active: bool [M].
        """
        g = torch.cat([grad.reshape(self.members, -1) for grad in grads], 1)  # [M, P]
        norm = torch.linalg.vector_norm(g, dim=1)
        finite = norm.isfinite()
        step = active & finite & ~self.diverged
        self.nonfinite = torch.where(active & ~self.diverged, (self.nonfinite + 1) * ~finite, self.nonfinite)
        scale = torch.ones_like(norm)
        if self.max_grad_norm is not None:
            scale = (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
        moving = step.to(g.dtype)
        g = g.mul_((scale * moving)[:, None])
        if not bool(finite.all()):
            g = torch.where(step[:, None], g, 0.0)  # nan times zero is nan
        b1, b2 = self.betas
        self.t += moving
        t = self.t.clamp(min=1.0)
        self.m.lerp_(g, ((1 - b1) * moving)[:, None])
        self.v.lerp_(g.square_(), ((1 - b2) * moving)[:, None])
        denominator = self.v.sqrt().div_((1 - b2**t).sqrt()[:, None]).add_(self.epsilon)
        size = learning_rate * moving / (1 - b1**t)
        self.flat.addcdiv_(self.m * size[:, None], denominator, value=-1.0)
        return StepResult(norm, norm * scale, step, finite)

    def state_dict(self) -> dict[str, Any]:
        return {"m": self.m, "v": self.v, "t": self.t, "nonfinite": self.nonfinite}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in ("m", "v", "t", "nonfinite"):
            getattr(self, name).copy_(state[name])
