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
from rlkit.build import FOREIGN_EVALUATION_LANES, build_policy, evaluation_limit, to_config
from rlkit.conf.schema import ConfigError
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


class Unending(gymnasium.Env):
    """Ends at step 7 in every fourth episode, at the very step 9 in another fourth, and else never."""

    observation_space, action_space = gymnasium.spaces.Box(0, 1, (1,), np.float32), gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.end = 0, {0: 7, 1: 9}.get((seed or 0) % 4)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(1, np.float32), 1.0, self.steps == self.end, False, {}

    def render(self):
        return np.zeros((16, 16, 3), np.uint8)


gymnasium.register("Broken-v0", Broken, max_episode_steps=100)
gymnasium.register("Unending-v0", Unending)


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
    assert scores(best, range(2), 20).means.tolist() == run.summary["eval_peak"]  # as exact as eval_return is
    assert best.member("best") == int(np.argmax(run.summary["eval_peak"]))


# --- episodes without an end ---------------------------------------------------------------------------------------

UNENDING = {**PPO, "env": "gym", "env.id": "Unending-v0", "total_steps": 256}


def cut_of(limit: int, episodes: int = 100) -> tuple[np.ndarray, np.ndarray]:
    """The lengths of evaluation episodes of `Unending`, and which of them are cut."""
    ends = np.array([{0: 7, 1: 9}.get(seed % 4, np.inf) for seed in start_seeds(episodes)])
    return np.minimum(ends, limit), ends > limit


