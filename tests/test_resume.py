"""Resumed runs against whole ones, bit for bit; what may be changed; and what is left when a process is killed."""

from __future__ import annotations

import csv
import functools
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SMALL, demonstrations, every_stabilizer, small_learner, weights
from omegaconf import DictConfig
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import rlkit
from rlkit import diagnose, files, report
from rlkit.build import ConfigError, build_learner, to_config
from rlkit.envs import NATIVE
from rlkit.keepers import checkpoint
from rlkit.keepers.keeper import copied
from rlkit.loop import Learner
from rlkit.resume import keep_settings, resume
from rlkit.session import Session
from rlkit.train import compose, execute, main, prepare

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def short_evaluations(monkeypatch):
    """The final evaluation decides nothing here."""
    monkeypatch.setattr("rlkit.session.FINAL_EPISODES", 4)


def tiny(algo: str, *overrides: str) -> tuple[str, ...]:
    """The settings of a run of a second."""
    often = ("total_steps=640", "log.every=64", "eval.every=0", "checkpoint.every=32")
    return (f"algo={algo}", "tuned=none", "policy.hidden=[8]", *SMALL[algo], *often, *overrides)


TINY = tiny("ppo")


@functools.cache
def composed(overrides: tuple[str, ...]) -> DictConfig:
    """Composing takes longer than most of these runs."""
    return compose([*overrides])[0]


def begin(folder: Path, *overrides: str, show: str = "off") -> rlkit.train.Run:
    """Train as the command line does, in a folder; of two values of a key the second counts."""
    given = list({override.split("=")[0]: override for override in overrides}.values())
    config = composed(tuple(given))
    prepared = prepare(config)
    keep_settings(folder, config, given)
    return execute(prepared, folder, show)


