"""Stepping speed: the native environments against Gymnasium's vector environments, in alternating runs of one script.

    python experiments/bench_envs.py
    python experiments/bench_envs.py --numpy
    python experiments/bench_envs.py --env Acrobot-v1 --lanes 64 --repeats 15 --seconds 0.5

Each environment takes random actions under the default autoreset mode, made as anyone would with `gymnasium.make_vec`:
ours, a SyncVectorEnv of Gymnasium's scalar environments, and Gymnasium's own batched CartPole. All run in this one
thread and its processor time is measured; they take turns, so that a busy neighbour slows all of them, and the median
of each counts. Where numba is installed ours is measured as it is after its first 20,000 steps, compiled; --numpy
measures it as it is before. The table is Markdown.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import cycle, islice

import gymnasium

import rlkit.envs
from rlkit.envs.native import NativeVectorEnv

WAYS = {  # column -> id prefix and how Gymnasium is to make it
    "ours": ("rlkit/", "vector_entry_point"),
    "SyncVectorEnv": ("", "sync"),
    "Gymnasium's batched": ("", "vector_entry_point"),
}
ACTIONS = 64  # sampled before the clock starts, then taken in turn
BURST = 8  # steps between two looks at the clock, which take time too


def stepper(id: str, way: str, lanes: int) -> Callable[[float], float]:
    """Make and reset an environment; return what measures its microseconds per step of all lanes."""
    prefix, mode = WAYS[way]
    envs = gymnasium.make_vec(prefix + id, num_envs=lanes, vectorization_mode=mode)
    envs.reset(seed=0)
    envs.action_space.seed(0)
    actions = cycle([envs.action_space.sample() for _ in range(ACTIONS)])
    envs.step(next(actions))

    def measure(seconds: float) -> float:
        steps, start = 0, time.process_time()
        while time.process_time() - start < seconds:
            for action in islice(actions, BURST):
                envs.step(action)
            steps += BURST
        return (time.process_time() - start) / steps * 1e6

    return measure


def medians(id: str, lanes: int, repeats: int, seconds: float) -> dict[str, float]:
    """Return the median microseconds per step of each way to make the environment."""
    ways = [way for way in WAYS if way != "Gymnasium's batched" or gymnasium.spec(id).vector_entry_point]
    measures = {way: stepper(id, way, lanes) for way in ways}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, measure in measures.items():
            times[way].append(measure(seconds))
    return {way: statistics.median(values) for way, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", nargs="+", default=list(rlkit.envs.NATIVE), choices=list(rlkit.envs.NATIVE))
    parser.add_argument("--lanes", nargs="+", type=int, default=[8, 64, 1024])
    parser.add_argument("--repeats", type=int, default=7, help="measurements of each")
    parser.add_argument("--seconds", type=float, default=0.15, help="time of one measurement")
    parser.add_argument("--numpy", action="store_true", help="without the compiled loop")
    args = parser.parse_args()
    NativeVectorEnv.compile_after = -1 if args.numpy else 0
    print("| environment | lanes | ours, us per step | SyncVectorEnv | ratio | Gymnasium's batched | ratio |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for id in args.env:
        for lanes in args.lanes:
            times = medians(id, lanes, args.repeats, args.seconds)
            ours = times.pop("ours")
            cells = [f"{value:.0f} | {value / ours:.1f}" for value in times.values()] + ["|"] * (2 - len(times))
            print(f"| {id} | {lanes} | {ours:.0f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
