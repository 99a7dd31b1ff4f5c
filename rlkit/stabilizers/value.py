"""The critic's loss as a link."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlkit.buffer import Batch
from rlkit.gradient import Evaluated, Rows
from rlkit.link import Link
from rlkit.losses import value_loss, value_loss_gradient
from rlkit.policy import Out, Policy


class Value(Link):
    """Loss coef (V - ret)^2 / 2, optionally clipped; see `rlkit.losses.value_loss`.

    Args:
        coef: multiplies the loss. CleanRL's `vf_coef` is the same number; Stable-Baselines3 has no factor 1/2, so its
            `vf_coef` 0.5 is 1.0 here.
        clip: range within which V may move from its value at collection, in units of return; None for no clip.
    """

    def __init__(self, coef: float, clip: float | None = None) -> None:
        self.coef, self.clip = coef, clip

    def losses(self, out: Out, batch: Batch, policy: Policy) -> dict[str, Tensor]:
        if out.value is None:
            raise ValueError("the value loss needs a policy with a critic")
        old = batch.value if self.clip is not None else None
        return {"loss": self.coef * value_loss(out.value, batch.ret, old, self.clip)}

    def gradients(self, out: Evaluated, batch: Rows) -> dict[str, Any]:
        if out.value is None:
            raise ValueError("the value loss needs a policy with a critic")
        old = batch.value if self.clip is not None else None
        return {"value": self.coef * value_loss_gradient(out.value, batch.ret, old, self.clip)}
