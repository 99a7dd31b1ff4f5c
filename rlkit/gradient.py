"""The gradient of a minibatch's loss: in closed form where links give theirs, by autograd where they do not.

Autograd spans at most from the losses down to the outputs of the networks, whose backward pass is by hand.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkit.arrays import array_library, as_array
from rlkit.buffer import Batch
from rlkit.distributions import Distribution
from rlkit.link import Chain, Link
from rlkit.mlp import CACHED_ROWS, SHORTEST_PIECE, ByHand, StackedMLP
from rlkit.optimizer import Adam
from rlkit.policy import LOG_STD_RANGE, Out, Policy, shifted
from rlkit.second_core import SecondCore

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


def reduce(terms: dict[str, Tensor], batch: Batch, column_of: Callable[[str], str] = lambda term: "weight") -> Tensor:
    """Return each member's loss, [M]: for each weight column, sum(weight * terms) over the rows that have a weight.

    Weights average to one over a batch (`rlkit.aggregation`), so the mean over a minibatch's rows estimates the loss of
    the batch without bias, for every aggregation. Terms of shape [M] are added as they are.
    """
    for name, term in terms.items():
        shape = tuple(term.shape) if isinstance(term, Tensor) else type(term).__name__
        if shape not in ((batch.members,), (batch.members, batch.height)):
            raise ValueError(
                f"the loss {name} is {shape}; it must be a tensor [M, B] = [{batch.members}, {batch.height}], "
                f"before any reduction, or [M] = [{batch.members}]"
            )
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
    evaluated: Callable[[], Out]  # gives `out`
    terms: dict[str, Tensor]  # losses by autograd
    losses: Callable[[Out], dict[str, Tensor]]  # gives `closed`

    @cached_property
    def out(self) -> Out:
        """The policy evaluated, which most steps are not asked for."""
        return self.evaluated()

    def closed(self) -> dict[str, Tensor]:
        """Calculate the losses that had a closed form, which the gradient does not need."""
        return self.losses(self.out)


@dataclass
class KL:
    """A KL divergence between pi and another distribution, and what the loss owes to it."""

    by: Any  # d loss / d KL, [M, B] or [M, 1]
    other: dict[str, Any]  # parameters of the other distribution, [M, A, B]
    of_pi: bool  # KL(pi || other), or KL(other || pi)


class CategoricalHeads:
    """log pi(action) [M, B] of categorical heads, and derivatives by logits [M, A, B] of it, entropy and KL.

        d log pi(a) / d l_i = 1[i = a] - p_i,      d H / d l_i = -p_i (log p_i + H)
        d KL(q || pi) / d l_i = p_i - q_i,         d KL(pi || q) / d l_i = p_i (log p_i - log q_i - KL(pi || q))

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

    def backward(self, by_log_prob: Any, by_entropy: Any, by_kl: Sequence[KL] = ()) -> Any:
        """Return d loss / d logits for d loss / d log pi(action) and, or None, d loss / d entropy, [M, B] each."""
        xp = self.xp
        grad = xp.empty_like(self.logits)
        for part, log_p, p, chosen in self.heads:
            d = grad[:, part]
            d[...] = (chosen - p) * by_log_prob[:, None]
            if by_entropy is not None:
                entropy = -(p * log_p).sum(1, keepdims=True)
                d -= p * (log_p + entropy) * by_entropy[:, None]
            for kl in by_kl:
                q = kl.other["logits"][:, part]
                log_q = q - xp.amax(q, 1, keepdims=True)
                log_q = log_q - xp.log(xp.exp(log_q).sum(1, keepdims=True))
                if kl.of_pi:
                    excess = log_p - log_q
                    d += p * (excess - (p * excess).sum(1, keepdims=True)) * kl.by[:, None]
                else:
                    d += (p - xp.exp(log_q)) * kl.by[:, None]
        return grad


