"""Advantages relative to a group: the other episodes from the same start state take the place of a critic.

Pure functions. An episode of a group begins in row 0 and stands alone in its environment's column; a row that is not
`valid` neither gives nor gets anything. What is equal throughout a group, one's own number alone included, has an
advantage of exactly zero, never the rounding error of a mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlkit.arrays import in_place
from rlkit.buffer import Rollout


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


def summarise_bins(x: Tensor, bins: Tensor, valid: Tensor) -> GroupSummary:
    """Summarise x over bins that may hold rows of any time and environment of a member; all [T, M, N].

    Args:
        bins: int64, ids from 0 within each member.
    """
    time, members, envs = x.shape

    def by_member(y: Tensor) -> Tensor:  # [T, M, N] -> [M, T*N]
        return y.transpose(0, 1).reshape(members, time * envs)

    def back(y: Tensor) -> Tensor:
        return y.view(members, time, envs).transpose(0, 1)

    summary = summarise_groups(*map(by_member, (x, bins, valid)))
    return GroupSummary(back(summary.count), back(summary.total), back(summary.degenerate))


def centre(x: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """x minus its mean over the valid members of the group; zero where they are all equal, and where not valid.

    Args as `summarise_groups`.
    """
    summary = summarise_groups(x, group, valid)
    return (x - summary.mean).masked_fill(summary.degenerate | ~valid, 0.0)


def discounted_sum(x: Tensor, carry: Tensor) -> Tensor:
    """y_t = x_t + carry_t y_{t+1}, from the last row back to the first; all [T, ...]."""
    y = x.clone()
    rows, factors = in_place(y), in_place(carry)
    for t in range(len(rows) - 2, -1, -1):
        rows[t] += factors[t] * rows[t + 1]
    return y


def returns_to_go(reward: Tensor, valid: Tensor, ended: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_{t+1} within an episode, over recorded steps, without bootstrap; [T, M, N]."""
    carry = gamma * (~ended & valid).to(reward.dtype)
    return discounted_sum(reward, carry) * valid


def outcome(episode_return: Tensor, group: Tensor, *, scale: bool = True, epsilon: float = 1e-4) -> Tensor:
    """(R_i - mean_g) / (std_g + eps), or without `scale` R_i - mean_g; zero where a group's returns are all equal.

    Source: Shao et al. 2024 (DeepSeekMath), section 4.1.2, outcome supervision; without the deviation, Liu et al. 2025
    (Dr.GRPO). The deviation is unbiased (ddof 1).

    Args:
        episode_return: R, the discounted return of each environment's episode, [M, N].
        group: int64 [M, N].
    """
    valid = torch.ones_like(episode_return, dtype=torch.bool)
    centred = centre(episode_return, group, valid)
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
    centred = centre(to_go, group, valid)
    rows = valid.sum((0, 2)).clamp(min=1)  # [M]
    std = (centred**2).sum((0, 2)).div(rows).sqrt()
    return centred / (std + epsilon)[:, None]


def grouped_gae(
    reward: Tensor,
    to_go: Tensor,
    group: Tensor,
    valid: Tensor,
    ended: Tensor,
    gamma: float,
    gae_lambda: float,
    bins: Tensor | None = None,
) -> Tensor:
    """Generalised advantage estimation on a value that the group itself gives (after Zhu et al. 2026, GAGPO).

        V_g(t)    = mean of G_t over the members of the group alive at t, and 0 beyond the end of an episode
        delta_t,i = r_t,i + gamma V_g(t+1) - V_g(t),   A_t,i = delta_t,i + gamma lambda A_{t+1,i}

    Lambda 1 gives G_t,i - V_g(t), the return-to-go minus the group's mean at t; lambda 0 gives delta_t,i. Over the
    members alive at t both delta and A sum to zero: the mean of the targets r_t,i + gamma V_g(t+1) is V_g(t), and so
    delta is computed, as centred targets. It is exactly zero where all targets are equal and for a member alone in its
    group; hence A is, where that holds from t on, as in a group of equal episodes.

    With `bins`, V(s) is the mean of G over all rows in the bin of s, and targets are centred within the bin: a value
    that depends on the state, for episodes that share no more than their start. Rows of a group whose returns-to-go
    are all equal at t keep an advantage of zero.

    Args:
        reward: [T, M, N].
        to_go: G_t, [T, M, N], over recorded steps without bootstrap (`returns_to_go`).
        group: int64 [M, N].
        valid, ended: bool [T, M, N].
        gamma, gae_lambda: in [0, 1].
        bins: int64 [T, M, N], ids from 0 within each member (`state_bins`); None: one for each (group, t).

    Returns:
        A, [T, M, N], in units of return.
    """
    members = summarise_groups(to_go, group, valid)
    value = members.mean if bins is None else summarise_bins(to_go, bins, valid).mean
    goes_on = torch.cat([valid[1:], torch.zeros_like(valid[:1])]) & ~ended
    following = torch.cat([value[1:], torch.zeros_like(value[:1])]).masked_fill(~goes_on, 0.0)
    target = reward + gamma * following
    if bins is None:
        return returns_to_go(centre(target, group, valid), valid, ended, gamma * gae_lambda)
    summary = summarise_bins(target, bins, valid)
    delta = (target - summary.mean).masked_fill(summary.degenerate | ~valid, 0.0)
    return returns_to_go(delta, valid, ended, gamma * gae_lambda).masked_fill(members.degenerate, 0.0)


