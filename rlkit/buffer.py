"""Rollout and Batch, the two containers that PPO and GRPO share.

The letters used in every shape comment of this package:

    T  time steps of a rollout           M  members (independent learners, stacked)
    N  environments of one member        B  rows of one member's batch
    K  groups of one member              G  episodes of one group
    D  observation size                  A  action size, or number of actions of a head

A rollout has one row for each (time, member, environment); `flatten` turns its valid rows into a batch.
"""

from __future__ import annotations

import dataclasses
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor


@dataclass
class Rollout:
    """What M members did in N environments each for T steps; every field is a tensor [T, M, N, ...] unless said.

    `action` is the raw sample of the policy (before clipping or squashing) and `log_prob` its log-probability; `old`
    holds the parameters of the behaviour distribution (`logits`, or `mean` and `log_std`). `final_obs` is the
    observation that followed the row, before any reset: it is filled where an episode ended and in the last row, zero
    elsewhere. `valid` marks real transitions; other rows hold zeros and never reach a loss, a normaliser or a step
    count.
    """

    obs: Tensor  # [T, M, N, D]
    final_obs: Tensor  # [T, M, N, D]
    action: Tensor  # [T, M, N, A or heads]
    log_prob: Tensor  # [T, M, N]
    old: dict[str, Tensor]  # name -> [T, M, N, A]
    reward: Tensor  # [T, M, N]
    terminated: Tensor  # bool [T, M, N]
    truncated: Tensor  # bool [T, M, N]
    valid: Tensor  # bool [T, M, N]
    group: Tensor | None = None  # int64 [M, N]: the group of each environment's episode
    offset: Tensor | None = None  # [T, M, N, A]: what exploration and masks added to the distribution's parameters
    value: Tensor | None = None  # [T, M, N] V(obs), where a critic exists
    final_value: Tensor | None = None  # [T, M, N] V(final_obs) where it is filled
    advantage: Tensor | None = None  # [T, M, N]
    ret: Tensor | None = None  # [T, M, N]: the value target, or the return-to-go
    weight: Tensor | None = None  # [T, M, N]: how much a row counts (the aggregation, times its importance)
    stale: Tensor | None = None  # bool [M, N]: columns collected by another policy than the learner's present one
    importance: Tensor | None = None  # [T, M, N]: multiplies a row's weight; 1 on fresh rows
    ratio: Tensor | None = None  # [T, M, N]: min(rho_max, present policy / behaviour); 1 on fresh rows

    @property
    def ended(self) -> Tensor:
        """Rows whose episode ended, by termination or by truncation, bool [T, M, N]."""
        return self.terminated | self.truncated

    def replace(self, **fields: Tensor | dict[str, Tensor] | None) -> Rollout:
        """Return a rollout with some fields exchanged."""
        return dataclasses.replace(self, **fields)  # type: ignore[arg-type]

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor it holds, by name; the behaviour distribution's parameters as `old_*`."""
        held = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        held |= {f"old_{name}": x for name, x in held.pop("old").items()}
        return {name: x for name, x in held.items() if x is not None}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Rollout:
        """Build a rollout from what `tensors` gives."""
        old = {name[len("old_") :]: x for name, x in tensors.items() if name.startswith("old_")}
        return cls(old=old, **{name: x for name, x in tensors.items() if not name.startswith("old_")})

    def lanes(self, part: slice) -> Rollout:
        """Return some of the columns: a part of the N axis."""
        return Rollout.of({name: x[(slice(None),) * lane_axis(name) + (part,)] for name, x in self.tensors().items()})

    def beside(self, other: Rollout) -> Rollout:
        """Return both rollouts as one, `other` after this one on the N axis; the shorter gets rows that are not valid.

        Raises:
            ValueError: they do not hold the same fields.
        """
        ours, theirs = self.tensors(), other.tensors()
        if set(ours) != set(theirs):
            raise ValueError(f"rollouts that differ in {sorted(set(ours) ^ set(theirs))} do not go side by side")
        time = max(len(self.valid), len(other.valid))
        joined = {}
        for name, x in ours.items():
            axis, pair = lane_axis(name), [x, theirs[name]]
            joined[name] = torch.cat(pair if axis == 1 else [longer(y, time) for y in pair], axis)
        return Rollout.of(joined)


def lane_axis(name: str) -> int:
    """The axis N of a field of a rollout: 1 of those that say something of whole columns [M, N], else 2."""
    return 1 if name in ("group", "stale") else 2


