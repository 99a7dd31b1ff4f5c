"""One member of a policy as a plain torch module, which needs nothing of this package to run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from torch import Tensor, nn

from rlkit.distributions import FORBIDDEN
from rlkit.layer_norm import EPSILON
from rlkit.mlp import StackedMLP
from rlkit.normalize import Normalizer
from rlkit.policy import LOG_STD_RANGE, Policy


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Standardize(nn.Module):
    """One member's `rlkit.normalize.Normalizer` with its statistics as constants."""

    mean: Tensor
    scale: Tensor

    def __init__(self, normalizer: Normalizer, member: int) -> None:
        super().__init__()
        self.clip = normalizer.clip
        self.register_buffer("mean", normalizer.mean[member].float().clone())
        self.register_buffer("scale", (normalizer.var[member] + normalizer.epsilon).rsqrt().float())

    def forward(self, x: Tensor) -> Tensor:
        return ((x - self.mean) * self.scale).clamp(-self.clip, self.clip)


def dense(mlp: StackedMLP, member: int) -> Iterator[nn.Module]:
    """One member's layers as torch.nn has them; dropped units are back, as in every evaluation."""
    for i, (bias, weight, *norm) in enumerate(mlp.layers):
        layer = nn.Linear(*weight.shape[1:])
        layer.load_state_dict({"weight": weight[member].T, "bias": bias[member, 0]})
        yield layer
        if i == mlp.num_hidden:
            return  # the output
        if norm:
            normed = nn.LayerNorm(weight.shape[2], EPSILON)
            normed.load_state_dict({"weight": norm[0][member, 0], "bias": norm[1][member, 0]})
            yield normed
        yield Apply(mlp.activation.function)


class ExportedPolicy(nn.Module):
    """One member of a policy, from flat observations to legal actions, in operations that export.

    Args:
        actions: the action space (`rlkit.envs.spaces.ActionSpec`).
        masked: it takes masks of legal actions.
    """

    low: Tensor
    high: Tensor
    log_std: Tensor
    start: Tensor

    def __init__(self, policy: Policy, actions: Any, member: int, masked: bool = False) -> None:
        super().__init__()
        parts: list[nn.Module] = [Standardize(policy.normalizer, member)] if policy.normalizer is not None else []
        for mlp in (policy.trunk, policy.actor):
            parts += dense(mlp, member) if mlp is not None else []
        self.network = nn.Sequential(*parts)
        space = actions.space
        self.discrete, self.sizes, self.squash = policy.discrete, list(policy.sizes), policy.squash
        self.action_size, self.state_std = policy.action_size, policy.state_std
        self.shape = list(space.shape)
        self.dtype: torch.dtype = torch.from_numpy(np.zeros(0, space.dtype)).dtype
        if isinstance(space, Box):  # tensors of their own: a file cannot hold parts of others
            for name in ("low", "high"):
                self.register_buffer(name, torch.tensor(getattr(space, name)))
        if policy.log_std is not None:
            self.register_buffer("log_std", policy.log_std.detach()[member, 0].clone())
        start = np.ravel(space.start) if isinstance(space, (Discrete, MultiDiscrete)) else np.zeros(len(self.sizes))
        self.register_buffer("start", torch.tensor(start.astype(np.int64)))
        self.inputs = ["obs", "action_mask"] if masked else ["obs"]
        self.eval().requires_grad_(False)

    def forward(self, obs: Tensor, action_mask: Tensor | None = None) -> dict[str, Tensor]:
        """Return action and logits, or action, mean and std, for observations [B, D] and masks, int8 [B, A]."""
        output = self.network(obs)
        if action_mask is not None:
            output = torch.where(action_mask != 0, output, output + FORBIDDEN)
        return self._choose(output) if self.discrete else self._scale(output)

    def _choose(self, output: Tensor) -> dict[str, Tensor]:
        heads = [head.log_softmax(-1) for head in output.split(self.sizes, -1)]
        index = torch.stack([head.argmax(-1) for head in heads], -1) + self.start
        return {"action": index.to(self.dtype).reshape(-1, *self.shape), "logits": torch.cat(heads, -1)}

    def _scale(self, output: Tensor) -> dict[str, Tensor]:
        if self.state_std:
            mean, log_std = output.split(self.action_size, -1)
            log_std = log_std.clamp(*LOG_STD_RANGE)
        else:
            mean, log_std = output, self.log_std
        action = mean.reshape(-1, *self.shape)
        if self.squash:
            low, high = self.low.float(), self.high.float()
            action = low + (action.tanh() + 1) / 2 * (high - low)
        action = action.to(self.dtype).clamp(self.low, self.high)
        return {"action": action, "mean": mean, "std": log_std.exp().expand_as(mean)}
