"""What a user or an environment can get wrong: one clear sentence, a documented status, nothing half-written."""

import csv
import multiprocessing
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete

import rlkit
from rlkit import diagnose, report
from rlkit.envs import EnvironmentFailure
from rlkit.train import EXIT_CONFIG, EXIT_FAULT, main

ROOT = Path(__file__).parents[1]


class Troubled(gymnasium.Env):
    """Goes wrong in the way it is told, from its 20th step on or in its third reset, where that is possible."""

    observation_space = Box(-1, 1, (3,), np.float32)
    action_space = Discrete(2)

    def __init__(self, how=""):
        self.how, self.steps, self.resets = how, 0, 0
        if how == "init":
            raise OSError("no licence")
        if how in ("missing part", "outside"):
            self.observation_space = Dict(a=Box(-1, 1, (1,)), b=Discrete(3))

    def good(self):
        return np.zeros(3, np.float32) if isinstance(self.observation_space, Box) else {"a": np.zeros(1), "b": 0}

    def bad(self, how):
        return {
            "shape": np.zeros(4, np.float32),
            "object": np.array([None, "a", 1]),
            "ragged": [[0.0, 1.0], [2.0]],
            "missing part": {"a": np.zeros(1)},
            "outside": {"a": np.zeros(1), "b": -1},
        }.get(how, self.good())

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.resets += 1
        if self.how == "first reset" or (self.how == "reset" and self.resets == 3):
            raise RuntimeError("the simulator is {not} there")
        if self.how == "no info":
            return self.good()
        info = {"seed": self.resets, "final_obs": "mine"} if self.resets % 2 else {"seed": "none", "_seed": None}
        return self.good(), info

    def step(self, action):
        self.steps += 1
        how = self.how if self.steps >= 20 else ""
        if how == "step":
            raise ZeroDivisionError("the motor is on fire")
        if how == "exit":
            sys.exit("goodbye")
        if how == "killed":
            os.kill(os.getpid(), 9)
        if how == "four values":
            return self.good(), 0.0, False, {}
        reward = {"no reward": None, "text": "much", "nan": float("nan"), "inf": np.inf}.get(how, 1.0)
        return self.bad(how), reward, self.steps % 4 == 0, False, {"n": self.steps, "final_info": 3}

    def close(self):
        if self.how == "close":
            raise RuntimeError("the window is stuck")


@pytest.fixture(autouse=True)
def _place(monkeypatch, tmp_path):
    gymnasium.register("Troubled-v0", Troubled, max_episode_steps=5)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rlkit.session.FINAL_EPISODES", 2)
    yield
    deadline = time.monotonic() + 5
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not multiprocessing.active_children()  # nothing is left behind


SMALL = {
    "ppo": ["algo=ppo", "num_envs=2", "algo.num_steps=8"],
    "grpo": ["algo=grpo", "num_envs=2", "algo.group_size=2", "algo.num_minibatches=1"],
}
REST = ["policy.hidden=[8]", "total_steps=400", "log.every=1"]


def train(monkeypatch, *overrides, algo="ppo"):
    monkeypatch.setattr("sys.argv", ["train", *SMALL[algo], *REST, *overrides])
    return main()


def troubled(how, *overrides):
    return ["env=gym", "env.id=Troubled-v0", f"+env.kwargs.how='{how}'", *overrides]


def files():
    return {path.name for path in Path.cwd().rglob("*") if path.is_file()}


OWN = {  # what the environment raises itself -> (how it is told of, its own last line)
    "init": ("Troubled-v0 cannot be made: it raised OSError: no licence", "OSError: no licence"),
    "first reset": (
        "environment 0 of member 0 raised RuntimeError: the simulator is {not} there in reset",
        "RuntimeError: the simulator is {not} there",
    ),
    "reset": (
        "environment 0 of member 0 raised RuntimeError: the simulator is {not} there in reset",
        "RuntimeError: the simulator is {not} there",
    ),
    "step": (
        "environment 0 of member 0 raised ZeroDivisionError: the motor is on fire in step 4",
        "ZeroDivisionError: the motor is on fire",
    ),
    "exit": ("environment 0 of member 0 raised SystemExit: goodbye in step 4", "SystemExit: goodbye"),
}


@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize("algo", SMALL)
@pytest.mark.parametrize("how", OWN)
def test_an_environment_that_raises_ends_the_run_with_its_own_traceback(monkeypatch, capfd, how, algo, backend):
    sentence, last = OWN[how]
    assert train(monkeypatch, *troubled(how, f"env.backend={backend}"), algo=algo) == EXIT_FAULT
    *trace, told = capfd.readouterr().err.splitlines()
    assert told == f"rlkit: {sentence}"
    assert trace[0] == "Traceback (most recent call last):"
    assert trace[-1] == last
    assert f'"{__file__}"' in trace[-3] or f'"{__file__}"' in trace[-4]
    assert not any("rlkit/" in line and "tests" not in line for line in trace)  # none of our frames


