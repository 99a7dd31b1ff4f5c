"""A study: trials of a plan that Optuna chooses, stored in a folder so that several calls and processes share them."""

from __future__ import annotations

import json
import math
import os
import socket
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from omegaconf import OmegaConf
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from rlkit import __version__
from rlkit.build import reward_threshold
from rlkit.conf.schema import ConfigError
from rlkit.decimals import number
from rlkit.faults import Fault
from rlkit.files import write_csv, write_text
from rlkit.interquartile import interquartile_mean
from rlkit.job import machine, prepare
from rlkit.search_space import Plan
from rlkit.session import FINAL_EPISODES, Evaluation, Session

Tell = Callable[[str], None]
STATES = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}
STORAGE = (sqlite3.Error, SQLAlchemyError, optuna.exceptions.StorageInternalError)  # what a disk's refusal becomes
LOCK_SECONDS = 60.0  # to wait for another process that writes
LEAST_FOR_IMPORTANCE = 10  # complete trials


@dataclass(frozen=True)
class Row:
    """A finished trial: a line of trials.csv."""

    number: int
    state: str  # complete, pruned or failed
    value: float | None  # of a pruned trial that of its last evaluation
    seconds: float
    steps: int | None  # environment steps of all members together
    reason: str  # why it failed
    parameters: dict[str, Any]


class Score:
    """Interquartile mean over members of their returns, finite also where a return is not.

    A member whose return is not finite counts with its last finite one; before it had any, with the lowest member's.
    """

    def __init__(self, members: int) -> None:
        self.last = np.full(members, np.nan)

    def __call__(self, returns: np.ndarray) -> float:
        """Score the returns [M] of an evaluation.

        Raises:
            Fault: no member has had a finite return.
        """
        self.last = np.where(np.isfinite(returns), returns, self.last)
        if np.isnan(self.last).all():
            raise Fault("no member has had a finite return in an evaluation")
        return float(interquartile_mean(np.where(np.isnan(self.last), np.nanmin(self.last), self.last)))


class Progress:
    """A session's log that keeps nothing and tells, at most five times a second, where the trial stands."""

    def __init__(self, tell: Tell, title: str, total_steps: int) -> None:
        self._tell, self._title, self._total = tell, title, total_steps
        self._due = 0.0  # on the monotonic clock, seconds

    def log(self, steps: np.ndarray, scalars: dict[str, np.ndarray], histograms: Any = None) -> None:
        pass

    def message(self, text: str) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def progress(self, steps: np.ndarray, scalars: dict[str, np.ndarray]) -> None:
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + 0.2
            self._tell(f"{self._title}: {steps.mean():,.0f}/{self._total:,} steps")


def train(trial: optuna.Trial, plan: Plan, folder: Path, tell: Tell, stop: Callable[[], bool]) -> float:
    """Train the configuration of a trial and return its value; nothing is written.

    Raises:
        optuna.TrialPruned: an evaluation during training was not good enough.
        ConfigError: the configuration cannot run.
        Fault: an environment failed, or gave what is not a number.
        KeyboardInterrupt: `stop` said so before the end.
    """
    prepared = prepare(plan.configure(trial.params))
    config, learner = prepared.config, prepared.learner
    score = Score(config.members)

    def judge(evaluation: Evaluation) -> None:
        value = score(evaluation.returns.numpy())
        due = evaluation.elapsed // config.eval.every * config.eval.every  # rollouts end elsewhere in each trial
        trial.report(value, due)
        if trial.should_prune():
            raise optuna.TrialPruned

    try:
        session = Session(
            learner=learner,
            evaluator=prepared.evaluator,
            logger=Progress(tell, f"trial {trial.number}", config.total_steps),
            folder=folder,
            eval_every=config.eval.every,
            eval_episodes=config.eval.episodes,
            checkpoint_every=0,
            log_every=0,
            threshold=reward_threshold(config),
            stop_when_solved=config.stop_when_solved,
            on_evaluation=judge,
        )
        session.train(stop)
        if bool(learner.running.any()):
            raise KeyboardInterrupt
        stochastic = plan.metric == "eval_return_stochastic"
        return score(prepared.evaluator(learner.policy, FINAL_EPISODES, stochastic).mean(1).numpy())
    finally:
        trial.set_user_attr("steps", int(learner.env_steps.sum()))
        prepared.close()


