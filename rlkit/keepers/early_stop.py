"""Early stop: a member that has stopped getting better learns no more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlkit.decimals import number
from rlkit.keepers.keeper import Best, Event, Keeper, State, put


class EarlyStop(Keeper):
    """Freezes a member after `patience` evaluations in a row that are not above its best (Prechelt 1998).

    With `restore` it gets back the weights of its best evaluation. `stop_when_solved` freezes members that are solved.

    Args:
        patience: evaluations.
        min_gain: a return counts as better if it is more than this above the best.
        restore: whether a member that stops has the weights of its best evaluation, or its last.
    """

    bounds: ClassVar = {"patience": {"ge": 1}, "min_gain": {"ge": 0}}

    def __init__(self, members: int, patience: int = 10, min_gain: float = 0.0, restore: bool = True) -> None:
        self.patience, self.min_gain, self.restore = patience, min_gain, restore
        self.waited = torch.zeros(members, dtype=torch.int64)
        self.best = Best(members)

    def judge(
        self, state: State, returns: Tensor, metrics: Mapping[str, Tensor], ended: Tensor
    ) -> tuple[Tensor, list[Event]]:
        better = self.best.see(state["policy"], returns, self.min_gain)
        self.waited = torch.where(better, 0, self.waited + 1)
        stopped = (self.waited >= self.patience) & ~state["frozen"]
        state["frozen"] |= stopped
        moved = stopped & self.restore
        put(state["policy"], self.best.state, moved)
        return moved, [(m, self._why(float(self.best.returns[m]))) for m in stopped.nonzero().flatten().tolist()]

    def _why(self, best: float) -> str:
        above = f"more than {self.min_gain:g} above {number(best)}" if self.min_gain else f"above {number(best)}"
        if self.patience == 1:
            return f"stopped early: its last evaluation was not {above}"
        return f"stopped early: none of its last {self.patience} evaluations was {above}"

    def state_dict(self) -> dict[str, Any]:
        return {"waited": self.waited, "best": self.best.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.waited = state["waited"].clone()
        self.best.load_state_dict(state["best"])
