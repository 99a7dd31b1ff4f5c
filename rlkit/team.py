"""A team: the members of a run shared out to processes, which a session sees as one learner.

Members know nothing of each other, so a part of them is a run of its own: seeds from its first member's on. A team adds
nothing to that but the messages: what the parts report is put side by side along the member axis.
"""

from __future__ import annotations

import io
import multiprocessing
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkit.build import build_evaluator, build_learner
from rlkit.conf.schema import Config
from rlkit.faults import Fault
from rlkit.keepers.keeper import Event, copied
from rlkit.orphan import end_with_parent
from rlkit.policy import Policy

PATIENCE = 5.0  # seconds that a process has to end by itself


def parts(members: int, number: int) -> list[range]:
    """Cut the members into parts whose sizes differ by at most one."""
    return [range(k * members // number, (k + 1) * members // number) for k in range(number)]


def joined(trees: Sequence[Any]) -> Any:
    """Put equal trees side by side: tensors and lists along their first axis, the members'."""
    first = trees[0]
    if isinstance(first, Tensor):
        return torch.cat(list(trees))
    if isinstance(first, list):
        return [x for tree in trees for x in tree]
    return {name: joined([tree[name] for tree in trees]) for name in first}


def some(tree: Any, members: range) -> Any:
    """The part of a tree that belongs to some members: what `joined` puts side by side."""
    if isinstance(tree, dict):
        return {name: some(x, members) for name, x in tree.items()}
    return tree[members.start : members.stop]


def packed(state: dict[str, Any]) -> bytes:
    """A state as bytes: tensors sent by themselves would be files in shared memory."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


class Team:
    """What a session needs of a `rlkit.loop.Learner`, done by several processes, each with some of the members.

    Args:
        config: of all members.
        number: of processes.

    Raises:
        rlkit.conf.schema.ConfigError: the configuration cannot run.
    """

    def __init__(self, config: Config, number: int) -> None:
        self.members = config.members
        self.metrics: dict[str, Tensor] = {}
        self.histograms: dict[str, Tensor] = {}
        self.env_steps = torch.zeros(self.members, dtype=torch.int64)
        self.running = torch.ones(self.members, dtype=torch.bool)
        self.frozen, self.diverged = torch.zeros(2, self.members, dtype=torch.bool)
        self.policy: Policy | None = None  # nobody here has it
        self.on_cut: Callable[[int, int], None] | None = None  # as of an Evaluator
        self.parts = parts(self.members, number)
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._at_work = False  # between a question and the last answer
        # a fork needs no guard in the user's script and starts at once, but is not safe where Apple's libraries are
        context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        for part in self.parts:
            ours, theirs = context.Pipe()
            share = replace(config, seed=config.seed + part.start, members=len(part), processes=1)
            inherited = [*self._pipes, ours] if sys.platform == "linux" else []
            process = context.Process(
                target=work, args=(theirs, share, part.start, inherited), name=f"members {part.start} to {part[-1]}"
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        try:
            (self.obs_size, self.rollout_steps, self.judged), *_ = self._answers()
        except BaseException:
            self.close()
            raise

    def iterate(self, detail: bool = True) -> None:
        """Make one iteration in every process."""
        answers = self._ask("iterate", detail)
        self.metrics = {
            name: torch.from_numpy(x) for name, x in _side_by_side([a[0] for a in answers], self.parts).items()
        }
        names = dict.fromkeys(name for a in answers for name in a[1])
        self.histograms = {
            name: torch.from_numpy(np.concatenate([a[1][name] for a in answers if name in a[1]])) for name in names
        }
        self._note([a[2] for a in answers])

    def begin(self) -> list[Event]:
        """Go through the phases before the first iteration in every process."""
        return self._events(self._ask("begin"))

    def judge(self, returns: Tensor) -> list[Event]:
        """Let the keepers of every process see an evaluation of its members."""
        for pipe, process, part in zip(self._pipes, self._processes, self.parts, strict=True):
            self._send(pipe, process, "judge", returns[part.start : part.stop].numpy())
        return self._events(self._answers())

    def _events(self, answers: list[Any]) -> list[Event]:
        self._note([now for _, now in answers])
        return [
            (part.start + member, text)
            for (events, _), part in zip(answers, self.parts, strict=True)
            for member, text in events
        ]

    def freeze(self, member: int) -> None:
        """Let a member learn no more."""
        for pipe, part in zip(self._pipes, self.parts, strict=True):
            if member in part:
                pipe.send(("freeze", (member - part.start,)))
                self._note([_answer(pipe)], [part])

    def evaluator(self, policy: Policy | None, episodes: int, stochastic: bool = False) -> Tensor:
        """Return the undiscounted return of each episode, [M, episodes], as `rlkit.evaluate.Evaluator` does."""
        answers = self._ask("evaluate", episodes, stochastic)
        returns = torch.from_numpy(np.concatenate([a[0] for a in answers]))
        cut = sum(a[1] for a in answers)
        if self.on_cut is not None and cut:
            self.on_cut(cut, returns.numel())
        return returns

    def state_dict(self) -> dict[str, Any]:
        """The state that one learner of all members would have."""
        states = [torch.load(io.BytesIO(state), weights_only=True) for state in self._ask("state")]
        for state in states:
            del state["metrics"]  # not of every part the same; they are here already
        return {**joined(states), "metrics": dict(self.metrics)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave, of this team or of a learner of all members."""
        for pipe, process, part in zip(self._pipes, self._processes, self.parts, strict=True):
            self._send(pipe, process, "load", packed(copied(some(state, part))))  # a slice is sent whole
        self._note(self._answers())
        self.metrics = dict(state["metrics"])

    def close(self) -> None:
        """End the processes; one that is at work, after a second Ctrl-C, or does not end by itself is killed."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + (0.0 if self._at_work else PATIENCE)
        for process in self._processes:
            process.join(max(deadline - time.monotonic(), 0.0))
            if process.is_alive():
                process.kill()
                process.join()

    def _ask(self, name: str, *args: Any) -> list[Any]:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            self._send(pipe, process, name, *args)
        return self._answers()

    def _send(self, pipe: Connection, process: BaseProcess, name: str, *args: Any) -> None:
        try:
            pipe.send((name, args))
        except OSError:
            raise _lost(process) from None

    def _answers(self) -> list[Any]:
        """What all processes answer; an error of one is raised once all have answered."""
        answers: list[Any] = []
        errors: list[Exception] = []
        self._at_work = True
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            try:
                answers.append(_answer(pipe))
            except (EOFError, OSError):
                errors.append(_lost(process))
            except Exception as error:
                errors.append(error)
        self._at_work = False
        if errors:
            raise errors[0]
        return answers

    def _note(self, states: Sequence[dict[str, np.ndarray]], which: Sequence[range] | None = None) -> None:
        for state, part in zip(states, which or self.parts, strict=True):
            for name, x in state.items():
                getattr(self, name)[part.start : part.stop] = torch.from_numpy(x)


def _answer(pipe: Connection) -> Any:
    error, answer = pipe.recv()
    if error is not None:
        raise error
    return answer


class LostProcessError(Fault):
    """A process of a team is gone: killed, for want of memory perhaps."""


def _lost(process: BaseProcess) -> LostProcessError:
    process.join(PATIENCE)
    return LostProcessError(f"the process of {process.name} ended unexpectedly, with status {process.exitcode}")


def _side_by_side(parts: Sequence[dict[str, np.ndarray]], members: Sequence[range]) -> dict[str, np.ndarray]:
    """Metrics [M] of all members; nan for those of a part that lacks one."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {
        name: np.concatenate(
            [
                part[name] if name in part else np.full(len(which), np.nan, np.float32)
                for part, which in zip(parts, members, strict=True)
            ]
        )
        for name in names
    }


class Worker:
    """A learner of some members, and what a team asks of it; answers hold NumPy arrays."""

    def __init__(self, config: Config) -> None:
        from rlkit.session import FINAL_EPISODES

        self.learner = build_learner(config)
        self.evaluator = build_evaluator(config, FINAL_EPISODES)

    def iterate(self, detail: bool) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, np.ndarray]]:
        if not bool(self.learner.running.any()):  # others go on
            return {}, {}, self.now()
        self.learner.iterate(detail)
        metrics, histograms = (
            {k: x.numpy() for k, x in y.items()} for y in (self.learner.metrics, self.learner.histograms)
        )
        return metrics, histograms, self.now()

    def now(self) -> dict[str, np.ndarray]:
        learner = self.learner
        names = ("env_steps", "running", "frozen", "diverged")
        return {name: getattr(learner, name).numpy() for name in names}

    def begin(self) -> tuple[list[Event], dict[str, np.ndarray]]:
        return self.learner.begin(), self.now()

    def judge(self, returns: np.ndarray) -> tuple[list[Event], dict[str, np.ndarray]]:
        return self.learner.judge(torch.from_numpy(returns)), self.now()

    def freeze(self, member: int) -> dict[str, np.ndarray]:
        self.learner.freeze(member)
        return self.now()

    def evaluate(self, episodes: int, stochastic: bool) -> tuple[np.ndarray, int]:
        played = self.evaluator.play(self.learner.policy, episodes, stochastic)
        return played.returns.numpy(), int(played.cut.sum())

    def state(self) -> bytes:
        return packed(self.learner.state_dict())

    def load(self, state: bytes) -> dict[str, np.ndarray]:
        self.learner.load_state_dict(torch.load(io.BytesIO(state), weights_only=True))
        return self.now()

    def close(self) -> None:
        self.learner.close()
        self.evaluator.close()


