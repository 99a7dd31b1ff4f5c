"""The entropy bonus as a link."""

from __future__ import annotations

from torch import Tensor

from rlkit.buffer import Batch
from rlkit.link import Link
from rlkit.policy import Out, Policy
from rlkit.schedules import Schedule


class Entropy(Link):
    """Loss -coef H(pi(. | s)) (Williams & Peng 1991; Mnih et al. 2016), coef on a schedule, in nats."""

    def __init__(self, coef: Schedule) -> None:
        self.coef = coef

    def losses(self, out: Out, batch: Batch, policy: Policy) -> dict[str, Tensor]:
        return {"loss": -self.coef.value[:, None] * out.dist.entropy()}
