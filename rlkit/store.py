"""A store of past segments: one first-in-first-out queue for each member, all in the same tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlkit.buffer import longer
from rlkit.faults import Fault

LARGEST = torch.finfo(torch.float16).max
HALVED = ("obs", "final_obs", "offset", "action")  # fields that `half` shortens


class Store:
    """Keeps the last `capacity` items that each member added; an item is a set of tensors [T, W, ...] by name.

    In memory they lie side by side as [M, C, T, W, ...], so that storing and drawing is one indexing for each field
    whatever M is; T grows to the longest item, zeros after the end of the others. Members may hold different numbers.

    With `half`, observations and offsets are float16 and actions of a discrete space int16. Rewards, log-probabilities,
    distribution parameters and continuous actions stay as they are: a ratio pi / mu is exact only for the action that
    mu's log-probability belongs to, and a small deviation magnifies a rounded one.

    Args:
        members: M.
        capacity: C, items of a member.
    """

    def __init__(self, members: int, capacity: int, half: bool = False) -> None:
        self.members, self.capacity, self.half = members, capacity, half
        self.fields: dict[str, Tensor] = {}  # name -> [M, C, T, W, ...]
        self.count = torch.zeros(members, dtype=torch.int64)  # items held
        self.next = torch.zeros(members, dtype=torch.int64)  # the slot that the next item takes

    @property
    def nbytes(self) -> int:
        """Memory of all members' items, in bytes."""
        return sum(x.nbytes for x in self.fields.values())

    def add(self, items: Mapping[str, Tensor], members: Tensor) -> Tensor:
        """Store items, the oldest making room.

        Args:
            items: name -> [M, K, T, W, ...], of which the last `capacity` are kept.
            members: bool [M], those whose items count.

        Returns:
            Where they are: slots, int64 [M, min(K, C)]; of no meaning for the other members.

        Raises:
            Fault: a number is too large for `half`.
        """
        items = {name: self._shortened(name, x[:, -self.capacity :]) for name, x in items.items()}
        number, time = next(iter(items.values())).shape[1:3]
        self._make_room(items, time)
        slots = (self.next[:, None] + torch.arange(number)) % self.capacity
        which = members.nonzero()  # [m, 1]
        for name, x in items.items():
            field = self.fields[name]
            field[which, slots[members]] = longer(x[members], field.shape[2], 2)
        self.next[members] = (self.next[members] + number) % self.capacity
        self.count[members] = (self.count[members] + number).clamp(max=self.capacity)
        return slots

    def take(self, slots: Tensor) -> dict[str, Tensor]:
        """Return the items in slots [M, n] as they were added, name -> [M, n, T, W, ...]."""
        rows = torch.arange(self.members)[:, None]
        return {name: _restored(x[rows, slots]) for name, x in self.fields.items()}

    def _make_room(self, items: Mapping[str, Tensor], time: int) -> None:
        for name, x in items.items():
            if name not in self.fields:
                self.fields[name] = x.new_zeros((self.members, self.capacity, *x.shape[2:]))
            elif self.fields[name].shape[2] < time:
                self.fields[name] = longer(self.fields[name], time, 2)

    def _shortened(self, name: str, x: Tensor) -> Tensor:
        if not self.half or name not in HALVED:
            return x
        if not x.is_floating_point():
            return x.to(torch.int16)
        if name == "action":
            return x
        half = x.to(torch.float16)
        for m in torch.nonzero(half.isinf().flatten(1).any(1)).flatten().tolist():
            raise Fault(
                f"the {name} of member {{member}} is beyond {LARGEST:g}, which half precision cannot store; "
                "the precision of the replay must be full",
                m,
            )
        return half

    def state_dict(self) -> dict[str, Any]:
        """What it holds: for each field a list of M tensors [count, T, W, ...], T as long as the member needs.

        A list, since members differ in number and length of their items, and each can be written back by itself.
        """
        times = self.times()
        parts = {
            name: [x[m, : int(n), :t].clone() for m, (n, t) in enumerate(zip(self.count, times, strict=True))]
            for name, x in self.fields.items()
        }
        return {"fields": parts, "count": self.count.clone(), "next": self.next.clone()}

    def times(self) -> list[int]:
        """Length of the longest item of each member, by `valid` rows."""
        if "valid" not in self.fields:
            return [0] * self.members
        return [_length(x) for x in self.fields["valid"].any(3).any(1)]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.next = state["count"].clone(), state["next"].clone()
        self.fields = {}
        for name, parts in state["fields"].items():
            time = max(part.shape[1] for part in parts)
            self.fields[name] = parts[0].new_zeros((self.members, self.capacity, time, *parts[0].shape[2:]))
            for field, part in zip(self.fields[name], parts, strict=True):
                field[: len(part), : part.shape[1]] = part


def _length(valid: Tensor) -> int:
    """Rows up to the last that is valid, of [T]."""
    rows = valid.nonzero()
    return int(rows[-1]) + 1 if len(rows) else 0


def _restored(x: Tensor) -> Tensor:
    return {torch.float16: x.float, torch.int16: x.long}.get(x.dtype, lambda: x)()
