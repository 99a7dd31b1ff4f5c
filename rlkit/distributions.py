"""Action distributions with exact log-probability, entropy and KL, over any leading axes."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
FORBIDDEN = -1e9  # added to a logit: its probability is then 0 to the last bit, and 0 log 0 is 0, not nan


def forbidding(legal: np.ndarray) -> np.ndarray:
    """Return offsets to logits, float32 [..., A], that leave the legal actions (bool) as they are and allow no other.

    A mask is an offset like those of `rlkit.exploration`: stored with the row, it makes pi(. | s) of the legal actions
    alone, and so log-probability, ratio, entropy, KL and their gradients (Huang & Ontanon 2022).
    """
    return np.where(legal, np.float32(0), np.float32(FORBIDDEN))


def library(x: Any) -> Any:
    """torch for a tensor, numpy for an array."""
    return torch if isinstance(x, Tensor) else np


class Distribution(ABC):
    """A batch of action distributions. Raw actions have a last axis (heads, or action dimensions); results drop it.

    `shifted`, `sample` and `mode` take NumPy arrays as well, with which acting is faster.
    """

    @property
    @abstractmethod
    def params(self) -> dict[str, Tensor]:
        """The tensors that determine the distribution, as `old_*` and `ref_*` columns store them."""

    @abstractmethod
    def with_params(self, params: Mapping[str, Tensor]) -> Distribution:
        """Return a distribution of the same kind with other parameters (a stored one)."""

    @abstractmethod
    def shifted(self, offset: Any) -> Distribution:
        """Return the distribution with an offset [..., A] added to its logits, or to its mean."""

    @abstractmethod
    def sample(self, noise: Any) -> Any:
        """Turn standard noise (what `noise_kind` names, shape of the parameters) into raw actions."""

    @abstractmethod
    def mode(self) -> Any:
        """The most likely raw action."""

    @abstractmethod
    def log_prob(self, action: Tensor) -> Tensor:
        """log pi(action), summed over heads or action dimensions, in nats."""

    @abstractmethod
    def entropy(self) -> Tensor:
        """Entropy in nats, summed over heads or action dimensions."""

    @abstractmethod
    def kl(self, other: Distribution) -> Tensor:
        """KL(self || other) in closed form, in nats, summed over heads or action dimensions."""


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities over the last axis: few numbers, so that the axis before it is the one to vectorise over."""
    if logits.dim() == 1:
        return F.log_softmax(logits, -1)
    return F.log_softmax(logits.mT, -2).mT


class Categorical(Distribution):
    """One categorical head for each action dimension; `logits` [..., sum of sizes], actions int64 [..., heads].

    Sampling is the Gumbel-max trick: argmax(logits - log E) with E standard exponential (Maddison et al. 2014).
    """

    def __init__(self, logits: Tensor, sizes: tuple[int, ...]) -> None:
        self.logits, self.sizes = logits, sizes

    @property
    def heads(self) -> list[Any]:
        """The logits of each head, [..., size]."""
        if len(self.sizes) == 1:
            return [self.logits]
        ends = itertools.accumulate(self.sizes, initial=0)
        return [self.logits[..., a:b] for a, b in itertools.pairwise(ends)]

    @cached_property
    def log_p(self) -> list[Tensor]:
        """Log-probabilities of each head, [..., size]; sampling needs none."""
        return [log_softmax(head) for head in self.heads]

    @property
    def params(self) -> dict[str, Tensor]:
        return {"logits": self.log_p[0] if len(self.sizes) == 1 else torch.cat(self.log_p, -1)}

    def with_params(self, params: Mapping[str, Tensor]) -> Categorical:
        dist = Categorical(params["logits"], self.sizes)
        dist.log_p = dist.heads  # as `params` gave them
        return dist

    def shifted(self, offset: Any) -> Categorical:
        return Categorical(self.logits + offset, self.sizes)

    def sample(self, noise: Any) -> Any:
        return Categorical(self.logits + noise, self.sizes).mode()

    def mode(self) -> Any:
        best = [head.argmax(-1)[..., None] for head in self.heads]
        return best[0] if len(best) == 1 else library(self.logits).concatenate(best, -1)

    def log_prob(self, action: Tensor) -> Tensor:
        if len(self.sizes) == 1:
            return self.log_p[0].gather(-1, action).squeeze(-1)
        picked = [p.gather(-1, action[..., i : i + 1]) for i, p in enumerate(self.log_p)]
        return torch.cat(picked, -1).sum(-1)

    def entropy(self) -> Tensor:
        return _sum([-(p.exp() * p).sum(-1) for p in self.log_p])

    def kl(self, other: Distribution) -> Tensor:
        if not isinstance(other, Categorical):
            raise TypeError(f"KL of a Categorical to a {type(other).__name__} is not defined")
        return _sum([(p.exp() * (p - q)).sum(-1) for p, q in zip(self.log_p, other.log_p, strict=True)])


class DiagonalGaussian(Distribution):
    """Independent normals, `mean` and `log_std` [..., A]; with `squash`, the action taken is tanh(sample).

    Raw actions are the samples before tanh. With `squash` the log-probability carries the change of variables
    -sum log(1 - tanh(u)^2) = -sum 2 (log 2 - u - softplus(-2u)) (Haarnoja et al. 2018, appendix C); KL is unchanged by
    squashing, a bijection; `entropy` is that of the normal before squashing, which has a closed form.
    """

    def __init__(self, mean: Tensor, log_std: Tensor, squash: bool = False) -> None:
        self.mean, self.log_std, self.squash = mean, log_std, squash

    @property
    def params(self) -> dict[str, Tensor]:
        return {"mean": self.mean, "log_std": self.log_std.expand_as(self.mean)}

    def with_params(self, params: Mapping[str, Tensor]) -> DiagonalGaussian:
        return DiagonalGaussian(params["mean"], params["log_std"], self.squash)

    def shifted(self, offset: Any) -> DiagonalGaussian:
        return DiagonalGaussian(self.mean + offset, self.log_std, self.squash)

    def sample(self, noise: Any) -> Any:
        return self.mean + library(self.mean).exp(self.log_std) * noise

    def mode(self) -> Any:
        return self.mean

    def log_prob(self, action: Tensor) -> Tensor:
        z = (action - self.mean) * (-self.log_std).exp()
        log_prob = -0.5 * z * z - self.log_std - _HALF_LOG_2PI
        if self.squash:
            log_prob = log_prob - 2 * (math.log(2) - action - F.softplus(-2 * action))
        return log_prob.sum(-1)

    def entropy(self) -> Tensor:
        return (self.log_std.expand_as(self.mean) + (0.5 + _HALF_LOG_2PI)).sum(-1)

    def kl(self, other: Distribution) -> Tensor:
        if not isinstance(other, DiagonalGaussian):
            raise TypeError(f"KL of a DiagonalGaussian to a {type(other).__name__} is not defined")
        log_ratio = other.log_std - self.log_std
        z = (self.mean - other.mean) * (-other.log_std).exp()
        # expm1 keeps small differences exact: 0.5 (s^2 - 1) - log s with s the ratio of the deviations
        return (0.5 * (torch.expm1(-2 * log_ratio) + z * z) + log_ratio).sum(-1)


def _sum(terms: list[Tensor]) -> Tensor:
    return terms[0] if len(terms) == 1 else torch.stack(terms).sum(0)
