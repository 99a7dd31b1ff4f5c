"""Learning from rows that another policy collected: old ones (replay), or those of a copy that lags (hybrid policies).

Such columns of a rollout are marked `stale`. Three policies meet on them: mu collected the row, pi_k is the learner's
as this update begins, pi the one being improved. mu is corrected for once, by a truncated weight before the update;
what the update does, its clip and its KL, is measured from pi_k, as on fresh rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlkit.buffer import Rollout, flat_rows, gather_rows, valid_rows
from rlkit.group_relative import discounted_sum

if TYPE_CHECKING:
    from rlkit.policy import Policy


@torch.no_grad()
def present(rollout: Rollout, policy: Policy, rho_max: float) -> Rollout:
    """Turn stale columns into columns of the learner's present policy, with a weight for what that leaves wrong.

        rho = min(rho_max, pi_k(a | s) / mu(a | s)),   loss = -rho min(r A, clip(r) A),   r = pi / pi_k

    rho multiplies `importance` and is kept as `ratio`; `log_prob` and `old_*` become those of pi_k, so r begins at 1
    and KL(old || new) is that of this update. This is the generalised objective of GePPO (Queeney et al. 2021, section
    4) with the clip range relative to pi_k / mu where theirs is absolute; the truncation is that of V-trace (Espeholt
    et al. 2018; Munos et al. 2016), which trades variance for bias.

    Args:
        rollout: with raw observations, and log_prob of the behaviour at the offset that it acted with.
        rho_max: at least 1.

    Returns:
        The rollout; as it is where nothing is stale.
    """
    if rollout.stale is None:
        return rollout
    rows, count = valid_rows(rollout.valid & rollout.stale)
    flat = flat_rows(rows, rollout.valid.shape[2])
    real = (torch.arange(rows.shape[1], device=rows.device) < count[:, None]).flatten()

    def put(x: Tensor, new: Tensor) -> Tensor:  # new [M, B, ...] into those rows of a copy of x [T, M, N, ...]
        y = x.flatten(0, 2).clone()
        y[flat[real]] = new.flatten(0, 1)[real]
        return y.view(x.shape)

    obs, action, behaviour = (gather_rows(x, rows, flat) for x in (rollout.obs, rollout.action, rollout.log_prob))
    offset = None if rollout.offset is None else gather_rows(rollout.offset, rows, flat)
    dist = policy.distribution(obs, offset)
    log_prob = dist.log_prob(action)
    ratio = put(torch.ones_like(rollout.reward), (log_prob - behaviour).exp().clamp(max=rho_max))
    return rollout.replace(
        log_prob=put(rollout.log_prob, log_prob),
        old={name: put(rollout.old[name], x) for name, x in dist.params.items()},
        ratio=ratio,
        importance=ratio if rollout.importance is None else rollout.importance * ratio,
    )


def v_trace(delta: Tensor, carry: Tensor, ratio: Tensor, n: int | None = None) -> Tensor:
    """Advantages of the actions taken, by V-trace from the next state on (Espeholt et al. 2018, section 4.1).

        x_t = rho_t delta_t + gamma c_t x_{t+1},   rho_t = min(rho_max, pi_k / mu),   c_t = lambda min(1, pi_k / mu)
        A_t = delta_t + gamma lambda x_{t+1}

    x_t is V-trace's v_t - V(s_t). A_t is r_t + gamma ((1 - lambda) V(s') + lambda v_{t+1}) - V(s_t): that form, which
    rlax has too, rather than the paper's r_t + gamma v_{t+1} - V(s_t), since it is `gae` to the last bit where all
    ratios are one. The ratio of the row itself is not in A_t but in the row's weight, and so the critic's target is
    V + A_t: the squared error weighed by rho_t has the gradient -rho_t A_t, with rho_max = 1 that of V-trace's target,
    -x_t. The target V + x_t under that weight would count the ratio twice.

    Args:
        delta: r_t + gamma V(s') - V(s_t), [T, M, N].
        carry: gamma lambda, or 0 where an episode ends, [T, M, N].
        ratio: rho, [T, M, N].
        n: cut the sum after n residuals, as the n-step return does (lambda is 1 there); None: never.

    Returns:
        A, [T, M, N], in units of return.
    """
    corrected, trace = ratio * delta, carry * ratio.clamp(max=1.0)
    if n is None:
        return delta + carry * _next(discounted_sum(corrected, trace))
    x = torch.zeros_like(delta)
    for _ in range(min(n, len(delta)) - 1):
        x = corrected + trace * _next(x)
    return delta + carry * _next(x)


def _next(x: Tensor) -> Tensor:
    """x_{t+1} in row t, and 0 in the last; [T, ...]."""
    return torch.cat([x[1:], torch.zeros_like(x[:1])])
