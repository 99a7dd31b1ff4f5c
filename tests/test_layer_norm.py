"""Layer normalisation against hand numbers, torch.nn and autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_policy import TORCH, make, observations, shaken
from torch import Tensor, nn

from rlkit.arrays import as_array
from rlkit.layer_norm import LayerNormByHand, layer_norm
from rlkit.mlp import StackedMLP

libraries = pytest.mark.parametrize("xp", [np, torch], ids=["numpy", "torch"])


def by_hand(xp: object, z: Tensor, gain: Tensor, shift: Tensor, d: Tensor | None = None) -> tuple[Tensor, ...]:
    """The output, and for d loss / d output the derivatives by z, gain and shift."""
    z, gain, shift = (x.detach().clone() for x in (z, gain, shift))
    places = [torch.full_like(gain, torch.nan), torch.full_like(shift, torch.nan)]
    arrays = [as_array(x, xp) for x in (gain, shift)]
    norm = LayerNormByHand(xp, *arrays, [as_array(x, xp) for x in places])
    out = torch.empty_like(z)
    norm.forward(as_array(z, xp), as_array(out, xp))
    if d is None:
        return (out,)
    back = d.clone()
    norm.backward(as_array(back, xp), as_array(torch.ones(1, 1, z.shape[1]), xp), more=False)
    return out, back, *places


@libraries
def test_two_rows_by_hand(xp):
    z = torch.tensor([[[1.0, 3.0], [4.0, 0.0]]])  # means 2 and 2, deviations 1 and 2
    gain, shift = torch.tensor([[[2.0, 1.0]]]), torch.tensor([[[0.0, 10.0]]])
    expected = torch.tensor([[[-2.0, 11.0], [2.0, 9.0]]])
    torch.testing.assert_close(layer_norm(z, gain, shift), expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(by_hand(xp, z, gain, shift)[0], expected, rtol=0, atol=2e-5)


@libraries
def test_both_passes_are_those_of_torch_for_each_member(xp):
    rng = torch.Generator().manual_seed(0)
    z, d = (3 * torch.randn(3, 7, 6, generator=rng) + 1 for _ in range(2))
    gain, shift = (torch.randn(3, 1, 6, generator=rng) for _ in range(2))
    leaves = [x.clone().requires_grad_() for x in (z, gain, shift)]
    expected = torch.stack(
        [nn.functional.layer_norm(leaves[0][m], (6,), leaves[1][m, 0], leaves[2][m, 0]) for m in range(3)]
    )
    grads = torch.autograd.grad(expected, leaves, d)
    for found, wanted in zip(by_hand(xp, z, gain, shift, d), (expected.detach(), *grads), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer_norm(z, gain, shift), expected.detach())


@libraries
def test_a_row_of_equal_units_gives_the_shift_and_finite_derivatives(xp):
    z, shift = torch.full((1, 2, 4), 7.0), torch.arange(4.0).view(1, 1, 4)
    out, back, *places = by_hand(xp, z, torch.ones(1, 1, 4), shift, torch.ones(1, 2, 4))
    torch.testing.assert_close(out, shift.expand(1, 2, 4))
    assert all(x.isfinite().all() for x in (back, *places))


def separate(stacked: StackedMLP, m: int, activation: str) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, (weight, bias) in enumerate(zip(stacked.weights, stacked.biases, strict=True)):
        linear = nn.Linear(*weight.shape[1:])
        linear.load_state_dict({"weight": weight[m].T, "bias": bias[m, 0]})
        layers.append(linear)
        if i < stacked.num_hidden:
            norm = nn.LayerNorm(weight.shape[2])
            norm.load_state_dict({"weight": stacked.norm_gains[i][m, 0], "bias": stacked.norm_shifts[i][m, 0]})
            layers += [norm, TORCH[activation]()]
    return nn.Sequential(*layers)


@pytest.mark.parametrize("activation", ["tanh", "relu", "silu"])
def test_members_are_separate_networks_of_linear_norm_activation(activation: str) -> None:
    policy = shaken(make(critic_hidden=(16,), activation=activation, layer_norm=True))
    obs = observations()
    with torch.no_grad():
        quick, acting = policy.distribution(obs).logits, policy.acting()(obs.numpy()).logits  # type: ignore[attr-defined]
        quick_value = policy.value(obs)
    logits, value = policy.distribution(obs).logits, policy.value(obs)  # type: ignore[attr-defined]
    torch.testing.assert_close(quick, logits)
    torch.testing.assert_close(torch.from_numpy(acting), logits.detach())
    torch.testing.assert_close(quick_value, value)
    for m in range(3):
        torch.testing.assert_close(logits[m], separate(policy.actor, m, activation)(obs[m]))
        torch.testing.assert_close(value[m], separate(policy.critic, m, activation)(obs[m])[:, 0])  # type: ignore[arg-type]


def test_every_hidden_layer_has_gain_and_shift_and_no_other_has_and_without_it_none() -> None:
    policy = make(hidden=(8, 6), critic_hidden=(5,), layer_norm=True)
    assert [tuple(gain.shape) for gain in policy.actor.norm_gains] == [(3, 1, 8), (3, 1, 6)]
    assert [tuple(gain.shape) for gain in policy.critic.norm_gains] == [(3, 1, 5)]  # type: ignore[union-attr]
    assert len(make(hidden=(8, 6), critic_hidden=(), shared_trunk=True, layer_norm=True).actor.norm_gains) == 0
    plain = make(hidden=(8, 6), critic_hidden=(5,))
    assert not [name for name in plain.state_dict() if "norm" in name]
    same = {name: x for name, x in policy.state_dict().items() if "norm" not in name}
    assert all(torch.equal(x, same[name]) for name, x in plain.state_dict().items())
