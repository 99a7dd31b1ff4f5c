"""Adam for many members against torch.optim.Adam, and what happens to members that do not step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from rlkit.optimizer import Adam

RATES = torch.tensor([3e-4, 1e-3, 1e-2])
EVERYONE = torch.ones(3, dtype=torch.bool)
SHAPES = [(3, 4, 5), (3, 1, 5), (3, 5, 2), (3, 1, 2)]  # an odd number of weights, so that no vector length divides it


class Net(nn.Module):
    """Parameters of three members, with values of the usual size."""

    def __init__(self) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(shape, generator=rng) for shape in SHAPES)


def some_grads(step: int) -> list[Tensor]:
    """Gradients whose norm lies above 0.5 for some members and steps, and below for others."""
    rng = torch.Generator().manual_seed(step + 1)
    size = torch.tensor([0.01, 0.1, 3.0])[torch.randperm(3, generator=rng)].view(3, 1, 1)
    return [torch.randn(shape, generator=rng) * size for shape in SHAPES]


def snapshot(net: Net, adam: Adam) -> dict[str, Tensor]:
    weights = torch.cat([p.detach().reshape(3, -1) for p in net.parameters()], 1)
    return {"weights": weights, **copy.deepcopy(adam.state_dict())}


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.9), (0.0, 0.99)])
@pytest.mark.parametrize("max_grad_norm", [0.5, None])
def test_fifty_steps_against_torch(betas: tuple[float, float], max_grad_norm: float | None) -> None:
    net = Net()
    theirs = [[nn.Parameter(p[m].detach().clone()) for p in net.parameters()] for m in range(3)]
    optimizers = [
        torch.optim.Adam(ps, lr=float(lr), betas=betas, eps=1e-5) for ps, lr in zip(theirs, RATES, strict=True)
    ]
    adam = Adam(net, betas=betas, epsilon=1e-5, max_grad_norm=max_grad_norm)
    clipped: set[bool] = set()
    for step in range(50):
        grads = some_grads(step)
        result = adam.step([g.clone() for g in grads], RATES, EVERYONE)
        assert result.stepped.all() and result.finite.all()
        for m, (params, optimizer) in enumerate(zip(theirs, optimizers, strict=True)):
            for p, g in zip(params, grads, strict=True):
                p.grad = g[m].clone()
            norm = nn.utils.clip_grad_norm_(params, max_grad_norm or float("inf"))
            torch.testing.assert_close(result.norm[m], norm)
            torch.testing.assert_close(
                (result.norm * result.scale)[m], norm.clamp(max=max_grad_norm or float("inf")), rtol=1e-5, atol=0
            )
            clipped.add(bool(norm > 0.5))
            optimizer.step()
    assert clipped == {True, False}
    for m, params in enumerate(theirs):
        for ours, p in zip(net.parameters(), params, strict=True):
            torch.testing.assert_close(ours[m], p, atol=1e-6, rtol=0)


def test_first_step_by_hand() -> None:
    # m/(1-b1) = g and v/(1-b2) = g^2, so a step is lr g / (|g| + eps): with g = 3e-5, eps = 1e-5 it is 0.75 lr
    net = Net()
    before = [p.detach().clone() for p in net.parameters()]
    Adam(net).step([torch.full(shape, 3e-5) for shape in SHAPES], torch.full((3,), 0.1), EVERYONE)
    for p, was in zip(net.parameters(), before, strict=True):
        torch.testing.assert_close(was - p, torch.full_like(p, 0.075), rtol=1e-4, atol=1e-6)


def test_gradients_given_are_not_changed() -> None:
    net, grads = Net(), some_grads(0)
    kept = [g.clone() for g in grads]
    Adam(net, max_grad_norm=1e-3).step(grads, RATES, EVERYONE)
    assert all(torch.equal(a, b) for a, b in zip(grads, kept, strict=True))


def test_parameters_that_take_no_gradient_stay_out() -> None:
    net = Net()
    net.weights[0].requires_grad_(False)
    adam = Adam(net)
    kept = net.weights[0].clone()
    adam.step(some_grads(0)[1:], RATES, EVERYONE)
    assert torch.equal(net.weights[0], kept)


# --- members that do not step -------------------------------------------------------------------------------


def test_an_inactive_member_keeps_everything() -> None:
    net = Net()
    adam = Adam(net)
    for step in range(3):
        adam.step(some_grads(step), RATES, EVERYONE)
    before = snapshot(net, adam)
    result = adam.step(some_grads(3), RATES, torch.tensor([True, False, True]))
    after = snapshot(net, adam)
    assert result.stepped.tolist() == [True, False, True]
    assert after["t"].tolist() == [4, 3, 4]
    for name, x in after.items():
        assert torch.equal(x[1], before[name][1]), name
        assert name == "nonfinite" or not torch.equal(x[0], before[name][0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("others_step", [True, False])
def test_a_non_finite_gradient_is_skipped_and_reaches_no_other_member(bad: float, others_step: bool) -> None:
    runs: list[dict[str, Tensor]] = []
    for poisoned in (False, True):
        net = Net()
        adam = Adam(net)
        for step in range(6):
            grads = some_grads(step)
            if poisoned and step == 2:
                grads[1][1, 0, 2] = bad
                before = snapshot(net, adam)
                active = torch.tensor([others_step, True, others_step])
                result = adam.step(grads, RATES, active)
                assert result.finite.tolist() == [True, False, True]
                assert result.stepped.tolist() == [others_step, False, others_step]
                after = snapshot(net, adam)
                assert all(torch.equal(after[n][1], before[n][1]) for n in ("weights", "m", "v", "t"))
            elif step != 2 or others_step:
                adam.step(grads, RATES, EVERYONE)
        runs.append(snapshot(net, adam))
    for name in ("weights", "m", "v", "t", "nonfinite"):
        assert torch.equal(runs[0][name][[0, 2]], runs[1][name][[0, 2]]), name
        assert runs[1][name].isfinite().all()


def feed(adam: Adam, gradients: str, active: str | None = None) -> None:
    """Steps of member 1 with a finite (.) or a non-finite (x) gradient; with `active`, - where it sits out."""
    for step, kind in enumerate(gradients):
        grads = some_grads(step)
        if kind == "x":
            grads[0][1] = torch.nan
        on = active is None or active[step] != "-"
        adam.step(grads, RATES, torch.tensor([True, on, True]))


@pytest.mark.parametrize(
    ("gradients", "active", "diverged", "steps"),
    [
        ("xx", None, False, 0),
        ("xxx", None, True, 0),
        ("xx.xx", None, False, 1),
        ("xx.xxx", None, True, 1),
        ("..xxx..", None, True, 2),  # it does not step again
        ("x.x.x.x.", None, False, 4),
        ("xxx.", "+-++", False, 1),  # a gradient that is not used does not count
        ("x.xx", "+-++", True, 0),  # nor does a finite one reset the count
    ],
)
def test_three_non_finite_gradients_in_a_row_are_the_end(
    gradients: str, active: str | None, diverged: bool, steps: int
) -> None:
    net = Net()
    adam = Adam(net)
    feed(adam, gradients, active)
    assert adam.diverged.tolist() == [False, diverged, False]
    assert adam.t.tolist() == [len(gradients), steps, len(gradients)]
    assert all(p.isfinite().all() for p in net.parameters())


# --- state --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gradients", ["...", "..x", ".xx", "xxx"])
def test_state_dict_round_trip(gradients: str) -> None:
    net = Net()
    adam = Adam(net)
    feed(adam, gradients)
    net_state, state = copy.deepcopy(net.state_dict()), copy.deepcopy(adam.state_dict())
    assert all(x.shape[0] == 3 for x in state.values())
    other_net = Net()
    other = Adam(other_net)
    other_net.load_state_dict(net_state)
    other.load_state_dict(state)
    for one in (adam, other):
        feed(one, ".x.")
    assert adam.diverged.tolist() == other.diverged.tolist()
    ours, theirs = snapshot(net, adam), snapshot(other_net, other)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