GIVEN = {  # what nothing can be learned from -> how it is told of
    "shape": "gave an observation in step 4 that is not of its space: its shape is (4,), that of the space is (3,)",
    "object": "gave an observation in step 4 that is not of its space: array([None, 'a', 1], dtype=object) is not an "
    "array of numbers",
    "ragged": "gave an observation in step 4 that is not of its space: [[0.0, 1.0], [2.0]] is not an array of numbers",
    "missing part": "gave an observation in step 4 that is not of its space: {'a': array([0.])} has not the keys a, b",
    "outside": "gave an observation in step 4 that is not of its space: -1 is not in Discrete(3)",
    "no reward": "gave the reward None, terminated True, truncated False in step 4; they must be ",
    "text": "gave the reward 'much', terminated True, truncated False in step 4; they must be ",
    "nan": "gave a non-finite reward in step ",
    "inf": "gave a non-finite reward in step ",
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # Gymnasium's checker warns too
@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize("how", GIVEN)
def test_what_nothing_can_be_learned_from_is_one_sentence(monkeypatch, capfd, how, backend):
    assert train(monkeypatch, *troubled(how, f"env.backend={backend}")) == EXIT_FAULT
    [told] = [line for line in capfd.readouterr().err.splitlines() if line.startswith("rlkit: ")]
    assert told.startswith(f"rlkit: environment 0 of member 0 {GIVEN[how]}")
    assert "Traceback" not in told


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize(
    ("how", "said", "due"),
    [
        (
            "four values",
            "raised ValueError: not enough values",
            "; step must return (observation, reward, terminated, ",
        ),
        ("no info", "gave array([0., 0., 0.], dtype=float32) in reset", ", where (observation, info) is due"),
    ],
)
def test_another_number_of_values_is_said_to_be_wrong(monkeypatch, capfd, how, said, due, backend):
    assert train(monkeypatch, *troubled(how, f"env.backend={backend}")) == EXIT_FAULT
    told = capfd.readouterr().err.splitlines()[-1]
    assert told.startswith(f"rlkit: environment 0 of member 0 {said}")
    assert due in told


def test_a_step_or_reset_without_wrappers_says_what_is_due():
    from rlkit.envs.guard import Guarded

    env = Guarded(Troubled("four values"))
    with pytest.raises(EnvironmentFailure, match=r"gave 4 values in step 20, where \(observation, rew.* is due"):
        for _ in range(20):
            env.step(0)
    with pytest.raises(EnvironmentFailure, match=r"gave array\(.*\) in reset, where \(observation, info\) is due"):
        Guarded(Troubled("no info")).reset()


@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize("algo", SMALL)
def test_keys_of_info_never_clash(monkeypatch, capfd, algo, backend):
    """Names of ours, and one name with values of several kinds."""
    assert train(monkeypatch, *troubled("", f"env.backend={backend}", "total_steps=64"), algo=algo) == 0
    assert capfd.readouterr().err == ""


def test_an_environment_that_writes_into_its_last_observation_is_read_in_time():
    class InPlace(Troubled):
        def __init__(self):
            super().__init__()
            self.obs = np.zeros(3, np.float32)

        def reset(self, *, seed=None, options=None):
            self.obs[:] = 0
            return self.obs, {}

        def step(self, action):
            self.obs += 0.25
            return self.obs, 1.0, bool(self.obs[0] == 1), False, {}

    gymnasium.register("InPlace-v0", InPlace)
    envs = rlkit.envs.make("InPlace-v0", 2, backend="sync")
    envs.reset(seed=[0, 1])
    for _ in range(4):
        obs, _, _, _, info = envs.step(np.zeros(2, int))
    envs.close()
    assert obs.tolist() == [[0, 0, 0]] * 2
    assert info["final_obs"].tolist() == [[1, 1, 1]] * 2


def test_the_log_is_whole_when_an_environment_fails(monkeypatch, capfd, tmp_path):
    assert train(monkeypatch, *troubled("reset")) == EXIT_FAULT  # in the first rollout
    assert train(monkeypatch, *troubled("step"), "algo.num_steps=6") == EXIT_FAULT  # in the fourth
    logs = sorted(tmp_path.rglob("metrics.csv"), key=lambda path: path.stat().st_size)
    rows = [list(csv.DictReader(log.open())) for log in logs]
    assert rows[0] == []
    assert {int(row["step"]) for row in rows[1]} == {12, 24, 36}
    assert list(tmp_path.rglob("events.out.tfevents.*"))
    assert not {"checkpoint.pt", "summary.json"} & files()
    assert not [name for name in files() if name.endswith(".tmp")]


@pytest.mark.parametrize("processes", [1, 2])
def test_the_member_is_named_whichever_process_has_it(monkeypatch, capfd, processes):
    """The environments of all members raise in the same step; the first to be asked is told of."""
    overrides = [*troubled("step"), "members=2", f"processes={processes}"]
    assert train(monkeypatch, *overrides) == EXIT_FAULT
    *trace, told = capfd.readouterr().err.splitlines()
    assert told == "rlkit: environment 0 of member 0 raised ZeroDivisionError: the motor is on fire in step 4"
    assert trace[-1] == "ZeroDivisionError: the motor is on fire"


def test_a_failure_keeps_its_place_in_a_later_process():
    failure = EnvironmentFailure("raised X in step 1", trace="the trace").in_lane(5, 8, members=2)
    assert str(failure) == "environment 1 of member 1 raised X in step 1"
    import pickle

    again = pickle.loads(pickle.dumps(failure))
    assert (str(again), again.trace, again.__notes__) == (str(failure), "the trace", ["the trace"])


def test_a_worker_that_dies_is_one_sentence(monkeypatch, capfd):
    assert train(monkeypatch, *troubled("killed", "env.backend=async")) == EXIT_FAULT
    err = capfd.readouterr().err.splitlines()
    lost = r"rlkit: environment \d of member 0 lost its worker process, which ended with status -9.*"
    assert re.fullmatch(lost, err[-1])
    assert not any("Traceback" in line for line in err)


def test_an_environment_that_cannot_be_closed_ends_a_finished_run_with_status_1(monkeypatch, capfd):
    assert train(monkeypatch, *troubled("close", "total_steps=32")) == EXIT_FAULT
    assert capfd.readouterr().err.endswith("rlkit: Troubled-v0 raised RuntimeError: the window is stuck in close\n")
    assert {"checkpoint.pt", "summary.json"} <= files()


def test_a_raise_in_a_worker_leaves_no_process_of_the_command(tmp_path):
    (tmp_path / "trouble.py").write_text(
        "import gymnasium, numpy as np\n"
        "class Trouble(gymnasium.Env):\n"
        "    observation_space, action_space = gymnasium.spaces.Box(0, 1, (1,)), gymnasium.spaces.Discrete(2)\n"
        "    n = 0\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        return np.zeros(1, np.float32), {}\n"
        "    def step(self, action):\n"
        "        self.n += 1\n"
        "        if self.n == 50:\n"
        "            raise KeyError('lost')\n"
        "        return np.zeros(1, np.float32), 0.0, False, False, {}\n"
        "gymnasium.register('Trouble-v0', Trouble, max_episode_steps=5)\n"
    )
    overrides = ["env=gym", "env.id=trouble:Trouble-v0", "env.backend=async", *SMALL["ppo"], *REST]
    command = subprocess.Popen(
        [sys.executable, "-m", "rlkit.train", *overrides],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    _, err = command.communicate(timeout=120)
    assert command.returncode == EXIT_FAULT
    assert err.endswith("KeyError: 'lost'\nrlkit: environment 0 of member 0 raised KeyError: 'lost' in step 5\n")
    assert f'"{tmp_path / "trouble.py"}", line 10, in step' in err
    with pytest.raises(ProcessLookupError):  # the group of the command's processes is empty
        os.killpg(command.pid, 0)


# --- what is refused before anything starts ------------------------------------------------------------------------

MODULES = {  # the module's text -> how it is told of
    "def broken(:": r"SyntaxError: invalid syntax .*, line 1\)",
    "import gymnasium\nx = 1 / 0": r"ZeroDivisionError: division by zero in .*, line 2",
    "from nowhere_at_all import x": "No module named 'nowhere_at_all'",
    "from os import no_such_name": "cannot import name 'no_such_name'",
    "import sys\nsys.exit(3)": "SystemExit: 3 in .*, line 2",
}


@pytest.mark.parametrize("text", MODULES)
def test_a_module_that_cannot_be_imported_is_one_sentence(monkeypatch, capfd, tmp_path, text):
    name = f"module_{list(MODULES).index(text)}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert train(monkeypatch, "env=gym", f"env.id={name}:X-v0") == EXIT_CONFIG
    [told] = capfd.readouterr().err.splitlines()
    assert re.fullmatch(
        rf"rlkit: env.id={name}:X-v0: the module {name} cannot be imported \(.*{MODULES[text]}.*\)", told
    )
    assert files() <= {f"{name}.py"} | {path.name for path in tmp_path.rglob("*.pyc")}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["env=gym", "env.id=LunarLandr-v3"], "is not a registered environment; the nearest are LunarLander-v3"),
        (["env=gym", "env.id=Troubled-v0", "+env.kwargs.what=1"], "env.kwargs is {'what': 1}: "),
        (["env=gym", "env.id=''"], "env.id is empty; it must be the id of an environment"),
        (["algo.learning_rate="], "algo.learning_rate is empty; it must be a number"),
        (["algo.learning_rate=nan"], "algo.learning_rate is nan; it must be a finite number > 0"),
        (["total_steps=15"], "total_steps is 15; it must be >= 16, one rollout"),
        (
            ["env=gym", "env.id=Blackjack-v1", "algo=grpo", "num_envs=8"],
            "algo.max_episode_steps must say after how many",
        ),
    ],
)
def test_what_cannot_run_is_refused_with_status_2(monkeypatch, capfd, overrides, words):
    monkeypatch.setattr("sys.argv", ["train", *(SMALL["ppo"] if "algo=grpo" not in overrides else []), *overrides])
    assert main() == EXIT_CONFIG
    [told] = capfd.readouterr().err.splitlines()
    assert words in told
    assert not files()


