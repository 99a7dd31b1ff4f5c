"""Start-up: seconds from process start to the end of the first update, against importing what any such tool needs.

    python experiments/bench_startup.py --repeats 5

The command `python -m rlkit.train env=CartPole algo=grpo` runs as it is and is ended after its first update; the other
process imports torch, gymnasium and hydra. Both alternate; medians are printed.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time

FIRST_UPDATE = """
import os, sys
import rlkit.loop
iterate = rlkit.loop.Learner.iterate
def once(self, detail=True):
    iterate(self, detail)
    os._exit(0)
rlkit.loop.Learner.iterate = once
from rlkit.train import main
sys.argv = ["rlkit.train", "env=CartPole", "algo=grpo"]
main()
"""
COMMANDS = {"first update": FIRST_UPDATE, "imports": "import torch, gymnasium, hydra"}


def seconds(code: str) -> float:
    """Run code in a new process and an empty directory, and return how long it took."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(repeats):
        for name, code in COMMANDS.items():
            times[name].append(seconds(code))
    for name, values in times.items():
        print(f"{name}: {statistics.median(values):.2f} s")
    more = statistics.median(a - b for a, b in zip(*times.values(), strict=True))
    print(f"first update after the imports: {more:.2f} s (median of {repeats} alternating pairs)")


if __name__ == "__main__":
    main()