def portable(error: Exception) -> Exception:
    """The error itself, or where it cannot be sent to another process one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception as reason:
        said = RuntimeError(f"{type(error).__name__}: {error}")
        said.add_note(
            f"{error.__notes__[-1]}\n({type(error).__name__} itself cannot be sent between processes: {reason})"
        )
        return said
    return error


def work(pipe: Connection, config: Config, first: int, inherited: Sequence[Connection]) -> None:
    """Answer what a team asks until it hangs up; errors are answers too.

    Args:
        config: of this part of the members.
        first: the number of its first member.
        inherited: pipes that a fork has copied and that are not ours.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the session decides what it means
    for other in inherited:
        other.close()
    torch.set_num_threads(1)
    worker: Worker | None = None
    try:
        worker = Worker(config)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # likewise; not sooner, since it ends processes of environments
        end_with_parent()  # a thread of this process, hence after its forks
        answer: Any = (worker.learner.obs_size, worker.learner.rollout_steps, worker.learner.judged)
        while True:
            pipe.send((None, answer))
            name, args = pipe.recv()
            answer = getattr(worker, name)(*args)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the team is gone, and there is nobody to tell
    except Exception as error:
        error.add_note(f"in a process of the team:\n{traceback.format_exc()}")
        if isinstance(error, Fault) and error.member is not None:
            error = error.of_member(first + error.member)
        pipe.send((portable(error), None))
    finally:
        if worker is not None:
            worker.close()
