"""Rollback: a member whose return falls while its policy moves fast gets back its best state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlkit.decimals import number
from rlkit.keepers.keeper import Best, Event, Keeper, State, put

RESTORED = ("policy", "optimizer", "chain")  # weights and statistics, moments and step counts, controllers


class Rollback(Keeper):
    """Restores the best state of a member after `patience` falls of its return in a row with a KL above `kl`.

    A fall is an evaluation below the one before it. The member gets back the weights, optimiser and controllers it had
    at its best evaluation, its learning rate is multiplied by `factor` from then on, and its reference policies are
    what it got back. The others go on. Steps that were made count.

    With `end_drop` a member that has ended so far below its best gets it back in any case: then there is no second fall
    to wait for. At 0 every member ends with the state of its highest evaluation, which is partly a lucky one, and less
    trained; a small distance leaves those alone whose last evaluation is lower by chance.

    Args:
        patience: falls in a row.
        kl: KL to the old policy in the last iteration that calls for a rollback, nats; 0: any.
        drop: least distance below the best evaluation, as a share of what has been gained since the first one,
            which is of the untrained policy.
        factor: of the learning rate, at each rollback.
        most: rollbacks of a member while it learns.
        end_drop: distance below the best evaluation, as such a share, from which a member that has ended gets its best
            state back; None: from none.
    """

    bounds: ClassVar = {
        "patience": {"ge": 1},
        "kl": {"ge": 0},
        "drop": {"ge": 0, "le": 1},
        "factor": {"gt": 0, "le": 1},
        "most": {"ge": 0},
        "end_drop": {"ge": 0, "le": 1},
    }

    def __init__(
        self,
        members: int,
        patience: int = 2,
        kl: float = 0.0,
        drop: float = 0.1,
        factor: float = 0.5,
        most: int = 3,
        end_drop: float | None = None,
    ) -> None:
        self.patience, self.kl, self.drop, self.factor, self.most = patience, kl, drop, factor, most
        self.end_drop = end_drop
        self.first, self.last = torch.full((2, members), torch.nan)
        self.falls, self.made = torch.zeros(2, members, dtype=torch.int64)
        self.best = Best(members)

    def judge(
        self, state: State, returns: Tensor, metrics: Mapping[str, Tensor], ended: Tensor
    ) -> tuple[Tensor, list[Event]]:
        self.first = torch.where(self.first.isnan(), returns, self.first)
        self.best.see({name: state[name] for name in RESTORED}, returns)
        best = self.best.returns
        self.falls = torch.where(returns < self.last, self.falls + 1, 0)
        gain = best - self.first
        fallen = (self.falls >= self.patience) & (best - returns > self.drop * gain)
        fast = ~(metrics["kl/old"] <= self.kl) if "kl/old" in metrics else torch.ones_like(fallen)
        back = fallen & fast & (self.made < self.most) & ~ended
        late = torch.zeros_like(back)
        if self.end_drop is not None:
            late = ended & ~state["frozen"] & ~(best - returns <= self.end_drop * gain)  # a return of nan is below any
        for name in RESTORED:
            put(state[name], self.best.state[name], back | late)
        scale = state["schedules"]["learning_rate"]["scale"]
        scale[back] *= self.factor
        self.made += back
        self.falls[back] = 0
        self.last = torch.where(back | late, best, returns)
        events = [
            (
                m,
                f"rolled back from {number(float(returns[m]))} to its best state, of {number(float(best[m]))} "
                f"({int(self.made[m])} of {self.most}); its learning rate is {float(scale[m]):g} times what it was",
            )
            for m in back.nonzero().flatten().tolist()
        ]
        events += [
            (
                m,
                f"ends with its best state, of {number(float(best[m]))}, and not with its last, of "
                f"{number(float(returns[m]))}",
            )
            for m in late.nonzero().flatten().tolist()
        ]
        return back | late, events

    def state_dict(self) -> dict[str, Any]:
        counts = {name: getattr(self, name) for name in ("first", "last", "falls", "made")}
        return {**counts, "best": self.best.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in ("first", "last", "falls", "made"):
            setattr(self, name, state[name].clone())
        self.best.load_state_dict(state["best"])
