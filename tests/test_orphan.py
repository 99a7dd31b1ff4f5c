"""Processes whose parent was killed, and what a second Ctrl-C ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import gymnasium
import numpy as np
import pytest

import rlkit.envs
from rlkit.build import to_config
from rlkit.interrupt import Interrupt, Terminated
from rlkit.loop import Learner
from rlkit.orphan import GRACE, LOOK
from rlkit.team import PATIENCE, Team
from rlkit.train import compose

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc and fork")
SLOW = 60.0  # seconds of a step or an iteration in whose midst something happens


class Sleeping(gymnasium.Env):
    """Its second step takes a minute and says that it has begun."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, begun: str) -> None:
        self.begun, self.steps = begun, 0

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps == 2:
            Path(self.begun).touch()
            time.sleep(SLOW)
        return np.zeros(2, np.float32), 1.0, False, False, {}


@pytest.fixture(autouse=True)
def registered(registered_ids):
    gymnasium.register("Sleeping-v0", Sleeping)


def wait_for(true: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return true()


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def killed(work: Callable[[], object], begun: Path) -> list[int]:
    """Do `work` in a process, kill that once `begun` exists, and return the processes that it had started."""
    parent = multiprocessing.get_context("fork").Process(target=work)
    parent.start()
    assert wait_for(begun.exists, 30)
    started = children(parent.pid)
    parent.kill()
    parent.join()
    return started


def test_workers_of_environments_end_without_a_word_when_the_run_is_killed(tmp_path, capfd):
    def work() -> None:
        envs = rlkit.envs.make("CartPole-v1", 4, backend="async")
        envs.reset(seed=0)
        (tmp_path / "begun").touch()
        while True:
            envs.step(np.zeros(4, int))

    workers = killed(work, tmp_path / "begun")
    assert len(workers) == 4
    assert wait_for(lambda: not any(map(running, workers)), 10)
    assert capfd.readouterr().err == ""


def test_a_worker_in_a_long_step_ends_soon_after_the_run_is_killed(tmp_path, capfd):
    def work() -> None:
        envs = rlkit.envs.make("Sleeping-v0", 2, backend="async", begun=str(tmp_path / "begun"))
        envs.reset(seed=0)
        for _ in range(2):
            envs.step(np.zeros(2, int))

    workers = killed(work, tmp_path / "begun")
    assert len(workers) == 2
    assert wait_for(lambda: not any(map(running, workers)), GRACE + LOOK + 5)
    assert capfd.readouterr().err == ""


def sleeping_team(monkeypatch: pytest.MonkeyPatch, begun: Path) -> Team:
    """Two processes whose iterations take a minute."""

    def iterate(*_: object) -> None:
        begun.touch()
        time.sleep(SLOW)

    monkeypatch.setattr(Learner, "iterate", iterate)
    return Team(to_config(compose(["tuned=none", "members=2"])[0]), 2)


def test_processes_of_a_team_in_a_long_iteration_end_soon_after_the_run_is_killed(tmp_path, monkeypatch, capfd):
    workers = killed(lambda: sleeping_team(monkeypatch, tmp_path / "begun").iterate(), tmp_path / "begun")
    assert len(workers) == 2
    assert wait_for(lambda: not any(map(running, workers)), GRACE + LOOK + 5)
    assert capfd.readouterr().err == ""


@contextmanager
def ctrl_c(begun: Path) -> Iterator[None]:
    """Ctrl-C once `begun` exists."""

    def interrupt(*_: object) -> None:
        if not begun.exists():
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            return
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_team_that_is_interrupted_at_work_is_not_waited_for(tmp_path, monkeypatch):
    team = sleeping_team(monkeypatch, tmp_path / "begun")
    with ctrl_c(tmp_path / "begun"):
        team.iterate()
    start = time.monotonic()
    team.close()
    assert time.monotonic() - start < PATIENCE / 2
    assert not any(process.is_alive() for process in team._processes)


def test_sigterm_is_answered_in_the_midst_of_an_iteration_and_a_second_one_ends_it(tmp_path, monkeypatch):
    team, told = sleeping_team(monkeypatch, tmp_path / "begun"), []

    def terminate(*_: object) -> None:
        if (tmp_path / "begun").exists():
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGALRM, terminate)
    try:
        with pytest.raises(Terminated), Interrupt(lambda text: told.append((text, time.monotonic()))) as interrupt:
            signal.setitimer(signal.ITIMER_REAL, 0.1, 0.5)
            team.iterate()
        ended = time.monotonic()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        team.close()
    [(text, when)] = told
    assert interrupt.requested and text.startswith(
        "SIGTERM: this iteration is finished, so that the checkpoint is exact"
    )
    assert ended - when < 5


def test_workers_that_are_interrupted_in_a_step_are_not_waited_for(tmp_path, capfd):
    envs = rlkit.envs.make("Sleeping-v0", 2, backend="async", begun=str(tmp_path / "begun"))
    envs.reset(seed=0)
    envs.step(np.zeros(2, int))
    with ctrl_c(tmp_path / "begun"):
        envs.step(np.zeros(2, int))
    start = time.monotonic()
    envs.close()
    assert time.monotonic() - start < PATIENCE / 2
    assert not any(process.is_alive() for process in envs.processes)
    assert capfd.readouterr().err == ""