def test_faults_that_do_not_hide_each_other_are_told_at_once(monkeypatch, capfd):
    wrong = ["total_steps=15", "algo.advantage=gaee", "env=gym", "env.id=Nowhere-v0", "policy.shared_trunk=true"]
    assert train(monkeypatch, *wrong, "policy.hidden=[]") == EXIT_CONFIG
    told = capfd.readouterr().err.splitlines()
    assert len(told) == 4
    for words in ("total_steps is 15; ", "algo.advantage is ", "env.id=Nowhere-v0 is not ", "policy.shared_trunk is "):
        assert any(words in line for line in told)


def test_an_environment_without_a_time_limit_trains_with_ppo(monkeypatch, capfd):
    assert train(monkeypatch, "env=gym", "env.id=Blackjack-v1", "total_steps=16") == 0


# --- folders that hold no run --------------------------------------------------------------------------------------

HEADER = "step,wall_seconds,name,value\n"
FOLDERS = {
    "nothing": {},
    "another table": {"metrics.csv": "a,b\n1,2\n", "summary.json": "{}"},
    "no table at all": {"metrics.csv": b"\xff\xfe\x00", "summary.json": "{}"},
    "another summary": {"metrics.csv": HEADER, "summary.json": "[]"},
    "a number for a summary": {"metrics.csv": HEADER, "summary.json": "5"},
    "half a summary": {"metrics.csv": HEADER, "summary.json": '{"env": '},
    "half a line": {"metrics.csv": HEADER + "1,2\n", "summary.json": "{}"},
}


