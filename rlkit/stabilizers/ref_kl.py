"""KL to a frozen reference policy as a link."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from rlkit.buffer import Batch
from rlkit.controllers import Controlled
from rlkit.gradient import Evaluated, Rows
from rlkit.keepers.keeper import put
from rlkit.link import Metrics
from rlkit.losses import exact_kl, kl_estimate
from rlkit.policy import Out, Policy

KINDS = ("exact", "k1", "k2", "k3")


class RefKL(Controlled):
    """Loss coef KL(pi || pi_ref) (Shao et al. 2024, equation 3), exact or by `rlkit.losses.kl_estimate`.

    The reference is the policy as it was at the start (after a warm-up, where there is one), with the observation
    statistics it had then, and, with `refresh_every` k > 0, the current one after every k iterations; a member that is
    rolled back has what it got back for its reference. Or it is a trained policy, for all members and for good. Its
    distribution is stored in `ref_*` columns.

    Args:
        policy: the policy to freeze.
        coef, controller and the rest: see `rlkit.controllers.Controlled`; the KL is that of the batch after the update.
        kind: "exact" (closed form), "k1", "k2" or "k3".
        refresh_every: iterations between two copies; 0 keeps the first reference.
        reference: "start", which after a warm-up is the clone, or the folder of a run, whose best member it is.
    """

    bounds: ClassVar = {**Controlled.bounds, "kind": {"choices": KINDS}, "refresh_every": {"ge": 0}}

    def __init__(
        self,
        policy: Policy,
        coef: float = 0.1,
        kind: str = "exact",
        refresh_every: int = 0,
        reference: str = "start",
        controller: str = "fixed",
        target: float = 0.01,
        horizon: int = 10_000,
        final: float = 0.01,
        min_coef: float = 1e-4,
        max_coef: float = 100.0,
    ) -> None:
        super().__init__(policy.members, coef, controller, target, horizon, final, min_coef, max_coef)
        self.reference = policy.frozen_copy()
        self.kind, self.refresh_every, self.given = kind, refresh_every, reference != "start"
        self.iteration = 0
        if self.given:
            if refresh_every:
                raise ValueError(f"reference is {reference} and refresh_every {refresh_every}; it must be 0 with a run")
            self._take(reference)

    def _take(self, folder: str) -> None:
        """Copy the best member of a run into every member of the reference."""
        from rlkit.evaluate import load

        try:
            agent = load(folder)
        except (FileNotFoundError, ValueError) as error:
            raise ValueError(f"reference is {folder}: {error}") from error
        source = agent.policy.state_dict()
        for name, x in self.reference.state_dict().items():
            if name.startswith("critic."):
                continue  # a reference has no use for it
            if name not in source or source[name].shape[1:] != x.shape[1:]:
                raise ValueError(f"reference is {folder}, whose policy has other networks than this run's ({name})")
            x.copy_(source[name][agent.member].expand_as(x))

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

    def gradients(self, out: Evaluated, batch: Rows) -> dict[str, Any]:
        coef = out.array(self.coef)
        if self.kind == "exact":
            return {"kl_ref": coef}
        log_ratio = batch.ref_log_prob - out.log_prob
        by_log_prob = {"k1": 1.0 + 0.0 * log_ratio, "k2": -log_ratio, "k3": -out.xp.expm1(log_ratio)}[self.kind]
        return {"log_prob": coef * by_log_prob}

    def observe(self, batch: Batch, metrics: Metrics, policy: Policy) -> None:
        if self.controller.rule != "fixed":
            dist = policy.distribution(batch.obs, batch.get("offset"))
            kl = exact_kl(dist, dist.with_params(batch.starting_with("ref_")))
            real = batch.real
            self.control((kl * real).sum(1) / real.sum(1), batch.count, metrics)
        self.iteration += 1
        if self.refresh_every and self.iteration % self.refresh_every == 0:
            self.reference.load_state_dict(policy.state_dict())

    def anchor(self, policy: Policy, members: Tensor) -> None:
        if not self.given:
            put(self.reference.state_dict(), policy.state_dict(), members)

    def state_dict(self) -> dict[str, Any]:
        members = self.reference.members
        return {
            **super().state_dict(),
            "reference": self.reference.state_dict(),
            "iteration": torch.full((members,), self.iteration, dtype=torch.int64),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.reference.load_state_dict(state["reference"])
        self.iteration = int(state["iteration"].max())
