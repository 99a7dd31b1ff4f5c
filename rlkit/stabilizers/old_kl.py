"""KL to the policy that collected the batch as a link: what adaptive-KL PPO has in place of the clip."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from rlkit.buffer import Batch
from rlkit.controllers import Controlled
from rlkit.gradient import Evaluated, Rows
from rlkit.link import Metrics
from rlkit.policy import Out, Policy


class OldKL(Controlled):
    """Loss coef KL(pi_old || pi), in closed form (Schulman et al. 2017, equation 8).

    With `algo.clip=null` and `controller=adaptive` it is the adaptive-KL variant of PPO (`experiment=kl_ppo`).

    Args:
        coef, controller and the rest: see `rlkit.controllers.Controlled`.
    """

    bounds: ClassVar = Controlled.bounds

    def __init__(
        self,
        members: int,
        coef: float = 1.0,
        controller: str = "adaptive",
        target: float = 0.01,
        horizon: int = 10_000,
        final: float = 0.01,
        min_coef: float = 1e-4,
        max_coef: float = 100.0,
    ) -> None:
        super().__init__(members, coef, controller, target, horizon, final, min_coef, max_coef)

    def losses(self, out: Out, batch: Batch, policy: Policy) -> dict[str, Tensor]:
        old = out.dist.with_params(batch.starting_with("old_"))
        return {"loss": self.coef * old.kl(out.dist)}

    def gradients(self, out: Evaluated, batch: Rows) -> dict[str, Any]:
        return {"kl_old": out.array(self.coef)}

    def observe(self, batch: Batch, metrics: Metrics, policy: Policy) -> None:
        if "kl/old" in metrics:
            self.control(metrics["kl/old"], batch.count, metrics)
