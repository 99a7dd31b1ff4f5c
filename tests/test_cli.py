"""The command `python -m rlkit.train` as a user meets it: what it writes, prints, refuses, and how it ends."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import gymnasium
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.envs.registration import EnvSpec
from omegaconf import OmegaConf

import rlkit
from rlkit.train import main, quiet_pipe

ROOT = Path(__file__).resolve().parents[1]
COMMAND = [sys.executable, "-m", "rlkit.train"]
PPO = ["algo=ppo", "total_steps=1024", "members=2", "eval.every=512", "log.every=512", "policy.hidden=[8]"]
# fmt: off
SUMMARY = {
    "env": str, "algo": str, "seed": int, "members": int, "total_steps": int, "env_steps": list,
    "wall_seconds": float, "train_seconds": float, "eval_return": list, "eval_return_stochastic": list,
    "solved_at_steps": list, "status": list, "version": str, "machine": str,
}
# fmt: on


def start(folder: Path, *arguments: str, command: list[str] = COMMAND) -> subprocess.Popen[str]:
    """Start the command in `folder`, its output in two files there; wherever it runs, this checkout is imported."""
    folder.mkdir(parents=True, exist_ok=True)
    env = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm"}
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        return subprocess.Popen([*command, *arguments], cwd=folder, env=env, stdout=out, stderr=err, text=True)


def finish(process: subprocess.Popen[str], folder: Path) -> tuple[int, str, str]:
    status = process.wait(timeout=120)
    return status, (folder / "out").read_text(), (folder / "err").read_text()


JOBS = {
    "ppo": PPO,
    "grpo": ["env=CartPole", "algo=grpo", "total_steps=500", "eval.every=0"],
}


def call(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Do what the command does in this process, which has loaded already what takes most of the time."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(folder)
        patch.setattr("sys.argv", ["train", *arguments])
        return main(), out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """What each of `JOBS` did: its folder, exit status, output and errors; the first as a user starts it."""
    folders = {name: tmp_path_factory.mktemp(name.replace(" ", "_")) for name in JOBS}
    process = start(folders["ppo"], *JOBS["ppo"])
    others = {name: (folders[name], *call(folders[name], *JOBS[name])) for name in list(JOBS)[1:]}
    return {"ppo": (folders["ppo"], *finish(process, folders["ppo"])), **others}


@pytest.fixture(scope="module")
def ppo_run(jobs) -> Path:
    [folder] = (jobs["ppo"][0] / "runs" / "CartPole" / "ppo").iterdir()
    return folder


# --- a run ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_a_run_ends_with_status_0_and_no_word_on_stderr(jobs, name):
    _, status, out, err = jobs[name]
    assert (status, err) == (0, "")
    assert "mean return of 100 episodes" in out


def test_the_run_directory_holds_what_is_promised(jobs, ppo_run):
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d-\d{6}", ppo_run.name)
    names = {path.name for path in ppo_run.iterdir()}
    assert {".hydra", "metrics.csv", "checkpoint.pt", "summary.json", "member_00", "member_01"} <= names
    assert not [name for name in names if name.endswith((".tmp", ".log"))]
    assert len([name for name in names if name.startswith("events.out.tfevents.")]) == 1
    assert {path.name for path in jobs["ppo"][0].iterdir()} == {"runs", "out", "err"}  # nothing beside it


@pytest.mark.parametrize(("name", "members"), [("ppo", 2), ("grpo", 1)])
def test_the_summary_has_every_promised_key(jobs, name, members):
    [file] = jobs[name][0].glob("runs/*/*/*/summary.json")
    summary = json.loads(file.read_text())
    assert {key: type(summary[key]) for key in SUMMARY} == SUMMARY
    assert all(len(value) == members for value in summary.values() if isinstance(value, list))
    assert (summary["env"], summary["algo"], summary["seed"]) == ("CartPole-v1", name, 0)
    assert (summary["members"], summary["status"]) == (members, ["finished"] * members)
    assert all(steps >= summary["total_steps"] for steps in summary["env_steps"])
    assert all(1 <= ret <= 500 for ret in summary["eval_return"] + summary["eval_return_stochastic"])
    assert summary["solved_at_steps"] == [None] * members
    assert 0 < summary["train_seconds"] <= summary["wall_seconds"]


def test_hydra_keeps_the_configuration(ppo_run):
    config = OmegaConf.load(ppo_run / ".hydra" / "config.yaml")
    assert config.algo.num_epochs == 20  # tuned
    assert config.policy.hidden == [8]
    assert OmegaConf.load(ppo_run / ".hydra" / "overrides.yaml") == PPO


def test_the_checkpoint_loads_without_running_code(ppo_run):
    state = torch.load(ppo_run / "checkpoint.pt", weights_only=True)
    assert state["learner"]["policy"]["actor.weights.0"].shape == (2, 4, 8)
    assert state["learner"]["collector"]["env_steps"].tolist() == [1024, 1024]


def test_metrics_are_logged_at_their_steps(ppo_run):
    rows = list(csv.DictReader((ppo_run / "metrics.csv").open()))
    steps = {name: [int(row["step"]) for row in rows if row["name"] == name] for name in ("kl/old", "eval/return")}
    assert steps == {"kl/old": [512, 1024], "eval/return": [512, 1024, 1024]}
    assert {f"kl/epoch_{epoch}" for epoch in range(20)} <= {row["name"] for row in rows}


def test_output_that_is_not_a_terminal_has_no_control_codes(jobs):
    for name in ("ppo", "grpo"):
        assert re.search(r"[\x00-\x09\x0b-\x1f\x7f]", jobs[name][2]) is None


def test_the_run_names_commands_that_show_it(jobs, ppo_run, capsys):
    lines = [line.strip() for line in jobs["ppo"][2].splitlines()]
    [line] = [line for line in lines if line.startswith("run ")]
    assert Path(line.split()[1]) == ppo_run
    [command] = [shlex.split(line) for line in lines if " -c " in line]
    exec(command[2])
    assert capsys.readouterr().out.strip() in ("0", "1")


def test_python_trains_the_same_weights_bit_for_bit(ppo_run, tmp_path):
    settings = dict(override.split("=", 1) for override in PPO) | {"policy.hidden": [8], "total_steps": 1024}
    run = rlkit.run(folder=tmp_path / "run", **settings)
    one, two = (torch.load(path / "checkpoint.pt", weights_only=True)["learner"] for path in (ppo_run, run.folder))
    assert all(torch.equal(one["policy"][name], two["policy"][name]) for name in one["policy"])
    assert torch.equal(one["optimizer"]["v"], two["optimizer"]["v"])
    assert run.summary["eval_return"] == json.loads((ppo_run / "summary.json").read_text())["eval_return"]
    assert {path.name for path in (run.folder / ".hydra").iterdir()} >= {"config.yaml", "overrides.yaml"}


# --- refused, helped, interrupted ----------------------------------------------------------------------------------


def test_a_fault_is_one_line_and_status_2(tmp_path):
    status, out, err = call(tmp_path, "algo=ppo", "algo.clip=-1", "seed=-1")
    assert (status, out) == (2, "")
    assert err.splitlines() == ["rlkit: algo.clip is -1.0; it must be > 0", "rlkit: seed is -1; it must be >= 0"]
    assert not (tmp_path / "runs").exists()


class Broken(CartPoleEnv):
    """Gives a reward that is not a number at its tenth step."""

    steps = 0

    def step(self, action):
        self.steps += 1
        obs, reward, *rest = super().step(action)
        return obs, math.nan if self.steps == 10 else reward, *rest


def test_an_environment_that_fails_is_one_line_and_status_1(tmp_path, monkeypatch):
    monkeypatch.setitem(gymnasium.registry, "Broken-v0", EnvSpec("Broken-v0", Broken, max_episode_steps=500))
    status, _, err = call(tmp_path, "env=gym", "env.id=Broken-v0", "algo=ppo", "num_envs=2")
    assert status == 1
    assert err == "rlkit: environment 0 of member 0 gave a non-finite reward in step 10 of the rollout\n"
    assert not list(tmp_path.glob("runs/*/*/*/checkpoint.pt"))


def test_help_comes_at_once(tmp_path):
    timed = [sys.executable, "-X", "importtime", *COMMAND[1:]]
    status, out, err = finish(start(tmp_path, "--help", command=timed), tmp_path)
    assert status == 0
    assert "python -m rlkit.train env=CartPole algo=grpo" in out
    assert max(len(line) for line in out.splitlines()) <= 160
    assert not {"torch", "hydra", "tensorboard"} & {line.split("|")[-1].strip() for line in err.splitlines()}


def test_a_reader_that_goes_away_gets_no_traceback(tmp_path):
    process = subprocess.Popen(
        [*COMMAND, *JOBS["grpo"]],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (141, "")


PIPED = {
    "help": ["rlkit.train", "--help"],
    "sweep": ["rlkit.train", "-m", *JOBS["grpo"], "seed=1,2"],
    "report": ["rlkit.report", "RUN"],
    "diagnose": ["rlkit.diagnose", "RUN"],
    "evaluate": ["rlkit.evaluate", "RUN", "--episodes", "1"],
    "export": ["rlkit.export", "RUN", "--format", "torch", "--output", "policy.pt2"],
    "tune": ["rlkit.tune", *PPO, "env=CartPole"],
}


@pytest.mark.parametrize("name", PIPED)
def test_every_command_ends_without_a_word_where_its_reader_has_gone(name, ppo_run, tmp_path):
    if name == "tune":
        pytest.importorskip("optuna")
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", *(str(ppo_run) if part == "RUN" else part for part in PIPED[name])]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with os.fdopen(write, "w") as out:
        done = subprocess.run(
            command, cwd=tmp_path, env=env, stdout=out, stderr=subprocess.PIPE, text=True, timeout=120
        )
    assert (done.returncode, done.stderr) == (141, "")


def test_an_error_of_another_pipe_is_not_taken_for_the_console_s():
    @quiet_pipe
    def entry() -> int:
        raise BrokenPipeError("a worker's")

    with pytest.raises(BrokenPipeError, match="a worker's"):
        entry()


def test_ctrl_c_saves_and_exits_with_130(tmp_path):
    process = start(tmp_path, "algo=ppo", "total_steps=100000000", "policy.hidden=[8]", "eval.every=0")
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("runs/*/*/*/metrics.csv")) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        status, out, err = finish(process, tmp_path)
    finally:
        process.kill()
    assert (status, err) == (130, "")
    [folder] = tmp_path.glob("runs/*/*/*")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == ["interrupted"]
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)["learner"]
    assert saved["collector"]["env_steps"].tolist() == summary["env_steps"]
    assert "interrupted" in out


# --- start-up ------------------------------------------------------------------------------------------------------

FIRST_UPDATE = """
import os, sys
import rlkit.loop, rlkit.train
iterate = rlkit.loop.Learner.iterate
def first(learner, detail=True):
    iterate(learner, detail)
    print(*sys.modules, sep="\\n", flush=True)
    os._exit(0)
rlkit.loop.Learner.iterate = first
sys.exit(rlkit.train.main())
"""


def cpu_seconds(folder: Path, program: str, *arguments: str) -> float:
    """Processor seconds of a Python program: unlike the clock's they do not grow when the machine is busy."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    status, _, err = finish(start(folder, *arguments, command=[sys.executable, "-c", program]), folder)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert status == 0, err
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_the_first_update_comes_soon_after_the_imports_it_needs(tmp_path):
    least = cpu_seconds(tmp_path / "least", "import torch, gymnasium, hydra")
    ours = cpu_seconds(tmp_path / "ours", FIRST_UPDATE, "algo=ppo")
    loaded = set((tmp_path / "ours" / "out").read_text().split())
    assert "rlkit.update" in loaded
    assert not {"tensorboard", "matplotlib", "rich", "scipy", "pandas", "pygame"} & loaded
    assert ours - least < 2.0
