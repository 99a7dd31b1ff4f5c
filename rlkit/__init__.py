"""rlkit: PPO and GRPO for classic control, many members at once.

run = rlkit.run(env="CartPole", algo="grpo", total_steps=50_000)
action = rlkit.load(run.folder).act(observation)
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlkit.comparison import Row
    from rlkit.evaluate import Agent
    from rlkit.job import Run

__version__ = "0.1.0"
__all__ = ["__version__", "compare", "load", "run"]

# In a bare checkout `envs/` and `conf/` stand beside this package, not inside it (an installed wheel has them inside).
if not (Path(__file__).parent / "conf").is_dir():
    __path__.append(str(Path(__file__).parent.parent))

import rlkit.envs  # noqa: E402, F401  registers rlkit/CartPole-v1 ... with Gymnasium; needs the path above


def run(**settings: Any) -> Run:
    """Train a run; see `rlkit.train.run`."""
    from rlkit.train import run as train_run  # torch loads only when something is trained

    return train_run(**settings)


def load(path: str | Path, member: int | str = "best", checkpoint: str = "last") -> Agent:
    """Load one member of a trained run; see `rlkit.evaluate.load`."""
    from rlkit.evaluate import load as load_agent

    return load_agent(path, member, checkpoint)


def compare(paths: str | Path | Iterable[str | Path]) -> list[Row]:
    """Compare finished runs; see `rlkit.comparison.compare`."""
    from rlkit.comparison import compare as compare_runs

    return compare_runs(paths)