def test_an_evaluation_without_a_time_limit_plays_a_thousand_steps_and_says_so_once(tmp_path, capsys):
    run = rlkit.run(folder=tmp_path / "run", show="plain", **UNENDING)
    lengths, cut = cut_of(1_000)
    assert run.eval_return == [lengths.mean()]  # 1 for each step
    line = f"{cut.sum()} of 100 evaluation episodes were still going at 1,000 steps and were cut there"
    out = capsys.readouterr().out
    assert out.count("were cut there") == 1 and f"{line} (eval.max_episode_steps)" in out
    assert main([str(run.folder), "--json", str(tmp_path / "a.json")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{line} (--max-episode-steps)"
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["max_episode_steps"] == 1_000 and found["cut"] == [cut.sum()]
    assert found["lengths"] == [lengths.tolist()]


@pytest.mark.parametrize("processes", [1, 2])
def test_the_key_cuts_where_it_says_and_an_episode_that_ends_there_is_not_cut(tmp_path, capsys, processes):
    settings = {**UNENDING, "eval.max_episode_steps": 9, "members": 3, "processes": processes, "eval.every": 128}
    run = rlkit.run(folder=tmp_path / "run", show="plain", **settings, **{"eval.episodes": 10})
    lengths, cut = cut_of(9)
    assert run.eval_return == [lengths.mean()] * 3
    first = 3 * cut_of(9, 10)[1].sum()  # of the first evaluation
    said = f"{first} of 30 evaluation episodes were still going at 9 steps and were cut there (eval.max_episode_steps)"
    out = capsys.readouterr().out
    assert said in out and out.count("were cut there") == 1
    again = played(run)
    assert again.cut.tolist() == [cut.tolist()] * 3 and again.lengths.tolist() == [lengths.tolist()] * 3


def test_the_command_s_option_takes_the_place_of_the_key(tmp_path, capsys):
    run = rlkit.run(folder=tmp_path / "run", **UNENDING, **{"eval.max_episode_steps": 9})
    assert main([str(run.folder), "--max-episode-steps", "8", "--json"]) == 0
    said = capsys.readouterr()
    lengths, cut = cut_of(8)
    assert json.loads(said.out)["lengths"] == [lengths.tolist()]
    assert f"{cut.sum()} of 100 evaluation episodes were still going at 8 steps" in said.err


def test_a_run_can_be_given_another_limit_when_it_is_resumed(tmp_path):
    run = rlkit.run(folder=tmp_path / "run", **UNENDING, **{"eval.max_episode_steps": 9})
    on = rlkit.run(resume=run.folder, total_steps=512, **{"eval.max_episode_steps": 20})
    assert run.eval_return == [cut_of(9)[0].mean()] and on.eval_return == [cut_of(20)[0].mean()]


def test_grpo_s_own_limit_is_that_of_its_evaluation_which_may_be_shorter(tmp_path, capsys):
    chosen = ["env=gym", "env.id=Unending-v0", "algo=grpo", "algo.max_episode_steps=30"]
    assert evaluation_limit(to_config(compose(chosen)[0])) == 30
    assert evaluation_limit(to_config(compose([*chosen, "eval.max_episode_steps=20"])[0])) == 20
    assert evaluation_limit(to_config(compose(["env=CartPole", "algo=ppo"])[0])) == 500
    assert evaluation_limit(to_config(compose(["env=CartPole", "algo=ppo", "eval.max_episode_steps=20"])[0])) == 20
    wanted = "eval.max_episode_steps is 31; it must be <= 30, the time limit of Unending-v0 in this run"
    with pytest.raises(ConfigError, match=f"^{wanted}$"):
        to_config(compose([*chosen, "eval.max_episode_steps=31"])[0])
    settings = {**GRPO, "env": "gym", "env.id": "Unending-v0", "algo.max_episode_steps": 9}
    run = rlkit.run(folder=tmp_path / "run", show="plain", **settings)
    assert run.eval_return == [cut_of(9)[0].mean()]
    assert "cut" not in capsys.readouterr().out  # it is the task's


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


def test_json_makes_the_folder_it_names(trained, tmp_path, capsys):
    file = tmp_path / "new" / "er" / "scores.json"
    assert main([str(trained("grpo").folder), "--episodes", "2", "--json", str(file)]) == 0
    assert len(json.loads(file.read_text())["returns"][0]) == 2


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
        (["--member", "2"], "member is 2; it must be all, best or a number from 0 to 1"),
        (["--checkpoint", "best"], "there is no checkpoint at "),
        (["--member", "1st"], "member is '1st'; it must be all, best or a number from 0 to 1"),
        (["--max-episode-steps", "0"], "--max-episode-steps is 0; it must be >= 1"),
        (
            ["--max-episode-steps", "501"],
            "--max-episode-steps is 501; it must be <= 500, the time limit of CartPole-v1 in this run",
        ),
        (["--json", f"{__file__}/a/b.json"], f"--json is {__file__}/a/b.json, but {__file__} is not a folder"),
        (["--json", "/"], "--json is /; it must end in .json, and not be the run's own summary.json"),
        (["--json", "/dev/full"], "--json is /dev/full; it must end in .json"),
        (["--json", "{run}/checkpoint.pt"], "--json is {run}/checkpoint.pt; it must end in .json"),
        (["--json", "{run}/summary.json"], "--json is {run}/summary.json; it must end in .json, and not be the run's"),
        (["--json", "x" * 300 + ".json"], f"--json is {'x' * 300}.json, which cannot be used: File name too long"),
        (["--json", "/proc/a/b.json"], "--json is /proc/a/b.json, but /proc cannot be written to: "),
        (["--video", "/proc/a.mp4"], "--video is /proc/a.mp4, but /proc cannot be written to: "),
    ],
)
def test_what_cannot_be_done_is_one_sentence(trained, options, sentence, capsys):
    run = str(trained("grpo").folder)
    assert main([run, *(option.replace("{run}", run) for option in options)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith(f"rlkit: {sentence.replace('{run}', run)}")
    assert said.err.count("\n") == 1


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
    whole = copy("kept")
    for name in ("best.pt", "checkpoint_100.pt", "checkpoint_150.pt"):
        shutil.copy(whole / "checkpoint.pt", whole / name)
    for name in ("checkpoint.pt", "checkpoint_150.pt"):
        (whole / name).write_bytes(file.read_bytes())
    remedy = f"resume={whole} goes on from checkpoint_100.pt\n"
    assert refused("kept").endswith(f"; --checkpoint best reads best.pt; python -m rlkit.train {remedy}")
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
