"""KL to a frozen reference policy as a link."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from rlkit.buffer import Batch
from rlkit.link import Link, Metrics
from rlkit.losses import kl_estimate
from rlkit.policy import Out, Policy

KINDS = ("exact", "k1", "k2", "k3")


class RefKL(Link):
    """Loss coef KL(pi || pi_ref) (Shao et al. 2024, equation 3), exact or by `rlkit.losses.kl_estimate`.

    The reference is the policy as it was at the start, with the observation statistics it had then, and, with
    `refresh_every` k > 0, the current one after every k iterations. Its distribution is stored in `ref_*` columns.

    Args:
        policy: the policy to freeze.
        coef: multiplies the KL (nats); 0 changes nothing.
        kind: "exact" (closed form), "k1", "k2" or "k3".
        refresh_every: iterations between two copies; 0 keeps the first reference.
    """

    bounds: ClassVar = {"coef": {"ge": 0}, "kind": {"choices": KINDS}, "refresh_every": {"ge": 0}}

    def __init__(self, policy: Policy, coef: float = 0.1, kind: str = "exact", refresh_every: int = 0) -> None:
        self.reference = policy.frozen_copy()
        self.coef, self.kind, self.refresh_every = coef, kind, refresh_every
        self.iteration = 0

    @torch.no_grad()
    def batch(self, batch: Batch) -> Batch:
        dist = self.reference.distribution(batch.obs, batch.get("offset"))
        columns = {f"ref_{name}": x for name, x in dist.params.items()}
        return batch.with_columns(**columns, ref_log_prob=dist.log_prob(batch.action))

    def losses(self, out: Out, batch: Batch, policy: Policy) -> dict[str, Tensor]:
        if self.kind == "exact":
            kl = out.dist.kl(out.dist.with_params(batch.starting_with("ref_")))
        else:
            kl = kl_estimate(batch.ref_log_prob - out.log_prob, self.kind)
        return {"loss": self.coef * kl}

    def observe(self, batch: Batch, metrics: Metrics, policy: Policy) -> None:
        self.iteration += 1
        if self.refresh_every and self.iteration % self.refresh_every == 0:
            self.reference.load_state_dict(policy.state_dict())

    def state_dict(self) -> dict[str, Any]:
        members = self.reference.members
        return {
            "reference": self.reference.state_dict(),
            "iteration": torch.full((members,), self.iteration, dtype=torch.int64),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reference.load_state_dict(state["reference"])
        self.iteration = int(state["iteration"][0])
