"""How far advantages are from Monte Carlo ones, and what a regularised critic changes (D7 of docs/stabilizers.md).

  python experiments/advantage_error.py --csv experiments/stability/advantage_error.csv

At five points of a run of PPO on CartPole some states of the rollout are restored, and the policy that met them plays
on from there many times: V(s), and Q(s, a) with the action it took. A = Q - V is what an advantage estimates. There is
no time limit, as there is none for PPO, which bootstraps there; after 600 steps the rest is discounted away.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stability_study import SETTINGS

from rlkit.buffer import Batch
from rlkit.build import build_learner, to_config
from rlkit.collect import action_noise
from rlkit.comparison import Estimate, bootstrap
from rlkit.envs.cartpole import cartpole
from rlkit.files import write_csv
from rlkit.job import use_threads
from rlkit.link import Link
from rlkit.loop import Learner
from rlkit.overrides import literal
from rlkit.policy import Policy
from rlkit.train import compose

POINTS = (0.1, 0.3, 0.5, 0.7, 0.9)  # of the run
STATES, REPEATS, HORIZON = 16, 16, 600  # states of a member at each point, times each is played on from, steps
TASKS: dict[str, dict[str, Any]] = {"tuned": {"env": "CartPole", "algo": "ppo"}, "falling": SETTINGS["CartPole_ppo"]}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "value_l2 1e-4": {"stabilizer": ["value_l2"], "stabilizer.value_l2.coef": 1e-4},
    "value_l2 1e-3": {"stabilizer": ["value_l2"], "stabilizer.value_l2.coef": 1e-3},
    "value_l2 1e-2": {"stabilizer": ["value_l2"], "stabilizer.value_l2.coef": 1e-2},
    "running": {"policy.value_normalization": "running"},
    "popart": {"policy.value_normalization": "popart"},
    "critic_hidden=[16,16]": {"policy.critic_hidden": [16, 16]},
}


class Recorder(Link):
    """Keeps the batch that the update is about to see."""

    def batch(self, batch: Batch) -> Batch:
        self.seen = batch
        return batch


def played(
    policy: Policy, state: np.ndarray, action: np.ndarray | None, gamma: float, rngs: Sequence[np.random.Generator]
) -> np.ndarray:
    """Return discounted returns of the policy from states.

    Args:
        state: [M, L, 4] of M members' L lanes.
        action: int [M, L], the first of each lane, or None: the policy's own.
    """
    pi, (members, lanes, _) = policy.acting(), state.shape
    total, alive, discount = np.zeros((members, lanes)), np.ones((members, lanes), bool), 1.0
    noise = action_noise(policy, rngs, lanes)
    x = state.astype(np.float64)
    for t in range(HORIZON):
        if t or action is None:
            action = pi(x.astype(np.float32)).sample(next(noise))[..., 0]
        after, reward, terminated = cartpole(x.reshape(-1, 4).T, action.ravel().astype(np.int64))
        total += discount * alive * reward.reshape(members, lanes)
        alive &= ~terminated.reshape(members, lanes)
        x = np.where(alive[..., None], after.T.reshape(x.shape), x)
        discount *= gamma
        if not alive.any():
            break
    return total


def errors(policy: Policy, batch: Batch, gamma: float, rngs: Sequence[np.random.Generator]) -> np.ndarray:
    """Return mean squared errors over the states, of advantages and of values, [2, M], less that of Monte Carlo."""
    members, height = batch.members, batch.height
    rows = torch.from_numpy(np.stack([rng.choice(height, STATES, replace=False) for rng in rngs]))
    picked = batch.take(rows)
    repeated = np.repeat(picked.obs.numpy(), REPEATS, 1)  # [M, STATES * REPEATS, 4]
    action = np.repeat(picked.action[..., 0].numpy(), REPEATS, 1)
    shape = (members, STATES, REPEATS)
    q, v = (played(policy, repeated, first, gamma, rngs).reshape(shape) for first in (action, None))
    true = q.mean(2) - v.mean(2)
    noise_of_v = v.var(2, ddof=1) / REPEATS
    wrong = (picked.advantage.numpy() - true) ** 2 - q.var(2, ddof=1) / REPEATS - noise_of_v
    return np.stack([wrong, (picked.value.numpy() - v.mean(2)) ** 2 - noise_of_v]).mean(2)


def measure(task: str, variant: str, seeds: range) -> np.ndarray:
    """Return root mean squared errors over the run, of advantages and of values, [2, S]; nan below what can be told."""
    settings = {**TASKS[task], **VARIANTS[variant], "seed": seeds.start, "members": len(seeds), "processes": 1}
    config = to_config(compose([f"{name}={literal(x)}" for name, x in settings.items()])[0])
    learner, recorder, rngs = build_learner(config), Recorder(), [np.random.default_rng(seed) for seed in seeds]
    learner.chain.links["recorder"] = recorder
    found, points = [], iter(POINTS)
    point: float | None = next(points)
    while bool(learner.running.any()):
        due = point is not None and _progress(learner) >= point
        policy = learner.policy.frozen_copy() if due else None
        learner.iterate(detail=False)
        if policy is not None:
            found.append(errors(policy, recorder.seen, config.algo.gamma, rngs))
            point = next(points, None)
    learner.close()
    with np.errstate(invalid="ignore"):
        return np.sqrt(np.mean(found, 0))


def _progress(learner: Learner) -> float:
    return float(learner.env_steps[0]) / learner.total_steps


def change(values: np.ndarray, plain: np.ndarray) -> Estimate:
    """Return the interquartile mean over seeds of value / plain - 1, in percent."""
    return bootstrap([100 * (values / plain - 1)])


def table(tasks: Sequence[str], variants: Sequence[str], seeds: range) -> list[list[str]]:
    """A row for each task and variant."""
    rows = [["task", "variant", "advantage_error", "change_percent", "low", "high", "value_error", "change_percent"]]
    rows[0] += ["low", "high"]
    for task in tasks:
        plain = measure(task, "plain", seeds)
        for variant in variants:
            values = plain if variant == "plain" else measure(task, variant, seeds)
            cells = [task, variant]
            for own, other in zip(values, plain, strict=True):
                moved = change(own, other)
                cells += [f"{bootstrap([own]).value:.2f}", *(f"{x:.0f}" for x in (moved.value, moved.low, moved.high))]
            print("  ".join(f"{cell:>22}" for cell in cells), flush=True)
            rows.append(cells)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seed", type=int, default=100, help="first seed (100)")
    parser.add_argument("--members", type=int, default=20, help="number of seeds (20)")
    parser.add_argument("--csv", type=Path, help="also write the table to this file")
    args = parser.parse_args()
    use_threads()
    rows = table(args.tasks, args.variants, range(args.seed, args.seed + args.members))
    if args.csv:
        write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
