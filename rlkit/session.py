"""A session: one run from first step to summary, with evaluations, checkpoints, log entries and a clean stop."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rlkit.diagnose import Diagnosis
from rlkit.files import write_text
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


class Evaluate(Protocol):
    """Plays episodes and returns their returns, [M, episodes] (`rlkit.evaluate.Evaluator`)."""

    def __call__(self, policy: Policy | None, episodes: int, stochastic: bool = False) -> Tensor: ...


class Record(Protocol):
    """Records an episode at some evaluations (`rlkit.video.Recorder`)."""

    def due(self) -> bool: ...

    def record(self, state: dict[str, Tensor], returns: Tensor, env_steps: Tensor, folder: Path) -> Path: ...


@dataclass(frozen=True)
class Evaluation:
    """An evaluation during training."""

    elapsed: int  # steps of the member that made most, as `Session.elapsed`
    returns: Tensor  # [M] mean return of the deterministic policy


@dataclass
class Clock:
    """Due each time the steps pass a multiple of `every`; never if `every` is 0."""

    every: int
    next: int = field(init=False)

    def __post_init__(self) -> None:
        self.next = self.every

    def due(self, steps: int) -> bool:
        if not self.every or steps < self.next:
            return False
        self.next = (steps // self.every + 1) * self.every
        return True


class Interrupt:
    """Turns the first Ctrl-C into a request to stop after this iteration; the second interrupts at once.

    Args:
        tell: called with a line of text at the first one.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.requested = False
        self._tell = tell
        self._main = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Interrupt:
        if self._main:
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._main:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._tell("Ctrl-C: this iteration is finished, then the run is saved and evaluated; once more ends it at once")


@dataclass
class Session:
    """Trains a learner and keeps the run's books.

    Args:
        folder: the run directory; `checkpoint.pt` and `summary.json` are written there.
        eval_every, eval_episodes, checkpoint_every, log_every: in steps of one member; 0 switches off.
        threshold: return at which the environment counts as solved, or None.
        stop_when_solved: freeze a member that held the threshold in two evaluations.
        about: what the summary says of the run before its results.
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
        self.peak = torch.full((members,), -torch.inf)
        self._diverged: set[int] = set()  # members that were told of
        self.train_seconds = 0.0
        self.elapsed = 0  # steps of the member that made most, summed over iterations: what `every` counts

    def run(self) -> dict[str, Any]:
        """Train to the end, or to the first Ctrl-C, and return the summary, which also lies in `summary.json`."""
        began = time.perf_counter()
        with Interrupt(self.logger.message) as interrupt:
            self.train(lambda: interrupt.requested)
            self._save()
            summary = {**self.about, **self._summary(interrupted=interrupt.requested)}
        summary["wall_seconds"] = round(time.perf_counter() - began, 3)
        write_text(self.folder / "summary.json", json.dumps(summary, indent=2) + "\n")
        return summary

    def train(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Iterate until no member is running or `stop` says so, with what is due in between."""
        self._tell(self.learner.begin())
        clocks = [Clock(every) for every in (self.log_every, self.eval_every, self.checkpoint_every)]
        while bool(self.learner.running.any()) and not stop():
            self._advance(*clocks)

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
            self._evaluate()
        if saving.due(self.elapsed):
            self._save()
        for member in learner.diverged.nonzero().flatten().tolist():
            self._note_divergence(member)

    def _evaluate(self) -> None:
        learner = self.learner
        returns = self.evaluator(learner.policy, self.eval_episodes).mean(1)
        self.peak = torch.maximum(self.peak, returns.float())
        self._log({"eval/return": returns.numpy(), "eval/peak": self.peak.numpy()})
        if self.on_evaluation is not None:
            self.on_evaluation(Evaluation(self.elapsed, returns))
        if self.recorder is not None and self.recorder.due():
            self._record(self.recorder, returns)
        self._tell(learner.judge(returns))
        if self.threshold is None:
            return
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

    def _save(self) -> None:
        state = self.learner.state_dict()
        checkpoint.save(self.folder / "checkpoint.pt", {"learner": state})
        best = state["keepers"].get(keep_best.NAME, {}).get("state")
        if best:
            checkpoint.save(self.folder / "best.pt", {"learner": {"policy": best["policy"]}})

    def _summary(self, interrupted: bool) -> dict[str, Any]:
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
            "status": [self._status(m, interrupted) for m in range(learner.members)],
            **found,
        }

    def _status(self, member: int, interrupted: bool) -> str:
        if bool(self.learner.diverged[member]):
            return "diverged"
        if bool(self.learner.frozen[member]):
            return "solved"
        return "interrupted" if interrupted and bool(self.learner.running[member]) else "finished"