def longer(x: Tensor, time: int, axis: int = 0) -> Tensor:
    """Append zeros to x on its time axis, up to `time` rows."""
    shape = list(x.shape)
    shape[axis] = time - shape[axis]
    return torch.cat([x, x.new_zeros(shape)], axis) if shape[axis] else x


@dataclass
class Batch(Mapping[str, Tensor]):
    """Columns of equal height, each a tensor [M, B, ...], read as `batch.advantage` or `batch["advantage"]`.

    Columns of every batch: obs, action, log_prob, old_* (behaviour parameters), advantage, ret, weight, value where a
    critic exists, and offset where there is exploration or an action mask; where not all rows are fresh, importance and
    lane (int64, the column of the rollout that a row is from). `count` [M] says how many leading rows of each member
    are real; the rest are padding, of weight 0. A further column of weights has a name that ends in `_weight`, so that
    padding gets weight 0 there too.
    """

    columns: Mapping[str, Tensor]
    count: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))  # int64 [M]
    padded: bool = True  # False: every row has a weight above 0, which saves masking
    uniform: bool = False  # True: every weight is 1, which saves weighing

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    def __getattr__(self, name: str) -> Tensor:
        try:
            columns: Mapping[str, Tensor] = self.__dict__["columns"]
            return columns[name]
        except KeyError:
            raise AttributeError(f"this batch has no column {name!r}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)

    @cached_property
    def members(self) -> int:
        """M."""
        return self.columns["weight"].shape[0]

    @cached_property
    def height(self) -> int:
        """B, padding included."""
        return self.columns["weight"].shape[1]

    def with_columns(self, **columns: Tensor) -> Batch:
        """Return a batch with further columns [M, B, ...]."""
        for name, column in columns.items():
            if column.shape[:2] != (self.members, self.height):
                raise ValueError(
                    f"column {name} has shape {tuple(column.shape)}; the batch is [{self.members}, {self.height}]"
                )
        batch = Batch({**self.columns, **columns}, self.count, self.padded, self.uniform)
        return batch.masked(self.real) if self.padded and any(map(is_weight, columns)) else batch

    @property
    def real(self) -> Tensor:
        """Rows that are not padding, bool [M, B]; of a whole batch, not of a minibatch."""
        return torch.arange(self.height, device=self.count.device) < self.count[:, None]

    def masked(self, real: Tensor) -> Batch:
        """Return the batch with weight 0 in every column of weights where `real` [M, B] is False."""
        weights = {name: self.columns[name] * real for name in self.columns if is_weight(name)}
        return Batch(ChainMap(weights, self.columns), self.count, padded=True)  # type: ignore[arg-type]

    def starting_with(self, prefix: str) -> dict[str, Tensor]:
        """Return the columns whose name starts with `prefix`, without it: the parameters of a stored distribution."""
        return {name[len(prefix) :]: x for name, x in self.columns.items() if name.startswith(prefix)}

    def take(self, rows: Tensor) -> Batch:
        """Return the rows `rows` (int64 [M, b], an index into B for each member)."""
        flat = (rows + torch.arange(self.members, device=rows.device)[:, None] * self.height).flatten()
        return Batch(_Taken(self.columns, rows, flat), self.count, self.padded, self.uniform)._sized(*rows.shape)

    def slices(self, width: int) -> Iterator[Batch]:
        """Yield batches of `width` rows of every member, as views."""
        arrays: dict[str, np.ndarray] = {}
        for start in range(0, self.height, width):
            stop = min(start + width, self.height)
            part = Batch(_Cut(self.columns, arrays, start, stop), self.count, self.padded, self.uniform)
            yield part._sized(self.members, stop - start)

    def _sized(self, members: int, height: int) -> Batch:
        """Note the size, so that no column need be gathered to tell it."""
        self.members, self.height = members, height
        return self

    def array(self, name: str) -> np.ndarray:
        """Return a column as a NumPy array over its memory."""
        return self.columns.array(name) if isinstance(self.columns, _Cut) else self.columns[name].numpy()


class _Some(Mapping[str, Tensor]):
    """Some rows of columns, found when a column is asked for: the steps of an update read few of them."""

    def __init__(self, whole: Mapping[str, Tensor]) -> None:
        self.whole = whole

    def __iter__(self) -> Iterator[str]:
        return iter(self.whole)

    def __len__(self) -> int:
        return len(self.whole)


class _Taken(_Some):
    """Rows in another order, gathered once."""

    def __init__(self, whole: Mapping[str, Tensor], rows: Tensor, flat: Tensor) -> None:
        super().__init__(whole)
        self.shape, self.flat = rows.shape, flat
        self.taken: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.taken:
            x = self.whole[name]
            self.taken[name] = x.flatten(0, 1).index_select(0, self.flat).view(*self.shape, *x.shape[2:])
        return self.taken[name]


class _Cut(_Some):
    """Neighbouring rows, as views."""

    def __init__(self, whole: Mapping[str, Tensor], arrays: dict[str, np.ndarray], start: int, stop: int) -> None:
        super().__init__(whole)
        self.arrays, self.start, self.stop = arrays, start, stop

    def __getitem__(self, name: str) -> Tensor:
        return self.whole[name][:, self.start : self.stop]

    def array(self, name: str) -> np.ndarray:
        """The rows as a NumPy array; the whole column is turned into one only once."""
        if name not in self.arrays:
            self.arrays[name] = self.whole[name].numpy()
        return self.arrays[name][:, self.start : self.stop]


def is_weight(name: str) -> bool:
    """Whether a column of this name holds weights of rows."""
    return name == "weight" or name.endswith("_weight")


def valid_rows(valid: Tensor) -> tuple[Tensor, Tensor]:
    """Find each member's valid rows in a rollout.

    Args:
        valid: bool [T, M, N].

    Returns:
        rows: int64 [M, B], indices into T*N (time-major), B the largest member's count; padding points at row 0.
        count: int64 [M], the number of real rows of each member.
    """
    time, members, envs = valid.shape
    mask = valid.permute(1, 0, 2).reshape(members, time * envs)  # [M, T*N]
    count = mask.sum(1)
    member, row = mask.nonzero(as_tuple=True)
    start = count.cumsum(0) - count
    rows = torch.zeros(members, max(int(count.max()), 1), dtype=torch.int64, device=valid.device)
    rows[member, torch.arange(row.numel(), device=valid.device) - start[member]] = row
    return rows, count


def flat_rows(rows: Tensor, envs: int) -> Tensor:
    """Turn the rows of `valid_rows` [M, B] into indices into a field flattened over [T, M, N], [M * B]."""
    members = len(rows)
    flat = (rows // envs * (members * envs) + rows % envs) + torch.arange(members, device=rows.device)[:, None] * envs
    return flat.flatten()


def gather_rows(x: Tensor, rows: Tensor, flat: Tensor | None = None) -> Tensor:
    """Return the rows `rows` [M, B] (as given by `valid_rows`) of a rollout field [T, M, N, ...], as [M, B, ...].

    Args:
        flat: `flat_rows` of them, where several fields are gathered.
    """
    flat = flat_rows(rows, x.shape[2]) if flat is None else flat
    return x.flatten(0, 2).index_select(0, flat).view(*rows.shape, *x.shape[3:])


def flatten(rollout: Rollout) -> Batch:
    """Compact the valid rows of a rollout into a batch, padded up to the largest member's count with weight 0."""
    if rollout.advantage is None or rollout.ret is None or rollout.weight is None:
        raise ValueError("flatten needs a rollout with advantage, ret and weight: estimate them first")
    rows, count = valid_rows(rollout.valid)
    fields = {
        "obs": rollout.obs,
        "action": rollout.action,
        "log_prob": rollout.log_prob,
        **{f"old_{name}": x for name, x in rollout.old.items()},
        "advantage": rollout.advantage,
        "ret": rollout.ret,
        "weight": rollout.weight,
    }
    if rollout.value is not None:
        fields["value"] = rollout.value
    if rollout.offset is not None:
        fields["offset"] = rollout.offset
    if rollout.importance is not None:
        fields["importance"] = rollout.importance
        fields["lane"] = torch.arange(rollout.valid.shape[2], device=rows.device).expand(rollout.valid.shape)
    flat = flat_rows(rows, rollout.valid.shape[2])
    columns = {name: gather_rows(x, rows, flat) for name, x in fields.items()}
    batch = Batch(columns, count)
    batch = batch.masked(batch.real)
    batch.padded = not bool((batch.weight > 0).all())
    batch.uniform = bool((batch.weight == 1).all())
    return batch
