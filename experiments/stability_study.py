"""Which stabilisers keep a run from falling after its peak: each alone, and pairs, against the plain run.

  python experiments/stability_study.py                     the study of experiments/stability: seeds 100 to 119
  python experiments/stability_study.py --only plain recommended --settings CartPole_grpo --seed 0

Runs lie in runs/stability/SETTING/VARIANT; one that is finished is not repeated. One job a core; at the end the table.
`python -m rlkit.report runs/stability/CartPole_grpo` shows the same runs as a page.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

import rlkit
from rlkit.build import build_learner, to_config
from rlkit.comparison import FALL, bootstrap, fallen, probability_of_improvement, volatility, worst_drop
from rlkit.cores import cores
from rlkit.files import write_csv
from rlkit.interquartile import interquartile_mean
from rlkit.job import use_threads
from rlkit.loop import Learner
from rlkit.overrides import literal
from rlkit.recorded import read_metrics
from rlkit.train import compose

Overrides = dict[str, Any]

# How a fall is provoked: a constant learning rate, five or ten times the tuned one for PPO and twenty for GRPO, which
# also has two small groups and many small steps on each batch.
SETTINGS: dict[str, Overrides] = {
    "CartPole_grpo": {
        "env": "CartPole",
        "algo": "grpo",
        "total_steps": 50_000,
        "num_envs": 8,
        "algo.group_size": 4,
        "algo.num_epochs": 16,
        "algo.num_minibatches": 8,
        "algo.learning_rate": 4e-2,
        "algo.schedule.learning_rate.name": "constant",
    },
    "CartPole_ppo": {
        "env": "CartPole",
        "algo": "ppo",
        "total_steps": 61_440,
        "algo.num_epochs": 10,
        "algo.learning_rate": 2e-2,
        "algo.schedule.learning_rate.name": "constant",
        "algo.schedule.clip.name": "constant",
    },
    "Acrobot_grpo": {
        "env": "Acrobot",
        "algo": "grpo",
        "total_steps": 150_000,
        "num_envs": 8,
        "algo.group_size": 4,
        "algo.num_epochs": 16,
        "algo.num_minibatches": 8,
        "algo.learning_rate": 2e-2,
        "algo.schedule.learning_rate.name": "constant",
    },
    "Acrobot_ppo": {
        "env": "Acrobot",
        "algo": "ppo",
        "total_steps": 122_880,
        "algo.learning_rate": 2e-2,
        "algo.schedule.learning_rate.name": "constant",
    },
}
# as many episodes as at the end, from the same start states, so that peak and end compare
WATCHED: Overrides = {"eval.every": 4_000, "eval.episodes": 100, "checkpoint.every": 0, "log.every": 4_000}


@dataclass(frozen=True)
class Variant:
    """What differs from the plain run."""

    overrides: Overrides
    only: str = ""  # the algorithm that can have it


def stabilizer(*names: str, **given: Any) -> Overrides:
    """Overrides that select stabilisers; `ref_kl__coef=1` is stabilizer.ref_kl.coef=1."""
    arguments = {f"stabilizer.{key.replace('__', '.')}": value for key, value in given.items()}
    return {"stabilizer": list(names), **arguments}


ANNEALED = {"algo.schedule.learning_rate.name": "linear"}
KL_RATE = {"algo.schedule.learning_rate.name": "kl_adaptive"}
FOLLOWING = {"ref_kl__controller": "adaptive", "ref_kl__refresh_every": 5}  # the policy of a few iterations ago
SOON = {"rollback__patience": 1}
VARIANTS: dict[str, Variant] = {
    "plain": Variant({}),
    "one number an episode (B2)": Variant({"algo.advantage": "outcome"}, "grpo"),
    "aggregation=episode (A5)": Variant({"algo.aggregation": "episode"}),
    "aggregation=constant (A5)": Variant({"algo.aggregation": "constant"}),
    "clip_high=0.28 (A6)": Variant({"algo.clip_high": 0.28}),
    "ratio_bound=3 (A6)": Variant({"algo.ratio_bound": 3.0}),
    "critic_hidden=[16,16] (A7)": Variant({"policy.critic_hidden": [16, 16]}, "ppo"),
    "groups=pilot (A7)": Variant({"algo.groups": "pilot"}, "grpo"),
    "ref_kl 0.1 (C1)": Variant(stabilizer("ref_kl")),
    "ref_kl refreshed, adaptive (C2, C6)": Variant(stabilizer("ref_kl", **FOLLOWING)),
    "old_kl adaptive, no clip (A4)": Variant(
        {**stabilizer("old_kl"), "algo.clip": None, "algo.schedule.clip.name": "constant"}
    ),
    "old_kl adaptive (C2)": Variant(stabilizer("old_kl")),
    "clip linear (C3)": Variant({"algo.schedule.clip.name": "linear"}),
    "clip exponential (C3)": Variant({"algo.schedule.clip.name": "exponential"}),
    "clip kl_driven (C3)": Variant({"algo.schedule.clip.name": "kl_driven", "algo.schedule.clip.target": 0.2}),
    "target_kl=0.01 (C4)": Variant({"algo.target_kl": 0.01}),
    "learning rate kl_adaptive (C5)": Variant(KL_RATE),
    "learning rate linear": Variant(ANNEALED),
    "max_grad_norm=null (D1 off)": Variant({"algo.max_grad_norm": None}),
    "replay (D3)": Variant(stabilizer("replay")),
    "replay by priority (D3)": Variant(stabilizer("replay", replay__sampling="priority")),
    "sync_every=4 (D4)": Variant({"algo.sync_every": 4}),
    "rollback (D5)": Variant(stabilizer("rollback")),
    "early_stop (D6)": Variant(stabilizer("early_stop", early_stop__patience=5)),
    "value_l2 (D7)": Variant(stabilizer("value_l2"), "ppo"),
    "popart (D7)": Variant({"policy.value_normalization": "popart"}, "ppo"),
    "layer_norm (D8)": Variant({"policy.layer_norm": True}),
    "dropout=0.1 (D8)": Variant({"policy.dropout": 0.1}),
    "adam_betas=[0.99,0.99] (D9)": Variant({"algo.adam_betas": [0.99, 0.99]}),
    "entropy_coef=0.01 (D10)": Variant({"algo.entropy_coef": 0.01}),
    "target entropy (D10)": Variant(
        {
            "algo.entropy_coef": 0.01,
            "algo.schedule.entropy_coef.name": "target_entropy",
            "algo.schedule.entropy_coef.target": 0.4,
        }
    ),
    "rollback at once": Variant(stabilizer("rollback", **SOON)),
    "ref_kl refreshed + rollback at once": Variant(stabilizer("ref_kl", "rollback", **FOLLOWING, **SOON)),
    "ref_kl refreshed + kl_adaptive": Variant({**stabilizer("ref_kl", **FOLLOWING), **KL_RATE}),
    "ref_kl refreshed + linear": Variant({**stabilizer("ref_kl", **FOLLOWING), **ANNEALED}),
    "kl_adaptive + rollback at once": Variant({**stabilizer("rollback", **SOON), **KL_RATE}),
    "old_kl + rollback at once": Variant(stabilizer("old_kl", "rollback", **SOON)),
    "old_kl + linear": Variant({**stabilizer("old_kl"), **ANNEALED}),
    "recommended": Variant(stabilizer("recommended")),
}


def job(folder: Path, overrides: Overrides) -> Path:
    """Train a run in one process, unless it is there."""
    if not (folder / "summary.json").exists():
        rlkit.run(folder=folder, processes=1, show="off", **WATCHED, **overrides)
    return folder


@dataclass(frozen=True)
class Result:
    """What a variant reached: values of each seed, [S]."""

    final: np.ndarray
    fell: np.ndarray
    drop: np.ndarray
    lost: np.ndarray  # steps at an evaluation more than 10 % below the best before it
    volatility: np.ndarray
    seconds: float  # of processor time, all seeds

    @classmethod
    def of(cls, folder: Path) -> Result:
        """Read a finished run."""
        summary = json.loads((folder / "summary.json").read_text())
        steps, values = read_metrics(folder / "metrics.csv", summary["members"])["eval/return"]
        final = np.array(summary["eval_return"], float)
        best = np.maximum.accumulate(values)
        below = values < best - FALL * np.abs(best)
        return cls(
            final,
            fallen(values.max(0), final),
            worst_drop(values),
            np.diff(steps, prepend=0.0) @ below,
            volatility(steps, values),
            summary["train_seconds"],
        )


def costs(setting: str, names: Sequence[str], rounds: int = 15) -> list[tuple[str, float]]:
    """Median processor time of an iteration of each variant beside the plain one, in turns; four members."""
    use_threads()
    learners = {}
    for name in dict.fromkeys(("plain", *names)):
        overrides = SETTINGS[setting] | VARIANTS[name].overrides | {"members": 4, "algo.learning_rate": 1e-9}
        config, _ = compose([f"{key}={literal(value)}" for key, value in overrides.items()])
        learners[name] = build_learner(to_config(config))
    seconds = np.array([[_seconds(learner) for learner in learners.values()] for _ in range(rounds)])[3:]
    return list(zip(learners, np.median(seconds / seconds[:, :1], 0).tolist(), strict=True))


def _seconds(learner: Learner) -> float:
    began = time.process_time()
    learner.iterate(detail=False)
    return time.process_time() - began


HEADING = ["variant", "final", "low", "high", "lowest", "fallen", "drop", "lost", "volatility", "better", "b_low"]
HEADING += ["b_high", "time"]


def table(folder: Path, names: Sequence[str]) -> list[list[str]]:
    """A row for each variant: IQM and interval of the final return, falls, probability to end above the plain run."""
    results = {name: Result.of(folder / name) for name in names if (folder / name / "summary.json").exists()}
    plain, made = results["plain"], [HEADING]
    for name, r in results.items():
        final = bootstrap([r.final])
        better = probability_of_improvement([(r.final, plain.final)])
        numbers = [final.value, final.low, final.high, r.final.min()]
        middle = [float(interquartile_mean(x)) for x in (r.drop, r.lost, r.volatility)]
        chance = [better.value, better.low, better.high, r.seconds / plain.seconds]
        made.append(
            [name, *(f"{x:.1f}" for x in numbers), f"{int(r.fell.sum())}/{len(r.fell)}"]
            + [f"{x:.1f}" for x in middle]
            + [f"{x:.2f}" for x in chance]
        )
    return made


def main() -> int:
    """Run what is missing and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=100, help="first seed (100)")
    parser.add_argument("--members", type=int, default=20, help="number of seeds (20)")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="which settings")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="which variants")
    parser.add_argument("--out", type=Path, default=Path("runs/stability"), help="folder of the runs")
    parser.add_argument("--jobs", type=int, default=cores(), help="jobs at once (one for each core)")
    parser.add_argument("--csv", type=Path, help="also write the tables to this folder, one file for each setting")
    parser.add_argument("--cost", action="store_true", help="only measure what each costs in processor time")
    args = parser.parse_args()
    if args.cost:
        for setting in args.settings:
            own = [name for name in args.only if VARIANTS[name].only in ("", SETTINGS[setting]["algo"])]
            for name, ratio in costs(setting, own):
                print(f"{setting}  {name:>36}  {ratio:.2f}")
        return 0
    seeds = {"seed": args.seed, "members": args.members}
    plan: dict[Path, Overrides] = {}
    for setting in args.settings:
        base = SETTINGS[setting]
        for name in args.only:
            if VARIANTS[name].only in ("", base["algo"]):
                plan[args.out / setting / name] = {**base, **seeds, **VARIANTS[name].overrides}
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        running = [pool.submit(job, folder, overrides) for folder, overrides in plan.items()]
        for done in as_completed(running):
            print(f"done {done.result()}", flush=True)
    for setting in args.settings:
        rows = table(args.out / setting, args.only)
        print(f"\n{setting}")
        for row in rows:
            print("  ".join(f"{cell:>{36 if k == 0 else 9}}" for k, cell in enumerate(row)))
        if args.csv:
            write_csv(args.csv / f"{setting}.csv", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
