"""A session: one run from first step to summary, with evaluations, checkpoints, log entries and a clean stop."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rlkit.diagnose import Diagnosis
from rlkit.files import write_text
from rlkit.interrupt import Interrupt
from rlkit.keepers import checkpoint, keep_best
from rlkit.keepers.keeper import Event
from rlkit.loop import Learner
from rlkit.policy import Policy
from rlkit.team import Team

FINAL_EPISODES = 100


class Log(Protocol):
    """What a session tells of itself (`rlkit.metrics.Logger`)."""

    def log(
        self, steps: np.ndarray, scalars: dict[str, np.ndarray], histograms: dict[str, np.ndarray] | None = None
    ) -> None: ...

    def progress(self, steps: np.ndarray, scalars: dict[str, np.ndarray]) -> None: ...

    def message(self, text: str) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...


class Evaluate(Protocol):
    """Plays episodes and returns their returns, [M, episodes] (`rlkit.evaluate.Evaluator`)."""

    def __call__(self, policy: Policy | None, episodes: int, stochastic: bool = False) -> Tensor: ...


class Record(Protocol):
    """Records an episode at some evaluations (`rlkit.video.Recorder`)."""

    evaluations: int  # so far

    def due(self) -> bool: ...

    def record(self, state: dict[str, Tensor], returns: Tensor, env_steps: Tensor, folder: Path) -> Path: ...


@dataclass(frozen=True)
class Evaluation:
    """An evaluation during training."""

    elapsed: int  # steps of the member that made most, as `Session.elapsed`
    returns: Tensor  # [M] mean return of the deterministic policy


@dataclass
class Clock:
    """Due each time the steps, which begin at `start`, pass a multiple of `every`; never if `every` is 0."""

    every: int
    start: int = 0
    next: int = field(init=False)

    def __post_init__(self) -> None:
        self.next = (self.start // self.every + 1) * self.every if self.every else 0

    def due(self, steps: int) -> bool:
        if not self.every or steps < self.next:
            return False
        self.next = (steps // self.every + 1) * self.every
        return True


@dataclass
class Session:
    """Trains a learner and keeps the run's books.

    Args:
        folder: the run directory; `checkpoint.pt` and `summary.json` are written there.
        eval_every, checkpoint_every, log_every: in steps of one member; 0 switches off.
        eval_episodes: of an evaluation during training.
        threshold: return at which the environment counts as solved, or None.
        stop_when_solved: freeze a member that held the threshold in two evaluations.
        stop_at: end the training, if not the run, once a member has made so many steps.
        checkpoint_keep: checkpoints that are kept, the newest included.
        about: what the run is, which the summary says before its results, and each checkpoint too.
        on_evaluation: called after each evaluation during training; what it raises ends the training.
        diagnosis: sees all that is logged; what it finds is told, and what holds at the end is in the summary.
        recorder: records an episode at evaluations during training, into `videos/`.
    """

    learner: Learner | Team
    evaluator: Evaluate
    logger: Log
    folder: Path
    eval_every: int
    eval_episodes: int
    checkpoint_every: int
    log_every: int
    threshold: float | None
    stop_when_solved: bool
    stop_at: int | None = None
    checkpoint_keep: int = 1
    about: dict[str, Any] = field(default_factory=dict)
    on_evaluation: Callable[[Evaluation], None] | None = None
    diagnosis: Diagnosis | None = None
    recorder: Record | None = None
    solved_at: list[int | None] = field(init=False)
    peak: Tensor = field(init=False)  # [M] best evaluation so far

    def __post_init__(self) -> None:
        members = self.learner.members
        self.solved_at = [None] * members
        self._above_since: list[int | None] = [None] * members  # steps of the first of the evaluations above
        self.peak = torch.full((members,), -torch.inf, dtype=torch.float64)
        self.stopped_early: list[str | None] = [None] * members  # why, of those that keepers have frozen
        self._diverged: set[int] = set()  # members that were told of
        self.train_seconds = 0.0
        self._evaluated = 0  # `elapsed` at the last evaluation
        self.elapsed = 0  # steps of the member that made most, summed over iterations: what `every` counts
        self.ended_by: KeyboardInterrupt | None = None  # Ctrl-C or SIGTERM
        self._saved: int | None = None  # `elapsed` of the newest checkpoint
        self._resumed = False
        self._began = time.perf_counter()

    def run(self) -> dict[str, Any]:
        """Train to the end, or to the first Ctrl-C, and return the summary, which also lies in `summary.json`."""
        with Interrupt(self.logger.message) as interrupt:
            self.train(lambda: interrupt.requested)
            self.ended_by = interrupt.cause
            self._save()
            summary = {**self.about, **self._summary()}
        summary["wall_seconds"] = round(time.perf_counter() - self._began, 3)
        write_text(self.folder / "summary.json", json.dumps(summary, indent=2) + "\n")
        return summary

    def train(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Iterate until no member is running or `stop` says so, with what is due in between."""
        if not self._resumed:
            self._tell(self.learner.begin())
            if self.eval_every and self.learner.judged:
                self._evaluate()  # what was gained is counted from here
        clocks = [Clock(every, self.elapsed) for every in (self.log_every, self.eval_every, self.checkpoint_every)]
        while bool(self.learner.running.any()) and not stop() and not self._far_enough():
            self._advance(*clocks)
        if self.eval_every and self._evaluated < self.elapsed and not bool(self.learner.running.any()):
            self._evaluate()  # keepers see each member at its end

    def _far_enough(self) -> bool:
        return self.stop_at is not None and int(self.learner.env_steps.max()) >= self.stop_at

    def _advance(self, log: Clock, evaluation: Clock, saving: Clock) -> None:
        """One iteration and what is due after it."""
        learner = self.learner
        before, start = learner.env_steps.clone(), time.perf_counter()
        detail = bool(log.every) and self.elapsed + learner.rollout_steps >= log.next
        learner.iterate(detail)
        seconds = time.perf_counter() - start
        self.train_seconds += seconds
        made = learner.env_steps - before
        self.elapsed += int(made.max())  # not the largest count: that of a member that has stopped would stand still
        scalars = {name: x.numpy() for name, x in learner.metrics.items()}
        scalars["speed/steps_per_second"] = np.full(learner.members, int(made.sum()) / seconds)
        if detail and log.due(self.elapsed):
            self._log(scalars, {name: x.numpy() for name, x in learner.histograms.items()})
        self.logger.progress(learner.env_steps.numpy(), scalars)
        if evaluation.due(self.elapsed):
            returns = self._evaluate()
            if self.on_evaluation is not None:
                self.on_evaluation(Evaluation(self.elapsed, returns))
        for member in learner.diverged.nonzero().flatten().tolist():
            self._note_divergence(member)
        if saving.due(self.elapsed):  # last, so that what is told is told in the checkpoint too
            self._save()

    def _evaluate(self) -> Tensor:
        """Evaluate, and let keepers see it; return the mean returns [M]."""
        learner = self.learner
        returns = self.evaluator(learner.policy, self.eval_episodes).mean(1)
        self._evaluated = self.elapsed
        self.peak = torch.maximum(self.peak, returns)
        self._log({"eval/return": returns.numpy(), "eval/peak": self.peak.numpy()})
        if self.recorder is not None and self.recorder.due():
            self._record(self.recorder, returns)
        before = learner.frozen.clone()
        events = learner.judge(returns)
        self._tell(events)
        self._note_stopped(learner.frozen & ~before, events)
        self._note_solved(returns)
        return returns

    def _note_stopped(self, which: Tensor, events: list[Event]) -> None:
        """Keep why keepers have just frozen some members, bool [M]."""
        why = dict(sorted(events, key=lambda event: event[1].startswith("stopped early: ")))  # the last one counts
        for m in which.nonzero().flatten().tolist():
            self.stopped_early[m] = why.get(m, "by a keeper").removeprefix("stopped early: ")

    def _note_solved(self, returns: Tensor) -> None:
        if self.threshold is None:
            return
        learner = self.learner
        for m, (ret, steps) in enumerate(zip(returns.tolist(), learner.env_steps.tolist(), strict=True)):
            since = self._above_since[m]
            if not ret >= self.threshold:  # nan is below
                self._above_since[m] = None
            elif since is None:
                self._above_since[m] = steps
            elif self.solved_at[m] is None and steps > since:  # it has learned since, and is above still
                self.solved_at[m] = since
                self.logger.message(f"member {m} solved at {since:,} steps")
                if self.stop_when_solved:
                    learner.freeze(m)

    def _record(self, recorder: Record, returns: Tensor) -> None:
        """Record an episode; where that fails the training goes on, since a picture is no reason to lose it."""
        learner = self.learner
        try:
            recorder.record(learner.state_dict()["policy"], returns, learner.env_steps, self.folder)
        except Exception as error:  # whatever a renderer or an encoder raises
            self.logger.message(f"no video of this evaluation: {' '.join(str(error).split())}")

    def _log(self, scalars: dict[str, np.ndarray], histograms: dict[str, np.ndarray] | None = None) -> None:
        """Write a log entry, and tell of what it shows to be wrong."""
        steps = self.learner.env_steps.numpy()
        self.logger.log(steps, scalars, histograms)
        for text in self.diagnosis.note(steps, scalars) if self.diagnosis else ():
            self.logger.message(text)

    def _tell(self, events: list[Event]) -> None:
        for member, text in events:
            self.logger.message(f"member {member} {text}")

    def _note_divergence(self, member: int) -> None:
        if member not in self._diverged:
            self._diverged.add(member)
            self.logger.message(f"member {member} diverged: its gradient was not finite three times in a row")

    def state_dict(self) -> dict[str, Any]:
        """The books: what a session knows besides its learner and its log."""
        return {
            "elapsed": self.elapsed,
            "evaluated": self._evaluated,
            "train_seconds": self.train_seconds,
            "wall_seconds": time.perf_counter() - self._began,
            "peak": self.peak,
            "solved_at": self.solved_at,
            "above_since": self._above_since,
            "stopped_early": self.stopped_early,
            "recorder": None if self.recorder is None else self.recorder.evaluations,
            "diverged": sorted(self._diverged),
            "diagnosis": None if self.diagnosis is None else self.diagnosis.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], newest: bool = True) -> None:
        """Take over the books of the session that made a checkpoint; the learner has its state already.

        Args:
            newest: whether they are those of `checkpoint.pt`, and not of an older one.
        """
        self.elapsed, self.train_seconds = state["elapsed"], state["train_seconds"]
        self._evaluated = state["evaluated"]
        self._began = time.perf_counter() - state["wall_seconds"]
        self.peak, self.solved_at = state["peak"].double(), list(state["solved_at"])
        self._above_since, self._diverged = list(state["above_since"]), set(state["diverged"])
        self.stopped_early = list(state.get("stopped_early", self.stopped_early))  # older checkpoints have none
        if self.recorder is not None:
            self.recorder.evaluations = state.get("recorder") or 0
        if self.diagnosis is not None and state["diagnosis"] is not None:
            self.diagnosis.load_state_dict(state["diagnosis"])
        self._saved = self.elapsed if newest else None
        self._resumed = True

    def _save(self) -> None:
        """Write `checkpoint.pt` and, if there is one, `best.pt`."""
        state = self.learner.state_dict()
        if self._saved not in (None, self.elapsed):
            checkpoint.put_by(self.folder, self._saved, self.checkpoint_keep)
        books = {"session": self.state_dict(), "log": self.logger.state_dict()}
        checkpoint.save(self.folder / checkpoint.NEWEST, {"about": self.about, "learner": state, **books})
        self._saved = self.elapsed
        best = state["keepers"].get(keep_best.NAME, {}).get("state")
        if best:
            checkpoint.save(self.folder / "best.pt", {"about": self.about, "learner": best})

    def _summary(self) -> dict[str, Any]:
        learner = self.learner
        deterministic = self.evaluator(learner.policy, FINAL_EPISODES).mean(1)
        stochastic = self.evaluator(learner.policy, FINAL_EPISODES, stochastic=True).mean(1)
        self._log({"eval/return": deterministic.numpy(), "eval/return_stochastic": stochastic.numpy()})
        found = {"findings": self.diagnosis.lines(learner.diverged.numpy())} if self.diagnosis else {}
        return {
            "env_steps": learner.env_steps.tolist(),
            "train_seconds": round(self.train_seconds, 3),
            "eval_return": deterministic.tolist(),
            "eval_return_stochastic": stochastic.tolist(),
            "eval_peak": [None if p == -torch.inf else p for p in self.peak.tolist()],
            "solved_at_steps": self.solved_at,
            "status": [self._status(m) for m in range(learner.members)],
            "stopped_early": self.stopped_early,
            **found,
        }

    def _status(self, member: int) -> str:
        if bool(self.learner.diverged[member]):
            return "diverged"
        if bool(self.learner.frozen[member]):
            return "solved" if self.stop_when_solved and self.solved_at[member] is not None else "stopped early"
        if not bool(self.learner.running[member]):
            return "finished"
        return "stopped" if self.ended_by is None else "interrupted"
