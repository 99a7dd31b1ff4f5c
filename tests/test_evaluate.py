"""Evaluation of a finished run: the same numbers again, each episode counted once, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

import rlkit
from rlkit.build import FOREIGN_EVALUATION_LANES, build_policy, to_config
from rlkit.envs import make
from rlkit.envs.spaces import ActionSpec
from rlkit.evaluate import Evaluator, main, start_seeds
from rlkit.saved import SavedRun
from rlkit.scores import Scores, parser, scores
from rlkit.train import Run, compose

QUICK = {"tuned": "none", "eval.every": 0, "log.every": 0, "policy.hidden": [8]}
PPO = {**QUICK, "algo": "ppo", "num_envs": 4, "algo.num_steps": 64, "algo.num_minibatches": 2, "total_steps": 512}
GRPO = {**QUICK, "algo": "grpo", "num_envs": 4, "algo.group_size": 4, "total_steps": 200}
RUNS: dict[str, dict[str, Any]] = {
    "ppo": {**PPO, "env": "Pendulum", "members": 3, "env.normalize_observation": True, "policy.log_std": "state"},
    "team": {**PPO, "env": "Pendulum", "members": 3, "processes": 2, "policy.squash": True},
    "grpo": {**GRPO, "env": "CartPole", "members": 2},
    "sync": {**PPO, "env": "gym", "env.id": "CartPole-v1", "members": 5, "processes": 2},
    "one-hot": {**GRPO, "env": "gym", "env.id": "FrozenLake-v1", "+env.kwargs": {"is_slippery": True}},
}


class Sprints(gymnasium.Env):
    """Most episodes take one step and earn 1; every fifth takes fifty and earns 5."""

    observation_space, action_space = gymnasium.spaces.Box(0, 1, (1,), np.float32), gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 50 if (seed or 0) % 5 == 0 else 1
        self.reward = 0.1 if self.left > 1 else 1.0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.left -= 1
        return np.zeros(1, np.float32), self.reward, self.left == 0, False, {}


class Broken(Sprints):
    """Fails once it is evaluated."""

    def step(self, action):
        if sys.argv[0].endswith("evaluate"):
            raise ValueError("the gearbox is gone")
        return super().step(action)


gymnasium.register("Sprints-v0", Sprints, max_episode_steps=100)
gymnasium.register("Broken-v0", Broken, max_episode_steps=100)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A function from a name of `RUNS` to that run, trained once."""
    done: dict[str, Run] = {}

    def get(name: str) -> Run:
        if name not in done:
            done[name] = rlkit.run(folder=tmp_path_factory.mktemp("runs") / name, **RUNS[name])
        return done[name]

    return get


def played(run: Run, **options: Any) -> Scores:
    saved = SavedRun.open(run.folder)
    return scores(saved, options.pop("members", range(saved.config.members)), **options)


@pytest.mark.parametrize("name", RUNS)
def test_evaluation_gives_the_numbers_the_run_ended_with_to_the_last_bit(trained, name):
    run = trained(name)
    assert played(run).means.tolist() == run.summary["eval_return"]
    assert played(run, stochastic=True).means.tolist() == run.summary["eval_return_stochastic"]


@pytest.mark.parametrize("name", ["ppo", "team", "sync"])
def test_a_member_evaluated_alone_has_the_numbers_it_has_among_others(trained, name):
    run = trained(name)
    every = played(run, stochastic=True)
    alone = played(run, stochastic=True, members=range(1, 2))
    assert alone.returns.shape == (1, 100)
    assert np.array_equal(alone.returns[0], every.returns[1])
    assert np.array_equal(alone.lengths[0], every.lengths[1])


def test_evaluation_leaves_the_statistics_of_observations_alone(trained):
    run = trained("ppo")
    saved = SavedRun.open(run.folder)
    assert saved.state["normalizer.count"].tolist() == [512.0] * 3
    assert (saved.state["normalizer.var"] != 1).all()
    policy, actions = saved.policy(range(3))
    before = {name: x.clone() for name, x in policy.state_dict().items()}
    evaluator = Evaluator(make("Pendulum-v1", 30, autoreset_mode="Disabled"), actions, 3)
    first, second = evaluator(policy, 10), evaluator(policy, 10)
    assert torch.equal(first, second)
    assert all(torch.equal(x, before[name]) for name, x in policy.state_dict().items())
    assert played(run).means.tolist() == run.summary["eval_return"]
    after = SavedRun.open(run.folder).state
    assert all(torch.equal(x, after[name]) for name, x in saved.state.items())