class GaussianDimensions:
    """log pi(action) [M, B] of independent normals, and derivatives by mean and log std [M, A, B].

    With z = (a - mean) / std:

        d log pi(a) / d mean = z / std,    d log pi(a) / d log std = z^2 - 1,    d H / d log std = 1
        d KL(q || pi) / d mean = (mean - mean_q) / var,
        d KL(q || pi) / d log std = 1 - (var_q + (mean - mean_q)^2) / var
        d KL(pi || q) / d mean = (mean - mean_q) / var_q,    d KL(pi || q) / d log std = var / var_q - 1

    Squashing the action adds a term to log pi(a) that depends on the action alone.

    Args:
        xp: numpy or torch.
        mean: [M, A, B].
        log_std: [M, A, B], or [M, A, 1].
        action: [M, B, A], raw.
    """

    def __init__(self, xp: Any, mean: Any, log_std: Any, action: Any, squash: bool) -> None:
        action = action.mT
        self.xp, self.mean, self.log_std = xp, mean, log_std
        self.inverse = xp.exp(-log_std)
        self.z = (action - mean) * self.inverse
        log_prob = -0.5 * self.z * self.z - log_std - _HALF_LOG_2PI
        if squash:  # softplus(-2 a) in the form that does not overflow
            softplus = xp.clip(-2 * action, 0.0, None) + xp.log1p(xp.exp(-2 * abs(action)))
            log_prob = log_prob - 2 * (math.log(2) - action - softplus)
        self.log_prob = log_prob.sum(1)

    def backward(self, by_log_prob: Any, by_entropy: Any, by_kl: Sequence[KL] = ()) -> tuple[Any, Any]:
        """Return d loss / d mean and log std for d loss / d log pi(action) and, or None, d loss / d entropy."""
        d = by_log_prob[:, None]
        by_mean, by_log_std = d * self.z * self.inverse, d * (self.z * self.z - 1.0)
        if by_entropy is not None:
            by_log_std += by_entropy[:, None]
        for kl in by_kl:
            by, mean, log_std = kl.by[:, None], kl.other["mean"], kl.other["log_std"]
            inverse = self.xp.exp(-log_std) if kl.of_pi else self.inverse
            apart = (self.mean - mean) * inverse
            by_mean += by * apart * inverse
            spread = self.xp.exp(2.0 * (self.log_std - log_std if kl.of_pi else log_std - self.log_std))
            by_log_std += by * (spread - 1.0 if kl.of_pi else 1.0 - spread - apart * apart)
        return by_mean, by_log_std


class Evaluated:
    """What `Link.gradients` reads of a policy evaluated on a minibatch: arrays [M, B], and `Out.value_std`."""

    def __init__(self, xp: Any, log_prob: Any, value: Any | None, value_std: Any | None = None) -> None:
        self.xp, self.log_prob, self.value, self.value_std = xp, log_prob, value, value_std

    def array(self, x: Tensor) -> Any:
        """A tensor as an array of the same library."""
        return as_array(x, self.xp)


