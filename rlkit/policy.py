"""Actor and critic of M members, stacked along a leading member axis."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from rlkit.buffer import Batch, Rollout
from rlkit.distributions import Categorical, DiagonalGaussian, Distribution
from rlkit.mlp import StackedMLP
from rlkit.normalize import Normalizer, ValueScale
from rlkit.streams import Purpose, Streams

LOG_STD_RANGE = (-20.0, 2.0)  # of a state-dependent deviation (Haarnoja et al. 2018)


class ActionSpace(Protocol):
    """What a policy must know of an action space (`rlkit.envs.spaces.ActionSpec` is one)."""

    kind: str  # "discrete" or "continuous"
    sizes: tuple[int, ...]  # number of actions of each head (discrete)
    size: int  # number of action dimensions (continuous)


@dataclass
class Out:
    """A policy evaluated on a batch: the distribution, log pi(action) [M, B] and, with a critic, value [M, B]."""

    dist: Distribution
    log_prob: Tensor
    value: Tensor | None  # in units of return
    value_std: Tensor | None = None  # [M, 1]: the unit that the critic's error is measured in, if it is another


class Policy(nn.Module):
    """Stacked actor and, for critic-based methods, critic of M members over flat observations.

    Args:
        obs_size: D.
        actions: the action space (kind and sizes).
        seeds: initialisation seed of each member; M is their number.
        hidden: widths of the actor's hidden layers.
        critic_hidden: widths of the critic's; None means there is no critic, and no critic parameter exists.
        activation: "tanh", "relu" or "silu".
        shared_trunk: actor and critic share the hidden layers `hidden`; `critic_hidden` is then not used for layers.
        log_std_init: initial log standard deviation of continuous actions.
        log_std: "free" (one parameter per dimension) or "state" (an output of the network).
        squash: continuous actions are tanh(sample), rescaled to the bounds.
        layer_norm: normalise the pre-activations of all hidden layers.
        dropout: probability with which a hidden unit of the actor (or the trunk) is dropped while `thinned`.
        value_normalization: the critic's output is V ("none"), or V in the units of running statistics of its targets,
            where a change of these changes V ("running") or rescales the last layer so that it does not ("popart").
        normalizer: statistics applied to every observation, or None.
    """

    def __init__(
        self,
        obs_size: int,
        actions: ActionSpace,
        seeds: Sequence[int],
        *,
        hidden: Sequence[int] = (64, 64),
        critic_hidden: Sequence[int] | None = None,
        activation: str = "tanh",
        shared_trunk: bool = False,
        log_std_init: float = 0.0,
        log_std: str = "free",
        squash: bool = False,
        layer_norm: bool = False,
        dropout: float = 0.0,
        value_normalization: str = "none",
        normalizer: Normalizer | None = None,
    ) -> None:
        super().__init__()
        rngs = [torch.Generator().manual_seed(int(seed)) for seed in seeds]
        self.members, self.obs_size = len(rngs), obs_size
        self.discrete = actions.kind == "discrete"
        self.sizes = actions.sizes
        self.squash, self.dropout = squash, dropout
        self.normalizer = normalizer
        self.action_size = sum(actions.sizes) if self.discrete else actions.size
        self.state_std = not self.discrete and log_std == "state"
        outputs = self.action_size * (2 if self.state_std else 1)
        self.trunk: StackedMLP | None = None
        if shared_trunk and hidden:
            self.trunk = StackedMLP([obs_size, *hidden], activation, None, rngs, layer_norm)
        actor_sizes = [hidden[-1], outputs] if self.trunk else [obs_size, *hidden, outputs]
        self.actor = StackedMLP(actor_sizes, activation, 0.01, rngs, layer_norm)
        if self.state_std:
            with torch.no_grad():
                self.actor.biases[-1][..., self.action_size :] = log_std_init
        self.log_std = (
            None
            if self.discrete or self.state_std
            else nn.Parameter(torch.full((self.members, 1, self.action_size), log_std_init))
        )
        self.critic: StackedMLP | None = None
        if critic_hidden is not None:
            critic_sizes = [hidden[-1], 1] if self.trunk else [obs_size, *critic_hidden, 1]
            self.critic = StackedMLP(critic_sizes, activation, 1.0, rngs, layer_norm)
        self.popart = value_normalization == "popart"
        self.value_scale = None if value_normalization == "none" else ValueScale(self.members)
        if self.value_scale is not None and self.critic is None:
            raise ValueError(f"value_normalization is {value_normalization}; without a critic it must be none")

    @property
    def noise_kind(self) -> str:
        """The standard noise that `Distribution.sample` wants: "gumbel" or "normal"."""
        return "gumbel" if self.discrete else "normal"

    def features(self, obs: Tensor) -> Tensor:
        """Normalise observations [M, B, D] and, with a shared trunk, pass them through it."""
        x = obs if self.normalizer is None else self.normalizer(obs)
        return x if self.trunk is None else self.trunk(x)

    def distribution(self, obs: Tensor, offset: Tensor | None = None) -> Distribution:
        """Return pi(. | obs) for obs [M, B, D], shifted by `offset` [M, B, A] (`rlkit.exploration`) if there is one."""
        return shifted(self.distribution_of(self.actor(self.features(obs))), offset)

    def acting(self) -> Callable[[np.ndarray], Distribution]:
        """Return what gives pi(. | obs), of arrays, for arrays obs [M, B, D] while the weights stay as they are."""
        actor = self.actor.by_hand(np).forward
        trunk = self.trunk.by_hand(np).forward if self.trunk else None
        normalized = self.normalizer.by_hand() if self.normalizer else None
        log_std = None if self.log_std is None else self.log_std.detach().numpy()

        def distribution(obs: np.ndarray) -> Distribution:
            x = obs if normalized is None else normalized(obs)
            return self.distribution_of(actor(x if trunk is None else trunk(x)).mT, log_std)

        return distribution

    def value(self, obs: Tensor) -> Tensor:
        """Return V(obs) [M, B] for obs [M, B, D]; an error where there is no critic."""
        if self.critic is None:
            raise ValueError("this policy has no critic")
        return self._scaled(self.critic(self.features(obs)).squeeze(-1))

    def _scaled(self, raw: Tensor) -> Tensor:
        value: Tensor = raw if self.value_scale is None else self.value_scale(raw)
        return value

    def evaluate(self, batch: Batch) -> Out:
        """Evaluate the policy on a batch: distribution, log-probability of the batch's actions, value."""
        features = self.features(batch.obs)
        dist = shifted(self.distribution_of(self.actor(features)), batch.get("offset"))
        value = None if self.critic is None else self._scaled(self.critic(features).squeeze(-1))
        std = None if self.value_scale is None else self.value_scale.units()[1]
        return Out(dist, dist.log_prob(batch.action), value, std)

    def frozen_copy(self) -> Policy:
        """Return a copy with its own weights and statistics that takes no gradient: a reference policy, whole."""
        other = copy.deepcopy(self).requires_grad_(False)
        other._hidden.masks = ()
        return other

    @property
    def _hidden(self) -> StackedMLP:
        """The network that holds the actor's hidden layers."""
        return self.actor if self.trunk is None else self.trunk

    @contextmanager
    def thinned(self, streams: Streams, iteration: int) -> Iterator[None]:
        """Drop hidden units with probability `dropout`, the same ones of a member throughout the `with` block.

        One mask for an iteration, at collection and in the update, makes the first ratios exactly one; with a new mask
        for each pass they would measure the masks. Outside of the block the network is whole.

        Args:
            iteration: index of the streams.
        """
        if self.dropout:
            self._hidden.drop(self.dropout, streams.open(Purpose.DROPOUT, iteration))
        try:
            yield
        finally:
            self._hidden.masks = ()

    @torch.no_grad()
    def update_statistics(self, rollout: Rollout) -> None:
        """Let the statistics of observations and of value targets, where there are any, take in a rollout."""
        if self.normalizer is not None:
            self.normalizer.update(rollout.obs, rollout.valid)
        if self.value_scale is None or self.critic is None or rollout.ret is None:
            return
        a, b = (x[:, None, None] for x in self.value_scale.update(rollout.ret, rollout.valid))
        if self.popart:  # into the optimiser's vector; its moments stay, since the loss is in standardised units
            bias, weight = self.critic.biases[-1], self.critic.weights[-1]
            weight.copy_(a * weight)
            bias.copy_(a * bias + b)

    def distribution_of(self, output: Any, log_std: Any = None) -> Distribution:
        """Return the distribution that an output of the actor [M, B, ...] stands for.

        Args:
            log_std: in place of the parameter, where there is one.
        """
        if self.discrete:
            return Categorical(output, self.sizes)
        if self.log_std is not None:
            # a copy: the optimiser writes into the parameter, and records keep this distribution
            return DiagonalGaussian(output, self.log_std.clone() if log_std is None else log_std, self.squash)
        mean, log_std = output[..., : self.action_size], output[..., self.action_size :]
        return DiagonalGaussian(mean, log_std.clip(*LOG_STD_RANGE), self.squash)


def shifted(dist: Distribution, offset: Tensor | None) -> Distribution:
    """The distribution with the offset, where there is one, added to its parameters."""
    return dist if offset is None else dist.shifted(offset)
