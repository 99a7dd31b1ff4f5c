"""Training speed: rlkit against Stable-Baselines3 at the same PPO settings, in alternating runs of one script.

    python experiments/bench_training.py                 # needs the extra `oracle` (stable-baselines3)
    python experiments/bench_training.py --repeats 9 --seconds 6

Each measurement is a process of its own that warms up, then counts training steps per second of the whole loop:
stepping, update and default logging. Stable-Baselines3 is measured with one and with two threads, and the better figure
of the two counts. Medians and ratios are printed as Markdown; one absolute figure of a shared machine means little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WARM_UP = 10_240  # steps of each environment set before the clock starts
SETTINGS = ["algo=ppo", "tuned=none", "algo.num_epochs=4", "algo.num_minibatches=4", "algo.num_steps=128"]


def rlkit_speed(members: int, num_envs: int, seconds: float, logging: bool) -> float:
    """Training steps per second of all members together."""
    from rlkit.build import build_learner, to_config
    from rlkit.metrics import Logger
    from rlkit.session import Session
    from rlkit.train import compose, use_threads

    rollout = 128 * num_envs
    config = to_config(compose([*SETTINGS, f"members={members}", f"num_envs={num_envs}", "total_steps=1000000000"])[0])
    use_threads(config)
    with tempfile.TemporaryDirectory() as folder:
        logger = Logger(Path(folder), members=members, total_steps=config.total_steps, title="", show="off")
        learner = build_learner(config)
        session = Session(
            learner=learner,
            evaluator=None,  # type: ignore[arg-type]  # training alone is measured
            logger=logger,
            folder=Path(folder),
            eval_every=0,
            eval_episodes=1,
            checkpoint_every=0,
            log_every=config.log.every if logging else 0,
            threshold=None,
            stop_when_solved=False,
        )
        learner.total_steps = max(WARM_UP // num_envs * num_envs, 3 * rollout)
        session.train()
        before, start = int(learner.env_steps.sum()), time.perf_counter()
        learner.total_steps = 10**9
        session.train(lambda: time.perf_counter() - start > seconds)
        speed = (int(learner.env_steps.sum()) - before) / (time.perf_counter() - start)
        logger.close()
    return speed


def sb3_speed(num_envs: int, seconds: float, threads: int) -> float:
    """Training steps per second of Stable-Baselines3's PPO."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(threads)
    batch = 128 * num_envs // 4
    envs = make_vec_env("CartPole-v1", num_envs)
    model = PPO("MlpPolicy", envs, n_steps=128, n_epochs=4, batch_size=batch, device="cpu")
    warm = max(WARM_UP, 128 * num_envs)
    model.learn(warm)
    start = time.perf_counter()
    model.learn(128 * num_envs)
    once = time.perf_counter() - start
    steps = int(128 * num_envs * max(seconds / once, 1))
    start, before = time.perf_counter(), model.num_timesteps
    model.learn(steps, reset_num_timesteps=False)
    return float(model.num_timesteps - before) / (time.perf_counter() - start)


def measure(job: dict[str, object], seconds: float) -> float:
    """Run one job in a process of its own."""
    command = [sys.executable, __file__, "--job", json.dumps({**job, "seconds": seconds})]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the measurement {job} failed:\n{done.stderr}")
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--num-envs", type=int, default=4)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        job = json.loads(args.job)
        kind = job.pop("kind")
        print((rlkit_speed if kind == "rlkit" else sb3_speed)(**job))
        return
    envs = args.num_envs
    jobs: dict[str, dict[str, object]] = {
        "Stable-Baselines3, 1 thread": {"kind": "sb3", "num_envs": envs, "threads": 1},
        "Stable-Baselines3, 2 threads": {"kind": "sb3", "num_envs": envs, "threads": 2},
        "rlkit, 1 member": {"kind": "rlkit", "num_envs": envs, "members": 1, "logging": True},
        "rlkit, 1 member, no logging": {"kind": "rlkit", "num_envs": envs, "members": 1, "logging": False},
        "rlkit, 16 members": {"kind": "rlkit", "num_envs": envs, "members": 16, "logging": True},
    }
    speeds: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(args.repeats):
        for name, job in jobs.items():
            speeds[name].append(measure(job, args.seconds))
    baseline = [max(pair) for pair in zip(*list(speeds.values())[:2], strict=True)]
    print(f"| CartPole-v1, {envs} environments, 128 steps, 4 epochs of 4 minibatches, 64x64 tanh | steps/s | ratio |")
    print("|---|---:|---:|")
    for name, values in speeds.items():
        ratio = statistics.median(value / base for value, base in zip(values, baseline, strict=True))
        print(f"| {name} | {statistics.median(values):,.0f} | {ratio:.2f} |")
    plain, logged = speeds["rlkit, 1 member, no logging"], speeds["rlkit, 1 member"]
    cost = statistics.median(1 - a / b for a, b in zip(logged, plain, strict=True))
    print(f"\nMedians of {args.repeats} alternating runs; ratios are to the better SB3 of the same round.")
    print(f"Logging takes {100 * cost:.1f} % of one member's time.")


if __name__ == "__main__":
    main()
