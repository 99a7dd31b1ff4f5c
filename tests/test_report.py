"""Comparison of finished runs: its statistics against hand numbers, scipy and rliable, its files, tables and page."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from omegaconf import OmegaConf

import rlkit
from rlkit import figures, report
from rlkit.comparison import (
    area_under_curve,
    band,
    bootstrap,
    compare,
    fallen,
    improvement_across,
    probability_of_improvement,
    rows,
    volatility,
    worst_drop,
)
from rlkit.interquartile import interquartile_mean
from rlkit.recorded import ReportError, differences, find

# --- runs on disk, as training leaves them ---------------------------------------------------------------------------

STEPS = (1000, 2000, 3000, 4000)
RETURNS = {  # at STEPS, a row for each of four seeds
    "ppo": [[100, 480, 490, 500], [200, 300, 480, 476], [100, 500, 400, 500], [50, 60, 70, 80]],
    "grpo": [[100, 200, 300, 400], [100, 490, 480, 490], [10, 20, 30, 40], [90, 80, 85, 70]],
}
SOLVED_AT = {"ppo": [2000, 3000, None, None], "grpo": [None, 2000, None, None]}
LOGGED = {  # scalar -> what every seed logs at STEPS
    "kl/old": 0.01,
    "kl/epoch_0": 0.0,
    "kl/epoch_1": 0.01,
    "ratio/clipped": 0.1,
    "entropy/mean": 0.5,
    "grad_norm/before": 0.3,
}


def write_run(
    folder: Path, algo: str = "ppo", *, env: str = "CartPole", seed: int = 100, settings=(), returns=None, **summary
) -> Path:
    """Write a finished run: `returns` [M, L] at STEPS, `settings` as on the command line; return its folder."""
    table = np.array(RETURNS[algo] if returns is None else returns, dtype=float)
    members = len(table)
    overrides = [f"env={env}", f"algo={algo}", f"seed={seed}", f"members={members}", *settings]
    config = OmegaConf.create(
        {
            "env": {"name": env, "id": f"{env}-v1"},
            "algo": {"name": algo, "gamma": 0.99, "clip": 0.2, "max_grad_norm": 0.5, "adam_betas": [0.9, 0.999]},
            "seed": seed,
            "members": members,
            "log": {"every": 2000},
            "eval": {"episodes": 20},
            "stabilizer": {},
        }
    )
    if algo == "grpo":
        config.algo.group_size = 8
    config.merge_with_dotlist(list(settings))
    (folder / ".hydra").mkdir(parents=True)
    OmegaConf.save(config, folder / ".hydra" / "config.yaml")
    OmegaConf.save(OmegaConf.create(overrides), folder / ".hydra" / "overrides.yaml")
    columns = [f"member_{m:02}" for m in range(members)] if members > 1 else []
    lines = [",".join(["step", "wall_seconds", "name", "value", *columns])]
    scalars = {"eval/return": table.T} | {name: np.full(table.T.shape, value) for name, value in LOGGED.items()}
    for name, values in scalars.items():
        for step, row in zip(STEPS, values, strict=True):
            cells = [f"{x:g}" for x in ([interquartile_mean(row), *row] if members > 1 else row)]
            lines.append(",".join([str(step), "1.5", name, *cells]))
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    content = {
        "env": f"{env}-v1",
        "algo": algo,
        "seed": seed,
        "members": members,
        "env_steps": [4000 + 10 * m for m in range(members)],
        "train_seconds": 2.0,
        "eval_return": table[:, -1].tolist(),
        "solved_at_steps": SOLVED_AT[algo][:members] if returns is None else [None] * members,
        "status": ["finished"] * members,
    }
    (folder / "summary.json").write_text(json.dumps(content | summary))
    return folder


@pytest.fixture
def runs(tmp_path):
    """A folder with a run of PPO and one of GRPO."""
    write_run(tmp_path / "runs" / "a", "ppo")
    write_run(tmp_path / "runs" / "b", "grpo")
    return tmp_path / "runs"


# --- statistics ------------------------------------------------------------------------------------------------------


def test_area_is_the_mean_return_over_the_span():
    # trapezoids (0+10)/2*10 = 50 and (10+20)/2*20 = 300, over 30 steps; the second seed is flat
    area = area_under_curve(np.array([5.0, 15.0, 35.0]), np.array([[0.0, 7.0], [10.0, 7.0], [20.0, 7.0]]))
    assert area == pytest.approx([350 / 30, 7.0])
    assert np.isnan(area_under_curve(np.array([5.0]), np.array([[1.0, 2.0]]))).all()


def test_worst_drop_is_below_the_best_before_it():
    # 5 -> 2 and 6 -> 3 are 3; a seed that only rises has none; a fall counts even if the peak comes later: 3 -> 1
    values = np.array([[1.0, 1.0, 3.0], [5.0, 2.0, 1.0], [2.0, 3.0, 5.0], [6.0, 4.0, 5.0], [3.0, 5.0, 5.0]])
    assert worst_drop(values).tolist() == [3.0, 0.0, 2.0]


def test_a_seed_has_fallen_when_it_ends_more_than_a_tenth_below_its_peak():
    # 449 < 450 and -83 < -82.5; on the border and above it is none; a peak of 0 leaves nothing to a tenth of it
    peak, final = np.array([500.0, 500.0, -75.0, -75.0, 0.0]), np.array([449.0, 450.0, -83.0, -82.0, -1.0])
    assert fallen(peak, final).tolist() == [True, False, True, False, True]


def test_volatility_is_over_the_last_half_of_the_steps():
    # steps >= 20 hold 2, 4, 6: mean 4, squares 4 + 0 + 4, so sqrt(8 / 3); the wild first value is outside
    value = volatility(np.array([10.0, 20.0, 30.0, 40.0]), np.array([[99.0], [2.0], [4.0], [6.0]]))
    assert value == pytest.approx([(8 / 3) ** 0.5])
    assert np.isnan(volatility(np.array([10.0, 40.0]), np.array([[1.0], [2.0]]))).all()


def test_probability_of_improvement_by_hand_and_as_mann_whitney():
    # 1 beats none of 2, 3; 3 beats 2 and ties with 3; 5 beats both: 0 + 1.5 + 2 of 6 pairs
    x, y = np.array([1.0, 3.0, 5.0]), np.array([2.0, 3.0])
    assert probability_of_improvement([(x, y)]).value == pytest.approx(3.5 / 6)
    equal = probability_of_improvement([(x, x)])
    assert equal.value == pytest.approx(0.5)
    assert equal.low < 0.4 < 0.6 < equal.high  # the two are resampled each by itself, so not always alike
    rng = np.random.default_rng(1)
    x, y = rng.integers(0, 9, 17).astype(float), rng.integers(2, 9, 23).astype(float)  # with ties
    statistic = scipy.stats.mannwhitneyu(x, y).statistic
    assert probability_of_improvement([(x, y)]).value == pytest.approx(statistic / (17 * 23))


def test_bootstrap_is_that_of_scipy():
    values = np.random.default_rng(3).gamma(2.0, 50.0, size=20)

    def trimmed(sample, axis):
        return scipy.stats.trim_mean(sample, 0.25, axis=axis)

    ours = bootstrap([values])
    theirs = scipy.stats.bootstrap(
        (values,), trimmed, n_resamples=10_000, method="percentile", rng=np.random.default_rng(4)
    )
    assert ours.value == pytest.approx(trimmed(values, 0))
    # the end of an interval of 10,000 resamples has a Monte Carlo error of about 2 % of the interval's width
    width = theirs.confidence_interval.high - theirs.confidence_interval.low
    assert (ours.low, ours.high) == pytest.approx(theirs.confidence_interval, abs=0.06 * width)


def test_an_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(5)
    estimates = [bootstrap([rng.normal(size=20)], resamples=400) for _ in range(300)]
    covered = np.mean([e.low <= 0 <= e.high for e in estimates])
    assert 0.88 < covered < 0.98  # a percentile interval of 20 seeds is a little narrow


# Made with rliable 1.2.0 (pandas 2.3, numpy 2.4): `get_interval_estimates` of `aggregate_iqm`, with 50,000 resamples,
# and of `probability_of_improvement`, with 10,000. Rows are runs, columns are two tasks.
X = np.array([[487, -82], [500, -79], [433, -95], [500, -81], [492, -88], [408, -77], [476, -110], [499.5, -84]])
Y = np.array([[500, -90], [497, -85], [500, -81], [465, -120], [500, -99], [500, -86.0]])


@pytest.mark.parametrize(
    ("strata", "value", "low", "high"),
    [
        ([X[:, 0]], 488.625, 446.5, 499.75),
        ([Y[:, 0]], 499.25, 481.75, 500.0),
        ([X[:, 1]], -83.75, -94.25, -79.75),
        ([X[:, 0], X[:, 1]], 185.625, 166.875, 204.75),
        ([Y[:, 0], Y[:, 1]], 201.66666667, 189.83333333, 208.66666667),
    ],
)
def test_interquartile_mean_and_interval_are_those_of_rliable(strata, value, low, high):
    ours = bootstrap(strata)
    assert ours.value == pytest.approx(value)
    assert (ours.low, ours.high) == pytest.approx((low, high), abs=0.04 * (high - low))


@pytest.mark.parametrize(
    ("pairs", "value", "low", "high"),
    [
        ([(X[:, 0], Y[:, 0])], 0.27083333, 0.0625, 0.5625),
        ([(X[:, 1], Y[:, 1])], 0.69791667, 0.39583333, 0.9375),
        ([(X[:, 0], Y[:, 0]), (X[:, 1], Y[:, 1])], 0.484375, 0.29166667, 0.67708333),
    ],
)
def test_probability_of_improvement_and_interval_are_those_of_rliable(pairs, value, low, high):
    ours = probability_of_improvement(pairs)
    assert ours.value == pytest.approx(value)
    # with 8 x 6 pairs of seeds a probability is a multiple of 1/96; Monte Carlo error may move an end by two of them
    assert (ours.low, ours.high) == pytest.approx((low, high), abs=2.01 / 96)


def test_each_stratum_keeps_its_number_of_seeds():
    # two seeds of 0 and six of 10: resampled within strata the mean is always 60 / 8; resampled together it would vary
    strata = [np.zeros(2), np.full(6, 10.0)]
    estimate = bootstrap(strata, lambda values: values.mean(-1))
    assert (estimate.value, estimate.low, estimate.high) == (7.5, 7.5, 7.5)


def test_a_single_seed_has_no_interval():
    assert bootstrap([np.array([3.0])]).value == 3.0
    assert np.isnan(bootstrap([np.array([3.0])]).low)
    assert np.isnan(probability_of_improvement([(np.array([3.0]), np.array([1.0, 2.0]))]).high)
    assert np.isnan(band(np.array([[3.0], [4.0]]))).all()


def test_a_band_is_the_interval_at_each_point():
    values = np.random.default_rng(6).normal(size=(3, 20))
    ends = band(values)
    for point in range(3):
        estimate = bootstrap([values[point]])
        assert ends[point] == pytest.approx((estimate.low, estimate.high), abs=0.08 * (estimate.high - estimate.low))
    values[0, 1:] = np.nan  # a resample without the one seed that measured says nothing
    assert band(values)[0] == pytest.approx([values[0, 0]] * 2)


# --- rows ------------------------------------------------------------------------------------------------------------


def test_a_row_of_the_table_by_hand(runs):
    ppo, grpo = rlkit.compare(runs)
    assert (ppo.env, ppo.algo, ppo.label, ppo.seeds) == ("CartPole-v1", "ppo", "PPO", 4)
    assert ppo.env_steps == 4030  # the most of 4000, 4010, 4020, 4030
    # finals 80, 476, 500, 500: one is cut at each end, (476 + 500) / 2
    assert ppo.final_return.value == pytest.approx(488.0)
    assert ppo.final_return.low == pytest.approx(80.0)
    # (first + last) / 2 + the two in between, over 3: 423.333, 372.667, 400, 65; the middle two
    assert ppo.area.value == pytest.approx((400 + (338 + 780) / 3) / 2)
    assert ppo.threshold == 475.0
    assert (ppo.steps_to_threshold, ppo.never, ppo.solved) == (
        np.inf,
        2,
        0.5,
    )  # 2000, 3000, never, never: (3000 + inf) / 2
    assert ppo.above == 0.75  # 500, 476, 500 of four
    # drops 0, 4, 100, 0: (0 + 4) / 2, and 100
    assert (ppo.worst_drop, ppo.worst_drop_max) == (2.0, 100.0)
    assert ppo.fallen == 0  # every seed ends at its peak
    # of the evaluations from step 2000 on: 8.165, 82.958, 47.140, 8.165; the middle two
    expected = (np.std([480, 490, 500]) + np.std([500, 400, 500])) / 2
    assert ppo.volatility == pytest.approx(expected)
    # 500 beats all of 400, 490, 40, 70, twice: 8; 476 beats three; 80 beats two: 13 of 16
    assert ppo.improvement["GRPO"].value == pytest.approx(13 / 16)
    assert grpo.improvement["PPO"].value == pytest.approx(3 / 16)
    assert grpo.improvement["PPO"].low == pytest.approx(1 - ppo.improvement["GRPO"].high)
    assert grpo.steps_to_threshold == np.inf


def test_an_environment_without_a_threshold_is_never_called_solved(tmp_path):
    write_run(tmp_path / "a", env="Pendulum", returns=RETURNS["ppo"])
    write_run(tmp_path / "b", env="nowhere:Unknown", returns=RETURNS["ppo"])
    for row in compare(tmp_path):
        assert row.threshold is None
        assert np.isnan([row.steps_to_threshold, row.solved, row.above]).all()


def test_improvement_across_environments_is_their_mean(tmp_path):
    for env in ("CartPole", "Acrobot"):
        write_run(tmp_path / env / "ppo", "ppo", env=env)
    write_run(tmp_path / "CartPole" / "grpo", "grpo")
    groups, _ = find(tmp_path)
    assert improvement_across(groups) == {}  # they meet on one environment only
    write_run(tmp_path / "Acrobot" / "grpo", "grpo", env="Acrobot", returns=[[500] * 4] * 4)
    groups, _ = find([tmp_path])
    ((labels, (count, estimate)),) = improvement_across(groups).items()
    assert (set(labels), count) == ({"PPO", "GRPO"}, 2)
    # GRPO over PPO: 3/16 on CartPole; on Acrobot 500 beats 476 and 80 and ties with 500 twice, 3/4
    expected = (3 / 16 + 3 / 4) / 2
    assert estimate.value == pytest.approx(expected if labels[0] == "GRPO" else 1 - expected)


# --- finding and grouping --------------------------------------------------------------------------------------------


def test_seeds_of_several_runs_with_equal_settings_are_one_group(tmp_path):
    write_run(tmp_path / "a", seed=0, returns=[[1, 2, 3, 4]])
    write_run(tmp_path / "b", seed=1, returns=[[5, 6, 7, 8], [5, 6, 7, 8]], settings=["log.every=1000"])
    ((group,), notes) = find(tmp_path)
    assert (group.label, group.column("eval_return"), notes) == ("PPO", [4, 8, 8], [])
    steps, values = group.curve("eval/return")
    assert steps.tolist() == list(STEPS)
    assert values.tolist() == [[1, 5, 5], [2, 6, 6], [3, 7, 7], [4, 8, 8]]


def test_curves_of_runs_meet_on_the_steps_they_share(tmp_path):
    write_run(tmp_path / "a", seed=0, returns=[[1, 2, 3, 4]])
    late = write_run(tmp_path / "b", seed=1, returns=[[10, 20, 30, 40]])
    text = (late / "metrics.csv").read_text()
    (late / "metrics.csv").write_text(re.sub(r"^(\d)000,", r"\g<1>500,", text, flags=re.M))
    ((group,), _) = find(tmp_path)
    steps, values = group.curve("eval/return")
    assert steps.tolist() == [2000, 3000, 4000]  # of the first run, within 1500 .. 4000
    assert values.tolist() == [[2, 15], [3, 25], [4, 35]]  # half way between the second run's
    text = (late / "metrics.csv").read_text()
    (late / "metrics.csv").write_text(text.replace("4500,1.5,eval/return,40", "4500,1.5,eval/return,"))
    ((group,), _) = find(tmp_path)
    np.testing.assert_equal(group.curve("eval/return")[1], [[2, 15], [3, 25], [4, np.nan]])  # not known after 3500


def test_different_settings_are_kept_apart_and_named(tmp_path):
    write_run(tmp_path / "a", "grpo")
    write_run(tmp_path / "b", "grpo", settings=["algo.gamma=0.9"])
    write_run(tmp_path / "c", "grpo", settings=["stabilizer.ref_kl.coef=0.1"])
    write_run(tmp_path / "d", "ppo", settings=["algo.clip=0.3"])  # alone among PPO runs
    assert [row.label for row in compare(tmp_path)] == [
        "GRPO",
        "GRPO algo.gamma=0.9",
        "GRPO stabilizer=[ref_kl]",
        "PPO",
    ]


def test_labels_name_what_is_not_most_common():
    base = {"a": 1, "b": "x"}
    assert differences([base]) == [""]
    assert differences([base, base | {"a": 2}]) == ["a=1", "a=2"]  # neither is most common
    assert differences([base, base | {"a": 2}, base | {"b": None}]) == ["", "a=2", "b=null"]
    assert differences([base | {"seed": 1}, base | {"seed": 2}]) == ["", ""]
    coefs = [base | {"stabilizer.ref_kl.coef": c} for c in (0.1, 0.2)]
    assert differences([base, base, base, *coefs])[3:] == [
        "stabilizer=[ref_kl] stabilizer.ref_kl.coef=0.1",
        "stabilizer=[ref_kl] stabilizer.ref_kl.coef=0.2",
    ]


def test_a_seed_is_not_counted_twice(tmp_path):
    write_run(tmp_path / "2020", returns=[[1, 1, 1, 1]] * 3)
    write_run(tmp_path / "2021", returns=[[2, 2, 2, 2]] * 3)
    with pytest.warns(UserWarning, match=r"skipped .*2020: .*2021 has the same settings and seeds, and is later"):
        (row,) = rlkit.compare(tmp_path)
    assert (row.seeds, row.final_return.value) == (3, 2.0)


def test_overlapping_paths_count_once(runs):
    assert [row.seeds for row in compare([runs, runs / "a", str(runs / "a")])] == [4, 4]


# --- faults ----------------------------------------------------------------------------------------------------------


def test_runs_that_cannot_count_are_skipped_with_a_line(runs):
    (write_run(runs / "c", seed=200) / "summary.json").unlink()
    write_run(runs / "d", seed=300, status=["interrupted"] * 4)
    (write_run(runs / "e", seed=400) / "summary.json").write_text('{"env": ')
    (write_run(runs / "f", seed=500) / "summary.json").write_text('{"env": "CartPole-v1"}')
    (write_run(runs / "g", seed=600) / ".hydra" / "config.yaml").unlink()
    groups, notes = find(runs)
    assert len(groups) == 2
    causes = [
        "has not finished",
        "was interrupted at 4,015 steps",
        "is damaged",
        "has no algo",
        "config.yaml does not exist",
    ]
    assert len(notes) == len(causes)
    for note, letter, cause in zip(notes, "cdefg", causes, strict=True):
        assert note.startswith(f"skipped {runs / letter}: ")
        assert cause in note
    with pytest.warns(UserWarning) as caught:
        compare(runs)
    assert [str(warning.message) for warning in caught] == notes


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("390,480,300", "390,480", "in line 3: 7 cells instead of 8"),
        ("390,480,300", "390,480,300,1", "in line 3: 9 cells instead of 8"),
        ("390,480,300", "390,4B0,300", "in line 3: could not convert string to float: '4B0'"),
        ("2000,1.5,eval", "two,1.5,eval", "in line 3: could not convert string to float: 'two'"),
        ("member_03", "member_03,member_04", ": line 1 must be the header of a run of members=4"),
        ("step,", "", ": line 1 must be the header of a run of members=4"),
    ],
)
def test_a_damaged_csv_is_one_sentence(old, new, sentence, runs):
    path = runs / "a" / "metrics.csv"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ReportError) as caught:
        find(runs)
    joint = "" if sentence.startswith(":") else " "
    assert str(caught.value) == f"{path} is damaged{joint}{sentence}"
    path.unlink()
    with pytest.raises(ReportError, match="metrics.csv is missing"):
        find(runs)


def test_no_run_is_one_sentence(tmp_path, capsys):
    with pytest.raises(ReportError, match=f"no finished run in {tmp_path}"):
        find(tmp_path)
    assert report.main([str(tmp_path)]) == 2
    assert report.main([str(tmp_path / "nowhere")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        f"rlkit: no finished run in {tmp_path}",
        f"rlkit: {tmp_path / 'nowhere'} is not a folder; name a run directory or a folder above some",
    ]


def test_without_matplotlib_only_drawing_is_refused(runs, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert report.main([str(runs), "--out", str(runs.parent / "out")]) == 2
    assert capsys.readouterr().err == ("rlkit: --out and --picture draw with matplotlib: pip install 'rlkit[report]'\n")
    assert not (runs.parent / "out").exists()
    assert report.main([str(runs)]) == 0


# --- what it writes --------------------------------------------------------------------------------------------------


def test_markdown_has_the_tables_and_the_commands(runs, capsys):
    assert report.main([str(runs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    (ppo,) = [line for line in lines if line.startswith("| 1 | PPO | 4 | 4,030")]
    cells = [cell.strip() for cell in ppo.strip("|").split("|")]
    assert cells[4].startswith("488.0 [80.0, ")
    assert cells[6:10] == ["never", "2/4", "3/4", "2.0 (max 100.0)"]
    assert "| 1 | PPO | – | 0.81 [" in "\n".join(lines)
    assert "    python -m rlkit.train env=CartPole algo=ppo seed=100 members=4" in lines
    assert any(line.startswith("Fewer than ten seeds (PPO, GRPO)") for line in lines)
    widths = {
        len(line.split(" | ")) for line in lines if line.startswith("| 1 | PPO | 4") or line.startswith("|  | Al")
    }
    assert len(widths) == 2  # the results' heading and row agree, and the other table's heading


def test_returns_between_zero_and_one_keep_their_decimals_in_a_report(tmp_path, capsys):
    shares = [[0.1, 0.4, 0.6, 0.67], [0.2, 0.5, 1.0, 1.0], [0.0, 0.2, 0.5, 0.75], [0.1, 0.1, 0.2, 0.25]]
    write_run(tmp_path / "runs", "ppo", env="FrozenLake", returns=shares)
    assert report.main([str(tmp_path)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| 1 | PPO | 4 |")]
    final, area = line.split(" | ")[4:6]
    assert final.startswith("0.710 [0.") and area.startswith("0.")
    assert all(len(figure.partition(".")[2]) == 3 for figure in re.findall(r"[\d.]+", f"{final} {area}"))


def test_csv_holds_the_rows(runs):
    groups, _ = find(runs)
    table = list(csv.DictReader(io.StringIO(report.comma_separated(rows(groups)))))
    assert [row["label"] for row in table] == ["PPO", "GRPO"]
    assert float(table[0]["final_return"]) == 488.0
    assert float(table[0]["improvement_over GRPO"]) == pytest.approx(13 / 16)
    assert table[0]["improvement_over PPO"] == ""
    assert float(table[0]["steps_to_threshold"]) == np.inf


class Reader(HTMLParser):
    """Collects the tags, attributes, captions and cells of a page, and checks that tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def page(runs) -> str:
    out = runs.parent / "out"
    assert report.main([str(runs), "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["report.csv", "report.html", "report.md"]
    return (out / "report.html").read_text()


def test_the_page_needs_nothing_but_itself(page):
    reader = Reader(page)
    assert not {"script", "link", "iframe", "img", "object"} & {tag for tag, _ in reader.tags}
    ids = [attrs["id"] for _, attrs in reader.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    for _, attrs in reader.tags:
        for name, value in attrs.items():
            if name in ("src", "href", "xlink:href", "data", "srcset"):
                assert value.startswith("data:image/png;base64,") or value[1:] in ids, (name, value[:60])
            elif not name.startswith("xmlns"):
                assert "//" not in (value or ""), (name, value)
            for target in re.findall(r"url\(#?([^)]*)\)", value or ""):
                assert target in ids
    (style,) = re.findall(r"<style>(.*?)</style>", page.split("<svg")[0], re.S)
    assert "url(" not in style
    assert "@import" not in page


def test_the_page_holds_the_charts_and_the_numbers(page):
    reader = Reader(page)
    charts = [attrs["aria-label"] for tag, attrs in reader.tags if tag == "svg"]
    assert [label.split(" on ")[0] for label in charts] == [
        "Learning curves and final returns",
        "KL between the policy at collection and the policy in training",
        "Distribution of the gradient norm before clipping",
        "KL after the update, share of clipped ratios, and entropy",
    ]
    text = " ".join(reader.text.split())
    for number in range(1, 5):
        assert f"Figure {number}." in text
        assert f"Table {number}." in text
    assert "bands their 95 % bootstrap intervals" in text
    assert "488.0 [80.0," in text
    assert "python -m rlkit.train env=CartPole algo=grpo seed=100 members=4" in text
    first = page[page.index("<svg") : page.index("</svg>")]
    for colour in figures.COLOURS[:2]:  # each has its line, and filled: a band, four dots, the last evaluation
        assert len(re.findall(f"<use [^>]*fill: {colour}", first)) == 6
        assert re.search(f"stroke: {colour}", first)


def test_the_same_runs_give_the_same_page(runs, page):
    report.main([str(runs), "--out", str(runs.parent / "again")])
    assert (runs.parent / "again" / "report.html").read_text() == page


def test_text_from_runs_is_escaped(tmp_path):
    write_run(tmp_path / "a<b>&", settings=["algo.note=<i>x</i>"], machine="<u>box</u>")
    write_run(tmp_path / "c", settings=["algo.note=plain"])
    report.main([str(tmp_path), "--out", str(tmp_path / "out")])
    reader = Reader((tmp_path / "out" / "report.html").read_text())
    assert "a<b>&" in reader.text
    assert "PPO algo.note=<i>x</i>" in reader.text
    assert "<u>box</u>" in reader.text
    assert "u" not in {tag for tag, _ in reader.tags}


def test_runs_without_logged_scalars_have_fewer_figures(tmp_path):
    folder = write_run(tmp_path / "a")
    lines = (folder / "metrics.csv").read_text().splitlines(keepends=True)
    (folder / "metrics.csv").write_text("".join(line for line in lines if "/" not in line or "eval/" in line))
    report.main([str(tmp_path), "--out", str(tmp_path / "out"), "--picture", str(tmp_path / "row.png")])
    assert (tmp_path / "out" / "report.html").read_text().count("<svg") == 1


def test_a_picture_has_a_row_for_each_environment(tmp_path):
    from matplotlib.image import imread

    write_run(tmp_path / "runs" / "a", "ppo")
    report.main([str(tmp_path / "runs"), "--picture", str(tmp_path / "one.png")])
    write_run(tmp_path / "runs" / "b", "ppo", env="Acrobot")
    report.main([str(tmp_path / "runs"), "--picture", str(tmp_path / "two.png")])
    one, two = imread(tmp_path / "one.png"), imread(tmp_path / "two.png")
    assert one.shape[1] == two.shape[1] == 1650  # 15 inches at 110 dots
    assert 1.8 < two.shape[0] / one.shape[0] < 2.0
    assert np.ptp(one[..., :3]) > 0.5  # something is drawn


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
@pytest.mark.parametrize("name", ["report.md", "report.csv", "report.html", "row.png"])
def test_a_full_disk_is_one_sentence_and_the_report_of_before_stays(name, runs, capsys):
    out = runs.parent / "full"
    assert report.main([str(runs), "--out", str(out), "--picture", str(out / "row.png")]) == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    (out / f"{name}.tmp").symlink_to("/dev/full")
    capsys.readouterr()
    assert report.main([str(runs), "--out", str(out), "--picture", str(out / "row.png")]) == 1
    assert capsys.readouterr().err == f"rlkit: {out / name} cannot be written: No space left on device\n"
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_folder_for_the_report_that_cannot_be_made_is_one_sentence(runs, capsys):
    (runs.parent / "file").touch()
    file = runs.parent / "file"
    for option, path in (("--out", file), ("--out", file / "out"), ("--picture", file / "row.png")):
        assert report.main([str(runs), option, str(path)]) == 2
        assert capsys.readouterr() == ("", f"rlkit: {option} is {path}, but {file} is not a folder\n")


def test_the_heat_map_is_epochs_by_iterations(tmp_path):
    folder = write_run(tmp_path / "a")
    lines = (folder / "metrics.csv").read_text().splitlines()
    kept = [line for line in lines if not line.startswith(("2000,1.5,kl/epoch_1", "4000,1.5,kl/epoch_1"))]
    kept += ["3000,1.5,kl/epoch_2,0.02,0.01,0.03,,"]
    (folder / "metrics.csv").write_text("\n".join(kept) + "\n")
    ((group,), _) = find(tmp_path)
    steps, table = figures.kl_by_epoch(group)
    nan = np.nan
    assert steps.tolist() == list(STEPS)
    np.testing.assert_allclose(table, [[0] * 4, [0.01, nan, 0.01, nan], [nan, nan, 0.02, nan]])
    assert figures.edges(steps).tolist() == [500, 1500, 2500, 3500, 4500]


def test_equal_seeds_do_not_hide_each_other():
    offset = figures.swarm(np.array([500.0, 500.0, 500.0, 400.0]))
    assert len(set(offset[:3].tolist())) == 3
    assert offset[:3].sum() == pytest.approx(0.0)
    assert offset[3] == 0.0


def test_what_training_writes_is_what_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = {"total_steps": 600, "num_envs": 4, "eval.every": 200, "log.every": 100, "tuned": "none", "members": 2}
    rlkit.run(env="CartPole", algo="ppo", **{"algo.num_steps": 32, "algo.num_epochs": 2}, **small)
    done = subprocess.run(
        [sys.executable, "-m", "rlkit.report", str(tmp_path / "runs"), "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(rlkit.__file__).parents[1],
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "| 1 | PPO | 2 | 640 |" in done.stdout
    assert (tmp_path / "out" / "report.html").read_text().count("<svg") == 4
