"""Replay: some columns of each batch come from earlier iterations."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rlkit.buffer import Batch, Rollout
from rlkit.link import Link
from rlkit.store import Store
from rlkit.streams import Purpose, Streams

LEAST_PRIORITY = 1e-6  # epsilon of Schaul et al.: an item without advantage is drawn at times too


class Replay(Link):
    """Mixes past columns of the rollout into the present one (P3O, Fakoor et al. 2020; GePPO, Queeney et al. 2021).

    An item of the store is what belongs together: with a critic the segment of one environment in one rollout, with
    groups a whole group, which comes back under a new id and is compared with itself alone. Old rows keep raw
    observations and the log-probability with which their action was taken; the learner makes rows of the present policy
    of them, with a truncated importance weight (`rlkit.off_policy.present`), and `gae`, `n_step` and `mixed` with a
    critic are corrected by V-trace. Advantages within a group compare returns of the policy that made them, a bias that
    grows with age: the weight corrects for the action taken, not for what followed.

    Item i is drawn with probability p_i^alpha / sum p^alpha, one in each of as many equal parts of the total as there
    are draws (Schaul et al. 2016, equation 1 and appendix B.2.1), where p_i is the mean absolute advantage of its rows
    when they were last learned from. With a critic that is |target - V|, the error of TD(lambda). Its rows weigh
    (n P(i))^-beta, n the items stored, over the largest such number in the store (section 3.4). `uniform` is
    alpha = 0, where all weigh 1.

    Logs `ess`, (sum w)^2 / sum w^2 / rows, w the importance of replayed rows: 1 where the policies agree; `share`,
    their share of the batch; `stored`, items in the store. Replayed rows count as no environment step and reach no
    running statistics.

    Args:
        num_envs: columns that the collector fills; the others are not stored.
        capacity: items a member keeps, the oldest leaving first.
        fraction: replayed items for each fresh one, in [0, 1); where that is no whole number, in the mean over
            iterations. Never more than are stored; 0 is off.
        sampling: "uniform" or "priority".
        alpha, beta: exponents of priority and of its correction.
        precision: "full", or "half" to store observations, offsets and discrete actions in 16 bits (`rlkit.store`).
    """

    adds_rows = True
    bounds: ClassVar = {
        "capacity": {"ge": 1},
        "fraction": {"ge": 0, "lt": 1},
        "sampling": {"choices": ("uniform", "priority")},
        "alpha": {"ge": 0},
        "beta": {"ge": 0, "le": 1},
        "precision": {"choices": ("full", "half")},
    }

    def __init__(
        self,
        streams: Streams,
        num_envs: int,
        capacity: int = 32,
        fraction: float = 0.5,
        sampling: str = "uniform",
        alpha: float = 0.6,
        beta: float = 0.4,
        precision: str = "full",
    ) -> None:
        self.streams, self.num_envs, self.fraction = streams, num_envs, fraction
        self.alpha, self.beta = alpha if sampling == "priority" else 0.0, beta
        self.store = Store(streams.members, capacity, precision == "half")
        self.priority = torch.ones(streams.members, capacity, dtype=torch.float64)
        self.iteration = 0
        self.lane = torch.full((streams.members, capacity), -1)  # a slot's first lane in the present rollout, or -1
        self.width = 1  # lanes of an item
        self.first = num_envs  # first replayed lane
        self.numbers: dict[str, Tensor] = {}

    @torch.no_grad()
    def rollout(self, rollout: Rollout) -> Rollout:
        if not self.fraction:
            return rollout
        fresh = rollout.lanes(slice(self.num_envs))
        if fresh.group is not None:  # groups lie side by side and are of one size
            self.width = self.num_envs // (int(fresh.group.max()) + 1)
        stale = torch.zeros_like(rollout.valid[0]) if rollout.stale is None else rollout.stale
        importance = torch.ones_like(rollout.reward) if rollout.importance is None else rollout.importance
        rollout = rollout.replace(stale=stale, importance=importance)
        self.first, self.lane = rollout.valid.shape[2], torch.full_like(self.lane, -1)
        past = self._draw(rollout, fresh.valid.flatten(2).any(2).any(0))
        self._keep(fresh)
        self.iteration += 1
        return rollout if past is None else rollout.beside(past)

    def _draw(self, rollout: Rollout, playing: Tensor) -> Rollout | None:
        """Return columns of the past for the members that play, bool [M]; None if there are none."""
        due = self.fraction * self.num_envs / self.width
        number = int((self.iteration + 1) * due) - int(self.iteration * due)
        slots, weight, real = self._choose(number, playing)
        if not bool(real.any()):
            return None
        for m in range(len(slots)):
            lanes = self.first + self.width * torch.arange(number)
            self.lane[m, slots[m][real[m]]] = lanes[real[m]]
        items = {
            name: x.masked_fill(~real.view(*real.shape, *[1] * (x.dim() - 2)), 0)
            for name, x in self.store.take(slots).items()
        }
        time = int(items["valid"].any(3).any(1).any(0).nonzero().max()) + 1
        columns = {name: x[:, :, :time].movedim(2, 0).flatten(2, 3) for name, x in items.items()}
        repeated = real.repeat_interleave(self.width, 1)
        columns["stale"] = repeated
        columns["importance"] = weight.repeat_interleave(self.width, 1).expand(time, *repeated.shape)
        if rollout.group is not None:
            ids = int(rollout.group.max()) + 1 + torch.arange(number)
            columns["group"] = ids.repeat_interleave(self.width).expand_as(repeated)
        return Rollout.of(columns)

    def _choose(self, number: int, playing: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Draw items of each member: their slots, weights, and whether there is one, [M, number] each."""
        shape = (self.streams.members, number)
        slots, weight, real = np.zeros(shape, np.int64), np.ones(shape, np.float32), np.zeros(shape, bool)
        for m, rng in enumerate(self.streams.open(Purpose.REPLAY, self.iteration)):
            points, stored = rng.random(number), int(self.store.count[m])
            drawn = min(number, stored) if playing[m] else 0
            if drawn:
                p = self.probabilities(m)
                total = p.cumsum()
                at = (np.arange(drawn) + points[:drawn]) / drawn * total[-1]
                slots[m, :drawn] = np.minimum(total.searchsorted(at, side="right"), stored - 1)
                correction = (stored * p) ** -self.beta
                weight[m, :drawn] = (correction / correction.max())[slots[m, :drawn]]
                real[m, :drawn] = True
        return torch.from_numpy(slots), torch.from_numpy(weight), torch.from_numpy(real)

    def probabilities(self, member: int) -> np.ndarray:
        """P(i) of the items that a member has stored, [count], slot by slot."""
        p = self.priority[member, : int(self.store.count[member])] ** self.alpha
        probabilities: np.ndarray = (p / p.sum()).numpy()
        return probabilities

    def _keep(self, fresh: Rollout) -> None:
        """Store the columns just collected, of the members that played."""
        items = {
            name: x.unflatten(2, (-1, self.width)).movedim(0, 2)
            for name, x in fresh.tensors().items()
            if name not in ("group", "stale", "importance", "ratio")
        }
        played = items["valid"].flatten(1).any(1)
        slots = self.store.add(items, played)
        lanes = torch.arange(self.num_envs - self.width * slots.shape[1], self.num_envs, self.width)
        self.lane[played.nonzero(), slots[played]] = lanes

    @torch.no_grad()
    def batch(self, batch: Batch) -> Batch:
        if self.fraction:
            self._prioritise(batch)
            self._measure(batch)
        return batch

    def _prioritise(self, batch: Batch) -> None:
        """Set the priorities of the items that this batch holds, new ones and old."""
        lanes = max(int(batch.lane.max()), int(self.lane.max())) + self.width
        empty = torch.zeros(batch.members, lanes, dtype=torch.float64)
        error = torch.nan_to_num(batch.advantage.double().abs(), posinf=0.0) * batch.real
        total, rows = empty.scatter_add(1, batch.lane, error), empty.scatter_add(1, batch.lane, batch.real.double())
        present = self.lane >= 0
        item = self.lane.clamp(min=0)[..., None] + torch.arange(self.width)  # [M, C, W]
        total, rows = (x.gather(1, item.flatten(1)).view(item.shape).sum(2) for x in (total, rows))
        self.priority = torch.where(present, total / rows.clamp(min=1.0) + LEAST_PRIORITY, self.priority)

    def _measure(self, batch: Batch) -> None:
        old = batch.real & (batch.lane >= self.first)
        rows = old.sum(1)
        weight = (batch.importance * old).double()
        ess = weight.sum(1) ** 2 / (weight**2).sum(1) / rows  # 0 / 0 is nan: nothing replayed
        self.numbers = {"ess": ess.float(), "share": rows / batch.count, "stored": self.store.count.float()}

    def report(self) -> dict[str, Tensor]:
        return self.numbers

    def state_dict(self) -> dict[str, Any]:
        iteration = torch.full((self.streams.members,), self.iteration, dtype=torch.int64)
        return {"iteration": iteration, "priority": self.priority, "store": self.store.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.iteration = int(state["iteration"].max())
        self.priority = state["priority"].clone()
        self.store.load_state_dict(state["store"])
