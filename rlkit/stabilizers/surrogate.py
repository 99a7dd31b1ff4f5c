"""The clipped surrogate as a link."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlkit.buffer import Batch
from rlkit.gradient import Evaluated, Rows
from rlkit.link import Link
from rlkit.losses import clipped_surrogate, clipped_surrogate_gradient
from rlkit.policy import Out, Policy
from rlkit.schedules import Schedule


class Surrogate(Link):
    """Loss -min(r A, clip(r, 1 - clip, 1 + clip_high) A); see `rlkit.losses.clipped_surrogate`.

    Args:
        clip: schedule of the clip range; a huge finite one, 1e9, is no clip (the plain policy gradient).
        clip_high: the upper range where it differs from the lower; None means `clip`.
        normalize_advantage: subtract the minibatch's mean advantage and divide by its deviation, for each member.
        ratio_bound: largest ratio that counts where A is negative; None for no bound.
    """

    def __init__(
        self,
        clip: Schedule,
        clip_high: float | None = None,
        normalize_advantage: bool = False,
        ratio_bound: float | None = None,
    ) -> None:
        self.clip, self.clip_high, self.normalize_advantage = clip, clip_high, normalize_advantage
        self.ratio_bound = ratio_bound

    def losses(self, out: Out, batch: Batch, policy: Policy) -> dict[str, Tensor]:
        advantage = standardized(batch) if self.normalize_advantage else batch.advantage
        low = self.clip.value[:, None]
        high = low if self.clip_high is None else self.clip_high
        return {"loss": clipped_surrogate(out.log_prob - batch.log_prob, advantage, low, high, self.ratio_bound)}

    def gradients(self, out: Evaluated, batch: Rows) -> dict[str, Any]:
        advantage = batch.of_all(standardized) if self.normalize_advantage else batch.advantage
        low = out.array(self.clip.value)[:, None]
        high = low if self.clip_high is None else self.clip_high
        log_ratio = out.log_prob - batch.log_prob
        return {"log_prob": clipped_surrogate_gradient(out.xp, log_ratio, advantage, low, high, self.ratio_bound)}


def standardized(batch: Batch | Rows, epsilon: float = 1e-8) -> Any:
    """(A - mean) / (std + epsilon) over the real rows of each member's minibatch, [M, B]; std unbiased (ddof 1)."""
    x: Any = batch.advantage
    rows: Any = batch.height
    if batch.padded:
        real: Any = batch.weight > 0
        rows = real.sum(1, keepdims=True, dtype=x.dtype).clip(min=1.0)
        centred = (x - (x * real).sum(1, keepdims=True) / rows) * real
    else:
        centred = x - x.sum(1, keepdims=True) / rows
    variance = (centred * centred).sum(1, keepdims=True) / (rows - 1 + (rows == 1))
    return centred / (variance**0.5 + epsilon)