class Study:
    """The trials of a plan, in a folder.

    Args:
        folder: holds study.db, trials.csv and best.yaml; it is made if need be.
        sampler_seed: makes the search of one process reproducible, interruptions included; None draws a seed.

    Raises:
        ConfigError: the folder cannot be used, or holds the study of another plan.
    """

    def __init__(self, folder: Path, plan: Plan, sampler_seed: int | None = None) -> None:
        self.folder, self.plan, self.sampler_seed = folder, plan, sampler_seed
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self._locked():
                self._study = self._open()
                self._recover()
        except (OSError, *STORAGE) as error:
            raise ConfigError(f"--study is {folder}, which cannot be used: {error.__cause__ or error}") from error

    def _open(self) -> optuna.Study:
        """Make the study, or open it if its trials compare with those of this plan.

        The median, and not successive halving, decides what is pruned: at each of its rungs halving would drop most
        trials, first those that learn late, while the median spares ties and half of the trials at each step.
        """
        url = f"sqlite:///{self.folder.absolute() / 'study.db'}"
        warmup = self.plan.config.total_steps // 4
        study = optuna.create_study(
            study_name="rlkit",
            storage=optuna.storages.RDBStorage(url, {"connect_args": {"timeout": LOCK_SECONDS}}),
            load_if_exists=True,
            direction="maximize",
            sampler=optuna.samplers.TPESampler(),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=warmup, n_min_trials=3),
        )
        facts = self.plan.facts()
        known = study.user_attrs.get("facts", facts)
        for key in sorted({**known, **facts}, key=lambda key: key not in ("env.id", "algo.name")):
            if known.get(key) != facts.get(key):
                there, now = _in_words(known.get(key)), _in_words(facts.get(key))
                raise ConfigError(
                    f"--study is {self.folder}, in whose trials {key} is {there}; now it is {now}, "
                    "so choose another folder"
                )
        study.set_user_attr("facts", facts)
        return study

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes of this study waiting; one that ends, in whatever way, gives the lock back."""
        connection = sqlite3.connect(self.folder / "study.lock", timeout=LOCK_SECONDS, isolation_level=None)
        try:
            connection.execute("BEGIN IMMEDIATE")
            yield
        finally:
            connection.close()

    def _trials(self, *states: TrialState) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False, states=states or None)

    def done(self) -> int:
        """Number of trials that count, which are those complete or pruned."""
        return len(self._trials(TrialState.COMPLETE, TrialState.PRUNED))

    def best(self) -> Row | None:
        """The complete trial of highest value, the first of equals."""
        complete = map(_row, self._trials(TrialState.COMPLETE))
        return max(complete, key=lambda row: -math.inf if row.value is None else row.value, default=None)

    def importance(self) -> dict[str, float]:
        """The share of each parameter in what sets the best quarter of the trials apart; {} if nothing does yet."""
        if len(self._trials(TrialState.COMPLETE)) < LEAST_FOR_IMPORTANCE:
            return {}
        evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=0.25)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                return optuna.importance.get_param_importances(self._study, evaluator=evaluator)
            except UserWarning:  # all trials tie
                return {}

    def ask(self, trials: int) -> optuna.Trial | None:
        """Begin a trial; None if `trials` of them are done or under way."""
        with self._locked():
            if self.done() + len(self._trials(TrialState.RUNNING)) >= trials:
                return None
            if self.sampler_seed is not None:  # a stream for each trial: one that goes on later repeats no draw
                before = sum(t.state != TrialState.WAITING and not _interrupted(t) for t in self._trials())
                [seed] = np.random.SeedSequence([self.sampler_seed, before]).generate_state(1)
                self._study.sampler = optuna.samplers.TPESampler(seed=int(seed))
            trial = self._study.ask(self.plan.space)
            trial.set_user_attr("process", f"{socket.gethostname()}:{os.getpid()}")
            return trial

    def conduct(self, trial: optuna.Trial, tell: Tell, stop: Callable[[], bool]) -> Row:
        """Train a trial, enter how it ended and write the files.

        Raises:
            KeyboardInterrupt: after the trial was entered as failed and queued again.
            rlkit.files.WriteError, or one of `STORAGE`: the study cannot be written.
        """
        value, state = None, TrialState.FAIL
        try:
            value, state = train(trial, self.plan, self.folder, tell, stop), TrialState.COMPLETE
        except optuna.TrialPruned:
            state = TrialState.PRUNED
        except KeyboardInterrupt:
            self._study.enqueue_trial(trial.params)
            raise
        except Exception as error:
            trial.set_user_attr("reason", "; ".join(str(error).split("\n")) or repr(error))
            if not isinstance(error, (ConfigError, Fault)):
                raise
        finally:
            with self._locked():
                ended = self._study.tell(trial, value, state)
                self._write()
        return _row(ended)

    def _recover(self) -> None:
        """Queue again what processes of this machine left under way when they were killed."""
        for trial in self._trials(TrialState.RUNNING):
            host, _, process = trial.user_attrs.get("process", f"{socket.gethostname()}:0").rpartition(":")
            if host == socket.gethostname() and not _alive(int(process)):
                self._study.tell(trial.number, state=TrialState.FAIL)
                self._study.enqueue_trial(trial.params)

    def _write(self) -> None:
        """Write trials.csv and best.yaml, each whole or not at all."""
        table: list[list[Any]] = [["number", "state", "value", "seconds", "steps", "reason", *self.plan.space]]
        for row in map(_row, self._trials(*STATES)):
            parameters = [as_yaml(row.parameters[key]) if key in row.parameters else "" for key in self.plan.space]
            steps = "" if row.steps is None else round(row.steps / self.plan.config.members)  # of one, as total_steps
            table.append([row.number, row.state, row.value, row.seconds, steps, row.reason, *parameters])
        write_csv(self.folder / "trials.csv", table)
        best = self.best()
        if best is not None:
            write_text(self.folder / "best.yaml", self._tuned(best))

    def _tuned(self, best: Row) -> str:
        """The settings of a trial in the form of a file of conf/tuned/."""
        pruned = len(self._trials(TrialState.PRUNED))
        reached = number(math.nan if best.value is None else best.value)
        settings = OmegaConf.create()
        for key, value in self.plan.settings(best.parameters).items():
            OmegaConf.update(settings, key, value)
        return (
            "# @package _global_\n"
            f"# Trial {best.number}, the best of {self.done()} ({pruned} pruned): IQM {reached} on "
            f"{self.plan.seeds} ({self.plan.metric}).\n"
            f"# rlkit {__version__}, {machine()}\n"
        ) + OmegaConf.to_yaml(settings)


def _in_words(fact: Any) -> str:
    """A fixed value, or, where it is how a key is searched, just that."""
    return "searched (perhaps in another range)" if isinstance(fact, dict) and "attributes" in fact else f"{fact}"


def as_yaml(value: Any) -> str:
    """A parameter as YAML and the command line write it."""
    return value if isinstance(value, str) else json.dumps(value)


def _row(trial: FrozenTrial) -> Row:
    seconds = round(trial.duration.total_seconds(), 3) if trial.duration else math.nan
    reason = "interrupted, and queued again" if _interrupted(trial) else trial.user_attrs.get("reason", "")
    steps = trial.user_attrs.get("steps")
    return Row(trial.number, STATES[trial.state], trial.value, seconds, steps, reason, trial.params)


def _interrupted(trial: FrozenTrial) -> bool:
    """Whether a trial has failed without a reason of its own."""
    return trial.state == TrialState.FAIL and "reason" not in trial.user_attrs


def _alive(process: int) -> bool:
    """Whether another process of this number runs; this one has only begun, so nothing under way is its own."""
    if process in (0, os.getpid()):
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is someone else's
        return True
    return True
