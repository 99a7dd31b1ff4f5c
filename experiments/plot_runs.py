"""Draw runs side by side from their `metrics.csv`: return, KL to the old policy, clipped ratios, entropy.

    python experiments/plot_runs.py docs/cartpole.png PPO=runs/CartPole/ppo/... GRPO=runs/CartPole/grpo/...

A line is the interquartile mean over a run's members, the band their interquartile range. Needs the extra `report`.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from pathlib import Path

import numpy as np

PANELS = {
    "eval/return": "return, deterministic policy",
    "kl/old": "KL to the policy at collection (nats)",
    "ratio/clipped": "share of ratios clipped",
    "entropy/mean": "entropy (nats)",
}


def read(folder: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return for each scalar the steps [L] and the members' values [L, M] of its entries."""
    entries: dict[str, list[tuple[float, list[float]]]] = defaultdict(list)
    with (folder / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            members = [row[name] for name in row if name.startswith("member_")] or [row["value"]]
            entries[row["name"]].append((float(row["step"]), [float(cell) if cell else np.nan for cell in members]))
    return {name: (np.array([s for s, _ in rows]), np.array([v for _, v in rows])) for name, rows in entries.items()}


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from rlkit.interquartile import interquartile_mean

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("runs", nargs="+", metavar="LABEL=FOLDER")
    args = parser.parse_args()
    runs = {label: read(Path(folder)) for label, _, folder in (run.partition("=") for run in args.runs)}
    figure, axes = plt.subplots(1, len(PANELS), figsize=(15, 3.4), layout="constrained")
    for axis, (name, title) in zip(axes, PANELS.items(), strict=True):
        for label, metrics in runs.items():
            if name not in metrics:
                continue
            steps, values = metrics[name]
            (line,) = axis.plot(steps / 1000, interquartile_mean(values), label=label, linewidth=1.8)
            low, high = np.nanpercentile(values, [25, 75], axis=1)
            axis.fill_between(steps / 1000, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
        axis.set(title=title, xlabel="environment steps of a member (thousands)")
        axis.title.set_fontsize(10)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, loc="lower right")
    figure.savefig(args.picture, dpi=110)


if __name__ == "__main__":
    main()
