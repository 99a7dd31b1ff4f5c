"""A team of processes against one learner of all members, and what happens when a process fails."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SMALL

import rlkit
from rlkit import team as module
from rlkit.build import build_learner, to_config
from rlkit.collect import NonFiniteError
from rlkit.conf.schema import Config, ConfigError
from rlkit.cores import cores, num_processes
from rlkit.evaluate import Evaluator
from rlkit.faults import Fault
from rlkit.loop import Learner
from rlkit.session import FINAL_EPISODES
from rlkit.team import Team, parts
from rlkit.train import compose


def small_config(algo: str, *overrides: str) -> Config:
    base = [f"algo={algo}", "tuned=none", "total_steps=100000", "policy.hidden=[8,8]", *SMALL[algo]]
    return to_config(compose([*base, *overrides])[0])


@pytest.fixture
def team_of():
    teams = []

    def make(number: int, *overrides: str, algo: str = "ppo") -> Team:
        teams.append(Team(small_config(algo, *overrides), number))
        return teams[-1]

    yield make
    for team in teams:
        team.close()


def alike(a: object, b: object, path: str = "") -> None:
    """Assert that two states hold the same, up to rounding."""
    if isinstance(a, dict):
        assert isinstance(b, dict) and set(a) == set(b), path
        for name in a:
            alike(a[name], b[name], f"{path}/{name}")
    elif isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, equal_nan=True, msg=lambda text: f"{path}: {text}")
    else:
        assert a == b, path


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_a_team_is_one_learner(algo, team_of):
    overrides = (
        "members=5",
        "env.normalize_observation=true",
        "env.normalize_reward=true",
        "stabilizer=[ref_kl]",
        "exploration.name=linear",
        "algo.schedule.clip.name=kl_driven",
    )
    team = team_of(2, *overrides, algo=algo)
    learner = build_learner(small_config(algo, *overrides))
    assert (team.members, team.obs_size, team.rollout_steps) == (5, 4, learner.rollout_steps)
    for detail in (True, False, True):
        team.iterate(detail)
        learner.iterate(detail)
        assert torch.equal(team.env_steps, learner.env_steps)
        assert torch.equal(team.running, learner.running) and not team.diverged.any()
        alike(team.metrics, learner.metrics)
        assert {name: len(x) for name, x in team.histograms.items()} == {
            name: len(x) for name, x in learner.histograms.items()
        }
    state = team.state_dict()
    alike(state, learner.state_dict())
    restored = build_learner(small_config(algo, *overrides))
    restored.load_state_dict(state)
    assert restored.iteration == 3


def test_evaluations_are_those_of_one_evaluator(team_of):
    team = team_of(3, "members=4", "env=Pendulum")
    returns = team.evaluator(None, 7)
    config = small_config("ppo", "members=4", "env=Pendulum")
    evaluator: Evaluator = rlkit.build.build_evaluator(config, FINAL_EPISODES)  # type: ignore[attr-defined]
    torch.testing.assert_close(returns, evaluator(build_learner(config).policy, 7), rtol=1e-4, atol=1e-2)
    assert returns.shape == team.evaluator(None, 7, stochastic=True).shape == (4, 7)


def test_a_frozen_member_learns_no_more_and_a_part_that_is_done_waits(team_of):
    team = team_of(2, "members=3")
    team.freeze(0)  # the only one of the first process
    assert team.running.tolist() == [False, True, True] and team.frozen.tolist() == [True, False, False]
    team.iterate()
    assert team.env_steps.tolist() == [0, 32, 32]
    assert team.metrics["ratio/mean"].isnan().tolist() == [True, False, False]
    before = team.state_dict()["policy"]["actor.weights.0"]
    team.freeze(2)
    team.iterate()
    after = team.state_dict()["policy"]["actor.weights.0"]
    assert [torch.equal(a, b) for a, b in zip(after, before, strict=True)] == [True, False, True]
    assert team.env_steps.tolist() == [0, 64, 32]


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("reward", NonFiniteError, "member 1 gave a non-finite reward in step 4 "),
        ("raise", RuntimeError, "the motor is on fire"),
        ("die", RuntimeError, "members 0 to 0 ended unexpectedly, with status -9"),
    ],
)
def test_a_process_that_fails_is_an_error_here_and_ends_the_others(team_of, how, error, words):
    team = team_of(2, "env=gym", "env.id=Failing-v0", f"+env.kwargs={{how:{how},at:12}}", "members=2")
    if how == "reward":
        team.freeze(0)  # the other is the first of its process, and member 1 of the run
    team.iterate()
    with pytest.raises(error, match=words):
        team.iterate()
    with pytest.raises(RuntimeError):  # and there is nobody left to ask
        team.iterate()
    team.close()
    assert not any(process.is_alive() for process in team._processes)


def test_a_fault_of_a_member_has_its_number_in_the_run(team_of, monkeypatch):
    """Whatever raised it: a process knows its members by the numbers that they have there."""

    def overflow(learner: Learner, detail: bool = True) -> None:
        raise Fault("the obs of member {member} is beyond 65504", 0)

    monkeypatch.setattr(Learner, "iterate", overflow)
    team = team_of(2, "members=2")
    team.freeze(0)  # the other is the first of its process
    with pytest.raises(Fault, match="^the obs of member 1 is beyond 65504$"):
        team.iterate()


def test_what_cannot_be_built_is_said_as_without_a_team():
    with pytest.raises(ConfigError, match=r"env\.kwargs"):
        Team(small_config("ppo", "env=gym", "env.id=Failing-v0", "+env.kwargs.what=1", "members=2"), 2)


def test_processes_end_when_the_run_is_killed(tmp_path):
    command = [sys.executable, "-m", "rlkit.train", "members=2", "processes=2", "total_steps=1000000000"]
    run = subprocess.Popen([*command, f"hydra.run.dir={tmp_path / 'run'}"], stdout=subprocess.DEVNULL)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children")
    if not children.exists():
        run.kill()
        pytest.skip("needs /proc")
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "metrics.csv").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    workers = [int(pid) for pid in children.read_text().split()]
    assert len(workers) == 2
    run.kill()
    run.wait()
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists() and "Z" not in status(pid)]


def status(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_run_with_processes_ends_as_one_without(tmp_path):
    settings = {
        "algo": "ppo",
        "tuned": "none",
        "members": 3,
        "total_steps": 512,
        "num_envs": 4,
        "eval.every": 200,
        "algo.num_steps": 16,
    }
    one, two = (rlkit.run(folder=tmp_path / str(n), show="off", processes=n, **settings) for n in (1, 2))
    same = ("env_steps", "eval_return", "eval_peak", "solved_at_steps", "status")
    assert {name: one.summary[name] for name in same} == {name: two.summary[name] for name in same}
    files = [sorted(p.name.split(".")[0] for p in run.folder.rglob("*") if p.is_file()) for run in (one, two)]
    assert files[0] == files[1]
    obs = np.zeros((5, 4), np.float32)
    assert np.array_equal(rlkit.load(one.folder, 2).act(obs), rlkit.load(two.folder, 2).act(obs))


def test_how_many_processes(monkeypatch):
    config = small_config("ppo", "members=20")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert cores() == 8 and num_processes(config) == 5  # four members each
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert cores() == 2 and num_processes(config) == 2
    assert num_processes(dataclasses.replace(config, members=7)) == 1
    assert num_processes(dataclasses.replace(config, processes=6)) == 6
    assert num_processes(dataclasses.replace(config, processes=6, members=3)) == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert cores() == 8
    assert parts(7, 3) == [range(0, 2), range(2, 4), range(4, 7)]


class TwoWords(Exception):
    """Cannot be built again from its arguments, as pickle would."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


@pytest.mark.parametrize("error", [TwoWords("odd", "exception"), ValueError("odd exception")])
def test_any_error_can_be_sent(error):
    error.add_note("where it was")
    sent = pickle.loads(pickle.dumps(module.portable(error)))
    assert "odd exception" in str(sent)
    assert any("where it was" in note for note in sent.__notes__)


def in_a_pool(folder: str) -> list[int]:
    return rlkit.run(
        algo="ppo",
        tuned="none",
        folder=folder,
        show="off",
        members=8,
        total_steps=4096,
        num_envs=1,
        **{"eval.every": 0},
    ).summary["env_steps"]


def test_a_worker_of_a_pool_trains_without_processes_of_its_own(tmp_path):
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map(in_a_pool, [str(tmp_path / "run")]) == [[4096] * 8]


def test_one_member_is_no_team(monkeypatch):
    monkeypatch.setattr("rlkit.cores.cores", lambda: 8)
    from rlkit.train import prepare

    prepared = prepare(compose(["tuned=none"])[0])
    assert isinstance(prepared.learner, Learner)
    prepared.close()
