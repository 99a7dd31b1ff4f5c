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

    Where the critic predicts standardised returns (`rlkit.normalize.ValueScale`) the error is in their unit, the
    standard deviation of value targets: coef (V - ret)^2 / (2 std^2), and so is the range of the clip.

    Args:
        coef: multiplies the loss. CleanRL's `vf_coef` is the same number; Stable-Baselines3 has no factor 1/2, so its
            `vf_coef` 0.5 is 1.0 here.
        clip: range within which V may move from its value at collection, in the unit of the error; None for no clip.
    """

    def __init__(self, coef: float, clip: float | None = None) -> None:
        self.coef, self.clip = coef, clip

    def losses(self, out: Out, batch: Batch, policy: Policy) -> dict[str, Tensor]:
        return {"loss": self.coef * value_loss(*self._in_unit(out, batch), self.clip)}

    def gradients(self, out: Evaluated, batch: Rows) -> dict[str, Any]:
        by_value = self.coef * value_loss_gradient(*self._in_unit(out, batch), self.clip)
        return {"value": by_value if out.value_std is None else by_value / out.value_std}

    def _in_unit(self, out: Out | Evaluated, batch: Batch | Rows) -> tuple[Any, Any, Any]:
        """V, its target and, for the clip, V at collection, in the unit of the error."""
        if out.value is None:
            raise ValueError("the value loss needs a policy with a critic")
        value, ret, old = out.value, batch.ret, batch.value if self.clip is not None else None
        if out.value_std is None:
            return value, ret, old
        return value / out.value_std, ret / out.value_std, None if old is None else old / out.value_std