def saved(folder: Path) -> dict[str, Any]:
    return checkpoint.load(folder / "checkpoint.pt")


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two states differ in a single bit."""
    if isinstance(a, dict):
        odd = [f"{path}: {sorted(map(str, a.keys() ^ b.keys()))}"] if a.keys() ^ b.keys() else []
        return odd + [d for name in a.keys() & b.keys() for d in differences(a[name], b[name], f"{path}/{name}")]
    if isinstance(a, list):
        odd = [f"{path}: {len(a)} and {len(b)} entries"] if len(a) != len(b) else []
        return odd + [d for k, (x, y) in enumerate(zip(a, b, strict=False)) for d in differences(x, y, f"{path}/{k}")]
    if isinstance(a, torch.Tensor):
        same = a.dtype == b.dtype and torch.equal(torch.nan_to_num(a, 1e9), torch.nan_to_num(b, 1e9))
        return [] if same else [path]
    return [] if a == b or a != a and b != b else [f"{path}: {a} and {b}"]


def rows(folder: Path) -> list[list[str]]:
    """metrics.csv without what is measured by a clock."""
    with (folder / "metrics.csv").open() as file:
        return [
            [step, name, *rest] for step, _, name, *rest in csv.reader(file) if name != "speed/steps_per_second"
        ]  # fmt: skip


def events(folder: Path) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """(folder, scalar or histogram) -> its steps and values, as TensorBoard reads them."""
    read = {}
    for path in sorted({file.parent for file in folder.rglob("events.out.tfevents.*")}):
        board = EventAccumulator(str(path), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0})
        board.Reload()
        name = str(path.relative_to(folder))
        for tag in board.Tags()["scalars"]:
            if tag != "speed/steps_per_second":
                read[name, tag] = [(event.step, event.value) for event in board.Scalars(tag)]
        for tag in board.Tags()["histograms"]:
            read[name, tag] = [(event.step, event.histogram_value.sum) for event in board.Histograms(tag)]
    return read


def assert_same_run(one: Path, other: Path) -> None:
    """Two folders hold the same run: its state, its books, metrics.csv and TensorBoard."""
    a, b = saved(one), saved(other)
    assert differences(a["learner"], b["learner"]) == []
    clocks = ("train_seconds", "wall_seconds")
    assert differences(*({k: v for k, v in x["session"].items() if k not in clocks} for x in (a, b))) == []
    assert [a["log"][k] for k in ("steps", "tags")] == [b["log"][k] for k in ("steps", "tags")]
    assert rows(one) == rows(other)
    assert events(one) == events(other)
    best = [checkpoint.load(folder / "best.pt")["learner"] for folder in (one, other) if (folder / "best.pt").exists()]
    assert best == [] or len(best) == 2 and differences(*best) == []


# --- a split run is the whole run ----------------------------------------------------------------------------------

STEPS = {"ppo": (640, 320), "grpo": (1800, 900)}  # 20 updates, or about so many, and 10


def everything(algo: str, env: str) -> list[str]:
    """Overrides of a small run with all on that has a state."""
    id = next(id for id in NATIVE if id.startswith(f"{env}-"))
    controllers = ["stabilizer.old_kl.controller=adaptive"]
    steady = ["stabilizer.early_stop.patience=50", "stabilizer.rollback.drop=0.0"]  # or members would soon stop
    return [
        f"env={env}",
        f"algo={algo}",
        "tuned=none",
        "policy.hidden=[8,8]",
        *SMALL[algo],
        f"total_steps={STEPS[algo][0]}",
        "members=2",
        *every_stabilizer(algo, demonstrations(id)),
        *controllers,
        *steady,
        "algo.schedule.clip.name=linear",
        "algo.schedule.clip.final=0.05",
        "env.normalize_observation=true",
        "env.normalize_reward=true",
        "exploration.name=correlated",
        "log.every=96",
        "eval.every=200",
        "eval.episodes=2",
        "checkpoint.every=128",
    ]


@pytest.mark.parametrize(
    ("algo", "env"),
    [  # a window of PPO ends within episodes; of GRPO's nothing is left over
        *(("ppo", id.rsplit("-", 1)[0]) for id in NATIVE),
        ("grpo", "CartPole"),
        ("grpo", "Pendulum"),
    ],
)
@pytest.mark.slow
def test_ten_updates_and_ten_more_are_twenty(algo, env, tmp_path):
    overrides = everything(algo, env)
    begin(tmp_path / "whole", *overrides)
    first = begin(tmp_path / "split", *overrides, f"stop_at={STEPS[algo][1]}")
    assert first.summary["status"] == ["stopped"] * 2
    assert max(first.summary["env_steps"]) < STEPS[algo][0]
    second = rlkit.run(resume=tmp_path / "split")
    assert second.summary["status"] == ["finished"] * 2
    assert_same_run(tmp_path / "whole", tmp_path / "split")


@pytest.mark.slow
def test_a_new_process_goes_on_from_the_command_line(tmp_path, monkeypatch):
    monkeypatch.undo()
    settings = tiny("ppo", "members=2", "algo.schedule.learning_rate.name=kl_adaptive", "eval.every=100")
    begin(tmp_path / "whole", *settings)
    begin(tmp_path / "split", *settings, "stop_at=320")
    done = subprocess.run(
        [sys.executable, "-m", "rlkit.train", "resume=split"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "the run goes on at 320 steps, from checkpoint.pt" in done.stdout
    assert_same_run(tmp_path / "whole", tmp_path / "split")


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_a_team_goes_on_bit_for_bit_too(algo, tmp_path):
    settings = tiny(algo, "members=3", "processes=2", "eval.every=100")
    begin(tmp_path / "whole", *settings)
    begin(tmp_path / "split", *settings, "stop_at=300")
    resume(tmp_path / "split", show="off")
    assert_same_run(tmp_path / "whole", tmp_path / "split")
    assert saved(tmp_path / "split")["about"]["processes"] == 2


def test_a_team_takes_the_state_of_one_learner_and_gives_it_back():
    settings = (*TINY, "members=3", "stabilizer=[replay,rollback]", "eval.every=100")
    learner = build_learner(to_config(composed(settings)))
    for _ in range(3):
        learner.iterate()
        learner.judge(torch.zeros(3))
    prepared = prepare(composed((*settings, "processes=2")))
    try:
        prepared.learner.load_state_dict(learner.state_dict())
        assert torch.equal(prepared.learner.env_steps, learner.env_steps)
        assert differences(prepared.learner.state_dict(), learner.state_dict()) == []
        prepared.learner.iterate()
        learner.iterate()
        theirs = prepared.learner.state_dict()["policy"]["actor.weights.0"]
        torch.testing.assert_close(theirs, learner.policy.state_dict()["actor.weights.0"], rtol=1e-4, atol=1e-5)
    finally:
        prepared.close()


def test_the_number_of_processes_and_threads_is_that_of_the_checkpoint(tmp_path, monkeypatch, capsys):
    begin(tmp_path / "run", *TINY, "members=3", "processes=2", "stop_at=64")
    state = saved(tmp_path / "run")
    assert (state["about"]["processes"], state["about"]["threads"]) == (2, 1)
    state["about"]["threads"] = 2
    checkpoint.save(tmp_path / "run" / "checkpoint.pt", {k: v for k, v in state.items() if k != "format"})
    monkeypatch.setattr("rlkit.cores.num_processes", lambda config: 1)  # as where no process may be started
    run = resume(tmp_path / "run", show="plain")
    assert (run.summary["processes"], run.summary["threads"]) == (1, 2)
    assert "processes=1, not 2: equal up to rounding" in capsys.readouterr().out
    torch.set_num_threads(1)


def test_phases_are_not_gone_through_again(tmp_path):
    """Not even by a run that was ended before its first iteration."""
    warm = ("stabilizer=[warm_up]", f"stabilizer.warm_up.demonstrations={demonstrations()}", "total_steps=64")

    def session(learner: Learner) -> Session:
        nothing: Any = type("Log", (), {"message": lambda *_: None, "progress": lambda *_: None})()
        return Session(
            learner, lambda *_: torch.zeros(1, 2), nothing, tmp_path, 0, 2, 0, 0, threshold=None, stop_when_solved=False
        )  # fmt: skip

    whole = small_learner("ppo", *warm)
    session(whole).train()
    begun = small_learner("ppo", *warm)
    books = session(begun)
    books.train(lambda: True)
    resumed = small_learner("ppo", *warm)
    resumed.load_state_dict(begun.state_dict())
    later = session(resumed)
    later.load_state_dict(books.state_dict())
    later.train()
    assert torch.equal(weights(resumed), weights(whole))


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_environments_that_cannot_be_saved_begin_anew_and_a_line_says_so(algo, tmp_path, capsys):
    settings = tiny(algo, "env.backend=sync", "total_steps=256", "exploration.name=linear")
    begin(tmp_path / "whole", *settings)
    begin(tmp_path / "split", *settings, "stop_at=128")
    start = saved(tmp_path / "split")["learner"]["policy"]["actor.weights.0"]
    run = resume(tmp_path / "split", show="plain")
    told = "environments of CartPole-v1 cannot be saved, only native ones can: they begin new episodes"
    assert told in capsys.readouterr().out
    assert run.summary["status"] == ["finished"]
    assert not torch.equal(start, saved(tmp_path / "split")["learner"]["policy"]["actor.weights.0"])
    if algo == "grpo":  # whose episodes begin from seeds in every rollout
        assert_same_run(tmp_path / "whole", tmp_path / "split")


def test_new_environments_of_a_resumed_run_do_not_repeat_its_first_start_states():
    learner, other = (small_learner("ppo", "env.backend=sync") for _ in range(2))
    first = learner.collector.obs.copy()
    learner.iterate()
    assert np.array_equal(learner.collect(learner.running).obs[0].numpy().reshape(4, 4)[0], first[0]) is False
    other.load_state_dict(learner.state_dict())
    again = other.collect(other.running).obs[0].numpy().reshape(4, 4)
    assert not np.isclose(again, first).all(1).any()
    assert np.abs(again).max() <= 0.05  # start states, though


@pytest.mark.parametrize("backend", ["native", "sync"])
def test_the_return_that_scales_rewards_goes_on_only_where_episodes_do(backend):
    learner, resumed = (small_learner("ppo", f"env.backend={backend}", "env.normalize_reward=true") for _ in range(2))
    learner.iterate()
    before = learner.chain.links["reward_scale"].running.clone()
    assert before.abs().min() > 0  # all episodes are under way
    state = copied(learner.state_dict())
    learner.load_state_dict(state)  # as keepers make it, in the same environments
    assert torch.equal(learner.chain.links["reward_scale"].running, before)
    resumed.load_state_dict(state)
    running = resumed.chain.links["reward_scale"].running
    assert running is None if backend == "sync" else torch.equal(running, before)
    resumed.iterate()


# --- a longer run, other settings ----------------------------------------------------------------------------------


def test_a_finished_run_goes_on_to_a_larger_total(tmp_path, capsys):
    begin(tmp_path / "whole", *TINY)
    begin(tmp_path / "longer", *TINY, "total_steps=320")
    run = resume(tmp_path / "longer", ["total_steps=640"], show="plain")
    assert "total_steps was 320 and is 640: schedules follow the new total" in capsys.readouterr().out
    assert (run.summary["total_steps"], run.summary["env_steps"], run.summary["status"]) == (640, [640], ["finished"])
    name = "run/progress"  # of what was made before it is the share of a shorter run
    one, other = ([row for row in rows(tmp_path / run) if row[1] != name] for run in ("whole", "longer"))
    assert one == other
    assert differences(saved(tmp_path / "whole")["learner"]["policy"], saved(run.folder)["learner"]["policy"]) == []


def test_what_is_changed_is_recorded_and_a_stop_counts_once(tmp_path):
    begin(tmp_path / "run", *TINY, "stop_at=96")
    run = resume(tmp_path / "run", ["eval.every=100", "checkpoint.keep=2", "stop_at=192", "total_steps=320"], "off")
    assert (run.summary["env_steps"], run.summary["status"]) == ([192], ["stopped"])
    stored = (run.folder / ".hydra" / "overrides.yaml").read_text()
    assert "eval.every=100" in stored and "total_steps=320" in stored
    assert "total_steps=640" not in stored and "stop_at" not in stored
    again = resume(run.folder, show="off")
    assert (again.summary["env_steps"], again.summary["status"]) == ([320], ["finished"])
    assert [step for step, name, *_ in rows(run.folder) if name == "eval/peak"] == ["128", "224", "320"]
    assert (run.folder / "best.pt").exists()  # which no evaluation asked for before


# fmt: off
REFUSED = {
    "another setting": (["algo.clip=0.1"], "algo.clip cannot change when a run is resumed; only total_steps, stop_at"),
    "another environment": (["env=Acrobot"], "env cannot change when a run is resumed"),
    "a misspelt key": (["eval.evry=5"], r"did you mean eval\.every\?"),
    "a wrong type": (["total_steps=many"], "total_steps is many; it must be a whole number"),
    "a wrong value": (["eval.every=-1"], "eval.every is -1; it must be >= 0"),
    "a stop that is past": (["total_steps=900", "stop_at=64"], "stop_at is 64, but 640 steps are made"),
    "no more to do": ([], "is finished: 640 of 640 steps; to go on give a larger total_steps"),
    "fewer steps": (["total_steps=600"], "total_steps is 600, but 640 steps are made; it must be more"),
}
# fmt: on


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    return begin(tmp_path_factory.mktemp("finished") / "run", *TINY).folder


def listing(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_resumed_so_is_refused_and_nothing_changes(name, finished):
    overrides, sentence = REFUSED[name]
    before = listing(finished)
    with pytest.raises(ConfigError, match=sentence):
        resume(finished, overrides, "off")
    assert listing(finished) == before


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda text: text.replace(b"step,", b"steps,", 1), "its first line must be step,wall_seconds,name,value;"),
        (lambda text: text.partition(b"\n")[2], "its first line must be step,wall_seconds,name,value;"),
        (lambda text: b"\xa5\xff" * 500, "can't decode byte"),
        (lambda text: text.replace(b"\n128,", b"\n12x8,", 1), "line [0-9]+ is '12x8,"),
        (lambda text: text + b"640,1.0\n", "line [0-9]+ is '640,1.0'"),
    ],
    ids=["another header", "no header", "no text", "no number", "too short"],
)
def test_damaged_metrics_are_refused_and_nothing_changes(finished, tmp_path, damage, sentence):
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    file = folder / "metrics.csv"
    text = file.read_bytes()
    file.write_bytes(damage(text))
    assert file.read_bytes() != text
    before = listing(folder)
    with pytest.raises(ConfigError, match=f"metrics.csv is damaged: .*{sentence}.*without the file the run goes on"):
        resume(folder, ["total_steps=900"], "off")
    assert listing(folder) == before


def call(capsys, monkeypatch, *arguments: str) -> tuple[int, str]:
    """Do what the command does; return its status and what it says on standard error."""
    monkeypatch.setattr("sys.argv", ["train", *arguments])
    status = main()
    return status, capsys.readouterr().err


def test_the_command_line_refuses_in_one_line_with_status_2(finished, tmp_path, capsys, monkeypatch):
    for arguments, words in (
        ((f"resume={finished}", "seed=1"), "seed cannot change"),
        ((f"resume={finished}", "-m"), "-m cannot be given with it"),
        ((f"resume={finished}", f"resume={tmp_path}"), "goes on with one run"),
        ((f"resume={tmp_path}",), "there is no run"),
        (("resume=",), "resume is empty; it must be the folder of a run, as in resume=runs/CartPole/grpo/TIME"),
        ((f"resume={finished}", "total_steps=1.5"), "total_steps is 1.5; it must be a whole number"),
    ):
        status, err = call(capsys, monkeypatch, *arguments)
        assert (status, err.count("\n")) == (2, 1), err
        assert err.startswith("rlkit: ") and words in err
    with pytest.raises(ConfigError, match="resume is empty"):
        rlkit.run(resume="")
    with pytest.raises(ValueError, match="a run goes on in its own folder"):
        rlkit.run(resume=finished, folder=tmp_path)


# --- checkpoints ---------------------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    """Change a bit of a tensor, which the file's structure does not show."""
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda entry: entry.file_size)
        place = data.index(archive.read(largest))  # not anywhere: between tensors lies padding, which nothing reads
    data[place + largest.file_size // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("damage", [cut, flip])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(damage, tmp_path, capsys):
    begin(tmp_path / "whole", *TINY, "eval.every=100")
    begin(tmp_path / "split", *TINY, "eval.every=100", "checkpoint.keep=3", "stop_at=320")
    names = {path.name for path in (tmp_path / "split").glob("checkpoint*")}
    assert names == {"checkpoint.pt", "checkpoint_256.pt", "checkpoint_288.pt"}
    damage(tmp_path / "split" / "checkpoint.pt")
    resume(tmp_path / "split", show="plain")
    out = capsys.readouterr().out
    assert "checkpoint.pt is not a checkpoint that can be read" in out
    assert "the run goes on at 288 steps, from checkpoint_288.pt" in out
    assert_same_run(tmp_path / "whole", tmp_path / "split")
    names = {path.name for path in (tmp_path / "split").glob("checkpoint*")}
    assert names == {"checkpoint.pt", "checkpoint_576.pt", "checkpoint_608.pt"}


def test_a_run_whose_checkpoints_are_all_damaged_is_refused(tmp_path, capsys, monkeypatch):
    begin(tmp_path / "run", *TINY, "checkpoint.keep=2", "stop_at=96")
    for path in (tmp_path / "run").glob("checkpoint*.pt"):
        cut(path)
    before = listing(tmp_path / "run")
    status, err = call(capsys, monkeypatch, f"resume={tmp_path / 'run'}")
    assert (status, err.count("\n")) == (2, 1)
    assert f"{tmp_path / 'run' / 'checkpoint.pt'} is not a checkpoint that can be read" in err
    assert listing(tmp_path / "run") == before


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda state, _: state["about"].update(env="Acrobot-v1"),
            "run with env=Acrobot-v1, and this one has env=",
        ),
        (lambda state, _: state["about"].update(algo="grpo"), "run with algo=grpo, and this one has algo=ppo"),
        (lambda state, _: state.update(format=1), "has format 1; this version reads format 2"),
        (lambda state, _: state["learner"]["policy"].popitem(), "does not fit its configuration"),
        (lambda state, path: state.update(extra=Hostile(path)), "is not a checkpoint that can be read"),
    ],
)
def test_a_checkpoint_that_is_not_of_this_run_is_refused(change, words, tmp_path):
    begin(tmp_path / "run", *TINY, "stop_at=64")
    state = saved(tmp_path / "run")
    change(state, tmp_path / "trace")
    torch.save(state, tmp_path / "run" / "checkpoint.pt")
    before = listing(tmp_path / "run")
    with pytest.raises(ConfigError, match=words) as error:
        resume(tmp_path / "run", show="off")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "trace").exists()
    assert listing(tmp_path / "run") == before


