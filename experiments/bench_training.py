"""Training speed: rlkit against Stable-Baselines3 and SBX at the same PPO settings, in alternating runs of one script.

    python experiments/bench_training.py                      # everything, about half an hour; needs the extra `oracle`
    python experiments/bench_training.py --only steps --repeats 5 --seconds 3
    python experiments/bench_training.py --sbx                # SBX too, in a virtual environment that is made for it

Each measurement is a process of its own that warms up, then measures the whole loop: stepping, update and default
logging. Stable-Baselines3 is measured with one and with two threads, and the better figure counts. Medians and ratios
are printed as Markdown; one absolute figure of a shared machine means little.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

WARM_UP = 10_240  # steps of each member before the clock starts
SETTINGS = ["algo=ppo", "tuned=none", "algo.num_epochs=4", "algo.num_minibatches=4", "algo.num_steps=128"]
ZOO = {"num_envs": 8, "steps": 32, "epochs": 20, "gamma": 0.98, "gae_lambda": 0.8, "learning_rate": 1e-3, "clip": 0.2}
HIDDEN = 64


def rlkit_steps(
    members: int, num_envs: int, seconds: float, overrides: Sequence[str] = SETTINGS, more: Sequence[str] = ()
) -> dict[str, float]:
    """Training steps per second of all members together, logging included."""
    from rlkit.metrics import Logger
    from rlkit.session import Session
    from rlkit.train import compose, prepare

    settings = [*overrides, *more, f"members={members}", f"num_envs={num_envs}", "total_steps=1000000000"]
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare(compose(settings)[0])
        config, learner = prepared.config, prepared.learner
        logger = Logger(Path(folder), members=members, total_steps=config.total_steps, title="", show="off")
        session = Session(
            learner=learner,
            evaluator=prepared.evaluator,
            logger=logger,
            folder=Path(folder),
            eval_every=0,
            eval_episodes=1,
            checkpoint_every=0,
            log_every=config.log.every,
            threshold=None,
            stop_when_solved=False,
        )
        warm = max(WARM_UP, 3 * 128 * num_envs)
        session.train(lambda: int(learner.env_steps.min()) >= warm)
        before, start = int(learner.env_steps.sum()), time.perf_counter()
        session.train(lambda: time.perf_counter() - start > seconds)
        speed = (int(learner.env_steps.sum()) - before) / (time.perf_counter() - start)
        logger.close()
        prepared.close()
    return {"steps_per_second": speed, "megabytes": peak_memory()}


def sb3_model(num_envs: int, zoo: bool = False, library: str = "stable_baselines3") -> Any:
    """PPO of Stable-Baselines3, or of SBX, which has the same interface."""
    from importlib import import_module

    from stable_baselines3.common.env_util import make_vec_env

    kind = import_module(library).PPO
    envs = make_vec_env("CartPole-v1", num_envs, seed=0)
    device = {"device": "cpu"} if library == "stable_baselines3" else {}
    if not zoo:
        return kind("MlpPolicy", envs, n_steps=128, n_epochs=4, batch_size=32 * num_envs, seed=0, **device)
    return kind(
        "MlpPolicy",
        envs,
        n_steps=ZOO["steps"],
        n_epochs=ZOO["epochs"],
        batch_size=int(ZOO["steps"] * ZOO["num_envs"]),
        gamma=ZOO["gamma"],
        gae_lambda=ZOO["gae_lambda"],
        ent_coef=0.0,
        learning_rate=lambda left: left * ZOO["learning_rate"],
        clip_range=lambda left: left * ZOO["clip"],
        seed=0,
        **device,
    )


def sb3_steps(num_envs: int, seconds: float, threads: int, library: str = "stable_baselines3") -> dict[str, float]:
    """Training steps per second of Stable-Baselines3's or SBX's PPO."""
    import torch

    torch.set_num_threads(threads)
    model = sb3_model(num_envs, library=library)
    model.learn(max(WARM_UP, 3 * 128 * num_envs))
    start = time.perf_counter()
    model.learn(128 * num_envs)
    once = time.perf_counter() - start
    steps = int(128 * num_envs * max(seconds / once, 1))
    start, before = time.perf_counter(), model.num_timesteps
    model.learn(steps, reset_num_timesteps=False)
    return {
        "steps_per_second": float(model.num_timesteps - before) / (time.perf_counter() - start),
        "megabytes": peak_memory(),
    }


def rlkit_zoo(members: int, seconds: float) -> dict[str, float]:
    """Seconds that `members` members need for 100,000 steps each with RL Zoo's settings, from their speed."""
    overrides = [
        "algo=ppo",
        "tuned=none",
        f"algo.num_steps={ZOO['steps']}",
        f"algo.num_epochs={ZOO['epochs']}",
        "algo.num_minibatches=1",
        f"algo.gamma={ZOO['gamma']}",
        f"algo.gae_lambda={ZOO['gae_lambda']}",
        f"algo.learning_rate={ZOO['learning_rate']}",
        "algo.schedule.learning_rate.name=linear",
        "algo.schedule.clip.name=linear",
    ]
    speed = rlkit_steps(members, int(ZOO["num_envs"]), seconds, overrides)["steps_per_second"]
    return {"seconds": 100_000 * members / speed}


