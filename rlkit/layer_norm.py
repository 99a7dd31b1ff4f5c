"""Layer normalisation of M members, by autograd and by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

EPSILON = 1e-5  # added to the variance, as torch.nn.LayerNorm does


def layer_norm(z: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    """gain (z - mean) / sqrt(var + epsilon) + shift (Ba, Kiros & Hinton 2016, equation 4), [M, B, units].

    Mean and variance (ddof 0) are those of a row's units: no row depends on another, nor a member's on the rest.

    Args:
        z: pre-activations, [M, B, units].
        gain, shift: learned, [M, 1, units].
    """
    return torch.addcmul(shift, nn.functional.layer_norm(z, z.shape[-1:], eps=EPSILON), gain)


class LayerNormByHand:
    """Both passes of `layer_norm` without autograd.

    With x = (z - mean) / sqrt(var + epsilon), means over the units of a row, and g = gain d loss / d output:

        d loss / d z = (g - mean(g) - x mean(g x)) / sqrt(var + epsilon)

    Args:
        xp: numpy or torch, whose arrays the others are.
        gain, shift: [M, 1, units].
        places: where the derivatives by these go, if the backward pass is wanted.
    """

    def __init__(self, xp: Any, gain: Any, shift: Any, places: Any = None) -> None:
        self.xp, self.gain, self.shift, self.places = xp, gain, shift, places
        self.average = xp.full_like(gain[:1].mT, 1.0 / gain.shape[2])  # [1, units, 1]: a product sums fastest

    def forward(self, z: Any, out: Any) -> Any:
        """Write the result for z [M, B, units] into `out`; z is used up."""
        z -= z @ self.average
        self.inverse = ((z * z) @ self.average + EPSILON) ** -0.5  # [M, B, 1]
        z *= self.inverse
        self.x = z
        self.xp.multiply(z, self.gain, out=out)
        out += self.shift
        return out

    def backward(self, d: Any, ones: Any, more: bool) -> None:
        """Turn d loss / d output into d loss / d z, in place; write that by gain and shift into their places.

        Args:
            ones: [1, 1, B].
            more: add to what the places hold.
        """
        dx = d * self.x
        for part, place in zip((dx, d), self.places, strict=True):
            if more:
                place += ones @ part
            else:
                self.xp.matmul(ones, part, out=place)
        averaged = self.gain.mT * self.average  # [M, units, 1]
        mean, slope = d @ averaged, dx @ averaged
        d *= self.gain
        d -= mean
        d -= self.xp.multiply(self.x, slope, out=dx)
        d *= self.inverse