class Rows:
    """The columns of a minibatch as arrays [M, B, ...], read as `rows.advantage`; converted when first read."""

    def __init__(self, xp: Any, batch: Batch) -> None:
        self._xp, self._batch = xp, batch
        self.padded, self.uniform, self.height = batch.padded, batch.uniform, batch.height
        self._whole, self._part = self, slice(None)
        self._known: dict[Any, Any] = {}

    def __getattr__(self, name: str) -> Any:
        array = self._batch.array(name) if self._xp is np else self._batch[name]
        setattr(self, name, array)
        return array

    def __contains__(self, name: str) -> bool:
        return name in self._batch.columns

    def parts(self, height: int) -> Iterator[Rows]:
        """Yield `height` rows of every member after the other."""
        for k, batch in enumerate(self._batch.slices(height)):
            part = Rows(self._xp, batch)
            part._whole, part._part = self, slice(k * height, (k + 1) * height)
            yield part

    def share(self, column: str) -> Any:
        """d (loss of a member) / d (its term), for terms weighed by `column`: see `reduce`; a number, or [M, B]."""
        if self.uniform and column == "weight":
            return 1.0 / self._whole.height
        return self.of_all(_share, column)

    def of_all(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return these rows of function(all rows of the minibatch, *args), [M, B]; it is called once."""
        known = self._whole._known
        if (function, args) not in known:
            known[function, args] = function(self._whole, *args)
        return known[function, args][:, self._part]


def _share(rows: Rows, column: str) -> Any:
    weight = getattr(rows, column)
    return weight / (weight > 0).sum(1, keepdims=True, dtype=weight.dtype).clip(min=1)


class Gradient:
    """Finds gradients on minibatches, each the sum over members of d loss / d parameters.

    Made anew for each update, since it holds arrays over the memory of the weights.

    Args:
        second: goes through the critic, if it is given, while the actor is gone through here.
    """

    def __init__(self, policy: Policy, chain: Chain, optimizer: Adam, second: SecondCore | None = None) -> None:
        self.policy, self.params = policy, optimizer.params
        self.chain, self.penalties = Chain(), Chain()  # losses through the outputs; through parameters, in closed form
        for name, link in chain.links.items():
            direct = type(link).parameter_gradients is not Link.parameter_gradients
            (self.penalties if direct else self.chain).links[name] = link
        self.xp = xp = array_library(optimizer.flat.device)
        self.flat = torch.zeros_like(optimizer.flat)
        # where in `flat` the gradient of a parameter goes
        self.places: dict[Tensor, Tensor] = dict(zip(self.params, optimizer.views(self.flat), strict=True))
        self.actor = self._by_hand(policy.actor)
        self.trunk = None if policy.trunk is None else self._by_hand(policy.trunk)
        self.critic = None if policy.critic is None else self._by_hand(policy.critic)
        self.second = second
        self.critic_places = [] if policy.critic is None else self._places(policy.critic)  # for `second` to fetch into
        self.log_std = None if policy.log_std is None else as_array(policy.log_std.detach().mT, xp)
        # the critic's mean and std, [M, 1]; () where its output is V
        self.units = tuple(as_array(x, xp) for x in policy.value_scale.units()) if policy.value_scale else ()
        self.in_pieces = xp is np

    def _by_hand(self, network: StackedMLP) -> ByHand:
        return network.by_hand(self.xp, self._places(network))

    def _places(self, network: StackedMLP) -> list[list[Tensor]]:
        """Where the gradients of a network's layers go; that of a parameter which is not learned is read by nobody."""
        return [[self.places.get(p, torch.empty_like(p)).detach() for p in layer] for layer in network.layers]

    def prepared(self, batch: Batch) -> Batch:
        """Return the batch with what no step of an update changes: the networks' input."""
        normalizer = self.policy.normalizer
        return batch if normalizer is None else batch.with_columns(input=normalizer(batch.obs))

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Differentiated:
        """Evaluate the policy on a minibatch and find the gradient of its loss."""
        self.flat.zero_()
        whole = Rows(self.xp, batch)
        number = min(batch.members * batch.height // CACHED_ROWS, batch.height // SHORTEST_PIECE)
        pieces: Iterable[Rows] = whole.parts(-(-batch.height // number)) if self.in_pieces and number > 1 else [whole]
        found: list[tuple[Any, Any, Any]] = []  # output, log_prob, value of each piece
        second = self.second if self.second is not None and batch.height <= self.second.rows else None
        for rows in pieces:
            x = rows.obs if self.policy.normalizer is None else rows.input
            if self.trunk is not None:
                x = self.trunk.forward(x)
            if second is not None:
                second.begin(x, moved=not found)
            output = self.actor.forward(x)
            value = None
            if self.critic is not None:
                value = self._scaled((self.critic.forward(x) if second is None else second.forward())[:, 0])
            head = self._head(output, rows)
            seen = Evaluated(self.xp, head.log_prob, value, self.units[1] if self.units else None)
            by, closed, rest = self._by_links(seen, rows)
            if rest.links:
                if rows is not whole:  # autograd goes through the minibatch at once
                    self.in_pieces = False
                    return self(batch)
                terms, by_params = self._by_autograd(rest, output, value, batch, by)
            self._backward(self._by_output(head, output, by, rows), by.get("value"), second, more=bool(found))
            found.append((output, head.log_prob, value))
        if second is not None:
            second.fetch(self.critic_places)
        if rest.links:
            for p, by_param in zip(self.params, by_params, strict=True):
                if by_param is not None:
                    self.places[p] += by_param
        free = self.policy.log_std
        log_std = None if free is None else free.detach().clone()  # as it is before the weights move
        result = Differentiated(
            self.flat,
            lambda: self._out(found, batch, log_std),
            terms if rest.links else {},
            lambda out: closed.losses(out, batch, self.policy),
        )
        if self.penalties.links:
            result.terms = self._penalise(result.out, batch) | result.terms
        return result

    @torch.no_grad()
    def _out(self, found: Sequence[tuple[Any, Any, Any]], batch: Batch, log_std: Tensor | None) -> Out:
        """The policy evaluated on a minibatch, from what its pieces gave."""
        output, log_prob, value = (self._joined(x) for x in zip(*found, strict=True))
        return Out(self._distribution(output.mT, batch, log_std), log_prob, value, self._value_std())

    def _scaled(self, raw: Any) -> Any:
        """V for the critic's output, [M, B] each."""
        return raw * self.units[1] + self.units[0] if self.units else raw

    def _value_std(self) -> Tensor | None:
        return torch.as_tensor(self.units[1]) if self.units else None

    def _penalise(self, out: Out, batch: Batch) -> dict[str, Tensor]:
        """Add what penalties owe to parameters; return them as they are before the weights move."""
        for link in self.penalties.links.values():
            for p, by_param in link.parameter_gradients(self.policy).items():
                if p in self.places:
                    self.places[p] += by_param
        return self.penalties.losses(out, batch, self.policy)

    def _by_links(self, seen: Evaluated, rows: Rows) -> tuple[dict[str, Any], Chain, Chain]:
        """Return d loss / d log_prob, entropy, value and KL, the links that gave theirs, and the others."""
        by: dict[str, Any] = {}
        closed, rest = Chain(), Chain()
        for name, link in self.chain.links.items():
            parts = link.gradients(seen, rows)
            (rest if parts is None else closed).links[name] = link
            for key, part in (parts or {}).items():
                part = part * rows.share(link.weight)
                by[key] = by[key] + part if key in by else part
        return by, closed, rest

    def _joined(self, pieces: Sequence[Any]) -> Any:
        """Arrays [M, ..., b] of pieces as one tensor [M, ..., B]; None if they are."""
        if pieces[0] is None:
            return None
        return torch.as_tensor(pieces[0] if len(pieces) == 1 else self.xp.concatenate(pieces, -1))

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

    def _distribution(self, output: Tensor, batch: Batch, log_std: Tensor | None = None) -> Distribution:
        return shifted(self.policy.distribution_of(output, log_std), batch.get("offset"))

    def _by_output(
        self, head: CategoricalHeads | GaussianDimensions, output: Any, by: dict[str, Any], rows: Rows
    ) -> Any:
        """d loss / d output of the actor; that by a free log std goes to its place."""
        by_log_prob = by["log_prob"] if "log_prob" in by else 0.0 * head.log_prob
        names = ("logits",) if isinstance(head, CategoricalHeads) else ("mean", "log_std")
        by_kl = [
            KL(by[key], {name: getattr(rows, f"{other}_{name}").mT for name in names}, of_pi=other == "ref")
            for key, other in (("kl_old", "old"), ("kl_ref", "ref"))
            if key in by
        ]
        if isinstance(head, CategoricalHeads):
            by_output = head.backward(by_log_prob, by.get("entropy"), by_kl)
        else:
            by_output, by_log_std = head.backward(by_log_prob, by.get("entropy"), by_kl)
            if self.log_std is None:
                low, high = LOG_STD_RANGE
                raw = output[:, self.policy.action_size :]
                by_output = self.xp.concatenate([by_output, by_log_std * ((raw >= low) & (raw <= high))], 1)
            elif self.policy.log_std in self.places:
                self.places[self.policy.log_std] += torch.as_tensor(by_log_std.sum(2, keepdims=True).mT)
        if "output" in by:
            by_output += by["output"]  # in place: another order in memory would mean other rounding
        return by_output

    def _by_autograd(
        self, rest: Chain, output: Any, value: Any, batch: Batch, by: dict[str, Any]
    ) -> tuple[dict[str, Tensor], Sequence[Tensor | None]]:
        """Add d loss / d output and value of links without a closed form to `by`.

        Returns:
            terms: their losses.
            by_params: what the losses owe to parameters directly, a penalty on weights for one.
        """
        leaves = [torch.as_tensor(x).detach().requires_grad_() for x in (output, value) if x is not None]
        with torch.enable_grad():
            dist = self._distribution(leaves[0].mT, batch)
            out = Out(dist, dist.log_prob(batch.action), None if value is None else leaves[1], self._value_std())
            terms = rest.losses(out, batch, self.policy)
            loss = reduce(terms, batch, rest.column).sum() if terms else torch.zeros(())
        found: Sequence[Tensor | None] = [None] * (len(leaves) + len(self.params))
        if loss.requires_grad:
            found = torch.autograd.grad(loss, [*leaves, *self.params], allow_unused=True)
        for name, leaf, grad in zip(("output", "value"), leaves, found, strict=False):
            part = as_array(torch.zeros_like(leaf) if grad is None else grad, self.xp)
            by[name] = by[name] + part if name in by else part
        return {name: term.detach() for name, term in terms.items()}, found[len(leaves) :]

    def _backward(self, by_output: Any, by_value: Any, second: SecondCore | None, more: bool) -> None:
        """Go back through the networks from d loss / d output and d loss / d value, if the loss knows the value.

        Args:
            second: what goes back through the critic, if that is not done here.
            more: add to the gradient of other rows.
        """
        shared = self.trunk is not None
        by_raw = None
        if self.critic is not None and by_value is not None:
            by_raw = (by_value * self.units[1] if self.units else by_value)[:, None]
            if second is not None:
                second.backward(by_raw, more)
        by_features = self.actor.backward(by_output, shared, more)
        if self.critic is not None and by_raw is not None and second is None:
            by_input = self.critic.backward(by_raw, shared, more)
            by_features = by_features + by_input if shared else None
        if self.trunk is not None:
            self.trunk.backward(by_features, more=more)