@pytest.mark.parametrize("lanes", [1, 3, 7, 40])
def test_each_start_state_counts_once_however_long_its_episode_is(lanes):
    config = to_config(compose(["env=gym", "env.id=Sprints-v0", "algo=ppo"])[0])
    policy, _ = build_policy(config)
    envs = make("Sprints-v0", lanes, backend="sync", autoreset_mode="Disabled")
    episodes = Evaluator(envs, ActionSpec.of(envs.single_action_space), 1).play(policy, 40)
    envs.close()
    long = np.array(start_seeds(40)) % 5 == 0
    assert 4 < long.sum() < 20  # taken as they end, 7 lanes would have counted 40 short ones before a single long one
    assert episodes.lengths[0].tolist() == np.where(long, 50, 1).tolist()
    np.testing.assert_allclose(episodes.returns[0], np.where(long, 5.0, 1.0))


def test_seed_0_means_the_start_states_of_training_and_another_seed_others(trained):
    wanted = np.random.default_rng(np.random.SeedSequence([4])).integers(0, 2**31, 3)
    assert start_seeds(3) == start_seeds(3, 0) == wanted.tolist()
    assert start_seeds(3, 1) != start_seeds(3)
    run = trained("ppo")
    assert not np.array_equal(played(run, episodes=3, seed=1).returns, played(run, episodes=3).returns)
    sampled = [played(trained("grpo"), episodes=20, seed=k, stochastic=True).returns for k in (1, 1, 2)]
    assert np.array_equal(sampled[0], sampled[1]) and not np.array_equal(sampled[0], sampled[2])


def test_the_number_of_environments_changes_rounding_alone(trained):
    run = trained("sync")
    assert np.array_equal(played(run, episodes=5, num_envs=2).lengths, played(run, episodes=5).lengths)
    assert FOREIGN_EVALUATION_LANES < 100  # so that the 100 episodes of the run itself took several turns


def test_progress_rises_to_one(trained):
    told: list[float] = []
    played(trained("team"), episodes=150, progress=told.append)
    assert told == sorted(told) and told[-1] == 1.0 and len(set(told)) > 2


def test_best_is_each_member_at_its_best_evaluation(tmp_path):
    settings = {**RUNS["grpo"], "total_steps": 2000, "eval.every": 200, "algo.learning_rate": 0.01}
    run = rlkit.run(folder=tmp_path / "run", **settings)
    best = SavedRun.open(run.folder, "best")
    assert scores(best, range(2), 20).means.astype(np.float32).tolist() == run.summary["eval_peak"]
    assert best.member("best") == int(np.argmax(run.summary["eval_peak"]))


# --- the command ---------------------------------------------------------------------------------------------------


def test_the_table_and_the_json_say_the_same(trained, tmp_path, capsys):
    run, file = trained("ppo"), tmp_path / "scores.json"
    assert main([str(run.folder), "--episodes", "7", "--stochastic", "--json", str(file)]) == 0
    table, found = capsys.readouterr().out, json.loads(file.read_text())
    returns = np.array(found["returns"])
    assert returns.shape == np.shape(found["lengths"]) == (3, 7)
    assert (np.array(found["lengths"]) == 200).all()
    np.testing.assert_allclose(found["mean"], returns.mean(1))
    np.testing.assert_allclose(found["std"], np.sqrt(((returns - returns.mean(1, keepdims=True)) ** 2).mean(1)))
    assert found["min"] == returns.min(1).tolist() and found["max"] == returns.max(1).tolist()
    np.testing.assert_allclose(found["interquartile_mean"], returns.mean(1).mean())  # of three none is cut off
    assert found["start_seeds"] == start_seeds(7) and found["member_seeds"] == [0, 1, 2]
    assert found["run"] == str(run.folder) and found["checkpoint"] == "last" and found["stochastic"] is True
    assert found["version"] == found["trained_with_version"] == rlkit.__version__
    rows = [line.split() for line in table.splitlines() if line.split() and line.split()[0] in "012"]
    for m, row in enumerate(rows):
        numbers = [found[name][m] for name in ("mean", "std", "min", "max", "mean_length")]
        assert row == [str(m), *(f"{x:,.1f}" for x in numbers)]
    assert len(rows) == 3 and f"IQM {returns.mean():,.1f}" in table
    assert "Pendulum-v1 ppo: 7 episodes, sampled actions" in table


