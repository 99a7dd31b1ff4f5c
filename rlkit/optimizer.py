"""Adam for M members at once, with a learning rate, a step count and a guard for each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlkit.arrays import array_library, as_array, in_place

CACHED = 1 << 15  # weights of the members that make their step together, whose vectors then stay in a core's cache


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
    weight: Any,
    m: Any,
    v: Any,
    t: Any,
    g: Any,
    learning_rate: Any,
    betas: tuple[float, float],
    table: Any,
    xp: Any,
) -> None:
    """One step of Adam in place, on vectors [M, P] with a step count (int64) and a learning rate [M] each.

        m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2,  w -= lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    Source: Kingma & Ba 2015, algorithm 1. Numerator and denominator are both taken times sqrt(1 - b2^t); `table` holds
    what that makes of the rest (`bias_corrections`). Arguments are arrays of `xp`, numpy or torch; g is used up.
    """
    b1, b2 = betas
    t += 1
    size, epsilon = table[xp.where(t < len(table), t, -1)].T[..., None]  # [M, 1] each; np.clip takes ten times as long
    work = (1 - b1) * g
    m *= b1
    m += work
    g *= g
    g *= 1 - b2
    v *= b2
    v += g
    xp.sqrt(v, out=work)
    work += epsilon
    xp.divide(m, work, out=work)
    work *= learning_rate[:, None] * size
    weight -= work


class Adam:
    """Adam on flat vectors [M, P] of stacked parameters, with everything of a member its own.

    Learning rate, step count, gradient-norm clip and the decision whether to step at all belong to the member. One
    that does not step keeps weights, moments and step count: a zero gradient would still move Adam. A non-finite
    gradient never reaches the weights; three in a row mark the member `diverged`, and it does not step again.

    The parameters of `module` become views of one vector for each member, so that a step is a handful of operations.
    On a CPU these are NumPy's, over the memory of the tensors: a step of a small network takes a fifth of the time.
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
        for p, view in zip(self.params, self.views(self.flat), strict=True):
            p.data = view
        self.m = torch.zeros_like(self.flat)
        self.v = torch.zeros_like(self.flat)
        self.t = torch.zeros(members, dtype=torch.int64, device=self.flat.device)
        self.nonfinite = torch.zeros(members, dtype=torch.int64, device=self.flat.device)  # in a row
        self.xp = array_library(self.flat.device)
        self.table = as_array(bias_corrections(betas, epsilon).to(self.flat.device), self.xp)
        self.state = tuple(as_array(x, self.xp) for x in (self.flat, self.m, self.v, self.t))  # over the same memory
        together = max(1, CACHED // self.flat.shape[1]) if self.xp is np else members
        parts = [slice(m, m + together) for m in range(0, members, together)]
        self.cached = [(some, [x[some] for x in self.state]) for some in parts]  # members whose step stays in cache
        self._sound = True  # no member has a non-finite gradient behind it

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return where in a vector [M, P] each parameter's numbers lie, as views of the parameters' shapes."""
        sizes = [p.numel() // self.members for p in self.params]
        return [part.view(p.shape) for part, p in zip(flat.split(sizes, 1), self.params, strict=True)]

    @property
    def diverged(self) -> Tensor:
        """Members given up after `PATIENCE` non-finite gradients in a row, bool [M]."""
        return self.nonfinite >= self.PATIENCE

    @torch.no_grad()
    @np.errstate(over="ignore", invalid="ignore")  # what is not finite is seen and told of
    def step(self, grads: Sequence[Tensor], learning_rate: Tensor, active: Tensor) -> StepResult:
        """Make one step for the active members.

        Args:
            grads: one gradient for each parameter, [M, ...], or that of all, [M, P]; may be overwritten.
            learning_rate: [M].
            active: bool [M].
        """
        xp = self.xp
        lr, taking = as_array(learning_rate, xp), as_array(active, xp)
        flat_grads = [as_array(grad, xp).reshape(self.members, -1) for grad in grads]
        g = flat_grads[0] if len(grads) == 1 else xp.concat(flat_grads, axis=1)  # [M, P]
        norm = xp.vecdot(g, g) ** 0.5
        finite = norm < math.inf
        stepped = taking & finite
        if self.max_grad_norm is None:
            scale = norm * 0 + 1
        else:
            scale = self.max_grad_norm / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_
            scale = xp.where(scale > 1.0, 1.0, scale)
            g *= scale[:, None]
        if self._sound and bool(stepped.all()):
            for some, (weight, m, v, t) in self.cached:
                adam_(weight, m, v, t, g[some], lr[some], self.betas, self.table, xp)
        else:  # on copies of the rows that step; the others are not touched
            stepped = self._guard(taking, finite)
            rows = weight, m, v, t = tuple(x[stepped] for x in self.state)
            adam_(weight, m, v, t, g[stepped], lr[stepped], self.betas, self.table, xp)
            for whole, part in zip(self.state, rows, strict=True):
                whole[stepped] = part
        return StepResult(*map(torch.as_tensor, (norm, scale, stepped, finite)))

    def _guard(self, active: Any, finite: Any) -> Any:
        """Count non-finite gradients in a row and return the members that may step, bool [M]."""
        nonfinite = in_place(self.nonfinite)
        counted = active & (nonfinite < self.PATIENCE)
        nonfinite[counted] = ((nonfinite + 1) * ~finite)[counted]
        self._sound = not bool(nonfinite.any())
        return counted & finite

    def forget(self) -> None:
        """Go back to the moments and the step count of a fresh optimiser; a member that has diverged stays so."""
        for x in (self.m, self.v, self.t):
            x.zero_()

    def state_dict(self) -> dict[str, Any]:
        return {"m": self.m, "v": self.v, "t": self.t, "nonfinite": self.nonfinite}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in ("m", "v", "t", "nonfinite"):
            getattr(self, name).copy_(state[name])
        self._sound = not bool(self.nonfinite.any())