def test_a_policy_of_another_environment_is_not_loaded(finished, tmp_path):
    run = begin(tmp_path / "run", *TINY, "env=Acrobot", "stop_at=32")
    (run.folder / "checkpoint.pt").write_bytes((finished / "checkpoint.pt").read_bytes())
    with pytest.raises(ValueError, match="is of a run with env=CartPole-v1, and this one has env=Acrobot-v1"):
        rlkit.load(run.folder)


def test_one_checkpoint_is_kept_unless_more_are_asked_for(finished):
    assert [path.name for path in finished.glob("checkpoint*")] == ["checkpoint.pt"]


def test_where_there_are_no_links_the_checkpoint_before_is_kept_all_the_same(tmp_path, monkeypatch):
    def none(*_: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(checkpoint.os, "link", none)
    run = begin(tmp_path / "run", *TINY, "checkpoint.keep=2", "stop_at=96")
    assert {path.name for path in run.folder.glob("checkpoint*")} == {"checkpoint.pt", "checkpoint_64.pt"}
    assert saved(run.folder)["session"]["elapsed"] == 96


def test_a_keeper_that_changes_nothing_costs_no_copy_of_the_state(monkeypatch):
    learner = small_learner("ppo")
    learner.iterate()
    copies: list[object] = []
    monkeypatch.setattr("rlkit.loop.copied", lambda state: copies.append(state) or state)
    learner.judge(torch.tensor([1.0]))
    assert [*learner.keepers] == ["checkpoint.best"] and copies == []
    other = small_learner("ppo", "stabilizer=[rollback]")
    other.iterate()
    other.judge(torch.tensor([1.0]))
    assert len(copies) == 1


# --- TensorBoard ---------------------------------------------------------------------------------------------------


def test_an_open_tensorboard_forgets_what_the_checkpoint_does_not_hold(tmp_path):
    begin(tmp_path / "run", *TINY, "checkpoint.every=320", "members=2", "checkpoint.keep=2")
    boards = [EventAccumulator(str(tmp_path / "run" / name)) for name in (".", "member_01")]
    for board in boards:
        board.Reload()
    (tmp_path / "run" / "checkpoint_320.pt").replace(tmp_path / "run" / "checkpoint.pt")  # as after a crash at 600
    resume(tmp_path / "run", show="off")
    for board in boards:
        board.Reload()
        steps = [event.step for event in board.Scalars("episode/return_recent")]
        assert steps == sorted(set(steps)) and steps[-1] == 640
    assert sorted({step for _, entries in events(tmp_path / "run").items() for step, _ in entries})[:2] == [64, 128]


# --- processes that are killed -------------------------------------------------------------------------------------


def forked(work: Callable[[], object]) -> multiprocessing.process.BaseProcess:
    """Start a process that does `work` and has loaded all it needs."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process


def go_on(folder: Path, overrides: tuple[str, ...]) -> None:
    """Begin a run or go on with it, as a script does that is started again and again."""
    torch.set_num_threads(1)
    if (folder / ".hydra" / "config.yaml").exists():
        resume(folder, show="off")
    else:
        begin(folder, *overrides)


linux = pytest.mark.skipif(sys.platform != "linux", reason="needs fork")


@linux
@pytest.mark.slow
def test_kill_9_at_twenty_random_moments_loses_at_most_the_work_since_the_last_checkpoint(tmp_path):
    settings = (*TINY, "total_steps=1920", "checkpoint.keep=2")
    begin(tmp_path / "whole", *settings)
    rng = random.Random(0)
    kills, lives, folder = 0, 0, tmp_path / "run0"
    while kills < 20:
        lives += 1
        process = forked(lambda folder=folder: go_on(folder, settings))
        before = elapsed(folder)
        while process.is_alive() and elapsed(folder) == before and before == 0:
            time.sleep(0.005)  # a life that is too short to build anything proves nothing
        process.join(rng.uniform(0.0, 0.4))
        if process.is_alive():
            process.kill()
            kills += 1
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        assert elapsed(folder) >= before
        logged = [int(step) for step, *_ in rows(folder)[1:]]
        assert max(logged, default=0) - elapsed(folder) < 2 * 32  # checkpoint.every, and the iteration that was cut off
        if process.exitcode == 0:
            assert_same_run(tmp_path / "whole", folder)
            folder = tmp_path / f"run{lives}"
    go_on(folder, settings) if not (folder / "summary.json").exists() else None
    assert_same_run(tmp_path / "whole", folder)


def elapsed(folder: Path) -> int:
    """Steps of the newest checkpoint, which must be whole; 0 before the first."""
    found = checkpoint.newest(folder)
    assert found is None or found[2] == []
    return 0 if found is None else int(found[1]["session"]["elapsed"])


MOMENTS = {  # what a save does -> the call that is its last
    "before the old one is put by": (checkpoint, "put_by", False),
    "after the old one was put by": (checkpoint, "put_by", True),
    "before the file is on disk": (os, "fsync", False),
    "before the file takes its place": (Path, "replace", False),
    "after the file took its place": (Path, "replace", True),
    "while the log is cut back": (os, "truncate", True),
}


@linux
@pytest.mark.parametrize("moment", MOMENTS)
def test_kill_9_within_a_save_or_while_resuming_leaves_a_run_that_goes_on(moment, tmp_path, monkeypatch):
    settings = (*TINY, "total_steps=320", "checkpoint.keep=2", "checkpoint.every=96", "log.every=32")
    begin(tmp_path / "whole", *settings)
    begin(tmp_path / "run", *settings, "stop_at=192")
    owner, name, after = MOMENTS[moment]
    original = getattr(owner, name)

    def last(*args: Any) -> Any:
        if after:
            original(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, last)
        process = forked(lambda: resume(tmp_path / "run", show="off"))
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert elapsed(tmp_path / "run") >= 192
    resume(tmp_path / "run", show="off")
    assert_same_run(tmp_path / "whole", tmp_path / "run")
    assert not list((tmp_path / "run").rglob("*.tmp"))


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(tmp_path, capsys):
    begin(tmp_path / "whole", *TINY)
    begin(tmp_path / "run", *TINY, "stop_at=128")
    (tmp_path / "run" / "checkpoint.pt").unlink()
    before = listing(tmp_path / "run")
    with pytest.raises(ConfigError, match="checkpoint.pt is gone, without which the run cannot go on; begin a new one"):
        resume(tmp_path / "run", show="off")
    assert listing(tmp_path / "run") == before
    (tmp_path / "run" / "summary.json").unlink()  # as if it had been killed
    resume(tmp_path / "run", show="plain")
    assert "there is no checkpoint yet: the run begins again" in capsys.readouterr().out
    assert_same_run(tmp_path / "whole", tmp_path / "run")


@linux
def test_a_run_that_is_going_on_is_not_resumed_but_one_that_was_killed_is(tmp_path):
    folder = tmp_path / "run"
    process = forked(lambda: begin(folder, *TINY, "total_steps=100000000", "processes=2", "members=2"))
    deadline = time.monotonic() + 60
    while not (folder / "checkpoint.pt").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    with pytest.raises(ConfigError, match="is the folder of a run that another process is training"):
        resume(folder, show="off")
    assert process.is_alive()
    process.kill()
    process.join()
    made = int(saved(folder)["learner"]["collector"]["env_steps"].max())
    run = resume(folder, [f"stop_at={made + 64}"], "off")
    assert run.summary["status"] == ["stopped"] * 2


# --- a log that has lost something ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "lost"),
    [(None, "from the beginning"), (0, "from the beginning"), (20, "from the beginning"), (192, "after 192 steps")],
)
def test_a_log_that_was_deleted_or_cut_short_is_one_line_and_the_report_works(size, lost, tmp_path, capsys):
    folder = begin(tmp_path / "run", *TINY, "eval.every=128", "stop_at=320").folder
    path = folder / "metrics.csv"
    if size is None:
        path.unlink()
    elif size < 30:  # within the header
        os.truncate(path, size)
    else:  # after the entry of so many steps
        heading, *lines = path.read_text().splitlines(keepends=True)
        path.write_text(heading + "".join(line for line in lines if int(line.partition(",")[0]) <= size))
    capsys.readouterr()
    resume(folder, show="plain")
    said = f"metrics.csv was deleted or cut short: entries {lost} up to 320 are missing in it"
    assert capsys.readouterr().out.count(said + "\n") == 1
    steps = [int(step) for step, *_ in rows(folder)[1:]]
    assert steps == sorted(steps) and steps[-1] == 640 and 320 not in steps
    assert report.main([str(folder)]) == 0
    assert diagnose.main([str(folder)]) == 0


def test_event_files_that_were_deleted_are_one_line(tmp_path, capsys):
    folder = begin(tmp_path / "run", *TINY, "stop_at=320").folder
    for path in folder.glob("events.out.tfevents.*"):
        path.unlink()
    resume(folder, show="plain")
    said = "an event file was deleted or cut short: TensorBoard lacks entries of before 320 steps"
    out = capsys.readouterr().out
    assert out.count(said + "\n") == 1 and "metrics.csv was" not in out


def test_a_log_that_lost_nothing_is_not_told_of(tmp_path, capsys):
    folder = begin(tmp_path / "run", *TINY, "stop_at=320").folder
    resume(folder, show="plain")
    assert "deleted" not in capsys.readouterr().out


def test_evaluations_are_counted_on_for_videos(tmp_path):
    """Every second evaluation is the same one in a split run as in a whole one."""
    pytest.importorskip("moviepy")
    pytest.importorskip("pygame")
    settings = (*TINY, "total_steps=192", "eval.every=32", "eval.episodes=1", "eval.video=2")
    whole = begin(tmp_path / "whole", *settings).folder
    split = begin(tmp_path / "split", *settings, "stop_at=96").folder
    resume(split, show="off")
    names = [sorted(path.name for path in (folder / "videos").iterdir()) for folder in (whole, split)]
    assert names[0] == names[1] == ["step_128.mp4", "step_192.mp4", "step_64.mp4"]


# --- faults --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_has_its_exit_status(number, status, tmp_path, capsys, monkeypatch):
    iterate = Learner.iterate

    def third(learner: Learner, detail: bool = True) -> None:
        iterate(learner, detail)
        if learner.iteration == 3:
            os.kill(os.getpid(), number)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Learner, "iterate", third)
        assert call(capsys, patch, *TINY, "hydra.run.dir=run") == (status, "")
    assert signal.getsignal(signal.SIGTERM) is before
    assert saved(tmp_path / "run")["session"]["elapsed"] == 96
    begin(tmp_path / "whole", *TINY)
    assert call(capsys, monkeypatch, "resume=run") == (0, "")
    assert_same_run(tmp_path / "whole", tmp_path / "run")


@pytest.mark.parametrize(
    ("how", "processes", "traced", "sentence"),
    [
        ("raise", 1, True, "rlkit: environment 0 of member 0 raised ZeroDivisionError: the motor is on fire in step 5"),
        ("raise", 2, True, "rlkit: environment 0 of member 0 raised ZeroDivisionError: the motor is on fire in step 5"),
        ("die", 2, False, "rlkit: the process of members 0 to 0 ended unexpectedly, with status -9"),
    ],
)
def test_an_environment_that_fails_leaves_a_trace_a_sentence_and_a_checkpoint(
    how, processes, traced, sentence, tmp_path, capsys, monkeypatch
):
    folder = tmp_path / "run"
    given = ("env=gym", "env.id=Failing-v0", "env.backend=sync", f"+env.kwargs={{how:{how},at:150}}", "members=2")
    status, err = call(capsys, monkeypatch, *TINY, *given, f"processes={processes}", f"hydra.run.dir={folder}")
    assert status == 1
    assert err.splitlines()[-1] == f"{sentence}; resume={folder} goes on from its last checkpoint"
    assert ('raise ZeroDivisionError("the motor is on fire")' in err) is traced
    assert traced or err.count("\n") == 1
    assert multiprocessing.active_children() == []
    assert elapsed(folder) == 576
    assert max(int(step) for step, *_ in rows(folder)[1:]) == 576
    assert not list(folder.rglob("*.tmp")) and not (folder / "summary.json").exists()
    assert call(capsys, monkeypatch, f"resume={folder}", "stop_at=600") == (0, "")  # new copies, some steps younger


def full(path: Path) -> None:
    path.symlink_to("/dev/full")


@linux
@pytest.mark.parametrize("name", ["checkpoint.pt.tmp", "summary.json.tmp", "best.pt.tmp"])
def test_a_full_disk_is_one_sentence_and_the_last_checkpoint_stays(name, tmp_path, capsys, monkeypatch):
    folder = begin(tmp_path / "run", *TINY, "stop_at=64", "eval.every=64").folder
    before = saved(folder)
    conduct = rlkit.resume.conduct

    def on_full_disk(*args: Any) -> Any:
        full(folder / name)
        return conduct(*args)

    with monkeypatch.context() as patch:
        patch.setattr("rlkit.resume.conduct", on_full_disk)
        status, err = call(capsys, patch, f"resume={folder}", "stop_at=96")
    path = folder / name.removesuffix(".tmp")
    goes_on = f"resume={folder} goes on from its last checkpoint"
    assert (status, err) == (1, f"rlkit: {path} cannot be written: No space left on device; {goes_on}\n")
    assert not list(folder.rglob("*.tmp"))
    if name == "checkpoint.pt.tmp":
        assert differences(saved(folder), before) == []
    begin(tmp_path / "whole", *TINY, "eval.every=64")
    resume(folder, show="off")
    assert_same_run(tmp_path / "whole", folder)


@linux
def test_a_disk_that_fills_within_an_entry_leaves_no_half_row(tmp_path):
    """The kernel writes what fits and refuses the rest."""
    path = tmp_path / "metrics.csv"
    path.write_bytes(b"row\n" * 10)

    def work() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))
        with pytest.raises(files.WriteError, match="metrics.csv cannot be written: File too large"):
            files.append(path, b"another row\n" * 2)

    process = forked(work)
    process.join()
    assert process.exitcode == 0
    assert path.read_bytes() == b"row\n" * 10
    files.append(path, b"one more\n")
    assert path.read_bytes() == b"row\n" * 10 + b"one more\n"


@linux
def test_a_read_only_folder_is_one_sentence(tmp_path_factory, capsys):
    folder = begin(tmp_path_factory.mktemp("read_only") / "run", *TINY, "stop_at=64").folder
    before = listing(folder)

    def work() -> None:
        if os.getuid() == 0:  # whom no permission stops
            os.chroot(folder.parent)
            os.chdir("/")
            os.setuid(65534)
        with pytest.raises(files.WriteError, match="run cannot be written: Permission denied"):
            resume(Path("run"), show="off")

    os.chmod(folder.parent, 0o755)
    os.chmod(folder, 0o555)
    (folder / ".lock").chmod(0o444)
    import hydra.core.override_parser.overrides_parser  # noqa: F401  a chroot has no packages

    process = forked(work) if os.getuid() == 0 else forked(lambda: (os.chdir(folder.parent), work()))
    process.join()
    folder.chmod(0o755)
    assert process.exitcode == 0
    assert listing(folder) == before


def test_a_folder_that_fills_while_a_run_begins_leaves_no_process(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise files.WriteError("x cannot be written: No space left on device")

    monkeypatch.setattr("rlkit.metrics.write_text", refuse)
    with pytest.raises(files.WriteError):
        execute(prepare(composed((*TINY, "members=2", "processes=2"))), tmp_path / "run", "off")
    assert multiprocessing.active_children() == []


def test_a_folder_in_which_the_settings_cannot_be_kept_is_one_sentence(tmp_path, capsys, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".hydra").touch()
    settings = (*TINY, "members=2", "processes=2", f"hydra.run.dir={tmp_path / 'run'}")
    said = f"rlkit: {tmp_path / 'run'} cannot be written: File exists\n"
    assert call(capsys, monkeypatch, *settings) == (1, said)
    assert multiprocessing.active_children() == []