def test_json_without_a_file_is_all_there_is_on_standard_output(trained, capsys):
    run = trained("grpo")
    assert main([str(run.folder), "--episodes", "3", "--member", "best", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["members"] == [int(np.argmax(run.eval_return))] and len(found["returns"]) == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--episodes", "0"], "--episodes is 0; it must be >= 1"),
        (["--num-envs", "0"], "--num-envs is 0; it must be >= 1"),
        (["--seed", "-1"], "--seed is -1; it must be >= 0"),
        (["--member", "2"], "member is 2; it must be best or a number from 0 to 1"),
        (["--checkpoint", "best"], "there is no checkpoint at "),
        (["--json", "no/where.json"], "--json is no/where.json, but no is not a folder"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(trained, options, sentence, capsys):
    assert main([str(trained("grpo").folder), *options]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith(f"rlkit: {sentence}") and said.err.count("\n") == 1


def test_a_run_that_is_not_there_or_damaged_is_one_sentence(trained, tmp_path, capsys):
    def refused(name: str) -> str:
        assert main([str(tmp_path / name)]) == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err.count("\n") == 1, said.err
        return said.err

    def copy(name: str) -> Path:
        return Path(shutil.copytree(trained("grpo").folder, tmp_path / name))

    assert "there is no run at" in refused("nowhere")
    file = copy("damaged") / "checkpoint.pt"
    file.write_bytes(file.read_bytes()[:500])
    assert "checkpoint.pt is not a checkpoint that can be read" in refused("damaged")
    file = copy("module") / ".hydra" / "config.yaml"
    file.write_text(file.read_text().replace("id: CartPole-v1", "id: gone:Gone-v0"))
    assert "the module gone cannot be imported" in refused("module")
    file = copy("yaml") / ".hydra" / "config.yaml"
    file.write_text("env: [\n")
    assert "config.yaml is damaged" in refused("yaml")
    shutil.copy(trained("ppo").folder / "checkpoint.pt", copy("foreign") / "checkpoint.pt")
    assert "is of a run with env=Pendulum-v1, and this one has env=CartPole-v1" in refused("foreign")
    file = copy("networks") / ".hydra" / "config.yaml"
    OmegaConf.save(OmegaConf.merge(OmegaConf.load(file), {"policy": {"hidden": [3]}}), file)
    assert "does not fit the networks that the configuration describes" in refused("networks")


def test_an_error_of_the_environment_keeps_its_traceback(tmp_path, monkeypatch, capsys):
    run = rlkit.run(folder=tmp_path / "run", **PPO, env="gym", **{"env.id": "Broken-v0"})
    monkeypatch.setattr(sys, "argv", ["evaluate"])
    assert main([str(run.folder)]) == 1
    trace, line = capsys.readouterr().err.rstrip().rsplit("\n", 1)
    assert trace.startswith("Traceback") and 'raise ValueError("the gearbox is gone")' in trace
    assert line.startswith("rlkit: environment 0 of member 0 raised ValueError: the gearbox is gone in step")


def test_the_module_runs_from_the_command_line(trained):
    command = [sys.executable, "-m", "rlkit.evaluate", str(trained("grpo").folder), "--episodes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stderr
    assert "CartPole-v1 grpo: 2 episodes, deterministic policy" in done.stdout


def test_the_help_says_what_the_exit_status_means():
    assert "Exit status: 0 done, 1 a fault" in parser().format_help()