def folder_with(content):
    folder = Path("folder")
    folder.mkdir()
    for name, text in content.items():
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


@pytest.mark.parametrize("tool", [report, diagnose], ids=["report", "diagnose"])
@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_holds_no_run_is_a_sentence(capsys, tool, name):
    assert tool.main([str(folder_with(FOLDERS[name]))]) == EXIT_CONFIG
    out, err = capsys.readouterr()
    assert out == ""
    assert all(line.startswith("rlkit: ") for line in err.splitlines())
    assert "folder" in err


@pytest.mark.parametrize("tool", [report, diagnose], ids=["report", "diagnose"])
def test_a_path_that_is_no_folder_is_a_sentence(capsys, tool):
    Path("file").touch()
    for path in ("nowhere", "file"):
        assert tool.main([path]) == EXIT_CONFIG
        assert (
            capsys.readouterr().err == f"rlkit: {path} is not a folder; name a run directory or a folder above some\n"
        )


def test_a_run_with_a_damaged_configuration_is_passed_over(capsys):
    summary = '{"env": "X-v0", "algo": "ppo", "seed": 0, "members": 1, "total_steps": 1, "status": ["finished"], '
    summary += '"env_steps": [1], "eval_return": [1.0], "eval_return_stochastic": [1.0], "solved_at_steps": [null], '
    summary += '"wall_seconds": 1.0, "train_seconds": 1.0, "eval_peak": [1.0], "version": "0", "machine": "m"}'
    folder = folder_with({"metrics.csv": HEADER, "summary.json": summary})
    (folder / ".hydra").mkdir()
    (folder / ".hydra" / "config.yaml").write_text("a: [1,\nb: {")
    assert report.main([str(folder)]) == EXIT_CONFIG
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("rlkit: skipped folder: folder/.hydra/config.yaml is damaged: ")
    assert last == "rlkit: no finished run in folder"


def test_a_study_that_is_a_file_is_refused(capsys):
    pytest.importorskip("optuna")
    from rlkit import tune

    Path("file").touch()
    assert tune.main(["env=CartPole", "algo=ppo", "--study", "file"]) == EXIT_CONFIG
    assert capsys.readouterr().err.startswith("rlkit: --study is file, which cannot be used: ")


def test_loading_a_folder_without_a_run_says_so():
    with pytest.raises(FileNotFoundError, match="there is no run at nowhere"):
        rlkit.load("nowhere")
