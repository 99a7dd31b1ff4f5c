"""Diagnosis: each rule on a run in which it must speak and on one in which it must be silent, live and afterwards."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import small_learner
from omegaconf import DictConfig, OmegaConf, open_dict
from test_session import Script, session

import rlkit
from rlkit.advice import EXHAUSTED
from rlkit.build import to_config
from rlkit.conf.schema import choice, options
from rlkit.diagnose import Diagnosis, diagnose, main
from rlkit.metrics import Logger
from rlkit.recorded import leaves, stabilizers
from rlkit.series import Series
from rlkit.symptoms import FAULTS, SYMPTOMS, findings
from rlkit.train import compose

NAN = float("nan")
L = 32  # entries, so that a window is the last eight
RISING = np.minimum(20 + 20.0 * np.arange(L), 400)  # 20 at the start, 400 from entry 19 on
FLAT = np.where(np.arange(L) % 2, 21.0, 20.0)
HEALTHY = {
    "advantage/mean": 0.0,
    "advantage/std": 1.0,
    "entropy/mean": 0.6,
    "grad_norm/before": 0.5,
    "grad_norm/after": 0.4,
    "kl/old": 0.005,
    "ratio/clipped": 0.05,
    "ratio/std": 0.08,
    "run/progress": np.linspace(0.0, 1.0, L),
    "update/nonfinite": 0.0,
    "value/error": 2.0,
    "value/explained_variance": 0.8,
}


def series(members: int = 1, **changed) -> Series:
    """A healthy run with other curves ([L] or [L, M]); names are written with two underscores, None leaves one out."""
    curves = HEALTHY | {"episode/return_recent": RISING} | {name.replace("__", "/"): x for name, x in changed.items()}
    tables = {}
    for name, curve in curves.items():
        if curve is not None:
            values = np.asarray(curve, dtype=float)
            length = len(values) if values.ndim else L
            values = values[:, None] if values.ndim == 1 else values
            tables[name] = (1000.0 * np.arange(1, length + 1), np.broadcast_to(values, (length, members)))
    return Series(members, tables)


def late(before: float, after: float, entries: int = 8) -> np.ndarray:
    """A curve that changes for the last entries."""
    return np.r_[np.full(L - entries, before), np.full(entries, after)]


EVALUATIONS = np.array([100.0, 300, 498, 498.4, 311, 311])
LADDER = np.r_[np.full(L - 7, 0.01), 0.01, 0.012, 0.016, 0.02, 0.025, 0.03, 0.04]

# rule, curves with which it speaks, words it must say, curves with which it is silent
CASES = [
    ("nonfinite", {"update__nonfinite": late(0, 1, 2)}, "2 gradients", {"update__nonfinite": late(0, NAN, 2)}),
    (
        "fell",
        {"eval__return": EVALUATIONS},
        r"from 498\.2 to 311\.0 \(39 % of its rise\) after step 4,000",  # of 478.2 from the 20 at the start
        {"eval__return": EVALUATIONS[:4]},
    ),
    (
        "fell",  # by the moving average where there are no evaluations
        {"episode__return_recent": np.r_[RISING[:26], 340, 300, 270, 250, 250, 250]},
        r"from 400\.0 to 250\.0 \(39 % of its rise\) after step 22,000",
        {"episode__return_recent": np.r_[RISING[:26], 370, 380, 365, 370, 365, 368]},  # 8 %
    ),
    (
        "fell",
        {"eval__return": [200.0, 400, 420, 410, 400, 300, 300]},
        "from 415.0 to 300.0",
        {"eval__return": [200.0, 420, 210, 430, 190, 420, 300, 300]},  # it never stood higher for two evaluations
    ),
    ("flat", {"episode__return_recent": FLAT}, "20.0 at the start, 20.7 now", {"episode__return_recent": RISING}),
    ("flat", {"episode__return_recent": FLAT}, "has not risen", {"episode__return_recent": FLAT, "run__progress": 0.4}),
    ("flat", {"episode__return_recent": np.full(L, -200.0)}, "-200", {"eval__return": [9.0, 9, 9, 9, 60, 80]}),
    ("clipped", {"ratio__clipped": late(0.05, 0.4)}, "40 % of the ratios", {"ratio__clipped": late(0.5, 0.25)}),
    ("kl_high", {"kl__old": late(0.01, 0.25)}, "KL of 0.25 nats", {"kl__old": late(0.25, 0.03)}),
    ("kl_rising", {"kl__old": LADDER}, "from 0.01 to 0.04 nats", {"kl__old": LADDER / 10}),
    ("kl_rising", {"kl__old": LADDER}, "6 entries in a row", {"kl__old": np.r_[LADDER[:-2], 0.024, 0.04]}),
]
# The same for symptoms: all these runs are ones whose return does not rise.
SICK = [
    ("still", {"ratio__std": 2e-7}, "2e-07", {"ratio__std": 0.002}),
    ("still", {"ratio__std": 2e-7}, "hardly moves", {"ratio__std": 0.0, "advantage__std": 0.0}),  # no advantages
    ("still", {"ratio__std": 2e-7}, "hardly moves", {"ratio__std": 0.0, "entropy__mean": late(0.6, 0.0)}),  # no choice
    (
        "degenerate",
        {"group__degenerate": late(0.5, 1.0)},
        r"each of the last 8 entries .*\(mean: 20\.7\)",
        {"group__degenerate": np.r_[np.ones(L - 1), 0.9]},
    ),
    ("advantage_sign", {"advantage__mean": -3.0}, "-3 of their deviations", {"advantage__mean": -0.9}),
    ("advantage_scale", {"advantage__std": 2500.0}, "2,500", {"advantage__std": 25.0}),
    ("advantage_scale", {"advantage__std": 1e-5}, "1e-05", {"advantage__std": 0.0}),
    ("gradient_high", {"grad_norm__before": 28.2}, "28.2 before clipping and 0.4 after", {"grad_norm__before": 0.9}),
    ("gradient_low", {"grad_norm__before": 0.03}, "norm is 0.03", {"grad_norm__before": 0.2}),
    ("gradient_low", {"grad_norm__before": 0.03}, "norm is 0.03", {"grad_norm__before": 0.0}),  # degenerate groups
    ("entropy", {"entropy__mean": late(0.6, 0.03)}, "from 0.6 to 0.03 nats", {"entropy__mean": late(0.6, 0.1)}),
    ("entropy", {"entropy__mean": late(0.6, 0.03)}, "0.03", {"entropy__mean": late(-1.0, -2.0)}),  # of a Gaussian
    (
        "value_error",
        {"value__error": late(2.0, 10.0)},
        "from 2 to 10 within 16 entries",
        {"value__error": late(2.0, 7.0)},
    ),
    ("unexplained", {"value__explained_variance": late(0.8, -0.5)}, "-0.5", {"value__explained_variance": 0.1}),
]


@pytest.mark.parametrize(("rule", "speaks", "words", "silent"), CASES)
def test_a_fault_is_told_and_only_where_it_is(rule, speaks, words, silent):
    assert re.search(words, diagnose(series(**speaks))[rule])
    assert rule not in diagnose(series(**silent))


@pytest.mark.parametrize(("rule", "speaks", "words", "silent"), SICK)
def test_a_symptom_is_told_of_a_run_that_does_not_rise_and_of_no_other(rule, speaks, words, silent):
    sick = {"episode__return_recent": FLAT}
    assert re.search(words, diagnose(series(**speaks, **sick))[rule])
    assert rule not in diagnose(series(**silent, **sick))
    assert rule not in diagnose(series(**speaks))  # the return is at its best
    fallen = {"eval__return": [300.0, 400, 400, 400, 200, 200]}
    assert rule in diagnose(series(**speaks, **fallen))


def test_every_rule_has_a_run_in_which_it_speaks_and_one_in_which_it_is_silent():
    assert {rule.__name__ for rule in FAULTS} == {case[0] for case in CASES} | {"behind"}  # of several members, below
    assert {rule.__name__ for rule in SYMPTOMS} == {case[0] for case in SICK}


@pytest.mark.parametrize("members", [1, 3])
def test_of_a_healthy_run_nothing_is_told(members):
    assert diagnose(series(members)) == {}
    assert diagnose(series(members, eval__return=[200.0, 400, 495, 500, 480, 500])) == {}


def test_a_member_far_behind_the_others_is_told_of_with_what_they_had():
    poor = np.minimum(RISING, 100.0)
    slow = np.minimum(RISING, 300.0)
    found = diagnose(series(3, episode__return_recent=np.stack([RISING, poor, slow], 1)))
    assert list(found) == ["behind"]
    assert "member 1: return stays at 100.0, its best 100.0, while others had 400.0" in found["behind"]
    early = np.stack([RISING, poor, slow], 1)
    assert diagnose(series(3, episode__return_recent=early, run__progress=0.4)) == {}


def test_a_group_without_a_critic_gets_advice_of_its_own():
    table = np.stack([RISING, np.minimum(RISING, 100.0)], 1)
    grouped = diagnose(series(2, episode__return_recent=table, group__degenerate=0.0))
    assert "algo.advantage=return_to_go" in grouped["behind"]
    assert "algo.advantage" not in diagnose(series(2, episode__return_recent=table))["behind"]


def test_members_with_the_same_finding_share_a_line_with_the_number_of_the_worst():
    clipped = np.full((L, 5), 0.05)
    clipped[-8:, [1, 4]] = 0.35, 0.6
    assert diagnose(series(5, ratio__clipped=clipped))["clipped"].startswith(
        "members 1, 4 (worst: 4): 60 % of the ratios"
    )
    assert diagnose(series(12, ratio__clipped=0.5))["clipped"].startswith("12 of 12 members (worst: 0): 50 %")


def test_one_member_is_judged_without_the_others():
    sick = np.stack([FLAT, RISING], 1)
    found = findings(series(2, episode__return_recent=sick, grad_norm__before=5.0))
    assert found["gradient_high"].holds.tolist() == [True, False]
    assert found["flat"].holds.tolist() == [True, False]


def test_a_member_that_stopped_is_judged_by_what_it_measured_last():
    clipped = np.full((L, 2), 0.05)
    clipped[10:18, 0], clipped[18:, 0] = 0.5, NAN
    returns = np.stack([RISING, RISING], 1)
    returns[25:, 0] = NAN
    found = diagnose(series(2, ratio__clipped=clipped, episode__return_recent=returns))
    assert list(found) == ["clipped"] and found["clipped"].startswith("member 0: 50 %")


def test_a_diverged_member_is_told_of_whatever_was_logged():
    run = series(2)
    run.diverged = np.array([False, True])
    assert diagnose(run)["nonfinite"].startswith("member 1: three gradients in a row were not finite")


@pytest.mark.parametrize("entries", range(1, 8))
def test_a_run_of_a_few_entries_is_judged_without_a_fault(entries):
    short = {name: np.full(entries, NAN) for name in ("episode__return_recent", "kl__old", "entropy__mean")}
    assert diagnose(series(2, **short, eval__return=np.full(entries, NAN))) == {}
    assert diagnose(Series(2)) == {}


def test_what_grows_entry_by_entry_is_what_is_read_at_once():
    rng = np.random.default_rng(0)
    table = rng.normal(size=(200, 3))
    steps = np.arange(200.0)
    grown = Series(3)
    for step, row in zip(steps, table, strict=True):
        grown.append(step, {"kl/old": row, "loss/surrogate": row})
    read = Series(3, {"kl/old": (steps, table), "loss/surrogate": (steps, table)})
    for name in ("kl/old", "loss/surrogate"):
        np.testing.assert_array_equal(grown.values(name), read.values(name))
        np.testing.assert_array_equal(grown.steps(name), read.steps(name))
    assert len(read.values("loss/surrogate")) == 0  # no rule reads it


def test_every_key_and_stabiliser_that_is_said_to_help_exists():
    from rlkit.train import help_page

    page = help_page()
    knobs = " ".join(finding.knob for run in (series(), series(group__degenerate=0.0, value__error=None)) for finding in
                     (rule(run) for rule in (*FAULTS, *SYMPTOMS)))  # fmt: skip
    words = set(re.findall(r"\b[a-z]+\.[a-z_]+", knobs)) | {"num_envs"}
    assert {"algo.learning_rate", "exploration.name", "algo.target_kl"} < words
    assert [word for word in words if f" {word}=" not in page] == []
    assert set(re.findall(r"stabilizer=\[(\w+)", knobs)) <= set(options("stabilizer"))


# --- what helps, given what is set already ---------------------------------------------------------------------------

GROUPED = {"value__error": None, "value__explained_variance": None, "group__degenerate": 0.0}


def flat_settings(config: DictConfig) -> dict[str, Any]:
    return dict(leaves(asdict(to_config(config))))


def advised(rule: str, config: DictConfig) -> str:
    run = series(**(GROUPED if config.algo.name == "grpo" else {}))
    run.settings = flat_settings(config)
    return next(each for each in (*FAULTS, *SYMPTOMS) if each.__name__ == rule)(run).knob


RATE = "algo.learning_rate=0.0001 (now 0.0003)"
# rule, what a run has set already, what it is told then; where a rule tells all runs what is still free, see below
SET = [
    ("nonfinite", ["env.normalize_reward=true"], f"{RATE} helps"),
    (
        "fell",
        ["stabilizer=[ref_kl]"],
        f"stabilizer=[ref_kl,rollback] or {RATE} helps",
    ),
    (
        "fell",
        ["stabilizer=[rollback]"],
        f"stabilizer.rollback.patience=1 (now 2), stabilizer.rollback.end_drop=0.01 or {RATE} helps",
    ),
    ("fell", ["stabilizer=[recommended]"], f"{RATE} helps"),
    ("fell", ["eval.every=0"], f"{RATE} helps"),  # nothing to judge by
    (
        "flat",
        ["exploration.name=linear", "algo.entropy_coef=0.01"],
        "exploration.scale=6.0 (now 3.0), algo.entropy_coef=0.02 (now 0.01) or "
        "algo.learning_rate=0.0009 or 0.0001 (now 0.0003) may help",
    ),
    (
        "flat",
        ["algo.learning_rate=0.5"],
        "exploration.name=linear, algo.entropy_coef=0.01 or algo.learning_rate=0.001 (now 0.5) may help",
    ),
    (
        "behind",
        ["exploration.name=correlated", "algo.entropy_coef=0.001"],
        "algo.entropy_coef=0.01 (now 0.001), exploration.scale=6.0 (now 3.0) or num_envs=16 (now 8) may help",
    ),
    (
        "behind",
        ["algo=grpo", "exploration.name=linear", "num_envs=8", "total_steps=8"],
        "exploration.scale=6.0 (now 3.0) may help",
    ),
    (
        "behind",
        ["algo=grpo", "algo.advantage=outcome"],
        "algo.advantage=return_to_go, exploration.name=linear or num_envs=16 (now 8) may help",
    ),
    ("clipped", ["algo.num_epochs=1", "algo.target_kl=0.01"], f"{RATE} helps"),
    ("clipped", ["algo.target_kl=0.1"], f"{RATE}, algo.num_epochs=5 (now 10) or algo.target_kl=0.02 (now 0.1) helps"),
    ("kl_high", ["algo.target_kl=0.02"], f"{RATE} or algo.num_epochs=5 (now 10) helps"),
    (
        "kl_rising",
        ["algo.target_kl=0.02", "algo.num_epochs=1", "algo.schedule.learning_rate.name=kl_adaptive"],
        "algo.schedule.learning_rate.target=0.0033 (now 0.01) helps",
    ),
    (
        "still",
        ["algo.learning_rate=1e-8"],
        "algo.learning_rate=0.0001 (now 1e-08) or algo.num_epochs=20 (now 10) helps",
    ),
    (
        "degenerate",
        ["algo=grpo", "exploration.name=linear", "num_envs=32"],
        "exploration.scale=6.0 (now 3.0) or algo.group_size=16 (now 8) helps",
    ),
    (
        "degenerate",
        ["algo=grpo", "num_envs=8"],
        "exploration.name=linear or algo.group_size=16 num_envs=16 (now 8 and 8) helps",
    ),
    ("advantage_sign", [], "algo.num_epochs=20 (now 10) or algo.value_coef=2.0 (now 1.0) helps"),
    ("advantage_sign", ["algo=grpo", "algo.normalize_advantage=true"], "algo.num_epochs=8 (now 4) helps"),
    ("advantage_scale", [], "env.normalize_reward=true or policy.value_normalization=popart helps"),
    ("advantage_scale", ["env.normalize_reward=true", "policy.value_normalization=running"], EXHAUSTED),
    (
        "gradient_high",
        ["env.normalize_reward=true", "policy.value_normalization=popart"],
        "algo.value_coef=0.33 (now 1.0) helps",
    ),
    ("gradient_high", ["algo=grpo", "algo.normalize_advantage=true"], f"{RATE} helps"),
    ("gradient_low", ["algo.entropy_coef=0.02"], "num_envs=16 (now 8) or algo.entropy_coef=0.04 (now 0.02) helps"),
    (
        "entropy",
        ["algo.entropy_coef=0.01", "algo.schedule.entropy_coef.name=target_entropy"],
        f"algo.schedule.entropy_coef.target=0.015 (now 0.01), exploration.name=linear or {RATE} helps",
    ),
    ("value_error", ["env.normalize_reward=true", "policy.value_normalization=popart"], f"{RATE} helps"),
    (
        "unexplained",
        ["env.normalize_reward=true", "policy.critic_hidden=[16]"],
        "policy.critic_hidden=[32] (now [16]) or algo.num_epochs=20 (now 10) helps",
    ),
    ("unexplained", ["policy.shared_trunk=true"], "algo.num_epochs=20 (now 10) or env.normalize_reward=true helps"),
]


@pytest.mark.parametrize(("rule", "given", "said"), SET)
def test_what_helps_goes_on_from_what_is_set(rule, given, said):
    algo = [] if "algo=grpo" in given else ["algo=ppo"]
    assert advised(rule, compose([*algo, "tuned=none", *given])[0]) == said


def test_every_rule_is_tried_with_something_set():
    assert {rule for rule, _, _ in SET} == {rule.__name__ for rule in (*FAULTS, *SYMPTOMS)}


def follow(config: DictConfig, knob: str) -> None:
    """Set what is advised; each move must be another value than the present one."""
    settings = flat_settings(config)
    for key, text in re.findall(r"([a-z]+(?:[._][a-z]+)*)=(\[[^\]]*\]|[^\s,]+)", knob):
        if key == "stabilizer":
            names = text.strip("[]").split(",")
            assert sorted(names) != sorted(stabilizers(settings))
            for name in names:
                config.stabilizer.setdefault(name, choice("stabilizer", name)[name])
        else:
            value = OmegaConf.create(f"value: {text}").value
            assert key in settings and settings[key] != value, knob
            OmegaConf.update(config, key, value)


@pytest.mark.parametrize("rule", [rule.__name__ for rule in (*FAULTS, *SYMPTOMS)])
@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_advice_that_is_followed_is_not_given_again_and_can_run(rule, algo):
    config, _ = compose([f"algo={algo}"])
    with open_dict(config):
        for _ in range(5):
            follow(config, advised(rule, config))
            to_config(config)


def test_what_helps_is_said_without_values_where_the_settings_are_not_known():
    assert (
        "a lower algo.learning_rate or env.normalize_reward=true helps"
        in diagnose(series(update__nonfinite=late(0, 1, 2)))["nonfinite"]
    )


# --- live ------------------------------------------------------------------------------------------------------------


def test_a_finding_is_told_once_for_each_member():
    diagnosis = Diagnosis(2)
    told: list[tuple[int, str]] = []
    for k in range(64):
        entry = {name: np.broadcast_to(np.asarray(x).flat[-1], 2) for name, x in HEALTHY.items()}
        entry["episode/return_recent"] = np.full(2, RISING[min(k, L - 1)])
        entry["ratio/clipped"] = np.array([0.5 if k >= 16 else 0.05, 0.5 if k >= 40 else 0.05])
        told += [(k, text) for text in diagnosis.note(np.full(2, 2000 * k), entry)]
    (first, one), (second, other) = told
    assert one.startswith("member 0: ") and other.startswith("member 1: ")
    assert 16 < first <= 24 and 40 < second <= 56 and (first + 1) % 4 == 0
    assert list(diagnosis.lines(np.zeros(2, dtype=bool))) == ["clipped"]


def test_a_session_tells_of_a_fall_and_lists_it_at_the_end(tmp_path):
    learner = small_learner("ppo", "members=2", "total_steps=320")
    rows = [[100.0, 100], [490, 490], [500, 500], [500, 500], [500, 300], [500, 200], [490, 200]]
    kept = session(learner, Script(*rows), tmp_path, eval_every=32, log_every=32, diagnosis=Diagnosis(2))
    summary = kept.run()
    falls = [text for text in kept.logger.messages if "return fell" in text]
    assert len(falls) == 1 and falls[0].startswith("member 1: return fell from 500.0 to ")
    assert set(summary["findings"]) >= {"fell"}
    assert summary["findings"]["fell"].startswith("member 1: return fell from 500.0 to 200.0")
    assert json.loads((tmp_path / "summary.json").read_text())["findings"] == summary["findings"]


def test_a_session_without_a_diagnosis_tells_nothing(tmp_path):
    kept = session(small_learner("ppo", "total_steps=256"), Script([100.0], [400], [1]), tmp_path, eval_every=32)
    assert "findings" not in kept.run()
    assert kept.logger.messages == []


def test_findings_are_text_in_tensorboard_and_lines_of_the_console(tmp_path, capsys):
    from test_metrics import _events

    logger = Logger(tmp_path, members=1, total_steps=256, title="t", show="plain")
    kept = session(
        small_learner("ppo", "total_steps=256"),
        Script([100.0], [500], [500], [500], [200]),
        tmp_path,
        eval_every=32,
        log_every=32,
        diagnosis=Diagnosis(1),
    )
    kept.logger = logger
    kept.run()
    logger.close()
    texts = [event.tensor_proto.string_val[0].decode() for event in _events(tmp_path).Tensors("events")]
    assert any(text.startswith("member 0: return fell from 500.0 to 200.0") for text in texts)
    assert [text for text in capsys.readouterr().out.splitlines() if "return fell" in text] == [
        text for text in texts if "return fell" in text
    ]


def test_no_rule_changes_what_is_learned_or_logged(tmp_path):
    settings = {"env": "CartPole", "algo": "ppo", "total_steps": 1024, "log.every": 256, "show": "off"}
    on = rlkit.run(folder=tmp_path / "on", **settings)
    off = rlkit.run(folder=tmp_path / "off", **settings, **{"log.diagnose": False})
    assert "findings" in on.summary and "findings" not in off.summary
    assert on.eval_return == off.eval_return
    states = [torch.load(run.folder / "checkpoint.pt", weights_only=True)["learner"]["policy"] for run in (on, off)]
    assert all(torch.equal(a, b) for a, b in zip(*(state.values() for state in states), strict=True))


# --- real runs -------------------------------------------------------------------------------------------------------

FAST = {"log.every": 256, "eval.every": 2048, "show": "off"}


@pytest.fixture(scope="module")
def wild(tmp_path_factory):
    """A run whose learning rate is a thousand times too high."""
    settings = {"env": "CartPole", "algo": "ppo", "algo.learning_rate": 1.0, "total_steps": 8192, "members": 2}
    return rlkit.run(folder=tmp_path_factory.mktemp("wild") / "run", **FAST, **settings)


def test_a_learning_rate_of_one_is_found_out(wild):
    found = wild.summary["findings"]
    assert {"flat", "entropy"} <= set(found)
    assert "algo.learning_rate" in found["flat"] and "algo.learning_rate=0.001 (now 1.0)" in found["entropy"]
    assert "still" not in found  # the ratio stands still, but since there is nothing left to choose


def test_a_learning_rate_of_next_to_nothing_is_found_out(tmp_path):
    settings = {"env": "CartPole", "algo": "ppo", "algo.learning_rate": 1e-8, "total_steps": 20_480}
    fast = FAST | {"log.every": 1024}  # sooner only short episodes have ended, which looks like a rise
    found = rlkit.run(folder=tmp_path / "run", **fast, **settings).summary["findings"]
    assert {"flat", "still"} <= set(found)
    assert "algo.learning_rate=0.0001 (now 1e-08)" in found["still"]


def test_groups_without_a_difference_are_found_out(tmp_path):
    """No random policy of MountainCar reaches the goal within 30 steps."""
    settings = {"env": "MountainCar", "algo": "grpo", "tuned": "none", "algo.max_episode_steps": 30}
    small = {"num_envs": 8, "total_steps": 240 * 20, "log.every": 240, "eval.every": 0, "show": "off"}
    found = rlkit.run(folder=tmp_path / "run", **settings, **small).summary["findings"]
    assert set(found) == {"flat", "degenerate"}
    assert "all groups had equal returns (mean: -30.0); exploration.name=linear" in found["degenerate"]


@pytest.mark.slow
@pytest.mark.parametrize(("algo", "steps"), [("ppo", 25_600), ("grpo", 40_000)])
def test_of_a_tuned_run_nothing_is_told(algo, steps, tmp_path):
    run = rlkit.run(folder=tmp_path / "run", env="CartPole", algo=algo, members=2, total_steps=steps, show="off")
    assert run.summary["findings"] == {}
    assert min(run.eval_return) > 300


def test_a_team_tells_what_one_process_tells(wild, tmp_path):
    settings = {"env": "CartPole", "algo": "ppo", "algo.learning_rate": 1.0, "total_steps": 8192, "members": 2}
    run = rlkit.run(folder=tmp_path / "run", **FAST, **settings, processes=2)
    assert set(run.summary["findings"]) == set(wild.summary["findings"])


# --- python -m rlkit.diagnose ----------------------------------------------------------------------------------------


def test_the_command_says_of_a_finished_run_what_was_said_at_its_end(wild, capsys):
    assert main([str(wild.folder)]) == 0
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == f"{wild.folder} (CartPole-v1 ppo, 2 members)"
    said = [re.sub(r"[\d.]+", "#", line.strip()) for line in lines]  # the file has single precision
    assert said == [re.sub(r"[\d.]+", "#", text) for text in wild.summary["findings"].values()]
    assert "(now 1.0)" in "".join(lines)  # both look at the settings


def test_the_command_says_of_damaged_settings_that_they_are(tmp_path, capsys):
    folder = unfinished(tmp_path / "run")
    (folder / ".hydra").mkdir()
    (folder / ".hydra" / "config.yaml").write_text("- a list\n")
    assert main([str(folder)]) == 2
    sentence = f"{folder}/.hydra/config.yaml is damaged: it holds a list, where keys and values are due"
    assert capsys.readouterr().err == f"rlkit: {sentence}\n"


def unfinished(folder: Path, **scalars: float) -> Path:
    logger = Logger(folder, members=1, total_steps=1000, title="t", show="off")
    for k in range(20):
        entry = {"episode/return_recent": RISING[k], **{name.replace("__", "/"): x for name, x in scalars.items()}}
        logger.log(np.array([50 * k]), {name: np.array([x]) for name, x in entry.items()})
    logger.close()
    return folder


def test_the_command_takes_folders_above_runs_and_runs_that_have_not_finished(tmp_path, capsys):
    unfinished(tmp_path / "runs" / "a")
    unfinished(tmp_path / "runs" / "b", ratio__clipped=0.5)
    assert main([str(tmp_path / "runs"), str(tmp_path / "runs" / "a")]) == 0
    first, nothing, second, finding = capsys.readouterr().out.splitlines()
    assert (first, nothing) == (f"{tmp_path}/runs/a (not finished, 1 member)", "  nothing found")
    assert second == f"{tmp_path}/runs/b (not finished, 1 member)"
    assert finding.startswith("  member 0: 50 % of the ratios are clipped")


def test_the_command_says_where_there_is_too_little_to_go_by(tmp_path, capsys):
    run = rlkit.run(folder=tmp_path / "run", algo="ppo", total_steps=512, **{"log.every": 0, "eval.every": 0})
    assert main([str(run.folder)]) == 0
    assert "nothing found: with 0 log entries most rules have nothing to go by" in capsys.readouterr().out


def test_a_folder_that_is_no_run_is_one_sentence(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert main([str(tmp_path / "absent")]) == 2
    folder = unfinished(tmp_path / "torn")
    with (folder / "metrics.csv").open("a") as file:
        file.write("9,9,kl/old\n")
    assert main([str(folder)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        f"rlkit: no run in {tmp_path}: no metrics.csv in it or below",
        f"rlkit: {tmp_path}/absent is not a folder; name a run directory or a folder above some",
        f"rlkit: {folder}/metrics.csv is damaged in line 22: 3 cells instead of 4",
    ]
