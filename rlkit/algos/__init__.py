"""Recipes: an algorithm is a way to collect, an estimator and a chain of links; each fits on a page."""

from rlkit.algos.grpo import GRPO
from rlkit.algos.ppo import PPO

ALGORITHMS: dict[str, type[PPO] | type[GRPO]] = {"ppo": PPO, "grpo": GRPO}