def sb3_zoo(seconds: float, threads: int) -> dict[str, float]:
    """Seconds that one Stable-Baselines3 run needs for 100,000 steps with RL Zoo's settings, from its speed."""
    import torch

    torch.set_num_threads(threads)
    model = sb3_model(int(ZOO["num_envs"]), zoo=True)
    model.learn(2_560)
    start, before = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        model.learn(5_120)
        before += 5_120
    return {"seconds": 100_000 * (time.perf_counter() - start) / before}


def rlkit_solved() -> dict[str, float]:
    """Nothing but the settings: the clock is the parent's, from process start (see `main`)."""
    import rlkit

    with tempfile.TemporaryDirectory() as folder:
        settings = {"eval.every": 5_000, "eval.episodes": 20, "checkpoint.every": 0, "stop_when_solved": True}
        run = rlkit.run(env="CartPole", algo="ppo", folder=Path(folder) / "run", show="off", **settings)
        return {"return": run.eval_return[0], "steps": float(run.summary["env_steps"][0])}


def sb3_solved(threads: int) -> dict[str, float]:
    """The same with Stable-Baselines3: RL Zoo's settings with its own early stop, then the same check."""
    import torch
    from stable_baselines3.common.callbacks import EvalCallback, StopTrainingOnRewardThreshold
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    torch.set_num_threads(threads)
    model = sb3_model(int(ZOO["num_envs"]), zoo=True)
    evaluation = make_vec_env("CartPole-v1", 8, seed=1_000)
    stop = StopTrainingOnRewardThreshold(475, verbose=0)
    callback = EvalCallback(
        evaluation, callback_on_new_best=stop, n_eval_episodes=20, eval_freq=5_000 // 8, verbose=0, warn=False
    )
    model.learn(100_000, callback=callback)
    mean, _ = evaluate_policy(model, make_vec_env("CartPole-v1", 8, seed=2_000), 100)
    return {"return": float(mean), "steps": float(model.num_timesteps)}


def product_rate(seconds: float) -> dict[str, float]:
    """GFLOP/s of one core in float32 products [128, 64] x [64, 64], the better of NumPy's and torch's."""
    import numpy as np
    import torch
    from threadpoolctl import threadpool_limits

    torch.set_num_threads(1)
    x, w = np.random.randn(16, 128, 64).astype(np.float32), np.random.randn(16, 64, 64).astype(np.float32)
    tx, tw = torch.from_numpy(x), torch.from_numpy(w)
    rates = []
    with threadpool_limits(1, "blas"):
        for product in (lambda: np.matmul(x, w), lambda: torch.bmm(tx, tw)):
            product()
            start, count = time.perf_counter(), 0
            while time.perf_counter() - start < seconds / 2:
                product()
                count += 1
            rates.append(count * 2 * 16 * 128 * 64 * 64 / (time.perf_counter() - start) / 1e9)
    return {"gflops": max(rates)}


