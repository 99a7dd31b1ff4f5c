"""Link, the one abstraction that stabilisers and losses are made of, and Chain, a link made of links."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from rlkit.buffer import Batch, Rollout

if TYPE_CHECKING:
    from rlkit.gradient import Evaluated, Rows
    from rlkit.policy import Out, Policy

Metrics = Mapping[str, Tensor]  # "area/name" -> [M]


class Link:
    """The identity at every seam of an iteration; a subclass overrides the seams it needs.

    Laws (tests/test_laws.py holds every link to them): a link with coefficient zero leaves the weights bit-identical;
    `batch` keeps the number of rows; saving, loading and one more update is bit-identical to going on; a link draws
    only from its own streams, one for each member, and holds no learner, environment or config; what it does for one
    member does not depend on the others.
    """

    bounds: ClassVar[Mapping[str, dict[str, Any]]] = {}  # of the arguments, as in `rlkit.conf.schema.key`
    adds_rows = False  # `rollout` adds rows: comes after links that change rewards
    weight = "weight"  # the column that weighs this link's losses; the name of another ends in `_weight`

    def rollout(self, rollout: Rollout) -> Rollout:
        """Change rewards of a rollout [T, M, N], or add rows on its N axis."""
        return rollout

    def batch(self, batch: Batch) -> Batch:
        """Add columns to a batch [M, B]; never rows."""
        return batch

    def losses(self, out: Out, batch: Batch, policy: Policy) -> dict[str, Tensor]:
        """Return loss terms by name: [M, B] before reduction, or [M] for a penalty on parameters."""
        return {}

    def gradients(self, out: Evaluated, batch: Rows) -> dict[str, Any] | None:
        """Return the derivatives of the losses [M, B] in closed form, or None to leave them to autograd.

        By name: `log_prob` (of the action taken), `entropy`, `value`, `kl_old` (KL(pi_old || pi), from the columns
        `old_*`), `kl_ref` (KL(pi || pi_ref), from `ref_*`); all weighed by the column `weight`. They spare autograd,
        nothing else: `losses` stays what says what the loss is, and a law holds the two together.
        """
        return {} if type(self).losses is Link.losses else None

    def parameter_gradients(self, policy: Policy) -> dict[Tensor, Tensor]:
        """Return the derivatives of losses [M] by parameters in closed form; a link that has this has no other losses.

        It spares autograd as `gradients` does, which is then not asked.
        """
        raise NotImplementedError

    def column(self, term: str) -> str:
        """Name the column that weighs the loss term `term`."""
        return self.weight

    def observe(self, batch: Batch, metrics: Metrics, policy: Policy) -> None:
        """See the finished update of an iteration; change own state only."""

    def anchor(self, policy: Policy, members: Tensor) -> None:
        """Take note that these members (bool [M]) got other weights than by an update: warmed up, or rolled back."""

    def restart(self) -> None:
        """Forget what belongs to episodes under way: those of all environments have begun anew."""

    def report(self) -> dict[str, Tensor]:
        """Numbers of its own to log, [M] by name: a coefficient that moves, for one."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """State to save; every tensor starts with the member axis M."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        if state:
            raise ValueError(f"{type(self).__name__} has no state, but the checkpoint holds {sorted(state)}")


class Chain(Link):
    """Links applied in order; itself a link. Loss names carry the link's name: `ref_kl/loss`."""

    def __init__(self, **links: Link) -> None:
        self.links = links

    def rollout(self, rollout: Rollout) -> Rollout:
        for link in self.links.values():
            rollout = link.rollout(rollout)
        return rollout

    def batch(self, batch: Batch) -> Batch:
        for link in self.links.values():
            batch = link.batch(batch)
        return batch

    def losses(self, out: Out, batch: Batch, policy: Policy) -> dict[str, Tensor]:
        return {
            f"{name}/{term}": loss
            for name, link in self.links.items()
            for term, loss in link.losses(out, batch, policy).items()
        }

    def column(self, term: str) -> str:
        name, _, rest = term.partition("/")
        return self.links[name].column(rest)

    def observe(self, batch: Batch, metrics: Metrics, policy: Policy) -> None:
        with torch.no_grad():
            for link in self.links.values():
                link.observe(batch, metrics, policy)

    def anchor(self, policy: Policy, members: Tensor) -> None:
        for link in self.links.values():
            link.anchor(policy, members)

    def restart(self) -> None:
        for link in self.links.values():
            link.restart()

    def report(self) -> dict[str, Tensor]:
        return {f"{name}/{number}": x for name, link in self.links.items() for number, x in link.report().items()}

    def state_dict(self) -> dict[str, Any]:
        return {name: link.state_dict() for name, link in self.links.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if set(state) != set(self.links):
            raise ValueError(f"the checkpoint holds links {sorted(state)}, the run has {sorted(self.links)}")
        for name, link in self.links.items():
            link.load_state_dict(state[name])
