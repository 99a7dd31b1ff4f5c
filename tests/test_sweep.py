"""Sweeps, as a user meets them: with each launcher, with jobs that fail, interrupted, repeated."""

from __future__ import annotations

import csv
import io
import os
import shlex
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch

from rlkit import sweep
from rlkit.train import main

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["tuned=none", "total_steps=64", "num_envs=2", "algo.num_minibatches=2", "eval.every=0", "policy.hidden=[8]"]
PPO = ["algo=ppo", "algo.num_steps=16", *SMALL]
GRPO = ["algo=grpo", "algo.group_size=2", *SMALL]
CORRIDOR = ["env=gym", "env.id=corridor:Corridor-v0"]

# Episodes of `length` steps; at 0 a step fails, at -1 Ctrl-C is pressed at the first step. Torch's threads are noted.
ENVIRONMENT = """
import os, signal
import gymnasium as gym, numpy as np, torch

class Corridor(gym.Env):
    observation_space, action_space = gym.spaces.Box(0, 1, (1,), np.float32), gym.spaces.Discrete(2)
    pressed = False

    def __init__(self, length=5):
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.float32([self.np_random.random()]), {}

    def step(self, action):
        with open("threads", "a") as file:
            file.write(f"{torch.get_num_threads()} ")
        if self.length == 0:
            raise RuntimeError("the motor is off\\nand cold")
        if self.length == -1 and not Corridor.pressed:
            Corridor.pressed = True
            os.kill(os.getpid(), signal.SIGINT)
        self.time += 1
        return np.float32([self.np_random.random()]), float(action), self.time >= abs(self.length), False, {}

gym.register("Corridor-v0", Corridor, max_episode_steps=20)
"""

# A Slurm of one machine: `sbatch` reads the size of the array from the script's own lines, starts every task with the
# variables that Slurm gives it and tells the array's number; `srun` runs what follows its options; `sacct` knows all.
SLURM = {
    "sbatch": """
import os, re, subprocess, sys
script = open(sys.argv[1]).read()
first, last = map(int, re.search(r"#SBATCH --array=([0-9]+)-([0-9]+)", script).groups())
for task in range(first, last + 1):
    given = {"SLURM_JOB_ID": 7, "SLURM_ARRAY_JOB_ID": 7, "SLURM_ARRAY_TASK_ID": task, "SLURM_NTASKS": 1}
    given |= {"SLURM_ARRAY_TASK_COUNT": last + 1, "SLURM_JOB_NUM_NODES": 1, "SLURM_JOB_NODELIST": "here"}
    given |= {"SLURM_PROCID": 0, "SLURM_LOCALID": 0, "SLURM_NODEID": 0}
    env = os.environ | {name: str(value) for name, value in given.items()}
    subprocess.Popen(["bash", sys.argv[1]], env=env, **dict.fromkeys(["stdin", "stdout", "stderr"], subprocess.DEVNULL))
print("Submitted batch job 7")
""",
    "srun": """
import os, sys
line = sys.argv[1:]
output = line[line.index("--output") + 1].replace("%A", "7").replace("%a", os.environ["SLURM_ARRAY_TASK_ID"])
os.dup2(os.open(output.replace("%t", "0"), os.O_WRONLY | os.O_CREAT), 1)
start = next(k for k, word in enumerate(line) if "python" in os.path.basename(word))
os.execvp(line[start], line[start:])
""",
    "sacct": """
print("JobID|State|NodeList")
print("7_0|RUNNING|here")
print("7_1|RUNNING|here")
""",
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder that is the working directory, with an environment of one's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "corridor.py").write_text(ENVIRONMENT)
    yield tmp_path
    sys.modules.pop("corridor", None)


def call(*arguments: str) -> tuple[int, str, str]:
    """Do what the command does in this process, which has loaded already what takes most of the time."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr("sys.argv", ["train", *arguments])
        return main(), out.getvalue(), err.getvalue()


def command(*arguments: str) -> tuple[int, str, str]:
    """What the command does as a user starts it."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    line = [sys.executable, "-m", "rlkit.train", *arguments]
    done = subprocess.run(line, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=180)
    return done.returncode, done.stdout, done.stderr


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "sweep.csv").open() as file:
        return list(csv.DictReader(file))


def policy(folder: Path) -> list[torch.Tensor]:
    return list(torch.load(folder / "checkpoint.pt", weights_only=True)["learner"]["policy"].values())


def assert_same_alone(folder: Path, row: dict[str, str]) -> None:
    """Train what a row of the table says, but alone, and compare the final weights bit for bit."""
    assert call(*shlex.split(row["overrides"]), f"hydra.run.dir=alone/{row['job']}")[0] == 0
    ours, alone = policy(folder / row["folder"]), policy(Path("alone", row["job"]))
    assert all(torch.equal(one, two) for one, two in zip(ours, alone, strict=True))


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- in this process -----------------------------------------------------------------------------------------------


