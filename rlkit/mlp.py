"""Multi-layer perceptrons of M members, stacked along a leading member axis; their gradient by autograd or by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlkit.arrays import array_library, as_array
from rlkit.layer_norm import LayerNormByHand, layer_norm

CACHED_ROWS = 2048  # of all members: more go one piece after the other, so that a core's cache holds what lies between
SHORTEST_PIECE = 512  # rows of a member; products of fewer are slow


@dataclass(frozen=True)
class Activation:
    """An activation as a differentiable function of tensors, and by hand.

    Args:
        function: of a tensor.
        by_hand: (array library, z) -> (activation at z, what multiplies an array by its derivative there, once); both
            may write into the memory they got, as long as the activation stays as it is until the second is called.
    """

    function: Callable[[Tensor], Tensor]
    by_hand: Callable[[Any, Any], tuple[Any, Callable[[Any], None]]]


def _tanh(xp: Any, z: Any) -> tuple[Any, Callable[[Any], None]]:
    h = xp.tanh(z, out=z)

    def backward(d: Any) -> None:  # d (1 - h^2), over the memory of h
        xp.multiply(h, h, out=h)
        xp.subtract(1.0, h, out=h)
        d *= h

    return h, backward


def _relu(xp: Any, z: Any) -> tuple[Any, Callable[[Any], None]]:
    h = xp.clip(z, 0.0, None)

    def backward(d: Any) -> None:
        d *= h > 0

    return h, backward


def _silu(xp: Any, z: Any) -> tuple[Any, Callable[[Any], None]]:
    sigmoid = 0.5 * (1.0 + xp.tanh(0.5 * z))
    h = z * sigmoid

    def backward(d: Any) -> None:
        d *= sigmoid + h * (1.0 - sigmoid)

    return h, backward


ACTIVATIONS = {
    "tanh": Activation(torch.tanh, _tanh),
    "relu": Activation(torch.relu, _relu),
    "silu": Activation(nn.functional.silu, _silu),
}


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
        norm: normalise the pre-activation of each hidden layer (`rlkit.layer_norm`); gains start at one.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        activation: str,
        gain: float | None,
        rngs: Sequence[torch.Generator],
        norm: bool = False,
    ) -> None:
        super().__init__()
        gains = [2.0**0.5] * (len(sizes) - 1)
        if gain is not None:
            gains[-1] = gain
        self.activation = ACTIVATIONS[activation]
        self.num_hidden = len(gains) - (gain is not None)
        self.weights = nn.ParameterList(
            orthogonal(a, b, g, rngs) for a, b, g in zip(sizes, sizes[1:], gains, strict=False)
        )
        self.biases = nn.ParameterList(torch.zeros(len(rngs), 1, size) for size in sizes[1:])
        self.widths = list(sizes[1:][: self.num_hidden])  # of hidden layers
        normed = self.widths if norm else []
        self.norm_gains = nn.ParameterList(torch.ones(len(rngs), 1, size) for size in normed)
        self.norm_shifts = nn.ParameterList(torch.zeros(len(rngs), 1, size) for size in normed)
        self.masks: tuple[Tensor, ...] = ()  # what multiplies each hidden layer's units, [M, 1, units]; () for nothing
        # plain tuples of the same tensors: looking a parameter up in a module costs as much as a small product
        layers = zip_longest(self.biases, self.weights, self.norm_gains, self.norm_shifts)
        self.layers = tuple(tuple(p for p in layer if p is not None) for layer in layers)

    def __call__(self, x: Tensor) -> Tensor:  # not through Module.__call__, which costs as much as a small product
        if not torch.is_grad_enabled():
            xp = array_library(x.device)
            forward = self.by_hand(xp).forward
            if self.num_hidden == len(self.layers):
                return torch.as_tensor(forward(as_array(x, xp)))
            height = max(CACHED_ROWS // x.shape[0], SHORTEST_PIECE) if xp is np else x.shape[1]
            pieces = [torch.as_tensor(forward(as_array(part, xp))) for part in x.split(height, 1)]
            return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)).mT
        for i, (bias, weight, *norm) in enumerate(self.layers):
            x = torch.baddbmm(bias, x, weight)
            if i < self.num_hidden:
                x = self.activation.function(layer_norm(x, *norm) if norm else x)
                x = x * self.masks[i] if self.masks else x
        return x

    def drop(self, p: float, rngs: Sequence[np.random.Generator]) -> None:
        """Drop each hidden unit with probability p, until `masks` is set to () (inverted dropout).

            h = mask activation(...) / (1 - p),   mask ~ Bernoulli(1 - p), one for each member and unit

        Source: Srivastava et al. 2014, section 4, with the factor at training, not at test time (their section 10).

        Args:
            rngs: one generator for each member, which gives the numbers of all its layers at once.
        """
        kept = np.stack([rng.random(sum(self.widths)) for rng in rngs]) >= p  # [M, all units]
        masks = torch.from_numpy(kept[:, None] / (1 - p)).to(self.weights[0])
        self.masks = tuple(mask.contiguous() for mask in masks.split(self.widths, 2))

    def by_hand(self, xp: Any, grads: Sequence[Sequence[Tensor]] = ()) -> ByHand:
        """Return both passes over the memory of the weights, with the operations of `xp`: numpy, or torch itself.

        Args:
            grads: where the backward pass writes d loss / d (bias, weight, ...) of each of `layers`.
        """
        layers, places = (
            [tuple(as_array(x.detach(), xp) for x in layer) for layer in some] for some in (self.layers, grads)
        )
        masks = [as_array(mask, xp) for mask in self.masks]
        return ByHand(layers, places, self.num_hidden, self.activation, masks, xp)


class ByHand:
    """Forward and backward pass of a `StackedMLP` without autograd.

    On small networks, whose time is that of starting operations, NumPy's are a quarter of eager ones under autograd.
    Memory is used again from one minibatch to the next, except that of a linear output.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        grads: Sequence[Any],
        num_hidden: int,
        activation: Activation,
        masks: Sequence[Any],
        xp: Any,
    ) -> None:
        self.layers, self.grads = [layer[:2] for layer in layers], [grad[:2] for grad in grads]
        self.num_hidden, self.activation, self.masks, self.xp = num_hidden, activation, masks, xp
        self.norms = [
            LayerNormByHand(xp, layer[2], layer[3], grads[i][2:] if grads else None)
            for i, layer in enumerate(layers)
            if layer[2:]
        ]  # of each hidden layer, or none
        self.inputs: list[Any] = []  # of each layer in the last forward pass, [M, B, in]
        self.slopes: list[Callable[[Any], None]] = []  # of each hidden layer
        self.hidden: list[Any] = []  # memory of hidden layers for inputs of this shape
        self.shape: Any = None
        self.memory: dict[tuple[str, int], Any] = {}

    def _empty(self, shape: tuple[int, ...]) -> Any:
        weight = self.layers[0][1]
        return np.empty(shape, weight.dtype) if self.xp is np else weight.new_empty(shape)

    def _place(self, name: str, layer: int, shape: tuple[int, ...]) -> Any:
        """Memory of this shape that is used again, not initialised."""
        place = self.memory.get((name, layer))
        if place is None or place.shape != shape:
            place = self.memory[name, layer] = self._empty(shape)
        return place

    def forward(self, x: Any) -> Any:
        """Return the output for x [M, B, in]: features [M, B, out], or of a linear last layer [M, out, B].

        Outputs are few; with rows last in memory the product is faster, and so is what is done with them.
        """
        xp, act = self.xp, self.activation.by_hand
        if x.shape != self.shape:
            self.shape = x.shape
            self.hidden = [self._empty((*x.shape[:2], bias.shape[2])) for bias, _ in self.layers[: self.num_hidden]]
        self.inputs, self.slopes = [x], []
        for i, z in enumerate(self.hidden):
            bias, weight = self.layers[i]
            xp.matmul(x, weight, out=z)
            z += bias
            if self.norms:
                z = self.norms[i].forward(z, out=self._place("n", i, z.shape))
            x, slope = act(xp, z)
            self.slopes.append(slope)
            if self.masks:  # into other memory, since the slope reads what it masks
                x = xp.multiply(x, self.masks[i], out=self._place("masked", i, x.shape))
            self.inputs.append(x)
        if len(self.hidden) == len(self.layers):
            return x
        bias, weight = self.layers[-1]
        y = (x @ weight).mT
        return xp.add(y, bias.mT, out=self._empty(y.shape))

    def backward(self, d: Any, into_input: bool = False, more: bool = False) -> Any:
        """Write d loss / d (bias, weight) of each layer into `grads`; return that of the input if it is wanted.

        Args:
            d: d loss / d what `forward` returned; may be overwritten.
            more: add to what `grads` hold.
        """
        members, rows, _ = self.inputs[0].shape
        ones = self._place("ones", 0, (1, 1, rows))
        ones[...] = 1.0
        for i in reversed(range(len(self.layers))):
            if i < self.num_hidden:
                if self.masks:
                    d *= self.masks[i]
                self.slopes[i](d)
                if self.norms:
                    self.norms[i].backward(d, ones, more)
            else:
                d = d.mT
            (grad_bias, grad_weight), weight = self.grads[i], self.layers[i][1]
            for x, grad in ((self.inputs[i].mT, grad_weight), (ones, grad_bias)):  # a product sums rows fastest
                if more:
                    grad += x @ d
                else:
                    self.xp.matmul(x, d, out=grad)
            if i or into_input:
                back = self._place("w", i, (members, weight.shape[2], weight.shape[1]))
                back[...] = weight.mT
                product = self.xp.matmul if weight.shape[2] > 1 else self.xp.multiply  # of a column and a row
                d = product(d, back, out=self._place("d", i, (members, rows, weight.shape[1])))
        return d
