"""Advantage estimators: how good each recorded step was, from a critic or from the other episodes of its group.

The pure functions take tensors [T, M, N]: those that read a critic are here, those that compare within a group in
`rlkit.group_relative`. `ESTIMATORS` names them for `algo.advantage=`, each as a function of a rollout.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from rlkit.buffer import Rollout
from rlkit.group_relative import (
    binned,
    degenerate_share,
    discounted_sum,
    grouped_gae,
    leave_one_out,
    outcome,
    return_to_go,
    returns_to_go,
    scaled,
    state_bins,
    summarise_groups,
    time_bins,
)
from rlkit.modules import load_module
from rlkit.off_policy import v_trace

__all__ = [
    "CRITIC",
    "ESTIMATORS",
    "GROUPS",
    "Estimator",
    "binned",
    "degenerate_share",
    "estimator",
    "find_estimator",
    "gae",
    "grouped_gae",
    "leave_one_out",
    "mixed",
    "n_step",
    "outcome",
    "return_to_go",
    "returns_to_go",
    "summarise_groups",
]

CRITIC, GROUPS = "a critic", "groups of whole episodes"  # what an estimator may take its baseline from


@dataclass(frozen=True)
class Estimator:
    """A function (rollout, gamma, gae_lambda, **arguments) -> (advantage, ret), both [T, M, N], and what it needs."""

    function: Callable[..., tuple[Tensor, Tensor]]
    needs: frozenset[str] = frozenset((CRITIC, GROUPS))  # any one of these is enough
    bounds: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # of arguments, as in `rlkit.conf.schema.key`
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, rollout: Rollout, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
        return self.function(rollout, gamma, gae_lambda, **self.arguments)

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The arguments it takes, by name."""
        return dict(list(inspect.signature(self.function).parameters.items())[3:])  # after rollout, gamma, gae_lambda

    def given(self, **arguments: Any) -> Estimator:
        """Return the estimator with arguments of its own."""
        return replace(self, arguments=arguments)


ESTIMATORS: dict[str, Estimator] = {}


def estimator(
    name: str, needs: Iterable[str], **bounds: dict[str, Any]
) -> Callable[[Callable[..., tuple[Tensor, Tensor]]], Estimator]:
    """Register (rollout, gamma, gae_lambda, **arguments) -> (advantage, ret) as `algo.advantage=name`.

    Args:
        needs: CRITIC, GROUPS or both, any one of which is enough.
        bounds: for each argument the values `algo.advantage_args` may give it: `n={"ge": 1}`.
    """

    def register(function: Callable[..., tuple[Tensor, Tensor]]) -> Estimator:
        ESTIMATORS[name] = Estimator(function, frozenset(needs), bounds)
        return ESTIMATORS[name]

    return register


def find_estimator(name: str) -> Estimator:
    """Return the estimator called `name`, or the one of the function at `module:function`.

    Raises:
        ValueError: there is none; the sentence names those that exist and the nearest.
    """
    if ":" in name:
        module, function = name.split(":", 1)
        try:
            found = getattr(load_module(module), function)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"algo.advantage is {name!r}, which cannot be imported: {error}") from error
        if not callable(found):
            raise ValueError(f"algo.advantage is {name!r}, which is not a function")
        if not isinstance(found, Estimator) and not _takes_three(found):
            raise ValueError(f"algo.advantage is {name!r}, which does not take (rollout, gamma, gae_lambda)")
        return found if isinstance(found, Estimator) else Estimator(found)
    if name not in ESTIMATORS:
        near = get_close_matches(name, ESTIMATORS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"algo.advantage is {name!r}; it must be one of {', '.join(sorted(ESTIMATORS))}{hint}")
    return ESTIMATORS[name]