def test_of_four_jobs_the_second_fails_is_named_and_the_others_finish(here):
    status, out, err = call("-m", *PPO, *CORRIDOR, "+env.kwargs.length=5,0,7,9")
    [folder] = Path("runs", "sweeps").iterdir()
    rows = table(folder)
    assert status == 1
    assert [(row["job"], row["status"]) for row in rows] == [("0", "ok"), ("1", "failed"), ("2", "ok"), ("3", "ok")]
    assert [row["env_steps"] for row in rows] == ["64", "", "64", "64"]
    assert all(0 <= float(row["eval_return"]) <= length for row, length in zip(rows[::2], (5, 7), strict=True))
    raised = "environment 0 of member 0 raised RuntimeError: the motor is off in step 1"
    assert rows[1]["fault"] == f"{raised} (the folder's traceback.txt says where)"
    assert "in step" in (folder / rows[1]["folder"] / "traceback.txt").read_text()
    told, last = [line for line in err.splitlines() if line.startswith("rlkit: ")]
    assert told.startswith("rlkit: job 1 (") and told.endswith(f"+env.kwargs.length=0): {rows[1]['fault']}")
    assert last == f"rlkit: 1 of 4 jobs failed; {folder.absolute() / 'sweep.csv'} says why"
    assert "Traceback" not in out + err
    assert "3 of 4 jobs ok" in out and f"job 1: {rows[1]['fault']}" in out.splitlines()
    for row in (rows[0], rows[3]):
        assert_same_alone(folder, row)


def test_a_job_that_leaves_the_environment_s_id_open_fails_as_others_do(here):
    status, out, err = call("-m", *PPO, "env=gym,CartPole")
    [folder] = Path("runs", "sweeps").iterdir()
    rows = table(folder)
    assert status == 1
    assert [(row["folder"], row["status"]) for row in rows] == [("0_gym_ppo", "failed"), ("1_CartPole_ppo", "ok")]
    sentence = "env.id must be given, as in env=gym env.id=LunarLander-v3"
    assert rows[0]["fault"] == sentence and f"job 0: {sentence}" in out.splitlines()
    told, last = [line for line in err.splitlines() if line.startswith("rlkit: ")]
    assert told.startswith("rlkit: job 0 (") and told.endswith(f"): {sentence}")
    assert last.startswith("rlkit: 1 of 2 jobs failed")
    assert "Interpolation" not in out + err and "Mandatory" not in out + err


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_on_a_full_disk_a_sweep_says_so_in_a_sentence_after_its_table(here):
    folder = here / "sweep"
    (folder / "1").mkdir(parents=True)
    for path in (folder / "sweep.csv.tmp", folder / "1" / "traceback.txt.tmp"):
        path.symlink_to("/dev/full")
    status, out, err = call(
        "-m",
        *PPO,
        *CORRIDOR,
        "+env.kwargs.length=5,0",
        f"hydra.sweep.dir={folder}",
        "hydra.sweep.subdir=${hydra.job.num}",
    )
    assert status == 1
    assert "1 of 2 jobs ok" in out and "Traceback" not in out + err
    full = "cannot be written: No space left on device"
    assert f"(where is not known: {folder / '1' / 'traceback.txt'} {full})" in err
    assert err.splitlines()[-1] == f"rlkit: {folder / 'sweep.csv'} {full}"
    assert not list(folder.rglob("*.tmp"))


def test_a_folder_for_a_sweep_that_cannot_be_made_is_one_sentence(here):
    (here / "file").touch()
    status, _, err = call("-m", *PPO, "seed=0,1", f"hydra.sweep.dir={here / 'file' / 'sweep'}")
    said = f"hydra.sweep.dir is {here / 'file' / 'sweep'}, but {here / 'file'} is not a folder"
    assert (status, err) == (2, f"rlkit: {said}\n")


def test_a_rerun_overwrites_nothing(here):
    first = ["-m", *PPO, "seed=0,1"]
    assert [call(*first)[0], call(*first)[0]] == [0, 0]
    folders = sorted(Path("runs", "sweeps").iterdir())
    assert [len(table(folder)) for folder in folders] == [2, 2]
    before = contents(folders[0])
    status, out, err = call(*first, f"hydra.sweep.dir={folders[0]}")
    assert (status, out) == (2, "")
    assert err == (
        f"rlkit: hydra.sweep.dir is {folders[0].absolute()}, which already holds a sweep; it must be a new folder\n"
    )
    assert contents(folders[0]) == before


def test_a_job_never_overwrites_another_s_run(here):
    assert call(*PPO, "hydra.run.dir=it's one/job")[0] == 2  # not Hydra's grammar
    assert call(*PPO, r"hydra.run.dir='it\'s one/job'")[0] == 0
    before = contents(Path("it's one", "job"))
    status, _, err = call("-m", *PPO, "seed=1,2", r"hydra.sweep.dir='it\'s one'", "hydra.sweep.subdir=job")
    assert status == 1
    assert err.count(f"{here}/it's one/job holds a run already; hydra.sweep.subdir must be a new folder") == 2
    assert contents(Path("it's one", "job")) == before


