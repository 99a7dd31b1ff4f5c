"""`python -m rlkit.tune`: what a search counts, prunes, refuses, writes, and how it goes on after an interruption."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import os
import signal
import sys
from pathlib import Path

import numpy as np
import optuna
import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from omegaconf import OmegaConf
from optuna.trial import TrialState
from sqlalchemy import Engine, event

import rlkit.tune
from rlkit.build import to_config
from rlkit.conf import schema
from rlkit.conf.schema import ConfigError
from rlkit.envs import EnvironmentFailure
from rlkit.evaluate import Evaluator
from rlkit.faults import Fault
from rlkit.interquartile import interquartile_mean
from rlkit.loop import Learner
from rlkit.search_space import Plan, distribution, make_plan
from rlkit.study import Score, Study
from rlkit.train import compose, execute, prepare

STEPS = 192  # of a member: three rollouts of 64
# fmt: off
SMALL = [
    "env=CartPole", "algo=ppo", "tuned=none", "members=2", f"total_steps={STEPS}", "num_envs=4", "algo.num_steps=16",
    "eval.every=50", "eval.episodes=2", "policy.hidden=[8]",
]
# fmt: on
SPACE = """
algo.learning_rate: {low: 1e-4, high: 1e-2, log: true}
algo.gamma: {choices: [0.9, 0.99]}
algo.num_epochs: {low: 1, high: 3}
algo.num_minibatches: {choices: [1, 2, 100]}
"""


@pytest.fixture(autouse=True, scope="module")
def no_waiting_for_the_disk():
    """Half of the time of these tests would go into making every commit last."""

    def relax(connection, _):
        connection.execute("PRAGMA synchronous = OFF")

    event.listen(Engine, "connect", relax)
    yield
    event.remove(Engine, "connect", relax)


@pytest.fixture
def space(tmp_path: Path) -> Path:
    """A file with what most tests search; a rollout has 64 rows, so 100 minibatches are refused."""
    (tmp_path / "space.yaml").write_text(SPACE)
    return tmp_path / "space.yaml"


def tune(folder: Path, space: Path, *arguments: str) -> int:
    return rlkit.tune.main([*SMALL, "--study", str(folder), "--space", str(space), *arguments])


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "trials.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def states(folder: Path) -> list[str]:
    return [row["state"] for row in rows(folder)]


def drawn(row: dict[str, str]) -> dict[str, str]:
    """What a line says of a trial, its number and its time aside."""
    return {name: text for name, text in row.items() if name not in ("number", "seconds")}


def planned(space: Path, *overrides: str) -> Plan:
    return make_plan([*SMALL, *overrides], space, "eval_return")


def test_a_search_takes_arguments_of_the_environment_together():
    lake = ["env=gym", "env.id=FrozenLake-v1", "algo=ppo", "env.kwargs={map_name: 8x8}", "total_steps=2e4"]
    config = make_plan(lake, None, "eval_return").config
    assert (config.env.kwargs, config.total_steps) == ({"map_name": "8x8"}, 20_000)


# --- a search ------------------------------------------------------------------------------------------------------


def test_a_second_call_runs_only_what_is_missing(tmp_path, space, capsys):
    folder = tmp_path / "study"
    assert tune(folder, space, "algo.num_minibatches=2", "--trials", "2") == 0
    first = rows(folder)
    assert tune(folder, space, "algo.num_minibatches=2", "--trials", "3") == 0
    assert rows(folder)[:2] == first and states(folder) == ["complete"] * 3
    assert [row["steps"] for row in rows(folder)] == [str(STEPS)] * 3  # of one member
    assert "algo.num_minibatches" not in first[0]  # given, so not searched
    assert {path.name for path in folder.iterdir()} == {"study.db", "study.lock", "trials.csv", "best.yaml"}
    assert "2 of the trials are there" in capsys.readouterr().out
    assert tune(folder, space, "algo.num_minibatches=2", "algo.clip=0.1", "--trials", "3") == 2
    assert "algo.clip is 0.2; now it is 0.1" in capsys.readouterr().err


def test_where_evaluation_cuts_episodes_short_a_line_says_so(tmp_path, space, capsys):
    for number, cut in enumerate(("", "eval.max_episode_steps=500", "eval.max_episode_steps=30")):
        assert tune(tmp_path / str(number), space, "--trials", "1", *filter(None, [cut])) == 0
        said = "evaluation episodes are cut at 30 steps (eval.max_episode_steps)"
        assert (said in capsys.readouterr().out) == cut.endswith("30")


def test_best_yaml_as_tuned_settings_gives_the_run_of_the_best_trial(tmp_path, space):
    folder = tmp_path / "conf" / "tuned"
    links = ("algo.num_minibatches=2", "stabilizer=[ref_kl]", "stabilizer.ref_kl.coef=0.2", "env.normalize_reward=true")
    assert tune(folder, space, *links, "--trials", "2") == 0
    schema.register()
    own = ["env=CartPole", "algo=ppo", "tuned=best", "members=2", "eval.every=0"]
    with initialize_config_module("rlkit.conf", version_base="1.3"):
        config = hydra_compose("config", [*own, f"hydra.searchpath=[file://{tmp_path / 'conf'}]"])
    assert (config.stabilizer.ref_kl.coef, config.env.normalize_reward, config.total_steps) == (0.2, True, STEPS)
    run = execute(prepare(config), tmp_path / "run", show="off")
    best = max(rows(folder), key=lambda row: float(row["value"]))
    assert float(interquartile_mean(np.array(run.eval_return))) == float(best["value"])


def test_a_trial_below_the_median_ends_at_that_evaluation(tmp_path, space, monkeypatch):
    closed = []
    monkeypatch.setattr(Learner, "close", lambda self: (closed.append(self), self.collector.close()))
    study = Study(tmp_path, planned(space, "algo.num_minibatches=2"))
    parameters = {"algo.learning_rate": 1e-3, "algo.gamma": 0.9, "algo.num_epochs": 1}
    for _ in range(5):  # within reach at 50 steps, out of reach from 100 on
        study._study.add_trial(
            optuna.trial.create_trial(
                value=500.0,
                params=parameters,
                distributions=study.plan.space,
                intermediate_values={50: 1.0, 100: 500.0, 150: 500.0},
            )
        )
    assert tune(tmp_path, space, "algo.num_minibatches=2", "--trials", "6") == 0
    last = rows(tmp_path)[-1]
    reported = study._trials(TrialState.PRUNED)[0].intermediate_values
    assert list(reported) == [50, 100]  # what is due; the rollouts end at 64 and 128
    assert (last["state"], last["steps"]) == ("pruned", "128")
    assert float(last["value"]) == reported[100]
    assert len(closed) == 1
    assert {path.name for path in tmp_path.glob("[!s]*")} == {"trials.csv", "best.yaml"}


def test_a_refused_configuration_is_a_failed_trial_that_is_not_counted(tmp_path, space):
    Study(tmp_path, planned(space))._study.enqueue_trial({"algo.num_minibatches": 100})
    assert tune(tmp_path, space, "--trials", "1", "--sampler-seed", "0") == 0
    assert states(tmp_path)[0] == "failed" and states(tmp_path)[-1] == "complete"
    assert states(tmp_path).count("complete") == 1
    assert rows(tmp_path)[0]["reason"].startswith("algo.num_minibatches is 100; it must be <= 64")


def test_a_search_in_which_all_is_refused_ends(tmp_path, space, monkeypatch, capsys):
    space.write_text("algo.num_minibatches: {choices: [100]}")
    monkeypatch.setattr(rlkit.tune, "GIVE_UP", 3)
    assert tune(tmp_path, space, "--trials", "2") == 1
    assert states(tmp_path) == ["failed"] * 3
    assert "3 trials in a row have failed, the last one thus: algo.num_minibatches is 100" in capsys.readouterr().err


# --- interruptions and company -------------------------------------------------------------------------------------


def test_after_ctrl_c_the_same_command_gives_what_an_undisturbed_search_gives(tmp_path, space, monkeypatch, capsys):
    arguments = ("algo.num_minibatches=2", "--trials", "3", "--sampler-seed", "7")
    assert tune(tmp_path / "whole", space, *arguments) == 0
    calls = itertools.count()

    def interrupting(*arguments):
        if next(calls) == 4:  # the first evaluation of the second trial: one has three, and a final one
            os.kill(os.getpid(), signal.SIGINT)
        return evaluate(*arguments)

    evaluate = Evaluator.__call__
    monkeypatch.setattr(Evaluator, "__call__", interrupting)
    assert tune(tmp_path / "parts", space, *arguments) == 130
    assert states(tmp_path / "parts") == ["complete", "failed"]
    assert rows(tmp_path / "parts")[1]["steps"] == "64"  # the iteration under way, and no more
    assert "1 of 3 trials done; the same command goes on" in capsys.readouterr().out
    parts = Study(tmp_path / "parts", planned(space, arguments[0]))
    [waiting] = parts._trials(TrialState.WAITING)
    assert waiting.system_attrs["fixed_params"] == parts._trials(TrialState.FAIL)[0].params
    assert tune(tmp_path / "parts", space, *arguments) == 0
    lines = rows(tmp_path / "parts")
    assert lines.pop(1)["reason"] == "interrupted, and queued again"
    assert [drawn(row) for row in lines] == [drawn(row) for row in rows(tmp_path / "whole")]


def test_processes_that_share_a_study_begin_no_trial_too_many(tmp_path, space):
    plan = planned(space)
    one = Study(tmp_path, plan)
    begun = one.ask(2)
    other = Study.__new__(Study)  # a process of its own would see the first one alive
    other.folder, other.plan, other.sampler_seed, other._study = tmp_path, plan, None, one._open()
    assert begun is not None and other.ask(2) is not None
    assert one.ask(2) is None and other.ask(2) is None


def test_what_a_killed_process_left_is_run_again(tmp_path, space):
    plan = planned(space)
    left = Study(tmp_path, plan).ask(1)
    again = Study(tmp_path, plan).ask(1)
    assert left is not None and again is not None
    assert again.params == left.params and again.number == left.number + 1


# --- numbers -------------------------------------------------------------------------------------------------------


def test_a_member_without_a_finite_return_counts_with_its_last_or_with_the_lowest():
    score, nan, inf = Score(4), float("nan"), float("inf")
    assert score(np.array([nan, 10.0, 4.0, 6.0])) == 5.0  # 4, 4, 6, 10: one is cut at each end
    assert score(np.array([8.0, inf, 2.0, nan])) == 7.0  # 2, 6, 8, 10
    with pytest.raises(Fault, match="^no member has had a finite return in an evaluation$") as caught:
        Score(2)(np.array([nan, inf]))
    assert not isinstance(caught.value, EnvironmentFailure)  # the environment did nothing wrong


def test_importance_is_given_to_the_parameter_that_decides(tmp_path, space):
    study = Study(tmp_path, planned(space, "algo.num_minibatches=2", "algo.gamma=0.9"))
    assert study.importance() == {}
    rng = np.random.default_rng(0)
    for _ in range(20):
        parameters = {"algo.learning_rate": float(rng.uniform(1e-4, 1e-2)), "algo.num_epochs": int(rng.integers(1, 4))}
        study._study.add_trial(
            optuna.trial.create_trial(
                value=1000 * parameters["algo.learning_rate"], params=parameters, distributions=study.plan.space
            )
        )
    assert study.importance()["algo.learning_rate"] > 0.9


def test_trials_that_tie_give_no_importance_and_the_first_is_the_best(tmp_path, space):
    study = Study(tmp_path, planned(space))
    for _ in range(12):
        study._study.tell(study.ask(12), -200.0)
    assert study.importance() == {}
    assert study.best().number == 0


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def config():
    return compose(["env=CartPole", "algo=ppo", "stabilizer=[ref_kl]"])[0]


@pytest.mark.parametrize(
    ("key", "entry", "sentence"),
    [
        ("algo.lernrate", {"low": 1, "high": 2}, "algo.lernrate is not a key .* did you mean algo.learning_rate"),
        ("algo.group_size", {"choices": [4]}, "algo.group_size is a key of algo=grpo alone"),
        ("algo.gamma", {"choices": [0.9, 1.5]}, "algo.gamma is 1.5 .* must be > 0 and <= 1"),
        ("algo.gamma", {"choices": ["high"]}, "algo.gamma is 'high' .* must be a number"),
        ("algo.gamma", {"choices": []}, "algo.gamma is .*one or more"),
        ("algo.gamma", {"low": 0.9}, "algo.gamma is .* must be {low: ..., high: ...}"),
        ("algo.gamma", {"low": 0.9, "high": float("nan")}, "algo.gamma is nan .* must be finite"),
        ("algo.learning_rate", {"low": 1e-2, "high": 1e-3}, "algo.learning_rate is .*low <= high"),
        ("algo.entropy_coef", {"low": 0, "high": 1, "log": True}, "algo.entropy_coef is .*low > 0"),
        ("algo.num_epochs", {"low": 1.5, "high": 3}, "algo.num_epochs is 1.5 .* must be a whole number"),
        ("algo.num_epochs", {"low": 1, "high": 4, "step": 2}, "algo.num_epochs is .*step must divide high - low"),
        ("algo.advantage", {"low": 1, "high": 4}, "algo.advantage is .*words have no order"),
        ("stabilizer.ref_kl.ceof", {"choices": [1]}, "stabilizer.ref_kl.ceof is not a key .* did you mean coef"),
        ("seed", {"choices": [1, 2]}, "seed is in the search space"),
        ("eval.every", {"choices": [1, 2]}, "eval.every is in the search space"),
    ],
)
def test_a_wrong_entry_of_a_space_is_one_sentence(config, key, entry, sentence):
    with pytest.raises(ConfigError, match=sentence) as error:
        distribution(key, entry, config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "entry", "kind"),
    [
        ("algo.num_epochs", {"low": 1, "high": 3}, optuna.distributions.IntDistribution),
        ("algo.gae_lambda", {"low": 0, "high": 1}, optuna.distributions.FloatDistribution),
        ("stabilizer.ref_kl.coef", {"low": 0.1, "high": 1}, optuna.distributions.FloatDistribution),
        ("policy.hidden", {"choices": [[8], [8, 8]]}, optuna.distributions.CategoricalDistribution),
    ],
)
def test_the_kind_of_a_range_is_that_of_the_key(config, key, entry, kind):
    assert type(distribution(key, entry, config)) is kind


def test_lists_are_drawn_as_text_and_set_as_lists(config):
    entry = distribution("policy.hidden", {"choices": [[8], [8, 4]]}, config)
    plan = Plan(config, config, {"policy.hidden": entry}, "eval_return")
    settings = plan.settings({"policy.hidden": entry.choices[1]})
    assert settings == {"policy.hidden": [8, 4], "total_steps": config.total_steps}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["seed=100"], "seed is 100 and members is 8, which takes seeds up to 107; a search must stay below 100"),
        (["seed=93"], "takes seeds up to 100"),
        (["algo.lr=1"], "algo.lr is not a key"),
        (["algo.gamma=2"], "algo.gamma is 2.0; it must be > 0 and <= 1"),
        (["--space", "nowhere.yaml"], "--space is nowhere.yaml, which cannot be read"),
    ],
)
def test_a_wrong_command_is_one_sentence_and_writes_nothing(tmp_path, monkeypatch, capsys, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    assert rlkit.tune.main(["env=CartPole", "algo=ppo", *arguments]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_study_is_one_sentence(tmp_path, space, capsys):
    (tmp_path / "study.db").write_bytes(b"no database" * 100)
    assert tune(tmp_path, space) == 2
    assert capsys.readouterr().err == f"rlkit: --study is {tmp_path}, which cannot be used: file is not a database\n"


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_a_full_disk_is_one_sentence_and_the_same_command_goes_on(tmp_path, space, capsys):
    folder = tmp_path / "study"
    assert tune(folder, space, "--trials", "1") == 0
    before = (folder / "trials.csv").read_bytes()
    (folder / "trials.csv.tmp").symlink_to("/dev/full")
    assert tune(folder, space, "--trials", "2") == 1
    assert capsys.readouterr().err == f"rlkit: {folder / 'trials.csv'} cannot be written: No space left on device\n"
    assert (folder / "trials.csv").read_bytes() == before

    def no_page_more(connection, _):
        connection.execute("PRAGMA max_page_count = 1")  # which means as many as there are

    event.listen(Engine, "connect", no_page_more)
    try:
        assert tune(folder, space, "--trials", "200") == 1
    finally:
        event.remove(Engine, "connect", no_page_more)
    said = f"rlkit: {folder / 'study.db'} cannot be written: (sqlite3.OperationalError) database or disk is full"
    assert capsys.readouterr().err.startswith(said)
    done = len(rows(folder))
    assert tune(folder, space, "--trials", str(done + 1)) == 0


def test_without_optuna_the_command_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr(rlkit.tune, "find_spec", lambda name: None)
    assert rlkit.tune.main(["env=CartPole"]) == 2
    assert "pip install 'rlkit[sweep]'" in capsys.readouterr().err


# --- the spaces that come with it ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("algo", "total_steps"), [("ppo", 16_384), ("grpo", 1_000)])
def test_every_combination_of_a_shipped_space_can_run(algo, total_steps):
    plan = make_plan(["env=CartPole", f"algo={algo}", "seed=92", f"total_steps={total_steps}"], None, "eval_return")
    config = to_config(plan.configure({key: d.choices[0] for key, d in plan.space.items() if hasattr(d, "choices")}))
    sizes = {
        key: d.choices
        for key, d in plan.space.items()
        if key.rpartition(".")[2] in ("num_envs", "num_steps", "num_minibatches", "group_size")
    }
    assert len(sizes) == 3
    for values in itertools.product(*sizes.values()):
        own = dict(zip(sizes, values, strict=True))
        inner = {key.removeprefix("algo."): value for key, value in own.items() if key.startswith("algo.")}
        varied = dataclasses.replace(config, num_envs=own["num_envs"], algo=dataclasses.replace(config.algo, **inner))
        assert [*schema.range_problems(varied), *schema.conflicts(varied)] == []


def test_the_shipped_spaces_are_plain_yaml():
    for algo in ("ppo", "grpo"):
        entries = OmegaConf.to_container(OmegaConf.load(Path(schema.__file__).parent / "search" / f"{algo}.yaml"))
        assert isinstance(entries["algo.learning_rate"]["low"], float)
