"""Advantage estimators: how good each recorded step was, from a critic or from the other episodes of its group.

The pure functions take tensors [T, M, N]; `ESTIMATORS` names them for `algo.advantage=`, each as a function of a
rollout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module

import torch
from torch import Tensor

from rlkit.buffer import Rollout

Estimator = Callable[[Rollout, float, float], tuple[Tensor, Tensor]]  # (rollout, gamma, lambda) -> advantage, ret
ESTIMATORS: dict[str, Estimator] = {}
CRITIC_BASED: set[str] = set()  # names of the estimators that need V


def estimator(name: str, critic: bool = False) -> Callable[[Estimator], Estimator]:
    """Register (rollout, gamma, gae_lambda) -> (advantage, ret), both [T, M, N], as `algo.advantage=name`."""

    def register(function: Estimator) -> Estimator:
        ESTIMATORS[name] = function
        if critic:
            CRITIC_BASED.add(name)
        return function

    return register


def find_estimator(name: str) -> Estimator:
    """Return the estimator called `name`, or the function at `module:function`.

    Raises:
        ValueError: there is none; the sentence names those that exist and the nearest.
    """
    if ":" in name:
        module, function = name.split(":", 1)
        try:
            return getattr(import_module(module), function)  # type: ignore[no-any-return]
        except (ImportError, AttributeError) as error:
            raise ValueError(f"algo.advantage is {name!r}, which cannot be imported: {error}") from error
    if name not in ESTIMATORS:
        near = get_close_matches(name, ESTIMATORS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"algo.advantage is {name!r}; it must be one of {', '.join(sorted(ESTIMATORS))}{hint}")
    return ESTIMATORS[name]


# --- critic-based --------------------------------------------------------------------------------------------------


def gae(
    reward: Tensor,
    value: Tensor,
    final_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    gae_lambda: float,
) -> Tensor:
    """Generalised advantage estimation (Schulman et al. 2016, equations 11, 12 and 16).

        delta_t = r_t + gamma V(s') (1 - terminated_t) - V(s_t),   A_t = delta_t + gamma lambda A_{t+1}

    V(s') is the value of the observation that followed the step before any reset: `final_value` where the episode ended
    or the window does, the next row's value elsewhere. The sum stops at the end of an episode. A truncated episode
    bootstraps, a terminated one does not, and both flags at once are a termination.

    Args:
        reward, value, final_value: [T, M, N]; `final_value` is read where an episode ends and in the last row.
        terminated, truncated: bool [T, M, N].
        gamma, gae_lambda: in [0, 1].

    Returns:
        A, [T, M, N], in units of return.
    """
    ended = terminated | truncated
    next_value = torch.cat([value[1:], final_value[-1:]])
    next_value = torch.where(ended, final_value, next_value)
    delta = reward + gamma * torch.where(terminated, 0.0, next_value) - value
    carry = gamma * gae_lambda * (~ended).to(value.dtype)
    advantage = torch.empty_like(delta)
    running = torch.zeros_like(delta[0])
    for t in range(len(delta) - 1, -1, -1):
        running = torch.addcmul(delta[t], carry[t], running)
        advantage[t] = running
    return advantage


@estimator("gae", critic=True)
def _gae(rollout: Rollout, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    if rollout.value is None or rollout.final_value is None:
        raise ValueError("algo.advantage=gae needs a critic, and this policy has none")
    flags = (rollout.terminated, rollout.truncated)
    advantage = gae(rollout.reward, rollout.value, rollout.final_value, *flags, gamma, gae_lambda)
    return advantage, advantage + rollout.value


# --- group-relative ------------------------------------------------------------------------------------------------


@dataclass
class GroupSummary:
    """Sums of a quantity over the valid members of each group, given back to each member: tensors like the quantity."""

    count: Tensor
    total: Tensor
    degenerate: Tensor  # bool: all valid members are equal

    @property
    def mean(self) -> Tensor:
        return self.total / self.count.clamp(min=1.0)


def summarise_groups(x: Tensor, group: Tensor, valid: Tensor) -> GroupSummary:
    """Summarise x over groups.

    Args:
        x: [..., M, N].
        group: int64 [M, N], ids from 0 within each member.
        valid: bool, shape of x.
    """
    index = group.expand(x.shape)
    shape = (*x.shape[:-1], int(group.max()) + 1)

    def reduce(source: Tensor, how: str, start: float) -> Tensor:
        return x.new_full(shape, start).scatter_reduce(-1, index, source, how).gather(-1, index)

    low = reduce(x.masked_fill(~valid, torch.inf), "amin", torch.inf)
    high = reduce(x.masked_fill(~valid, -torch.inf), "amax", -torch.inf)
    count = reduce(valid.to(x.dtype), "sum", 0.0)
    total = reduce(x.masked_fill(~valid, 0.0), "sum", 0.0)
    return GroupSummary(count, total, low >= high)


def returns_to_go(reward: Tensor, valid: Tensor, ended: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_{t+1} within an episode, over recorded steps, without bootstrap; [T, M, N]."""
    result = torch.zeros_like(reward)
    carry = gamma * (~ended & valid).to(reward.dtype)
    running = torch.zeros_like(reward[0])
    for t in range(len(reward) - 1, -1, -1):
        running = torch.addcmul(reward[t], carry[t], running)
        result[t] = running
    return result * valid


def outcome(episode_return: Tensor, group: Tensor, *, scale: bool = True, epsilon: float = 1e-4) -> Tensor:
    """(R_i - mean_g) / (std_g + eps), or without `scale` R_i - mean_g; zero where a group's returns are all equal.

    Source: Shao et al. 2024 (DeepSeekMath), section 4.1.2, outcome supervision; without the deviation, Liu et al. 2025
    (Dr.GRPO). The deviation is unbiased (ddof 1).

    Args:
        episode_return: R, the discounted return of each environment's episode, [M, N].
        group: int64 [M, N].
    """
    valid = torch.ones_like(episode_return, dtype=torch.bool)
    summary = summarise_groups(episode_return, group, valid)
    centred = (episode_return - summary.mean).masked_fill(summary.degenerate, 0.0)
    if not scale:
        return centred
    squares = summarise_groups(centred**2, group, valid)
    std = (squares.total / (squares.count - 1).clamp(min=1.0)).sqrt()
    return centred / (std + epsilon)


def leave_one_out(episode_return: Tensor, group: Tensor) -> Tensor:
    """R_i minus the mean of the other G - 1 returns of its group (Ahmadian et al. 2024, RLOO; Kool et al. 2019).

    Args and result as `outcome`; an episode alone in its group has zero advantage.
    """
    summary = summarise_groups(episode_return, group, torch.ones_like(episode_return, dtype=torch.bool))
    others = (summary.total - episode_return) / (summary.count - 1).clamp(min=1.0)
    return (episode_return - others).masked_fill(summary.degenerate, 0.0)


def return_to_go(to_go: Tensor, group: Tensor, valid: Tensor, epsilon: float = 1e-8) -> Tensor:
    """G_t,i minus the mean of G_t over the members of the group still alive at t, over one deviation of the batch.

    Source: per-step group baseline (GR2PO; process supervision in Shao et al. 2024). The deviation is that of the
    centred values over all valid rows of the member (one number, ddof 0). A member alone in its group at t, or a
    group whose returns-to-go are all equal at t, has zero advantage there.

    Args:
        to_go: G_t, [T, M, N].
        group: int64 [M, N].
        valid: bool [T, M, N].
    """
    summary = summarise_groups(to_go, group, valid)
    centred = (to_go - summary.mean).masked_fill(summary.degenerate | ~valid, 0.0)
    rows = valid.sum((0, 2)).clamp(min=1)  # [M]
    std = (centred**2).sum((0, 2)).div(rows).sqrt()
    return centred / (std + epsilon)[:, None]


def _episodes(rollout: Rollout, gamma: float) -> tuple[Tensor, Tensor, Tensor]:
    if rollout.group is None:
        raise ValueError("a group-relative advantage needs groups: use algo=grpo")
    to_go = returns_to_go(rollout.reward, rollout.valid, rollout.ended, gamma)
    return to_go, to_go[0], rollout.group


def _per_episode(advantage: Tensor, rollout: Rollout) -> Tensor:
    return advantage * rollout.valid  # [M, N] -> [T, M, N]


@estimator("outcome")
def _outcome(rollout: Rollout, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    to_go, episode_return, group = _episodes(rollout, gamma)
    return _per_episode(outcome(episode_return, group), rollout), to_go


@estimator("outcome_no_std")
def _outcome_no_std(rollout: Rollout, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    to_go, episode_return, group = _episodes(rollout, gamma)
    return _per_episode(outcome(episode_return, group, scale=False), rollout), to_go


@estimator("leave_one_out")
def _leave_one_out(rollout: Rollout, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    to_go, episode_return, group = _episodes(rollout, gamma)
    return _per_episode(leave_one_out(episode_return, group), rollout), to_go


@estimator("return_to_go")
def _return_to_go(rollout: Rollout, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    to_go, _, group = _episodes(rollout, gamma)
    return return_to_go(to_go, group, rollout.valid), to_go


def degenerate_share(rollout: Rollout) -> Tensor:
    """Share of each member's groups in which no row has an advantage, [M]: they teach nothing. Nan if none played."""
    if rollout.group is None or rollout.advantage is None:
        raise ValueError("degenerate groups are counted on a rollout with groups and advantages")
    moves = ((rollout.advantage != 0) & rollout.valid).any(0).to(rollout.reward.dtype)  # [M, N]
    played = rollout.valid[0]
    teaches = summarise_groups(moves, rollout.group, played).total > 0
    return (~teaches & played).sum(1) / played.sum(1)


# --- aggregation ---------------------------------------------------------------------------------------------------


def row_weight(rollout: Rollout, horizon: int) -> Tensor:
    """Every valid row counts 1: the loss is the mean over steps."""
    return rollout.valid.to(rollout.reward.dtype)


def episode_weight(rollout: Rollout, horizon: int) -> Tensor:
    """Every episode counts the same: weight rows / (episodes * length of the row's episode).

    The original GRPO loss, 1/G sum 1/len sum (Shao et al. 2024, equation 3), biased by episode length (Liu et al.
    2025); in control tasks length is the return. Episodes cut by a window's edge count as episodes.
    """
    valid, ended = rollout.valid, rollout.ended
    length = torch.zeros_like(rollout.reward)
    running = torch.zeros_like(length[0])
    for t in range(len(length)):
        running = (running + 1) * valid[t]
        length[t] = running
        running = running * ~ended[t]
    for t in range(len(length) - 2, -1, -1):  # carry each episode's final length back to its first row
        inside = valid[t] & ~ended[t] & valid[t + 1]
        length[t] = torch.where(inside, length[t + 1], length[t])
    inverse = torch.where(valid, 1.0 / length.clamp(min=1.0), 0.0)
    episodes = inverse.sum((0, 2))  # [M]
    rows = valid.sum((0, 2))
    return inverse * (rows / episodes.clamp(min=1.0))[:, None]


def constant_weight(rollout: Rollout, horizon: int) -> Tensor:
    """Every row counts rows / (episodes * horizon): a sum over steps over a constant (Dr.GRPO, Liu et al. 2025)."""
    valid = rollout.valid
    last = torch.cat([~valid[1:], torch.ones_like(valid[:1])])
    episodes = (valid & (rollout.ended | last)).sum((0, 2))
    rows = valid.sum((0, 2))
    return valid * (rows / (episodes.clamp(min=1) * horizon))[:, None]


AGGREGATIONS: dict[str, Callable[[Rollout, int], Tensor]] = {
    "row": row_weight,
    "episode": episode_weight,
    "constant": constant_weight,
}
