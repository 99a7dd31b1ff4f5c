"""A decaying pull towards demonstrations as a link."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rlkit.buffer import Batch
from rlkit.demonstrations import Demonstrations
from rlkit.gradient import Evaluated, Rows
from rlkit.link import Link, Metrics
from rlkit.policy import Out, Policy
from rlkit.streams import Purpose, Streams

if TYPE_CHECKING:
    from rlkit.envs.spaces import ActionSpec

NEGLIGIBLE = 1e-8  # of the coefficient at the start: below the rounding of what it is added to


class Cloning(Link):
    """Loss coef decay^k mean(-log pi(a | s)) over demonstrations, k the iteration (Rajeswaran et al. 2018, DAPG).

    Their weight of a demonstration (section IV-C) is lambda_0 lambda_1^k times the largest advantage of the batch;
    that factor is left out here, since advantages come standardised. `batch_size` rows are drawn with replacement once
    an iteration and stay the same in each minibatch of its update. The policy normalises the observations, which are
    raw; exploration does not shift it there. A term that has decayed to 1e-8 of its start is dropped.

    Args:
        policy, streams, actions: of the run.
        demonstrations: what to imitate; see `rlkit.demonstrations.Demonstrations.load`.
        coef: multiplies the loss (nats) in the first iteration; 0 changes nothing and costs nothing.
        decay: what the coefficient is multiplied by after each iteration; 1 keeps it.
        batch_size: demonstrations of an iteration, for each member.
        episodes: that a teacher plays, where the demonstrations are a run's folder.
    """

    bounds: ClassVar = {
        "coef": {"ge": 0},
        "decay": {"gt": 0, "le": 1},
        "batch_size": {"ge": 1},
        "episodes": {"ge": 1},
    }

    def __init__(
        self,
        policy: Policy,
        streams: Streams,
        actions: ActionSpec,
        demonstrations: str | None = None,
        coef: float = 0.1,
        decay: float = 0.95,
        batch_size: int = 256,
        episodes: int = 20,
    ) -> None:
        self.demonstrations = Demonstrations.load(demonstrations, policy, actions, episodes)
        self.streams, self.coef, self.decay, self.batch_size = streams, coef, decay, batch_size
        self.iteration = torch.zeros(streams.members, dtype=torch.int64)  # k of each member: a rollback takes it back
        self.current = torch.zeros(streams.members)  # coef decay^k
        self.drawn: Batch | None = None  # of this iteration; None while the term is off

    def batch(self, batch: Batch) -> Batch:
        decayed = self.decay ** self.iteration.double()
        self.current = (self.coef * decayed * (decayed > NEGLIGIBLE)).float()
        self.drawn = None
        if bool(self.current.any()):
            rngs = self.streams.open(Purpose.CLONING, self.iteration.tolist())
            rows = np.stack([rng.integers(0, len(self.demonstrations), self.batch_size) for rng in rngs])
            self.drawn = self.demonstrations.batch(torch.from_numpy(rows))
        return batch

    def losses(self, out: Out, batch: Batch, policy: Policy) -> dict[str, Tensor]:
        if self.drawn is None:
            return {}
        log_prob = policy.distribution(self.drawn.obs).log_prob(self.drawn.action)
        return {"loss": -self.current * log_prob.mean(1)}

    def gradients(self, out: Evaluated, batch: Rows) -> dict[str, Any] | None:
        return {} if self.drawn is None else None

    def observe(self, batch: Batch, metrics: Metrics, policy: Policy) -> None:
        self.iteration += 1

    def report(self) -> dict[str, Tensor]:
        return {"coef": self.current}

    def state_dict(self) -> dict[str, Any]:
        return {"iteration": self.iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.iteration = state["iteration"].clone()
