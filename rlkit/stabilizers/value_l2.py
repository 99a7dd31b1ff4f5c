"""L2 regularisation of the critic as a link."""

from __future__ import annotations

import functools
import operator
from typing import ClassVar

import torch
from torch import Tensor

from rlkit.buffer import Batch
from rlkit.link import Link
from rlkit.policy import Out, Policy


class ValueL2(Link):
    """Loss coef / 2 sum w^2 over the weights of the critic's layers, not its biases (Krogh & Hertz 1991), [M].

    A large weight answers a few extreme returns; kept small, the critic errs less between the states it has seen. The
    derivative coef w goes through Adam and the gradient clip like the rest: it is a penalty, not the decoupled decay
    of AdamW (Loshchilov & Hutter 2019). Of a shared trunk only the critic's own output layer is meant.

    Args:
        policy: checked for a critic.
        coef: in units of the value loss for a unit of squared weight; 0 changes nothing.

    Raises:
        ValueError: there is no critic.
    """

    bounds: ClassVar = {"coef": {"ge": 0}}

    def __init__(self, policy: Policy, coef: float = 1e-3) -> None:
        if policy.critic is None:
            raise ValueError("there is no critic whose weights it could keep small; it needs algo=ppo")
        self.coef = coef

    def losses(self, out: Out, batch: Batch, policy: Policy) -> dict[str, Tensor]:
        squares = [torch.linalg.vecdot(w, w) for w in (weight.flatten(1) for weight in _weights(policy))]  # [M] each
        return {"loss": 0.5 * self.coef * functools.reduce(operator.add, squares)}

    def parameter_gradients(self, policy: Policy) -> dict[Tensor, Tensor]:
        return {weight: self.coef * weight.detach() for weight in _weights(policy)}


def _weights(policy: Policy) -> list[Tensor]:
    if policy.critic is None:
        raise ValueError("the penalty on the critic's weights needs a policy with a critic")
    return [layer[1] for layer in policy.critic.layers]