def _takes_three(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind_partial(None, 1.0, 1.0)
    except (TypeError, ValueError):  # the latter: it tells nothing of what it takes
        return False
    return True


# --- critic-based --------------------------------------------------------------------------------------------------


def next_value(value: Tensor, final_value: Tensor, terminated: Tensor, truncated: Tensor) -> Tensor:
    """V of the observation that followed each step before any reset, and 0 after a termination, [T, M, N].

    That is `final_value` where the episode ended or the window does, the next row's value elsewhere. A truncated
    episode bootstraps, a terminated one does not, and both flags at once are a termination. Args as `gae`.
    """
    following = torch.cat([value[1:], final_value[-1:]])
    following = torch.where(terminated | truncated, final_value, following)
    return torch.where(terminated, 0.0, following)


def gae(
    reward: Tensor,
    value: Tensor,
    final_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    gae_lambda: float,
    ratio: Tensor | None = None,
) -> Tensor:
    """Generalised advantage estimation (Schulman et al. 2016, equations 11, 12 and 16).

        delta_t = r_t + gamma V(s') (1 - terminated_t) - V(s_t),   A_t = delta_t + gamma lambda A_{t+1}

    V(s') is that of `next_value`; the sum stops at the end of an episode.

    Args:
        reward, value, final_value: [T, M, N]; `final_value` is read where an episode ends and in the last row.
        terminated, truncated: bool [T, M, N].
        gamma, gae_lambda: in [0, 1].
        ratio: truncated ratio of the policy to the behaviour, [T, M, N], where they differ: see `v_trace`.

    Returns:
        A, [T, M, N], in units of return.
    """
    delta = reward + gamma * next_value(value, final_value, terminated, truncated) - value
    carry = gamma * gae_lambda * (~(terminated | truncated)).to(value.dtype)
    return discounted_sum(delta, carry) if ratio is None else v_trace(delta, carry, ratio)


def n_step(
    reward: Tensor,
    value: Tensor,
    final_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    n: int,
    ratio: Tensor | None = None,
) -> Tensor:
    """The n-step return minus V(s_t) (Sutton & Barto 2018, section 7.1; Mnih et al. 2016, section 4).

        A_t = sum_{k<h} gamma^k r_{t+k} + gamma^h V(s_{t+h}) - V(s_t),   h = min(n, steps left)

    Steps are left until the episode ends or the window does. V(s_{t+h}) is that of `next_value`: the return bootstraps
    where the window or the time limit cut the episode, not after a termination. n = 1 gives the one-step residual, n
    beyond all that is left what `gae` gives with lambda 1.

    Args and result as `gae`; n is at least 1.
    """
    following = next_value(value, final_value, terminated, truncated)
    goes_on = ~(terminated | truncated)
    if ratio is not None:
        return v_trace(reward + gamma * following - value, gamma * goes_on.to(value.dtype), ratio, n)
    goes_on[-1] = False
    ret = reward + gamma * following
    for _ in range(min(n, len(reward)) - 1):  # from the return of k steps to that of k + 1
        ret = reward + gamma * torch.where(goes_on, ret.roll(-1, 0), following)
    return ret - value


def _steps(rollout: Rollout) -> dict[str, Any]:
    if rollout.value is None or rollout.final_value is None:
        raise ValueError("this advantage needs a critic, and the policy has none")
    names = ("reward", "value", "final_value", "terminated", "truncated", "ratio")
    return {name: getattr(rollout, name) for name in names}


@estimator("gae", needs={CRITIC})
def _gae(rollout: Rollout, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    steps = _steps(rollout)
    advantage = gae(**steps, gamma=gamma, gae_lambda=gae_lambda) * rollout.valid
    return advantage, advantage + steps["value"]


@estimator("n_step", needs={CRITIC}, n={"ge": 1})
def _n_step(rollout: Rollout, gamma: float, gae_lambda: float, n: int = 5) -> tuple[Tensor, Tensor]:
    steps = _steps(rollout)
    advantage = n_step(**steps, gamma=gamma, n=n) * rollout.valid
    return advantage, advantage + steps["value"]


# --- group-relative ------------------------------------------------------------------------------------------------


def _episodes(rollout: Rollout, gamma: float) -> tuple[Tensor, Tensor, Tensor]:
    if rollout.group is None:
        raise ValueError("a group-relative advantage needs groups: use algo=grpo")
    to_go = returns_to_go(rollout.reward, rollout.valid, rollout.ended, gamma)
    return to_go, to_go[0], rollout.group


def _per_episode(advantage: Tensor, rollout: Rollout) -> Tensor:
    return advantage * rollout.valid  # [M, N] -> [T, M, N]


@estimator("outcome", needs={GROUPS})
def _outcome(rollout: Rollout, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    to_go, episode_return, group = _episodes(rollout, gamma)
    return _per_episode(outcome(episode_return, group), rollout), to_go


@estimator("outcome_no_std", needs={GROUPS})
def _outcome_no_std(rollout: Rollout, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    to_go, episode_return, group = _episodes(rollout, gamma)
    return _per_episode(outcome(episode_return, group, scale=False), rollout), to_go


@estimator("leave_one_out", needs={GROUPS})
def _leave_one_out(rollout: Rollout, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    to_go, episode_return, group = _episodes(rollout, gamma)
    return _per_episode(leave_one_out(episode_return, group), rollout), to_go


@estimator("vine", needs={GROUPS})
def _vine(rollout: Rollout, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """A(s, a_i) = R_i - mean_g in the first row of each branch, s the state the group shares; the rest are probes.

    Source: Schulman et al. 2015 (TRPO, section 5.2); Kazemnejad et al. 2024 (VinePPO). R_i is the discounted return
    from s on. Needs `algo.groups=vine` to be of use beyond the first steps of episodes.
    """
    to_go, branch_return, group = _episodes(rollout, gamma)
    advantage = torch.zeros_like(to_go)
    advantage[0] = outcome(branch_return, group, scale=False) * rollout.valid[0]
    return advantage, to_go


@estimator("return_to_go", needs={GROUPS})
def _return_to_go(rollout: Rollout, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    to_go, _, group = _episodes(rollout, gamma)
    return return_to_go(to_go, group, rollout.valid), to_go


BINS: dict[str, dict[str, Any]] = {"by": {"choices": ("time", "state", "scaled_state")}, "resolution": {"gt": 0}}


def _state_bins(rollout: Rollout, by: str, resolution: float) -> Tensor | None:
    """The bins of rows by their rounded state, in units of the observation or (scaled_state) of its deviation."""
    if by == "time":
        return None
    obs = rollout.obs if by == "state" else scaled(rollout.obs, rollout.valid)
    return state_bins(obs, resolution)


@estimator("grouped_gae", needs={GROUPS}, **BINS)
def _grouped_gae(
    rollout: Rollout, gamma: float, gae_lambda: float, by: str = "time", resolution: float = 0.1
) -> tuple[Tensor, Tensor]:
    to_go, _, group = _episodes(rollout, gamma)
    flags = (rollout.valid, rollout.ended)
    bins = _state_bins(rollout, by, resolution)
    return grouped_gae(rollout.reward, to_go, group, *flags, gamma, gae_lambda, bins), to_go


@estimator("binned", needs={GROUPS}, **BINS)
def _binned(
    rollout: Rollout, gamma: float, gae_lambda: float, by: str = "time", resolution: float = 0.1
) -> tuple[Tensor, Tensor]:
    to_go, _, group = _episodes(rollout, gamma)
    bins = _state_bins(rollout, by, resolution)
    if bins is None:
        bins = time_bins(group, len(to_go))
    return binned(to_go, bins, group, rollout.valid), to_go


# --- either --------------------------------------------------------------------------------------------------------


def mixed(whole: Tensor, residual: Tensor, gae_lambda: float) -> Tensor:
    """(1 - lambda) (G_t - b) + lambda delta_t: part Monte Carlo, part one step.

    The baseline b and the value in delta_t are the same. Where a critic exists they are V, and G_t bootstraps where the
    window or the time limit cut the episode; where not they are the group's mean return-to-go at t. Then G_t - b is
    `gae` or `grouped_gae` with lambda 1 and delta_t the same with lambda 0: their lambda weighs all lengths in between
    by powers, this one only the two ends.

    Args:
        whole: G_t - b, [T, M, N].
        residual: delta_t, [T, M, N].
        gae_lambda: in [0, 1].
    """
    return torch.lerp(whole, residual, gae_lambda)


@estimator("mixed", needs={CRITIC, GROUPS})
def _mixed(rollout: Rollout, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    family = _grouped_gae if rollout.value is None else _gae
    advantage, ret = (
        mixed(whole, residual, gae_lambda)  # the target of a critic mixes as its advantage does
        for whole, residual in zip(family(rollout, gamma, 1.0), family(rollout, gamma, 0.0), strict=True)
    )
    return advantage, ret