def flops_per_step(epochs: int = 4, obs: int = 4, actions: int = 2, width: int = HIDDEN) -> float:
    """Floating-point operations of the matrix products of one training step: acting, values, and the update."""
    layers = [[(obs, width), (width, width), (width, out)] for out in (actions, 1)]
    forward = [sum(2 * a * b for a, b in network) for network in layers]
    backward = sum(forward) * 2 - sum(2 * a * b for a, b in (network[0] for network in layers))
    return 2 * forward[0] + forward[1] + epochs * (sum(forward) + backward)


def peak_memory() -> float:
    """Peak memory of this process and of its largest child, MB."""
    own, children = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return (own + children) / 1024


def measure(job: dict[str, Any], python: str = sys.executable) -> dict[str, float]:
    """Run one job in a process of its own; `wall` is its time from start to end."""
    start = time.perf_counter()
    done = subprocess.run([python, __file__, "--job", json.dumps(job)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the measurement {job} failed:\n{done.stderr}")
    return {**json.loads(done.stdout.splitlines()[-1]), "wall": time.perf_counter() - start}


def rounds(jobs: dict[str, dict[str, Any]], repeats: int, pythons: dict[str, str]) -> dict[str, list[dict[str, float]]]:
    """Measure all jobs in turn, `repeats` times."""
    results: dict[str, list[dict[str, float]]] = {name: [] for name in jobs}
    for _ in range(repeats):
        for name, job in jobs.items():
            results[name].append(measure(job, pythons.get(name, sys.executable)))
    return results


def median_ratio(values: list[float], base: list[float]) -> float:
    """Median of the ratios within each round."""
    return statistics.median(value / b for value, b in zip(values, base, strict=True))


def steps_table(repeats: int, seconds: float, sbx: str | None) -> None:
    """Steps per second at 4, 64 and 1,024 environments, and of 4, 16 and 64 members of 4."""
    pythons: dict[str, str] = {}
    for envs, members in ((4, (1, 4, 16, 64)), (64, (1,)), (1024, (1,))):
        jobs: dict[str, dict[str, Any]] = {
            f"Stable-Baselines3, {threads} thread{'s' * (threads > 1)}": {
                "kind": "sb3_steps",
                "num_envs": envs,
                "seconds": seconds,
                "threads": threads,
            }
            for threads in (1, 2)
        }
        if sbx:
            jobs["SBX"] = {**jobs["Stable-Baselines3, 1 thread"], "library": "sbx"}
            pythons["SBX"] = sbx
        for number in members:
            name = f"rlkit, {number} member{'s' * (number > 1)}"
            jobs[name] = {"kind": "rlkit_steps", "members": number, "num_envs": envs, "seconds": seconds}
        if envs == 1024:
            jobs["products alone"] = {"kind": "product_rate", "seconds": seconds}
        results = rounds(jobs, repeats, pythons)
        rates = results.pop("products alone", [])
        speeds = {name: [r["steps_per_second"] for r in rs] for name, rs in results.items()}
        base = [max(pair) for pair in zip(*list(speeds.values())[:2], strict=True)]
        print(f"\n| CartPole-v1, {envs:,} environments | steps/s | ratio | memory |\n|---|---:|---:|---:|")
        for name, values in speeds.items():
            memory = statistics.median(r["megabytes"] for r in results[name])
            row = f"{statistics.median(values):,.0f} | {median_ratio(values, base):.2f} | {memory:,.0f} MB"
            print(f"| {name} | {row} |", flush=True)
        if rates:
            share = [
                s * flops_per_step() / 1e9 / r["gflops"] for s, r in zip(speeds["rlkit, 1 member"], rates, strict=True)
            ]
            rate = statistics.median(r["gflops"] for r in rates)
            print(
                f"\nOne core's products of 64-wide layers: {rate:.0f} GFLOP/s; one member reaches "
                f"{100 * statistics.median(share):.0f} % of that."
            )


def zoo_table(repeats: int, seconds: float) -> None:
    """Twenty members with RL Zoo's settings against one Stable-Baselines3 run."""
    jobs: dict[str, dict[str, Any]] = {
        f"one Stable-Baselines3 run, {threads} thread{'s' * (threads > 1)}": {
            "kind": "sb3_zoo",
            "seconds": seconds,
            "threads": threads,
        }
        for threads in (1, 2)
    }
    jobs["twenty members of rlkit"] = {"kind": "rlkit_zoo", "members": 20, "seconds": seconds}
    results = {name: [r["seconds"] for r in rs] for name, rs in rounds(jobs, repeats, {}).items()}
    base = [min(pair) for pair in zip(*list(results.values())[:2], strict=True)]
    print("\n| CartPole-v1, RL Zoo's settings, 100,000 steps | seconds | ratio |\n|---|---:|---:|")
    for name, values in results.items():
        print(f"| {name} | {statistics.median(values):.1f} | {median_ratio(values, base):.2f} |", flush=True)


def solved_table(repeats: int) -> None:
    """From process start to a solved CartPole."""
    jobs: dict[str, dict[str, Any]] = {
        "Stable-Baselines3, RL Zoo's settings, stops when solved": {"kind": "sb3_solved", "threads": 1},
        "rlkit, its tuned settings, stops when solved": {"kind": "rlkit_solved"},
    }
    results = rounds(jobs, repeats, {})
    base = [r["wall"] for r in next(iter(results.values()))]
    print("\n| from process start to a solved CartPole-v1 | seconds | ratio | steps | return of 100 episodes |")
    print("|---|---:|---:|---:|---:|")
    for name, rs in results.items():
        walls = [r["wall"] for r in rs]
        steps, low = statistics.median(r["steps"] for r in rs), min(r["return"] for r in rs)
        row = f"{statistics.median(walls):.1f} | {median_ratio(walls, base):.2f} | {steps:,.0f} | {low:.1f} or more"
        print(f"| {name} | {row} |", flush=True)


def scale_table(seconds: float) -> None:
    """How speed and memory of one process grow with members, environments and width; one measurement each."""
    grids = {
        "members": [(m, 4, 64) for m in (1, 4, 16, 64, 256)],
        "environments": [(1, n, 64) for n in (1, 16, 256, 4096)],
        "width": [(1, 64, w) for w in (64, 128, 256, 512)],
    }
    print("\n| grows | members | environments | width | us per step | ns per thousand operations | memory |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for what, grid in grids.items():
        for members, envs, width in grid:
            more = [f"policy.hidden=[{width},{width}]", "processes=1"]
            job = {"kind": "rlkit_steps", "members": members, "num_envs": envs, "seconds": seconds, "more": more}
            found = measure(job)
            time_of_step = 1e6 / found["steps_per_second"]
            per_thousand = 1e6 * time_of_step / flops_per_step(width=width)
            cells = f"{time_of_step:.1f} | {per_thousand:.0f} | {found['megabytes']:,.0f} MB"
            print(f"| {what} | {members} | {envs:,} | {width} | {cells} |", flush=True)


def sbx_python() -> str:
    """Make a virtual environment with SBX and return its interpreter."""
    folder = Path(tempfile.gettempdir()) / "rlkit-bench-sbx"
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", "sbx-rl", "torch==2.13.0"], check=True)
    return str(python)


KINDS: dict[str, Callable[..., dict[str, float]]] = {
    kind.__name__: kind for kind in (rlkit_steps, sb3_steps, rlkit_zoo, sb3_zoo, rlkit_solved, sb3_solved, product_rate)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--only", choices=("steps", "zoo", "solved", "scale"), help="one of the four tables")
    parser.add_argument("--sbx", action="store_true", help="measure SBX too")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        job = json.loads(args.job)
        print(json.dumps(KINDS[job.pop("kind")](**job)))
        return
    if args.only in (None, "steps"):
        steps_table(args.repeats, args.seconds, sbx_python() if args.sbx else None)
    if args.only in (None, "zoo"):
        zoo_table(args.repeats, args.seconds)
    if args.only in (None, "solved"):
        solved_table(args.repeats)
    if args.only in (None, "scale"):
        scale_table(args.seconds)
    print(
        f"\nMedians of {args.repeats} alternating runs; ratios are to the better Stable-Baselines3 of the same round."
    )


if __name__ == "__main__":
    main()
