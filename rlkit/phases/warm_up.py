"""Behaviour cloning before the first iteration."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rlkit.buffer import Batch
from rlkit.demonstrations import Demonstrations
from rlkit.gradient import Evaluated, Rows
from rlkit.keepers.keeper import Event
from rlkit.link import Chain, Link
from rlkit.optimizer import Adam
from rlkit.phases.phase import Phase
from rlkit.policy import Out, Policy
from rlkit.streams import Purpose, Streams
from rlkit.update import update

if TYPE_CHECKING:
    from rlkit.envs.spaces import ActionSpec


class Likelihood(Link):
    """Loss -log pi(a | s), in nats: the negative log-likelihood of the batch's actions."""

    def losses(self, out: Out, batch: Batch, policy: Policy) -> dict[str, Tensor]:
        return {"loss": -out.log_prob}

    def gradients(self, out: Evaluated, batch: Rows) -> dict[str, Any]:
        return {"log_prob": -out.xp.ones_like(out.log_prob)}


class WarmUp(Phase):
    """Behaviour cloning (Pomerleau 1989): the run's own update, on demonstrations, with the loss -log pi(a | s).

    It makes `share` of the updates that the run plans,

        iterations x epochs x minibatches,    iterations = ceil(total_steps / rows of a rollout),

    and takes no environment step. The rows of a GRPO rollout are `num_envs` times the mean length of the
    demonstrations' episodes; where these are not told apart, the time limit, or all rows if they are fewer, stands for
    it. Each member goes through the demonstrations in an order of its own.

    Afterwards Adam's moments and step count are those of a fresh optimiser. As the clone gets better its gradients get
    small, and a second moment remembered from them would make the first steps of the run, with other gradients, many
    times too large. An observation normaliser gets the statistics of the demonstrations before the first update. The
    critic is not trained, though a trunk it shares is. A Gaussian policy's deviation shrinks towards the error of the
    clone, and with it exploration.

    Args:
        policy, streams, actions, total_steps, num_envs, rollout_steps, episode_limit, num_epochs, num_minibatches,
            initial_learning_rate: of the run; `rollout_steps` is None where episodes decide.
        demonstrations: what to imitate; see `rlkit.demonstrations.Demonstrations.load`.
        share: of the run's planned updates; at least one update unless 0, which changes nothing.
        batch_size: demonstrations of an update, for each member.
        learning_rate: of the warm-up; None for the run's own at the start.
        episodes: that a teacher plays, where the demonstrations are a run's folder.
    """

    bounds: ClassVar = {
        "share": {"ge": 0, "le": 1},
        "batch_size": {"ge": 1},
        "learning_rate": {"gt": 0},
        "episodes": {"ge": 1},
    }

    def __init__(
        self,
        policy: Policy,
        streams: Streams,
        actions: ActionSpec,
        total_steps: int,
        num_envs: int,
        rollout_steps: int | None,
        episode_limit: int | None,
        num_epochs: int,
        num_minibatches: int,
        initial_learning_rate: float,
        demonstrations: str | None = None,
        share: float = 0.1,
        batch_size: int = 256,
        learning_rate: float | None = None,
        episodes: int = 20,
    ) -> None:
        rate = initial_learning_rate if learning_rate is None else learning_rate
        self.demonstrations = steps = Demonstrations.load(demonstrations, policy, actions, episodes)
        length = steps.mean_length or min(len(steps), episode_limit or len(steps))
        iterations = math.ceil(total_steps / (rollout_steps or num_envs * length))
        self.updates = max(round(share * iterations * num_epochs * num_minibatches), int(share > 0))
        self.streams, self.batch_size, self.learning_rate = streams, batch_size, float(rate)
        self.chain = Chain(cloning=Likelihood())

    def __call__(self, policy: Policy, optimizer: Adam) -> list[Event]:
        if not self.updates:
            return []
        steps, members = self.demonstrations, policy.members
        if policy.normalizer is not None:
            obs = steps.obs[:, None, None].expand(-1, members, 1, -1)
            policy.normalizer.update(obs, torch.ones(obs.shape[:3], dtype=torch.bool))
        before = steps.loss(policy)
        rngs = self.streams.open(Purpose.WARM_UP, 0)
        for rows in islice(orders(rngs, len(steps), self.batch_size), self.updates):
            update(
                policy,
                optimizer,
                self.chain,
                steps.batch(rows),
                learning_rate=torch.full((members,), self.learning_rate),
                active=torch.ones(members, dtype=torch.bool),
                num_epochs=1,
                num_minibatches=1,
                rngs=rngs,
            )
        optimizer.forget()
        did = f"cloned {len(steps):,} demonstration steps in {self.updates:,} updates"
        losses = zip(before.tolist(), steps.loss(policy).tolist(), strict=True)
        return [(m, f"{did}: loss {first:.2f} to {last:.2f}") for m, (first, last) in enumerate(losses)]


def orders(rngs: Sequence[np.random.Generator], count: int, size: int) -> Iterator[Tensor]:
    """Yield indices below `count`, int64 [M, size] or all there are, without end, each member's from its generator.

    A member sees no row again before it has seen all; the few that are left over at the end of a pass sit it out.
    """
    size = min(size, count)
    while True:
        order = torch.from_numpy(np.stack([rng.permutation(count) for rng in rngs]))
        yield from (order[:, start : start + size] for start in range(0, count - size + 1, size))