def binned(to_go: Tensor, bins: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """G_t minus the mean of its bin, the mean over each trajectory's first visit to the bin.

    Source: Chen et al. 2025 (Group Policy Gradient); first visits as in Monte Carlo prediction (Sutton & Barto 2018,
    section 5.1). A trajectory that returns to a bin does not count twice in its mean, but its later rows are compared
    with that mean too. A row has zero advantage where the first visits to its bin have equal returns-to-go, or are of
    one trajectory alone, and where the members of its group alive at t have equal ones, or it is alone there.

    Args:
        to_go: G_t, [T, M, N].
        bins: int64 [T, M, N], ids from 0 within each member (`time_bins`, `state_bins`); groups may share a bin.
        group: int64 [M, N].
        valid: bool [T, M, N].
    """
    summary = summarise_bins(to_go, bins, first_visits(bins, valid))
    nothing = summary.degenerate | summarise_groups(to_go, group, valid).degenerate | ~valid
    return (to_go - summary.mean).masked_fill(nothing, 0.0)


def time_bins(group: Tensor, time: int) -> Tensor:
    """One bin for each (group, t): group int64 [M, N] -> int64 [T, M, N]."""
    return group + (group.max() + 1) * torch.arange(time, device=group.device)[:, None, None]


def state_bins(obs: Tensor, resolution: float) -> Tensor:
    """One bin for each state, its numbers rounded to multiples of `resolution`: obs [T, M, N, D] -> int64 [T, M, N]."""
    bins = torch.zeros(obs.shape[:-1], dtype=torch.int64, device=obs.device)
    for number in (obs / resolution).round().unbind(-1):  # splitting bins in turn beats unique(dim=0) on whole states
        level = number.unique(return_inverse=True)[1]
        bins = (bins * (level.max() + 1) + level).unique(return_inverse=True)[1]
    return bins


def scaled(obs: Tensor, valid: Tensor) -> Tensor:
    """Observations [T, M, N, D] over their standard deviation among the valid rows [T, M, N] of each member."""
    rows = valid[..., None].to(obs.dtype)
    count = rows.sum((0, 2), keepdim=True).clamp(min=1.0)
    mean = (obs * rows).sum((0, 2), keepdim=True) / count
    std = (((obs - mean) * rows) ** 2).sum((0, 2), keepdim=True).div(count).sqrt()
    return obs / std.clamp(min=1e-8)


def first_visits(bins: Tensor, valid: Tensor) -> Tensor:
    """Rows in which a trajectory (an environment's column) is in a bin for the first time, bool [T, M, N]."""
    time, members, envs = bins.shape
    step = torch.arange(time, device=bins.device)[:, None, None].where(valid, time)  # [T, M, N]
    column = torch.arange(members * envs, device=bins.device).view(members, envs)
    pair = (column * (bins.max() + 1) + bins).unique(return_inverse=True)[1].flatten()  # of trajectory and bin
    first = bins.new_full((int(pair.max()) + 1,), time).scatter_reduce(0, pair, step.flatten(), "amin")
    return valid & (step == first[pair].view_as(step))


def degenerate_share(rollout: Rollout) -> Tensor:
    """Share of each member's groups in which no row has an advantage, [M]: they teach nothing. Nan if none played."""
    if rollout.group is None or rollout.advantage is None:
        raise ValueError("degenerate groups are counted on a rollout with groups and advantages")
    moves = ((rollout.advantage != 0) & rollout.valid).any(0).to(rollout.reward.dtype)  # [M, N]
    played = rollout.valid[0]
    teaches = summarise_groups(moves, rollout.group, played).total > 0
    return (~teaches & played).sum(1) / played.sum(1)