def test_a_sweep_trains_every_job_wherever_its_flag_stands(here):
    status, out, err = call(*SMALL, "-m", "algo=ppo,grpo", "algo.num_epochs=1", "total_steps=2048", "num_envs=8")
    [folder] = Path("runs", "sweeps").iterdir()
    assert (status, err) == (0, "")
    assert [row["folder"] for row in table(folder)] == ["0_CartPole_ppo", "1_CartPole_grpo"]
    assert out.splitlines()[-3].split()[-1] == "algo=grpo"  # of the overrides, the one that is the job's own


@pytest.mark.parametrize("launcher", ["basic", "joblib"])
def test_ctrl_c_saves_the_job_and_ends_the_sweep(here, launcher):
    one = ["hydra.launcher.n_jobs=1"] if launcher == "joblib" else []  # in this process
    lengths = ["+env.kwargs.length=5,-1,7", f"hydra/launcher={launcher}", *one]
    status, out, _ = call("-m", *PPO, *CORRIDOR, *lengths)
    [folder] = Path("runs", "sweeps").iterdir()
    rows = table(folder)
    assert status == 130
    assert [(row["status"], row["env_steps"]) for row in rows] == [("ok", "64"), ("interrupted", "32")]
    assert (folder / rows[1]["folder"] / "checkpoint.pt").exists()
    assert "1 of 2 jobs that began ok" in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["seed=0,1", "sed=2"], "sed is not a key of this configuration; did you mean seed?"),
        (["env=CartPole,Acrobat"], "env is 'Acrobat'; it must be one of"),
        (["hydra/launcher=joblib"], "hydra/launcher is joblib, which needs absent: pip install 'rlkit[sweep]'"),
    ],
)
def test_a_sweep_that_cannot_start_is_one_sentence(here, monkeypatch, arguments, sentence):
    monkeypatch.setitem(sweep.LAUNCHERS, "joblib", "absent")
    status, _, err = call("-m", *arguments)
    assert status == 2
    assert err.startswith(f"rlkit: {sentence}") and err.count("\n") == 1


def test_lines_of_a_job_are_labelled_and_written_whole():
    class Stream(io.StringIO):
        def write(self, text):
            pieces.append(text)
            return len(text)

    pieces: list[str] = []
    print("one\n\ntwo", file=sweep.Labelled(Stream(), "[3] "))
    assert pieces == ["[3] one\n[3]\n[3] two\n"]


# --- in processes of their own -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_joblib_trains_two_jobs_at_once_with_one_thread_each(here):
    arguments = [*PPO, *CORRIDOR, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    status, out, err = command("-m", *arguments, "+env.kwargs.length=5,0")
    [folder] = Path("runs", "sweeps").iterdir()
    rows = table(folder)
    assert status == 1
    assert [row["status"] for row in rows] == ["ok", "failed"]
    assert "rlkit: 1 of 2 jobs failed" in err and "Traceback" not in err
    assert f"[0] run   {folder.absolute() / rows[0]['folder']}" in out.splitlines()
    assert set(Path("threads").read_text().split()) == {"1"}
    assert_same_alone(folder, rows[0])


@pytest.mark.slow
def test_submitit_trains_two_jobs(here):
    status, out, err = command("-m", *GRPO, "seed=0,1", "hydra/launcher=submitit_local")
    [folder] = Path("runs", "sweeps").iterdir()
    rows = table(folder)
    assert (status, err) == (0, "")
    assert [row["status"] for row in rows] == ["ok", "ok"]
    assert "2 of 2 jobs ok" in out
    assert not any(torch.equal(*pair) for pair in zip(*(policy(folder / row["folder"]) for row in rows), strict=True))
    assert_same_alone(folder, rows[1])


@pytest.mark.slow
def test_slurm_trains_two_jobs(here, monkeypatch):
    for name, text in SLURM.items():
        (here / "bin").mkdir(exist_ok=True)
        (here / "bin" / name).write_text(f"#!{sys.executable}{text}")
        (here / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{here / 'bin'}{os.pathsep}{os.environ['PATH']}")
    status, out, err = command("-m", *GRPO, "seed=0,1", "hydra/launcher=submitit_slurm", "hydra.launcher.partition=cpu")
    [folder] = Path("runs", "sweeps").iterdir()
    rows = table(folder)
    assert (status, err) == (0, "")
    assert [row["status"] for row in rows] == ["ok", "ok"]
    script, *_ = (folder / ".submitit").rglob("*submission*.sh")
    assert "#SBATCH --partition=cpu" in script.read_text()
    assert_same_alone(folder, rows[1])
