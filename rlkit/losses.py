"""Loss terms as pure functions: [M, B] in, [M, B] out, before any reduction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlkit.distributions import Distribution


def clipped_surrogate(
    log_ratio: Tensor,
    advantage: Tensor,
    clip_low: Tensor | float,
    clip_high: Tensor | float,
    ratio_bound: float | None = None,
) -> Tensor:
    """Negative clipped surrogate, -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    Source: Schulman et al. 2017, equation 7; unequal bounds: Yu et al. 2025 (DAPO), equation 8. The minimum binds on
    one side only, so r A is held below max((1 + clip_high) A, (1 - clip_low) A), which does not depend on the policy.
    Written so, value and gradient are the same and the backward pass is a third as long.

    Where A is negative the minimum leaves r A without a bound. With `ratio_bound` c it is -min(r, c) A there: the
    two-sided clip of INTELLECT-2 (Prime Intellect 2025, section 3.4) and dual-clip PPO (Ye et al. 2020, equation 5).

    Args:
        log_ratio: log pi - log pi_old of the action taken, [M, B].
        advantage: [M, B].
        clip_low, clip_high: numbers or [M, 1]; a huge finite one, 1e9, for no clip (the plain policy gradient).
        ratio_bound: c > 1 + clip_high, or None.
    """
    ratio = log_ratio.exp()
    limit = torch.maximum((1 + clip_high) * advantage, (1 - clip_low) * advantage)
    gain = (ratio * advantage).clamp(max=limit)
    return -gain if ratio_bound is None else -gain.clamp(min=ratio_bound * advantage.clamp(max=0.0))


def clipped_surrogate_gradient(
    xp: Any,
    log_ratio: Any,
    advantage: Any,
    clip_low: Any | float,
    clip_high: Any | float,
    ratio_bound: float | None = None,
) -> Any:
    """Derivative of `clipped_surrogate` by log pi: -r A where the minimum does not bind, else 0, [M, B].

    Args:
        xp: numpy or torch, whose arrays the others are; they are those of `clipped_surrogate`.
    """
    limit = xp.maximum((1 + clip_high) * advantage, (1 - clip_low) * advantage)
    gain = xp.exp(log_ratio) * advantage
    bound = gain > limit
    if ratio_bound is not None:
        bound = bound | (gain < ratio_bound * advantage.clip(None, 0.0))
    return xp.where(bound, 0.0, -gain)  # so written, a gain that is not a number stays one


def value_loss(value: Tensor, ret: Tensor, old_value: Tensor | None = None, clip: float | None = None) -> Tensor:
    """Squared error (V - ret)^2 / 2, or with `clip` the larger of it and that of V kept within `clip` of the old value.

    Source: Schulman et al. 2017, equation 9; the clipped form is that of OpenAI baselines' ppo2.

    Args:
        value, ret, old_value: [M, B] in units of (normalised) return.
        clip: largest change of the value that is still rewarded, in the same units; None for no clip.
    """
    error = (value - ret) ** 2
    if clip is not None:
        if old_value is None:
            raise ValueError("a clipped value loss needs the values at collection")
        kept = old_value + (value - old_value).clamp(-clip, clip)
        error = torch.maximum(error, (kept - ret) ** 2)
    return 0.5 * error


def value_loss_gradient(value: Any, ret: Any, old_value: Any | None = None, clip: float | None = None) -> Any:
    """Derivative of `value_loss` by the value, [M, B] in units of return; arguments as there."""
    error = value - ret
    if clip is None:
        return error
    change = value - old_value
    kept = old_value + change.clip(-clip, clip) - ret
    return error * ((abs(change) <= clip) | (error * error > kept * kept))


def kl_estimate(log_ratio: Tensor, kind: str) -> Tensor:
    """Estimate KL(pi || pi_ref) from actions of pi, by Schulman's estimators (2020, "Approximating KL divergence").

    With r = pi_ref / pi and log r = `log_ratio`:

        k1 = -log r              unbiased, may be negative, large variance
        k2 = (log r)^2 / 2       biased, never negative
        k3 = (r - 1) - log r     unbiased, never negative, smaller variance

    As a loss (differentiated through log pi on fixed actions) they are not their values: the gradient of k1 has zero
    expectation on-policy; k2's equals that of KL(pi || pi_ref) on-policy, that is, k1 counted in the reward; k3's is a
    biased first-order approximation of it, and on-policy the gradient of KL(pi_ref || pi) instead (Liu et al. 2025;
    DeepSeekMath's GRPO uses it).

    Args:
        log_ratio: log pi_ref - log pi of the action taken, [M, B], nats.
        kind: "k1", "k2" or "k3".
    """
    if kind == "k1":
        return -log_ratio
    if kind == "k2":
        return 0.5 * log_ratio**2
    if kind == "k3":
        return torch.expm1(log_ratio) - log_ratio
    raise ValueError(f"kl kind is {kind!r}; it must be one of k1, k2, k3")


def exact_kl(old: Distribution, new: Distribution) -> Tensor:
    """KL(old || new) in closed form, [M, B] nats; clamped at zero, where rounding may have gone below."""
    return old.kl(new).clamp(min=0.0)
