"""The entropy bonus as a link."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlkit.buffer import Batch
from rlkit.gradient import Evaluated, Rows
from rlkit.link import Link
from rlkit.policy import Out, Policy
from rlkit.schedules import Schedule


class Entropy(Link):
    """Loss -coef H(pi(. | s)) (Williams & Peng 1991; Mnih et al. 2016), coef on a schedule, in nats.

    While the coefficient of every member is zero the term is not computed.
    """

    def __init__(self, coef: Schedule) -> None:
        self.coef = coef
        self.on = True

    def batch(self, batch: Batch) -> Batch:
        self.on = bool(self.coef.value.any())
        return batch

    def losses(self, out: Out, batch: Batch, policy: Policy) -> dict[str, Tensor]:
        if not self.on:
            return {}
        return {"loss": -self.coef.value[:, None] * out.dist.entropy()}

    def gradients(self, out: Evaluated, batch: Rows) -> dict[str, Any]:
        return {"entropy": -out.array(self.coef.value)[:, None]} if self.on else {}
