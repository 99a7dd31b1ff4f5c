"""Actor and critic of M members, stacked along a leading member axis."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from rlkit.buffer import Batch
from rlkit.distributions import Categorical, DiagonalGaussian, Distribution
from rlkit.normalize import Normalizer

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "silu": nn.functional.silu,
}
NUMPY_ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0.0),
    "silu": lambda x: 0.5 * x * (1.0 + np.tanh(0.5 * x)),
}
NUMPY_ROWS = 64  # up to so many rows a forward pass is faster in NumPy, whose operations cost a quarter of eager ones
_LOG_STD_RANGE = (-20.0, 2.0)  # of a state-dependent deviation (Haarnoja et al. 2018)


class ActionSpace(Protocol):
    """What a policy must know of an action space (`rlkit.envs.spaces.ActionSpec` is one)."""

    kind: str  # "discrete" or "continuous"
    sizes: tuple[int, ...]  # number of actions of each head (discrete)
    size: int  # number of action dimensions (continuous)


def orthogonal(size_in: int, size_out: int, gain: float, rngs: Sequence[torch.Generator]) -> Tensor:
    """Orthogonal weights [M, in, out] with the given gain (Saxe et al. 2013), each member's from its own generator."""
    weight = torch.empty(len(rngs), size_in, size_out)
    for member, rng in zip(weight, rngs, strict=True):
        # drawn as [out, in], as torch.nn.Linear holds it, since the draw is not symmetric in the two
        member.copy_(nn.init.orthogonal_(torch.empty(size_out, size_in), gain, generator=rng).T)
    return weight


class StackedMLP(nn.Module):
    """M multi-layer perceptrons of equal shape: x -> activation(x W + b) ... and, with `gain`, a linear output layer.

    x is [M, B, in], W [M, in, out], b [M, 1, out]. Hidden weights are orthogonal with gain sqrt 2, the output's with
    `gain`; biases start at zero. A member's weights do not depend on how many others there are.

    Args:
        sizes: width of the input and of each layer.
        gain: of the last layer, which then has no activation; None if the last layer is a hidden one too.
    """

    def __init__(
        self, sizes: Sequence[int], activation: str, gain: float | None, rngs: Sequence[torch.Generator]
    ) -> None:
        super().__init__()
        gains = [2.0**0.5] * (len(sizes) - 1)
        if gain is not None:
            gains[-1] = gain
        self.activation, self.numpy_activation = ACTIVATIONS[activation], NUMPY_ACTIVATIONS[activation]
        self.num_hidden = len(gains) - (gain is not None)
        self.weights = nn.ParameterList(
            orthogonal(a, b, g, rngs) for a, b, g in zip(sizes, sizes[1:], gains, strict=False)
        )
        self.biases = nn.ParameterList(torch.zeros(len(rngs), 1, size) for size in sizes[1:])
        # a plain tuple of the same tensors: looking a parameter up in a module costs as much as a small product
        self._layers = tuple(zip(self.biases, self.weights, strict=True))

    def __call__(self, x: Tensor) -> Tensor:  # not through Module.__call__, which costs as much as a small product
        for i, (bias, weight) in enumerate(self._layers):
            x = torch.baddbmm(bias, x, weight)
            if i < self.num_hidden:
                x = self.activation(x)
        return x

    def in_numpy(self) -> Callable[[np.ndarray], np.ndarray]:
        """Return the same function of arrays, over the memory of the weights as they lie now; it takes no gradient."""
        layers = [(bias.detach().numpy(), weight.detach().numpy()) for bias, weight in self._layers]

        def forward(x: np.ndarray) -> np.ndarray:
            for i, (bias, weight) in enumerate(layers):
                x = x @ weight + bias
                if i < self.num_hidden:
                    x = self.numpy_activation(x)
            return x

        return forward


@dataclass
class Out:
    """A policy evaluated on a batch: the distribution, log pi(action) [M, B] and, with a critic, value [M, B]."""

    dist: Distribution
    log_prob: Tensor
    value: Tensor | None


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
        normalizer: Normalizer | None = None,
    ) -> None:
        super().__init__()
        rngs = [torch.Generator().manual_seed(int(seed)) for seed in seeds]
        self.members, self.obs_size = len(rngs), obs_size
        self.discrete = actions.kind == "discrete"
        self.sizes = actions.sizes
        self.squash = squash
        self.normalizer = normalizer
        self.action_size = sum(actions.sizes) if self.discrete else actions.size
        self.state_std = not self.discrete and log_std == "state"
        outputs = self.action_size * (2 if self.state_std else 1)
        self.trunk = StackedMLP([obs_size, *hidden], activation, None, rngs) if shared_trunk and hidden else None
        actor_sizes = [hidden[-1], outputs] if self.trunk else [obs_size, *hidden, outputs]
        self.actor = StackedMLP(actor_sizes, activation, 0.01, rngs)
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
            self.critic = StackedMLP(critic_sizes, activation, 1.0, rngs)

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
        return shifted(self._of(self.actor(self.features(obs))), offset)

    def acting(self, rows: int) -> Callable[[Tensor], Distribution]:
        """Return what gives pi(. | obs) for obs [M, B, D] while the weights stay as they are; M * B = `rows`."""
        if rows > NUMPY_ROWS:
            return self.distribution
        actor = self.actor.in_numpy()
        trunk = self.trunk.in_numpy() if self.trunk else None

        def distribution(obs: Tensor) -> Distribution:
            x = (obs if self.normalizer is None else self.normalizer(obs)).numpy()
            return self._of(torch.from_numpy(actor(x if trunk is None else trunk(x))))

        return distribution

    def value(self, obs: Tensor) -> Tensor:
        """Return V(obs) [M, B] for obs [M, B, D]; an error where there is no critic."""
        if self.critic is None:
            raise ValueError("this policy has no critic")
        value: Tensor = self.critic(self.features(obs)).squeeze(-1)
        return value

    def evaluate(self, batch: Batch) -> Out:
        """Evaluate the policy on a batch: distribution, log-probability of the batch's actions, value."""
        features = self.features(batch.obs)
        dist = shifted(self._of(self.actor(features)), batch.get("offset"))
        value = None if self.critic is None else self.critic(features).squeeze(-1)
        return Out(dist, dist.log_prob(batch.action), value)

    def frozen_copy(self) -> Policy:
        """Return a copy with its own weights and statistics that takes no gradient: a reference policy."""
        return copy.deepcopy(self).requires_grad_(False)

    def _of(self, out: Tensor) -> Distribution:
        """The distribution that an output of the actor stands for."""
        if self.discrete:
            return Categorical(out, self.sizes)
        if self.log_std is not None:
            # a copy: the optimiser writes into the parameter, and records keep this distribution
            return DiagonalGaussian(out, self.log_std.clone(), self.squash)
        mean, log_std = out.split(self.action_size, -1)
        return DiagonalGaussian(mean, log_std.clamp(*_LOG_STD_RANGE), self.squash)


def shifted(dist: Distribution, offset: Tensor | None) -> Distribution:
    """The distribution with the offset, where there is one, added to its parameters."""
    return dist if offset is None else dist.shifted(offset)
