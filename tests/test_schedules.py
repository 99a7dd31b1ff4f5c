"""Schedules on numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch
from conftest import small_learner, weights

from rlkit.schedules import SCHEDULES, Constant, Exponential, KLDriven, Linear, Schedule

PROGRESS = torch.tensor([0.0, 0.25, 1.0])


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Constant(0.2, 3), [0.2, 0.2, 0.2]),
        (Linear(0.4, 3), [0.4, 0.3, 0.0]),  # .4 (1 - t)
        (Linear(0.4, 3, final=0.8), [0.4, 0.5, 0.8]),
        (Linear(0.4, 3, final=0.8, until=0.5), [0.4, 0.6, 0.8]),  # .4 + .4 t / .5, and no further
        (Exponential(1.0, 3, rate=4.0), [1.0, 0.3678794, 0.0183156]),  # exp 0, -1, -4
        (Exponential(0.3, 3, final=0.1, rate=4.0), [0.3, 0.1735759, 0.1036631]),  # .1 + .2 exp(-4t)
        (Exponential(1.0, 3), [1.0, 0.4723666, 0.0497871]),  # exp -.75, -3
    ],
)
def test_by_hand(schedule: Schedule, expected: list[float]) -> None:
    assert schedule.value.shape == (3,) and (schedule.value == schedule.initial).all()
    value = schedule(PROGRESS, {})
    torch.testing.assert_close(value, torch.tensor(expected), atol=1e-6, rtol=0)
    assert schedule.value is value


@pytest.mark.parametrize("name", ["linear", "exponential"])
def test_progress_beyond_the_plan_stays_at_the_end(name: str) -> None:
    schedule = SCHEDULES[name](0.5, 3, final=0.1)  # type: ignore[call-arg]
    beyond = schedule(PROGRESS * 7, {})
    assert torch.equal(beyond[2:], schedule(PROGRESS, {})[2:])


def test_kl_driven_by_hand() -> None:
    schedule = KLDriven(0.3, 5, target=1.0, floor=0.05)
    progress = torch.zeros(5)
    assert (schedule(progress, {}) == 0.3).all()  # the first iteration knows no KL
    # sqrt: .2, .5 above the start, 0 and .01 below the floor; a member without a KL keeps its value
    kl = torch.tensor([0.04, 0.25, 0.0, 1e-4, float("nan")])
    torch.testing.assert_close(schedule(progress, {"kl/old": kl}), torch.tensor([0.2, 0.3, 0.05, 0.05, 0.3]))
    torch.testing.assert_close(
        schedule(progress, {"kl/old": torch.tensor([float("nan")] * 5)}), torch.tensor([0.2, 0.3, 0.05, 0.05, 0.3])
    )


def test_kl_driven_measures_in_targets() -> None:
    # sqrt(.01 / .25) = .2
    value = KLDriven(0.3, 1, target=0.25, floor=0.0)(torch.zeros(1), {"kl/old": torch.tensor([0.01])})
    assert value.item() == pytest.approx(0.2)


def test_state_dict_round_trip() -> None:
    one, two = KLDriven(0.3, 2, 1.0, 0.05), KLDriven(0.3, 2, 1.0, 0.05)
    one(torch.zeros(2), {"kl/old": torch.tensor([0.01, 0.04])})
    two.load_state_dict(one.state_dict())
    unknown = {"kl/old": torch.full((2,), float("nan"))}
    torch.testing.assert_close(two(torch.zeros(2), unknown), torch.tensor([0.1, 0.2]))


def test_a_learning_rate_follows_kl_by_hand():
    rate = SCHEDULES["kl_adaptive"](1e-3, 4, target=0.01, min_factor=0.5, max_factor=2.0)
    progress = torch.zeros(4)
    assert rate(progress, {}).tolist() == pytest.approx([1e-3] * 4)
    kl = torch.tensor([0.021, 0.019, 0.004, torch.nan])  # above 2 targets, between, below half, not measured
    assert rate(progress, {"kl/old": kl}).tolist() == pytest.approx([1e-3 / 1.5, 1e-3, 1.5e-3, 1e-3])
    for _ in range(5):
        rate(progress, {"kl/old": kl})
    assert rate.value.tolist() == pytest.approx([0.5e-3, 1e-3, 2e-3, 1e-3])  # its bounds


def test_an_entropy_coefficient_follows_entropy_by_hand():
    coef = SCHEDULES["target_entropy"](0.01, 3, target=0.5, rate=2.0, min_factor=0.1, max_factor=10.0)
    progress = torch.zeros(3)
    coef(progress, {})
    entropy = torch.tensor([0.4, 0.5, torch.nan])
    assert coef(progress, {"entropy/mean": entropy}).tolist() == pytest.approx([0.01 * 1.2214027582, 0.01, 0.01])
    coef(progress, {"entropy/mean": torch.tensor([-9.0, 9.0, 9.0])})
    assert coef.value.tolist() == pytest.approx([0.1, 0.001, 0.001])


def test_an_entropy_coefficient_sees_the_entropy_whether_or_not_it_is_logged():
    overrides = ("algo.entropy_coef=0.01", "algo.schedule.entropy_coef.name=target_entropy")
    overrides = (*overrides, "algo.schedule.entropy_coef.target=0.5")
    logged, silent = (small_learner("ppo", *overrides) for _ in range(2))
    for _ in range(3):
        logged.iterate(detail=True)
        silent.iterate(detail=False)
    assert logged.schedules["entropy_coef"].value != 0.01
    assert torch.equal(logged.schedules["entropy_coef"].value, silent.schedules["entropy_coef"].value)
    assert torch.equal(weights(logged), weights(silent))


def test_a_keeper_scales_what_a_rule_gives_and_nothing_it_remembers():
    rate = SCHEDULES["kl_adaptive"](1e-3, 1, target=0.01)
    rate(torch.zeros(1), {})
    rate.scale = torch.tensor([0.5])
    for _ in range(3):
        rate(torch.zeros(1), {"kl/old": torch.tensor([0.01])})
    assert rate.value.tolist() == pytest.approx([0.5e-3])
