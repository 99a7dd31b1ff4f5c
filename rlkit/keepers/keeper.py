"""What keepers have in common: they judge a learner's state after each evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

Event = tuple[int, str]  # (member, what happened to it)
State = dict[str, Any]  # what `rlkit.loop.Learner.state_dict` gives; every tensor and list starts with the member axis


class Keeper:
    """Sees each evaluation, outside the update, and may change the learner's state: of some members, never of others.

    If it may, the first evaluation is of the untrained policy.

    It acts on `learner.state_dict()` alone. The learner takes the state back if a keeper says it has changed.
    """

    bounds: ClassVar[Mapping[str, dict[str, Any]]] = {}  # of the arguments, as in `rlkit.conf.schema.key`
    moves: ClassVar[bool] = True  # False: it never changes a state, which then is not copied for it

    def judge(
        self, state: State, returns: Tensor, metrics: Mapping[str, Tensor], ended: Tensor
    ) -> tuple[Tensor, list[Event]]:
        """Judge an evaluation and change `state`, in place, where that is called for.

        Args:
            state: the learner's, which a keeper may write into, row by row.
            returns: mean return of each member's deterministic policy, [M].
            metrics: those of the last iteration, "area/name" -> [M].
            ended: bool [M], the members that learn no more; each of them is judged at least once.

        Returns:
            moved: bool [M], the members whose weights are others now.
            events: (member, sentence) to tell of.
        """
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """State to save; every tensor and list starts with the member axis M."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""


class Best:
    """The state each member had at its best evaluation."""

    def __init__(self, members: int) -> None:
        self.returns = torch.full((members,), torch.nan)
        self.state: State = {}

    def see(self, state: State, returns: Tensor, min_gain: float = 0.0) -> Tensor:
        """Copy the members whose return is more than `min_gain` above their best; return which, bool [M]."""
        better = ~(returns <= self.returns + min_gain) & returns.isfinite()
        if not self.state:
            self.state = copied(state)
        elif bool(better.any()):
            put(self.state, state, better)
        self.returns = torch.where(better, returns, self.returns)
        return better

    def state_dict(self) -> dict[str, Any]:
        return {"returns": self.returns, "state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.returns, self.state = state["returns"].clone(), copied(state["state"])


def copied(tree: Any) -> Any:
    """A copy of a state that shares no memory with it."""
    if isinstance(tree, Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {name: copied(x) for name, x in tree.items()}
    return list(tree) if isinstance(tree, list) else tree


def put(target: Any, source: Any, members: Tensor) -> None:
    """Write the rows of some members (bool [M]) of a state into another of the same form.

    What has another shape by now is left as it is: a store that has grown, for one, which is no worse for being new.
    """
    if isinstance(target, Tensor):
        if target.shape == source.shape:
            target[members] = source[members]
    elif isinstance(target, dict):
        for name in target.keys() & source.keys():
            put(target[name], source[name], members)
    else:
        for m in members.nonzero().flatten().tolist():
            target[m] = source[m]
