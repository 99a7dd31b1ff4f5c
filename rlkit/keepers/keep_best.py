"""The best checkpoint: what each member was at its best evaluation, for `best.pt`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlkit.keepers.keeper import Best, Event, Keeper, State

NAME = "checkpoint.best"  # of this keeper in a learner: that of its key, which no stabiliser can have


class KeepBest(Keeper):
    """Keeps the policy of each member's best evaluation during training; changes nothing."""

    moves = False

    def __init__(self, members: int) -> None:
        self.best = Best(members)

    def judge(
        self, state: State, returns: Tensor, metrics: Mapping[str, Tensor], ended: Tensor
    ) -> tuple[Tensor, list[Event]]:
        seen = {"policy": state["policy"], "collector": {"env_steps": state["collector"]["env_steps"]}}
        self.best.see(seen, returns)
        return torch.zeros_like(returns, dtype=torch.bool), []

    def state_dict(self) -> dict[str, Any]:
        return self.best.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best.load_state_dict(state)
