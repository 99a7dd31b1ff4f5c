"""The gradient of a minibatch's loss: in closed form where links give theirs, by autograd where they do not.

Autograd spans at most from the losses down to the outputs of the networks, whose backward pass is by hand.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkit.buffer import Batch
from rlkit.distributions import Distribution
from rlkit.link import Chain
from rlkit.mlp import ByHand, StackedMLP, array_library, as_array
from rlkit.optimizer import Adam
from rlkit.policy import LOG_STD_RANGE, Out, Policy, shifted

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


def reduce(terms: dict[str, Tensor], batch: Batch, column_of: Callable[[str], str] = lambda term: "weight") -> Tensor:
    """Return each member's loss, [M]: for each weight column, sum(weight * terms) over the rows that have a weight.

    Weights average to one over a batch (`rlkit.aggregation`), so the mean over a minibatch's rows estimates the loss of
    the batch without bias, for every aggregation. Terms of shape [M] are added as they are.
    """
    parts = [term for term in terms.values() if term.dim() == 1]
    totals: dict[str, Tensor] = {}
    for name, term in terms.items():
        if term.dim() == 2:
            column = column_of(name)
            totals[column] = totals[column] + term if column in totals else term
    for column, total in totals.items():
        weight = batch[column]
        parts.append((total * weight).sum(1) / (weight > 0).sum(1).clamp(min=1))
    return functools.reduce(operator.add, parts)


@dataclass
class Differentiated:
    """What a minibatch gave."""

    flat: Tensor  # d loss / d parameters, [M, P] in the order of the optimiser's vector; valid until the next call
    out: Out  # the policy evaluated
    terms: dict[str, Tensor]  # losses by autograd
    closed: Callable[[], dict[str, Tensor]]  # calculates the other losses, which the gradient does not need


class CategoricalHeads:
    """log pi(action) [M, B] of categorical heads, and the derivatives of it and of the entropy by logits [M, A, B].

        d log pi(a) / d l_i = 1[i = a] - p_i,      d H / d l_i = -p_i (log p_i + H)

    Args:
        xp: numpy or torch.
        logits: [M, sum of sizes, B].
        action: int64 [M, B, heads].
    """

    def __init__(self, xp: Any, logits: Any, sizes: Sequence[int], action: Any) -> None:
        self.xp, self.logits, self.heads = xp, logits, []
        log_probs = []
        start = 0
        for i, size in enumerate(sizes):
            part = slice(start, start := start + size)
            x = logits[:, part]
            x = x - xp.amax(x, 1, keepdims=True)
            p = xp.exp(x)
            total = p.sum(1, keepdims=True)
            p /= total
            x -= xp.log(total)  # log p
            chosen = action[:, None, :, i] == xp.arange(size)[:, None]
            chosen = xp.asarray(chosen, dtype=x.dtype)
            log_probs.append((x * chosen).sum(1))
            self.heads.append((part, x, p, chosen))
        self.log_prob = functools.reduce(operator.add, log_probs)

    def backward(self, by_log_prob: Any, by_entropy: Any) -> Any:
        """Return d loss / d logits for d loss / d log pi(action) and, or None, d loss / d entropy, [M, B] each."""
        grad = self.xp.empty_like(self.logits)
        for part, log_p, p, chosen in self.heads:
            d = grad[:, part]
            d[...] = (chosen - p) * by_log_prob[:, None]
            if by_entropy is not None:
                entropy = -(p * log_p).sum(1, keepdims=True)
                d -= p * (log_p + entropy) * by_entropy[:, None]
        return grad


class GaussianDimensions:
    """log pi(action) [M, B] of independent normals, and derivatives by mean and log std [M, A, B].

    With z = (a - mean) / std:

        d log pi(a) / d mean = z / std,    d log pi(a) / d log std = z^2 - 1,    d H / d log std = 1

    Squashing the action adds a term to log pi(a) that depends on the action alone.

    Args:
        xp: numpy or torch.
        mean: [M, A, B].
        log_std: [M, A, B], or [M, A, 1].
        action: [M, B, A], raw.
    """

    def __init__(self, xp: Any, mean: Any, log_std: Any, action: Any, squash: bool) -> None:
        action = action.mT
        self.inverse = xp.exp(-log_std)
        self.z = (action - mean) * self.inverse
        log_prob = -0.5 * self.z * self.z - log_std - _HALF_LOG_2PI
        if squash:  # softplus(-2 a) in the form that does not overflow
            softplus = xp.clip(-2 * action, 0.0, None) + xp.log1p(xp.exp(-2 * abs(action)))
            log_prob = log_prob - 2 * (math.log(2) - action - softplus)
        self.log_prob = log_prob.sum(1)

    def backward(self, by_log_prob: Any, by_entropy: Any) -> tuple[Any, Any]:
        """Return d loss / d mean and log std for d loss / d log pi(action) and, or None, d loss / d entropy."""
        d = by_log_prob[:, None]
        by_log_std = d * (self.z * self.z - 1.0)
        if by_entropy is not None:
            by_log_std += by_entropy[:, None]
        return d * self.z * self.inverse, by_log_std


class Evaluated:
    """What `Link.gradients` reads of a policy evaluated on a minibatch: arrays [M, B]."""

    def __init__(self, xp: Any, log_prob: Any, value: Any | None) -> None:
        self.xp, self.log_prob, self.value = xp, log_prob, value

    def array(self, x: Tensor) -> Any:
        """A tensor as an array of the same library."""
        return as_array(x, self.xp)


class Rows:
    """The columns of a minibatch as arrays [M, B, ...], read as `rows.advantage`; converted when first read."""

    def __init__(self, xp: Any, batch: Batch) -> None:
        self._xp, self._batch = xp, batch
        self.padded, self.uniform, self.height = batch.padded, batch.uniform, batch.height

    def __getattr__(self, name: str) -> Any:
        array = self._batch.array(name) if self._xp is np else self._batch[name]
        setattr(self, name, array)
        return array

    def __contains__(self, name: str) -> bool:
        return name in self._batch.columns

    def share(self, column: str) -> Any:
        """d (loss of a member) / d (its term), for terms weighed by `column`: see `reduce`; a number, or [M, B]."""
        if self.uniform and column == "weight":
            return 1.0 / self.height
        weight = getattr(self, column)
        return weight / (weight > 0).sum(1, keepdims=True, dtype=weight.dtype).clip(min=1)


class Gradient:
    """Finds gradients on minibatches, each the sum over members of d loss / d parameters.

    Made anew for each update, since it holds arrays over the memory of the weights.
    """

    def __init__(self, policy: Policy, chain: Chain, optimizer: Adam) -> None:
        self.policy, self.chain, self.params = policy, chain, optimizer.params
        self.xp = xp = array_library(optimizer.flat.device)
        self.flat = torch.zeros_like(optimizer.flat)
        self.places: dict[Tensor, Tensor] = {}  # where in `flat` the gradient of a parameter goes
        start = 0
        for p in self.params:
            stop = start + p.numel() // p.shape[0]
            self.places[p] = self.flat[:, start:stop].view(p.shape)
            start = stop
        self.actor = self._by_hand(policy.actor)
        self.trunk = None if policy.trunk is None else self._by_hand(policy.trunk)
        self.critic = None if policy.critic is None else self._by_hand(policy.critic)
        self.log_std = None if policy.log_std is None else as_array(policy.log_std.detach().mT, xp)

    def _by_hand(self, network: StackedMLP) -> ByHand:
        # the gradient of a parameter that is not learned goes to a place that nobody reads
        places = [[self.places.get(p, torch.empty_like(p)).detach() for p in layer] for layer in network.layers]
        return network.by_hand(self.xp, places)

    def prepared(self, batch: Batch) -> Batch:
        """Return the batch with what no step of an update changes: the networks' input."""
        normalizer = self.policy.normalizer
        return batch if normalizer is None else batch.with_columns(input=normalizer(batch.obs))

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Differentiated:
        """Evaluate the policy on a minibatch and find the gradient of its loss."""
        rows = Rows(self.xp, batch)
        x = rows.obs if self.policy.normalizer is None else rows.input
        if self.trunk is not None:
            x = self.trunk.forward(x)
        output = self.actor.forward(x)
        value = None if self.critic is None else self.critic.forward(x)[:, 0]
        head = self._head(output, rows)

        seen = Evaluated(self.xp, head.log_prob, value)
        by: dict[str, Any] = {}  # d loss / d log_prob, entropy, value
        closed, rest = Chain(), Chain()
        for name, link in self.chain.links.items():
            parts = link.gradients(seen, rows)
            (rest if parts is None else closed).links[name] = link
            for key, part in (parts or {}).items():
                part = part * rows.share(link.weight)
                by[key] = by[key] + part if key in by else part

        self.flat.zero_()
        by_output, by_value = self._by_output(head, output, by), by.get("value")
        output, log_prob = torch.as_tensor(output.mT), torch.as_tensor(head.log_prob)
        value = None if value is None else torch.as_tensor(value)
        terms: dict[str, Tensor] = {}
        by_params: Sequence[Tensor | None] = ()
        if rest.links:
            terms, more, more_value, by_params = self._by_autograd(rest, output, value, batch)
            by_output += as_array(more.mT, self.xp)  # in place: another order in memory would mean other rounding
            if more_value is not None:
                by_value = as_array(more_value, self.xp) + (0.0 if by_value is None else by_value)
        self._backward(by_output, by_value)
        for p, by_param in zip(self.params, by_params, strict=False):
            if by_param is not None:
                self.places[p] += by_param
        out = Out(self._distribution(output, batch), log_prob, value)
        return Differentiated(self.flat, out, terms, functools.partial(closed.losses, out, batch, self.policy))

    def _head(self, output: Any, rows: Rows) -> CategoricalHeads | GaussianDimensions:
        """What lies between the actor's output and log pi(action)."""
        policy, size = self.policy, self.policy.action_size
        centre = output[:, :size]
        if "offset" in rows:  # into memory of the same order, which decides about rounding
            centre = self.xp.add(centre, rows.offset.mT, out=self.xp.empty_like(centre))
        if policy.discrete:
            return CategoricalHeads(self.xp, centre, policy.sizes, rows.action)
        log_std = self.xp.clip(output[:, size:], *LOG_STD_RANGE) if self.log_std is None else self.log_std
        return GaussianDimensions(self.xp, centre, log_std, rows.action, policy.squash)

    def _distribution(self, output: Tensor, batch: Batch) -> Distribution:
        return shifted(self.policy.distribution_of(output), batch.get("offset"))

    def _by_output(self, head: CategoricalHeads | GaussianDimensions, output: Any, by: dict[str, Any]) -> Any:
        """d loss / d output of the actor; that by a free log std goes to its place."""
        by_log_prob = by["log_prob"] if "log_prob" in by else 0.0 * head.log_prob
        if isinstance(head, CategoricalHeads):
            return head.backward(by_log_prob, by.get("entropy"))
        by_mean, by_log_std = head.backward(by_log_prob, by.get("entropy"))
        if self.log_std is None:
            low, high = LOG_STD_RANGE
            raw = output[:, self.policy.action_size :]
            return self.xp.concatenate([by_mean, by_log_std * ((raw >= low) & (raw <= high))], 1)
        if self.policy.log_std in self.places:
            self.places[self.policy.log_std] += torch.as_tensor(by_log_std.sum(2, keepdims=True).mT)
        return by_mean

    def _by_autograd(
        self, rest: Chain, output: Tensor, value: Tensor | None, batch: Batch
    ) -> tuple[dict[str, Tensor], Tensor, Tensor | None, Sequence[Tensor | None]]:
        """Return the terms of links without a closed form, and d loss / d output, value and parameters.

        Parameters get a share of their own from losses that depend on them directly, a penalty on weights for one.
        """
        leaves = [x.detach().requires_grad_() for x in (output, value) if x is not None]
        with torch.enable_grad():
            dist = self._distribution(leaves[0], batch)
            out = Out(dist, dist.log_prob(batch.action), None if value is None else leaves[1])
            terms = rest.losses(out, batch, self.policy)
            loss = reduce(terms, batch, rest.column).sum() if terms else torch.zeros(())
        found: Sequence[Tensor | None] = [None] * (len(leaves) + len(self.params))
        if loss.requires_grad:
            found = torch.autograd.grad(loss, [*leaves, *self.params], allow_unused=True)
        grads = [torch.zeros_like(x) if by is None else by for x, by in zip(leaves, found, strict=False)]
        terms = {name: term.detach() for name, term in terms.items()}
        return terms, grads[0], None if value is None else grads[1], found[len(leaves) :]

    def _backward(self, by_output: Any, by_value: Any) -> None:
        """Go back through the networks from d loss / d output and d loss / d value, if the loss knows the value."""
        shared = self.trunk is not None
        by_features = self.actor.backward(by_output, shared)
        if self.critic is not None and by_value is not None:
            by_input = self.critic.backward(by_value[:, None], shared)
            by_features = by_features + by_input if shared else None
        if self.trunk is not None:
            self.trunk.backward(by_features)
