"""Where the time of training goes, by stage.

    python experiments/profile_training.py members=16 algo=ppo tuned=none num_envs=4 algo.num_steps=128
    python experiments/profile_training.py env=MountainCar algo=grpo        # any settings of a run

Medians over iterations of one process, in milliseconds and as a share.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from rlkit.buffer import Batch
from rlkit.build import build_learner, to_config
from rlkit.gradient import Differentiated, Gradient
from rlkit.job import use_threads
from rlkit.mlp import ByHand
from rlkit.optimizer import Adam
from rlkit.train import compose

ITERATIONS = 20
WARM_UP = 3
STAGES = (
    "collect",
    "of it environments",
    "estimate",
    "update",
    "of it networks",
    "of it losses",
    "of it Adam",
    "measure",
)


class Watch:
    """Adds up the time of calls by stage, iteration by iteration."""

    def __init__(self) -> None:
        self.now: dict[str, float] = defaultdict(float)
        self.iterations: list[dict[str, float]] = []

    def watch(self, owner: Any, name: str, stage: str) -> None:
        """Add the time of `owner.name` to a stage."""
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.now[stage] += time.perf_counter() - start

        setattr(owner, name, timed)

    def end(self) -> None:
        """Close an iteration."""
        self.iterations.append(dict(self.now))
        self.now.clear()


def main() -> None:
    config = to_config(compose([*sys.argv[1:], "total_steps=1000000000", "processes=1"])[0])
    use_threads()
    learner = build_learner(config)
    watch = Watch()
    watch.watch(learner.collector, "collect", "collect")
    watch.watch(learner.collector.envs, "step", "of it environments")
    watch.watch(learner, "estimate", "estimate")
    watch.watch(learner, "update", "update")
    watch.watch(learner, "measure", "measure")
    watch.watch(Adam, "step", "of it Adam")
    for name in ("forward", "backward"):
        watch.watch(ByHand, name, "passes")
    gradient = Gradient.__call__

    def timed(self: Gradient, batch: Batch) -> Differentiated:
        start, passes = time.perf_counter(), watch.now["passes"]
        found = gradient(self, batch)
        passes = watch.now["passes"] - passes
        watch.now["of it networks"] += passes
        watch.now["of it losses"] += time.perf_counter() - start - passes
        return found

    Gradient.__call__ = timed  # type: ignore[method-assign]
    for _ in range(WARM_UP):
        learner.iterate()
    watch.now.clear()
    for _ in range(ITERATIONS):
        before = time.perf_counter()
        learner.iterate()
        watch.now["all"] = time.perf_counter() - before
        watch.end()
    learner.close()
    total = statistics.median(x["all"] for x in watch.iterations)
    print(f"{config.env.name} {config.algo.name}, {config.members} members: {1e3 * total:.1f} ms an iteration")
    for stage in STAGES:
        seconds = statistics.median(x.get(stage, 0.0) for x in watch.iterations)
        print(f"  {stage:20} {1e3 * seconds:8.2f} ms {100 * seconds / total:5.1f} %")


if __name__ == "__main__":
    main()
