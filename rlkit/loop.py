"""The loop: collect, estimate, update, observe."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlkit.advantage import Estimator, degenerate_share
from rlkit.buffer import Batch, Rollout, flatten
from rlkit.collect import Episodes, Windows, with_values
from rlkit.keepers.keeper import Event, Keeper, copied, put
from rlkit.link import Chain
from rlkit.off_policy import present
from rlkit.optimizer import Adam
from rlkit.phases.phase import Phase
from rlkit.policy import Policy
from rlkit.schedules import Schedule
from rlkit.second_core import SecondCore
from rlkit.streams import Purpose, Streams
from rlkit.update import UpdateRecord, UpdateRows, last_kl, statistics, update

RECENT = 100  # episodes in the moving average of the return


@dataclass
class UpdateSettings:
    """What an update and an estimate need to know besides tensors."""

    num_epochs: int
    num_minibatches: int
    target_kl: float | None
    gamma: float
    gae_lambda: float
    aggregation: Callable[[Rollout, int], Tensor]
    horizon: int  # the constant of the `constant` aggregation
    clip_high: float | None
    rho_max: float = 1.0  # bound of the importance weight of a stale row


@dataclass
class Learner:
    """M members that learn together and know nothing of each other."""

    policy: Policy
    optimizer: Adam
    chain: Chain
    collector: Windows | Episodes
    estimator: Estimator
    schedules: dict[str, Schedule]  # learning_rate, clip, entropy_coef
    settings: UpdateSettings
    streams: Streams
    total_steps: int
    keepers: dict[str, Keeper] = field(default_factory=dict)
    phases: dict[str, Phase] = field(default_factory=dict)  # come before the first iteration
    second: SecondCore | None = None  # goes through the critic in updates
    sync_every: int = 1  # iterations between two copies of the policy to the one that collects; 1: no copy is made
    iteration: int = 0
    metrics: dict[str, Tensor] = field(default_factory=dict)  # of the last iteration, "area/name" -> [M]
    histograms: dict[str, Tensor] = field(default_factory=dict)
    frozen: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))  # [M]: learn no more

    def __post_init__(self) -> None:
        self.frozen = torch.zeros(self.streams.members, dtype=torch.bool)
        self.recent: list[deque[float]] = [deque(maxlen=RECENT) for _ in range(self.streams.members)]
        self.collecting = self.policy.frozen_copy() if self.sync_every > 1 else None

    @property
    def env_steps(self) -> Tensor:
        """Environment steps each member has executed, int64 [M]."""
        return self.collector.env_steps

    @property
    def running(self) -> Tensor:
        """Members that still learn, bool [M]."""
        return (self.env_steps < self.total_steps) & ~self.frozen & ~self.optimizer.diverged

    @property
    def members(self) -> int:
        """M."""
        return self.streams.members

    @property
    def diverged(self) -> Tensor:
        """Members given up because their gradient was not finite, bool [M]."""
        return self.optimizer.diverged

    @property
    def obs_size(self) -> int:
        """D."""
        return self.collector.obs_size

    @property
    def rollout_steps(self) -> float:
        """Most steps that a rollout adds to a running member: no number where episodes decide."""
        collector = self.collector
        return collector.num_steps * collector.num_envs if isinstance(collector, Windows) else math.inf

    @property
    def judged(self) -> bool:
        """Whether there are keepers that evaluations may lead to change members."""
        return any(keeper.moves for keeper in self.keepers.values())

    def freeze(self, member: int) -> None:
        """Let a member learn no more."""
        self.frozen[member] = True

    def close(self) -> None:
        """End the environments, and the process beside this one."""
        self.collector.close()
        if self.second is not None:
            self.second.close()

    def begin(self) -> list[Event]:
        """Go through the phases that come before the first iteration, if it is still to come; tell what they did."""
        events: list[Event] = []
        if self.iteration == 0:
            for phase in self.phases.values():
                events += phase(self.policy, self.optimizer)
            if self.phases:
                self.chain.anchor(self.policy, torch.ones(self.members, dtype=torch.bool))
        return events

    def judge(self, returns: Tensor) -> list[Event]:
        """Let the keepers see an evaluation, mean returns [M]; return what they have to tell."""
        if not self.keepers:
            return []
        state = {name: x for name, x in self.state_dict().items() if name != "keepers"}  # those they have
        if self.judged:
            state = copied(state)
        moved, events = torch.zeros(self.members, dtype=torch.bool), []
        for keeper in self.keepers.values():
            some, told = keeper.judge(state, returns.float(), self.metrics, ~self.running)
            moved |= some
            events += told
        if events:
            self.load_state_dict({**state, "keepers": {name: k.state_dict() for name, k in self.keepers.items()}})
        if bool(moved.any()):
            self.chain.anchor(self.policy, moved)
            self.synchronize(moved)
        return events

    def synchronize(self, members: Tensor) -> None:
        """Give the policy that collects the weights and statistics of the one that learns, for members bool [M]."""
        if self.collecting is not None:
            put(self.collecting.state_dict(), self.policy.state_dict(), members)

    def iterate(self, detail: bool = True) -> None:
        """Make one iteration: six lines, and the numbers that are wanted of it (`detail`: all of them)."""
        running = self.running
        progress = self.env_steps / self.total_steps
        for schedule in self.schedules.values():
            schedule(progress, self.metrics)

        with self.policy.thinned(self.streams, self.iteration):
            rollout = self.chain.rollout(self.collect(running))
            rollout = self.estimate(rollout)
            batch = self.chain.batch(flatten(rollout))
            record = self.update(batch, running)
            self.metrics, self.histograms = self.measure(record, batch, detail)
            self.metrics["run/progress"] = progress
            self.chain.observe(batch, self.metrics, self.policy)
        fresh = rollout.lanes(slice(self.collector.num_envs))  # before those that links have added

        if detail:
            self.metrics |= self.chain.report()
            if rollout.group is not None:
                self.metrics["group/degenerate"] = degenerate_share(fresh)
        self.policy.update_statistics(fresh)
        self.iteration += 1

    def collect(self, running: Tensor) -> Rollout:
        """Collect with the policy, or with its copy, which then is up to `sync_every` - 1 iterations old."""
        if self.collecting is None:
            return self.collector.collect(self.policy, self.iteration, running)
        behind = self.iteration % self.sync_every
        if not behind:
            self.synchronize(torch.ones(self.members, dtype=torch.bool))
        with self.collecting.thinned(self.streams, self.iteration):
            rollout = self.collector.collect(self.collecting, self.iteration, running)
        return rollout.replace(stale=torch.ones_like(rollout.valid[0])) if behind else rollout

    def estimate(self, rollout: Rollout) -> Rollout:
        """Add values (where there is a critic), advantages, returns and row weights to a rollout."""
        s = self.settings
        rollout = present(rollout, self.policy, s.rho_max)
        if self.policy.critic is not None:
            rollout = with_values(rollout, self.policy)
        parts = [rollout]
        if rollout.group is not None and rollout.valid.shape[2] > self.collector.num_envs:
            # other groups decide nothing for those that were just played, their scale and their bins included
            fresh = self.collector.num_envs
            parts = [rollout.lanes(slice(fresh)), rollout.lanes(slice(fresh, None))]
        found = zip(*(self.estimator(part, s.gamma, s.gae_lambda) for part in parts), strict=True)
        advantage, ret = (torch.cat(x, 2) if x[1:] else x[0] for x in found)
        weight = s.aggregation(rollout, s.horizon)
        if rollout.importance is not None:
            weight = weight * rollout.importance
        return rollout.replace(advantage=advantage, ret=ret, weight=weight)

    def update(self, batch: Batch, running: Tensor) -> UpdateRecord:
        """Update the policy on a batch, with the minibatch order of this iteration."""
        s = self.settings
        return update(
            self.policy,
            self.optimizer,
            self.chain,
            batch,
            learning_rate=self.schedules["learning_rate"].value,
            active=running,
            num_epochs=s.num_epochs,
            num_minibatches=s.num_minibatches,
            rngs=self.streams.open(Purpose.ORDER, self.iteration),
            target_kl=s.target_kl,
            second=self.second if self.second is not None and self.second.ready() else None,
        )

    def measure(self, record: UpdateRecord, batch: Batch, detail: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the metrics [M] and histograms of this iteration; without `detail` only what schedules need."""
        metrics: dict[str, Tensor] = dict(self.episode_metrics())
        histograms: dict[str, Tensor] = {}
        if detail:
            low = self.schedules["clip"].value
            high = low if self.settings.clip_high is None else torch.full_like(low, self.settings.clip_high)
            scalars, histograms = statistics(record, batch, low, high)
            metrics |= scalars
            metrics |= {f"schedule/{name}": schedule.value for name, schedule in self.schedules.items()}
        elif record.minibatches and any(schedule.reads == "entropy/mean" for schedule in self.schedules.values()):
            metrics["entropy/mean"] = UpdateRows.of(record).entropy()
        kl = last_kl(record)
        if kl is not None:
            metrics["kl/old"] = kl
        return metrics, histograms

    def episode_metrics(self) -> Iterator[tuple[str, Tensor]]:
        """Mean return and length of the episodes that ended in the last rollout, and the return's moving average."""
        finished = self.collector.finished
        for recent, episodes in zip(self.recent, finished, strict=True):
            recent.extend(ret for ret, _ in episodes)
        yield "episode/return", _means([[ret for ret, _ in episodes] for episodes in finished])
        yield "episode/length", _means([[length for _, length in episodes] for episodes in finished])
        yield "episode/return_recent", _means([list(recent) for recent in self.recent])

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next iteration depends on; tensors start with the member axis."""
        members = self.streams.members
        copy = {} if self.collecting is None else {"collecting": self.collecting.state_dict()}
        return {
            **copy,
            "policy": self.policy.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "chain": self.chain.state_dict(),
            "schedules": {name: schedule.state_dict() for name, schedule in self.schedules.items()},
            "collector": self.collector.state_dict(),
            "keepers": {name: keeper.state_dict() for name, keeper in self.keepers.items()},
            "frozen": self.frozen,
            "iteration": torch.full((members,), self.iteration, dtype=torch.int64),
            "metrics": dict(self.metrics),
            "recent": [list(recent) for recent in self.recent],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave: the next iteration is then bit-identical."""
        self.policy.load_state_dict(state["policy"])
        if self.collecting is not None:
            self.collecting.load_state_dict(state["collecting"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.chain.load_state_dict(state["chain"])
        for name, schedule in self.schedules.items():
            schedule.load_state_dict(state["schedules"][name])
        self.collector.load_state_dict(state["collector"])
        if self.collector.anew:
            self.chain.restart()
        for name, keeper in self.keepers.items():
            if name in state["keepers"]:  # else it is one that was switched on since
                keeper.load_state_dict(state["keepers"][name])
        self.frozen = state["frozen"].clone()
        self.iteration = int(state["iteration"].max())  # in a team those that have stopped are behind
        self.metrics = dict(state["metrics"])
        self.recent = [deque(recent, maxlen=RECENT) for recent in state["recent"]]


def _means(values: list[list[float]]) -> Tensor:
    return torch.tensor([sum(v) / len(v) if v else float("nan") for v in values])
