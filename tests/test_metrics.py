"""The log of a run: the same numbers in TensorBoard and `metrics.csv`, the HPARAMS tab, and the console."""

from __future__ import annotations

import csv
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import small_learner
from scipy.stats import trim_mean
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as custom_scalar
from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups
from tensorboard.util.tensor_util import make_ndarray

import rlkit
from rlkit.console import Console, PlainConsole, RichConsole, clock, make_console
from rlkit.decimals import decimals
from rlkit.events import HEALTH, charts, histogram
from rlkit.metrics import Logger, interquartile_mean
from rlkit.results import Result, evaluation_table, final_table

NAN = float("nan")


def _logger(folder: Path, members: int = 1, **overrides: Any) -> Logger:
    settings: dict[str, Any] = {"total_steps": 1000, "title": "CartPole grpo", "show": "off"}
    return Logger(folder, members=members, **settings | overrides)


def _events(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0, "histograms": 0}).Reload()


def _points(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in _events(folder).Scalars(tag)]


def _rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


# --- interquartile mean -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([7.0], 7.0),
        ([1.0, 2.0, 6.0], 3.0),  # fewer than four: nothing is cut
        ([100.0, 2.0, 4.0, -50.0], 3.0),
        ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 700.0], 3.5),
        ([NAN, 100.0, 2.0, NAN, 4.0, -50.0], 3.0),
        ([NAN, NAN], NAN),
    ],
)
def test_interquartile_mean_on_hand_numbers(values: list[float], expected: float) -> None:
    np.testing.assert_allclose(interquartile_mean(np.array(values)), expected)


@pytest.mark.parametrize("count", range(1, 25))
def test_interquartile_mean_is_the_trimmed_mean(count: int) -> None:
    values = np.random.default_rng(count).normal(size=(3, 5, count))
    np.testing.assert_allclose(interquartile_mean(values), trim_mean(values, 0.25, axis=-1), rtol=1e-12, atol=1e-12)


# --- TensorBoard and metrics.csv ----------------------------------------------------------------------------


def test_csv_and_tensorboard_hold_the_same_numbers(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    logger = _logger(tmp_path, members=5)
    for k in range(3):
        scalars = {f"area/name_{i}": rng.normal(size=5) * 10.0 ** rng.integers(-9, 9) for i in range(20)}
        logger.log(np.arange(5) + 100 * k, scalars)
    logger.close()
    rows = _rows(tmp_path)
    assert len(rows) == 60
    for i in range(20):
        mine = [row for row in rows if row["name"] == f"area/name_{i}"]
        read = [(int(row["step"]), float(np.float32(row["value"]))) for row in mine]
        assert read == _points(tmp_path, f"area/name_{i}")
        for row in mine:
            members = np.array([float(row[f"member_{m:02}"]) for m in range(5)])
            assert float(row["value"]) == pytest.approx(trim_mean(members, 0.25), rel=1e-6)


def test_one_member_is_logged_as_it_is(tmp_path: Path) -> None:
    logger = _logger(tmp_path)
    logger.log(np.array([64]), {"kl/old": np.array([0.1], dtype=np.float32), "eval/return": np.array([NAN])})
    assert (tmp_path / "metrics.csv").read_text().splitlines()[0] == "step,wall_seconds,name,value"
    old, missing = _rows(tmp_path)
    assert (old["step"], old["name"], old["value"]) == ("64", "kl/old", "0.1")
    assert (missing["name"], missing["value"]) == ("eval/return", "")
    assert _points(tmp_path, "kl/old") == [(64, float(np.float32(0.1)))]
    assert "eval/return" not in _events(tmp_path).Tags()["scalars"]
    assert not list(tmp_path.glob("member_*"))
    logger.close()


def test_members_have_folders_of_their_own_at_their_own_steps(tmp_path: Path) -> None:
    logger = _logger(tmp_path, members=4)
    returns = np.array([10.0, 20.0, NAN, 90.0])
    logger.log(np.array([100, 200, 300, 404]), {"eval/return": returns, "kl/old": np.full(4, 0.5)})
    logger.close()
    assert _points(tmp_path, "eval/return") == [(251, 40.0)]  # three values: nothing is cut; mean of the steps
    assert _points(tmp_path / "member_01", "eval/return") == [(200, 20.0)]
    assert _points(tmp_path / "member_03", "eval/return") == [(404, 90.0)]
    assert _events(tmp_path / "member_03").Tags()["scalars"] == ["eval/return"]
    assert not (tmp_path / "member_02").exists()  # it measured nothing
    assert _rows(tmp_path)[0]["member_02"] == ""


def test_a_log_entry_is_one_event_and_on_disk_at_once(tmp_path: Path) -> None:
    logger = _logger(tmp_path)
    logger.log(np.array([1]), {"a/x": np.ones(1)})
    (path,) = tmp_path.glob("events.out.tfevents.*")
    before = path.stat().st_size
    logger.log(np.array([2]), {f"a/x{i}": np.ones(1) for i in range(10)}, {"h": np.arange(5.0)})
    assert path.stat().st_size > before  # without close
    tags = _events(tmp_path).Tags()
    assert {f"a/x{i}" for i in range(10)} < set(tags["scalars"])
    assert len({_events(tmp_path).Scalars(f"a/x{i}")[0].wall_time for i in range(10)}) == 1
    logger.close()


def test_histograms_leave_out_what_is_not_finite(tmp_path: Path) -> None:
    logger = _logger(tmp_path, members=2)
    values = np.array([0.0, 1.0, NAN, np.inf, 3.0], dtype=np.float32)
    logger.log(np.array([10, 10]), {}, {"ratio": values, "nothing": np.array([NAN]), "constant": np.full(7, 2.0)})
    logger.close()
    events = _events(tmp_path)
    assert sorted(events.Tags()["histograms"]) == ["constant", "ratio"]
    histo = events.Histograms("ratio")[0].histogram_value
    assert (histo.min, histo.max, histo.num, histo.sum, histo.sum_squares) == (0.0, 3.0, 3.0, 4.0, 10.0)
    assert sum(histo.bucket) == 3
    assert events.Histograms("constant")[0].histogram_value.bucket == [7.0]
    ((step, share),) = _points(tmp_path, "ratio/nonfinite")
    assert (step, share) == (10, float(np.float32(0.4)))
    assert "constant/nonfinite" not in events.Tags()["scalars"]


@pytest.mark.parametrize(
    "values",
    [
        np.random.default_rng(0).normal(size=1000),
        np.array([1.0, np.nextafter(1.0, 2.0)]),
        np.array([-3e38, 3e38]),
    ],
    ids=["normal", "neighbours", "extremes"],
)
def test_a_histogram_counts_every_value_in_its_bin(values: np.ndarray) -> None:
    fields = histogram(values)
    limits, counts = np.array(fields["bucket_limit"]), np.array(fields["bucket"])
    assert counts.sum() == values.size == fields["num"]
    assert np.all(np.diff(limits) >= 0) and limits[-1] == values.max()
    if values.size == 1000:
        edges = np.concatenate([[values.min()], limits])
        np.testing.assert_array_equal(counts, np.histogram(values, edges)[0])


def test_a_resumed_run_continues_its_file(tmp_path: Path) -> None:
    first = _logger(tmp_path)
    first.log(np.array([1]), {"a/x": np.ones(1)})
    first.close()
    path = tmp_path / "metrics.csv"
    path.write_text(path.read_text().replace(_rows(tmp_path)[0]["wall_seconds"], "50.000") + "2,60.0,a/")  # torn
    second = _logger(tmp_path)
    second.log(np.array([2]), {"a/x": np.ones(1)})
    second.close()
    assert [row["step"] for row in _rows(tmp_path)] == ["1", "2"]
    assert 50.0 <= float(_rows(tmp_path)[1]["wall_seconds"]) < 60.0
    assert path.read_text().count("wall_seconds") == 1
    assert _points(tmp_path, "a/x") == [(1, 1.0), (2, 1.0)]
    with pytest.raises(ValueError, match="its first line must be step,wall_seconds,name,value,"):
        _logger(tmp_path, members=3)


def test_a_scalar_of_the_wrong_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'a/x' has shape \(2,\), expected \(3,\)"):
        _logger(tmp_path, members=3).log(np.zeros(3), {"a/x": np.zeros(2)})


def _page(folder: Path) -> dict[str, tuple[str, ...]]:
    """The health page that TensorBoard shows: title of a chart -> its tags."""
    event = _events(folder).Tensors(custom_scalar.CONFIG_SUMMARY_TAG)[-1]
    (page,) = layout_pb2.Layout.FromString(make_ndarray(event.tensor_proto).item()).category
    assert page.title == "health"
    return {chart.title: tuple(chart.multiline.tag) for chart in page.chart}


def test_the_health_page_has_the_charts_that_there_are_scalars_for(tmp_path: Path) -> None:
    logger = _logger(tmp_path)
    one = np.ones(1)
    logger.log(np.array([1]), {"a/x": one, "kl/old": one, "ratio/mean": one, "ref_kl/coef": one, "speed/x": one})
    assert list(_page(tmp_path)) == ["ratio", "KL", "stabilisers: coefficients"]
    logger.log(np.array([2]), {"eval/return": one})
    logger.close()
    page = _page(tmp_path)
    assert list(page) == ["return: evaluations", "ratio", "KL", "stabilisers: coefficients"]
    assert all(page[title] == HEALTH[title] for title in page)


@pytest.mark.parametrize(
    ("tag", "titles"),
    [
        ("kl/ref", ["KL"]),
        ("kl/epoch_16", ["KL: in epochs 0, 1, 2, 4, 8, 16"]),
        ("kl/epoch_11", []),
        ("schedule/clip", ["schedules"]),
        ("schedule/entropy_coef", ["schedules"]),
        ("schedule/learning_rate", ["schedules: learning rate"]),
        ("old_kl/coef", ["stabilisers: coefficients"]),
        ("outer/inner/coef", ["stabilisers: coefficients"]),
        ("loss/coef", []),
        ("episode/return_recent", ["return: training, and its moving average"]),
        ("ratio/std", ["ratio: deviation, share clipped"]),
        ("value/error", ["value: error"]),
    ],
)
def test_a_scalar_is_in_the_chart_meant_for_it(tag: str, titles: list[str]) -> None:
    assert charts([tag]) == titles


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_the_health_page_shows_all_that_a_run_logs_but_lengths_losses_and_some_epochs(
    tmp_path: Path, algo: str
) -> None:
    learner = small_learner(algo, "stabilizer=[ref_kl]", "members=2")
    learner.iterate()
    beside = {tag for tag in learner.metrics if not charts([tag])}
    assert {tag.split("/")[0] for tag in beside} == {"episode", "loss", "run"}
    shown = charts(learner.metrics)
    missing = {"grpo": {"value: error", "value: explained variance"}, "ppo": {"groups: share degenerate"}}[algo]
    others = {
        "return: evaluations",
        "speed: of all members together",
        "stabilisers: replay",
        "stabilisers: coefficients",
    }  # not the learner's
    assert set(HEALTH) - set(shown) - others == missing


def test_every_histogram_is_written(tmp_path: Path) -> None:
    learner = small_learner("ppo", "stabilizer=[ref_kl]", "members=2")
    learner.iterate()
    logger = _logger(tmp_path, members=2)
    logger.log(learner.env_steps.numpy(), {}, {name: x.numpy() for name, x in learner.histograms.items()})
    logger.close()
    events = _events(tmp_path)
    names = {"ratio", "advantage", "kl", "kl_ref", "grad_norm_before", "grad_norm_after"}
    assert set(events.Tags()["histograms"]) == names
    counts = {name: events.Histograms(name)[0].histogram_value.num for name in names}
    rows, steps = 2 * 4 * 8, 2 * 2 * 2  # members x environments x steps; members x epochs x minibatches
    assert (counts["advantage"], counts["ratio"], counts["kl"], counts["kl_ref"]) == (rows, 2 * rows, rows, rows / 2)
    assert counts["grad_norm_before"] == counts["grad_norm_after"] == steps


def test_messages_become_text_even_before_the_first_entry(tmp_path: Path) -> None:
    logger = _logger(tmp_path)
    logger.message("begins")
    assert not list(tmp_path.glob("events.*"))  # TensorBoard is not loaded for it
    logger.log(np.array([70]), {"a/x": np.ones(1)})
    logger.message("member 0 solved")
    logger.close()
    events = _events(tmp_path).Tensors("events")
    texts = [(event.step, make_ndarray(event.tensor_proto).item()) for event in events]
    assert texts == [(0, b"begins"), (70, b"member 0 solved")]


# --- HPARAMS ------------------------------------------------------------------------------------------------


def _hparams_tab(
    folder: Path,
) -> tuple[set[str], list[str], dict[str, tuple[dict[str, Any], dict[str, float]]]]:
    """What the HPARAMS tab shows of a folder: hyperparameters, metrics, and both of each session."""
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(folder))
    multiplexer.Reload()
    provider = MultiplexerDataProvider(multiplexer, str(folder))
    context = backend_context.Context(SimpleNamespace(data_provider=provider))
    ctx = RequestContext()
    experiment = context.experiment_from_metadata(
        ctx, "", True, context.hparams_metadata(ctx, ""), context.hparams_from_data_provider(ctx, "", None)
    )
    request = api_pb2.ListSessionGroupsRequest(start_index=0, slice_size=10, allowed_statuses=[api_pb2.STATUS_SUCCESS])
    groups = list_session_groups.Handler(ctx, context, "", request).run().session_groups
    sessions = {
        group.name: (
            {name: getattr(value, value.WhichOneof("kind")) for name, value in group.hparams.items()},
            {value.name.tag: value.value for value in group.metric_values},
        )
        for group in groups
    }
    return (
        {info.name for info in experiment.hparam_infos},
        [m.name.tag for m in experiment.metric_infos],
        sessions,
    )


def test_hparams_show_metric_values_and_hide_no_extra_hyperparameter(tmp_path: Path) -> None:
    for name in "abc":
        hparams: dict[str, str | int | float | bool] = {"algo.name": "grpo", "algo.clip": 0.2}
        if name == "b":
            hparams |= {"algo.group_size": 8, "policy.shared_trunk": True}
        logger = _logger(tmp_path / name, members=2)
        logger.log(np.array([9, 11]), {"eval/return": np.array([1.0, 2.0]), "kl/old": np.zeros(2)})
        logger.hparams(hparams, {"final/return": 487.5, "final/bad": NAN})
        logger.close()
    names, metrics, sessions = _hparams_tab(tmp_path)
    assert names == {"algo.name", "algo.clip", "algo.group_size", "policy.shared_trunk"}
    assert metrics == ["final/return"]  # the run's curves are no columns
    assert set(sessions) == {"a/hparams", "b/hparams", "c/hparams"}
    shown, values = sessions["b/hparams"]
    assert shown == {
        "algo.name": "grpo",
        "algo.clip": 0.2,
        "algo.group_size": 8.0,
        "policy.shared_trunk": True,
    }
    assert shown["policy.shared_trunk"] is True  # and not the number 1
    assert values == {"final/return": 487.5}
    assert sessions["a/hparams"][1] == {"final/return": 487.5}

    _, metrics, sessions = _hparams_tab(tmp_path / "b")  # TensorBoard pointed at one run
    assert metrics == ["final/return"]
    assert sessions["hparams"][1] == {"final/return": 487.5}


def test_runs_of_other_algorithms_stand_side_by_side_in_the_hparams_tab(tmp_path: Path) -> None:
    small = {"num_envs": 4, "total_steps": 64, "eval.every": 0, "log.every": 0, "policy.hidden": [4], "tuned": "none"}
    own: dict[str, dict[str, Any]] = {
        "ppo": {"algo.num_steps": 16, "algo.num_minibatches": 2},
        "grpo": {"algo.group_size": 4, "algo.clip": 0.3, "stabilizer": ["ref_kl"]},
    }
    runs = {algo: rlkit.run(folder=tmp_path / algo, algo=algo, **small, **more) for algo, more in own.items()}
    names, metrics, sessions = _hparams_tab(tmp_path)
    assert {"algo.clip", "algo.num_steps", "algo.group_size", "stabilizer"} <= names  # those of one run alone, too
    assert set(metrics) == {"final/eval_return", "final/eval_return_stochastic"}
    assert set(sessions) == {"ppo/hparams", "grpo/hparams"}
    for algo, run in runs.items():
        shown, values = sessions[f"{algo}/hparams"]
        assert shown["algo.name"] == algo and shown["env.id"] == "CartPole-v1"
        assert ("algo.group_size" in shown) == (algo == "grpo") and ("algo.num_steps" in shown) == (algo == "ppo")
        for name in ("eval_return", "eval_return_stochastic"):
            assert values[f"final/{name}"] == pytest.approx(run.summary[name][0])


# --- cost ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("members", "milliseconds"), [(1, 2.0), (20, 5.0)])
def test_a_log_entry_is_cheap(tmp_path: Path, members: int, milliseconds: float) -> None:
    rng = np.random.default_rng(0)
    names = ["eval/return", "episode/return", "episode/length", "episode/return_recent"]
    scalars = {name: rng.normal(size=members) for name in names + [f"area/name_{i}" for i in range(56)]}
    histograms = {f"h{i}": rng.normal(size=10_000).astype(np.float32) for i in range(5)}
    logger = _logger(tmp_path, members)
    seconds = []
    for k in range(20):
        start = time.perf_counter()
        logger.log(np.full(members, k), scalars, histograms)
        seconds.append(time.perf_counter() - start)
    logger.close()
    assert min(seconds) < 3 * milliseconds / 1000  # a busy machine is allowed three times the target


def test_importing_loads_neither_tensorboard_nor_rich() -> None:
    code = (
        "import sys, rlkit.metrics, rlkit.results\n"
        "heavy = {'tensorboard', 'rich', 'torch', 'scipy', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH")]))
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


# --- console ------------------------------------------------------------------------------------------------


def test_the_plain_console_prints_a_line_at_the_first_entry_and_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = _logger(tmp_path, members=4, show="plain")
    logger.progress(np.full(4, 100), {"episode/return": np.full(4, 1.0)})
    assert capsys.readouterr().out == ""
    scalars = {
        "episode/return": np.array([10.0, 20.0, 30.0, NAN]),
        "kl/old": np.full(4, 0.0123),
        "entropy/mean": np.full(4, 0.5),
        "speed/steps_per_second": np.full(4, 2000.0),
    }
    logger.log(np.full(4, 500), scalars)
    line = capsys.readouterr().out
    assert line == (
        "CartPole grpo  500/1,000 steps (50%)  2,000 steps/s (all 4)  return 20.0 (IQM of 4)  KL 0.0123"
        "  entropy 0.500  0:01 left\n"
    )
    logger.log(np.full(4, 600), scalars)
    logger.progress(np.full(4, 1000), {"episode/return": np.array([NAN, NAN, NAN, 40.0])})
    assert capsys.readouterr().out == ""  # not yet due
    logger.message("[bold] is no markup")
    logger.close()
    logger.close()
    message, last = capsys.readouterr().out.splitlines()
    assert message == "[bold] is no markup"
    assert "1,000/1,000 steps (100%)" in last and "return 25.0 (IQM of 4)" in last and "0:00 left" in last


def test_the_console_that_is_off_prints_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = _logger(tmp_path, show="off")
    logger.log(np.array([5]), {"episode/return": np.ones(1)})
    logger.message("hello")
    logger.close()
    final_table([Result(1.0, "finished", 5, None)], title="t", folder="f", show="off")
    assert capsys.readouterr().out == ""


def test_auto_is_plain_where_there_is_no_terminal() -> None:
    assert type(make_console("auto", 1, 10, "t")) is PlainConsole  # pytest captures the output
    with pytest.raises(ValueError, match="show='loud': expected one of auto, rich, plain, off"):
        make_console("loud", 1, 10, "t")


def test_speed_and_time_left_follow_the_members_that_move(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("rlkit.console.time.monotonic", lambda: now[0])
    console = Console(3, 1000, "t")
    console.note(np.array([0, 0, 500]), {})
    assert np.isnan(console.speed()) and np.isnan(console.seconds_left())
    now[0] += 4.0
    console.note(np.array([400, 200, 500]), {})  # the third is frozen
    assert console.speed() == 150.0
    assert console.seconds_left() == 16.0  # the second makes 50 steps a second and has 800 to go
    assert [clock(5.0), clock(65.2), clock(3723.0), clock(NAN)] == ["0:05", "1:06", "1:02:03", "-:--"]


def test_a_slow_evaluation_is_shown_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr("rlkit.console.time.monotonic", lambda: now[0])
    console = PlainConsole(1, 1000, "CartPole grpo")
    for k in range(25):  # a second each
        console.busy(f"evaluation {4 * k}%")
        now[0] += 1.0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"CartPole grpo  evaluation {20 * k}%" for k in range(1, 5)]
    rich = RichConsole(1, 1000, "CartPole grpo")
    rich.note(np.array([500]), {"episode/return": np.array([231.5])})
    rich._due = np.inf
    rich.busy("evaluation 40%")
    assert "evaluation 40%" in rich.line(120).plain and "return" not in rich.line(120).plain
    rich.note(np.array([600]), {})
    assert "return 231.5" in rich.line(120).plain and "evaluation" not in rich.line(120).plain


@pytest.mark.parametrize(("width", "lines"), [(50, 2), (80, 2), (120, 1)])
def test_the_progress_line_fits_the_terminal(width: int, lines: int) -> None:
    console = RichConsole(1, 100_000, "CartPole grpo")
    console.note(
        np.array([50_000]),
        {
            "episode/return": np.array([231.5]),
            "kl/old": np.array([0.0123]),
            "entropy/mean": np.array([0.5]),
            "speed/steps_per_second": np.array([12_300.0]),
        },
    )
    text = console.line(width).plain.split("\n")
    assert len(text) == lines
    assert width < 80 or max(map(len, text)) < width
    bar = text[0].count("━"), text[0].count("─")
    assert abs(bar[0] - bar[1]) <= 1  # half of the steps
    assert "50,000/100,000 steps" in text[0] and "return 231.5  KL 0.0123  entropy 0.500" in text[-1]


def test_the_rich_console_gives_the_terminal_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    logger = _logger(tmp_path, show="rich")
    logger.progress(np.array([10]), {"episode/return": np.ones(1)})
    logger.message("an event")
    logger.close()
    output = capsys.readouterr().out
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")  # the cursor is shown again
    assert "an event" in output
    assert (sys.stdout, sys.stderr) == before


COMMANDS = [
    "tensorboard --logdir runs/CartPole/grpo/2026-01-01",
    "python -c \"import rlkit; print('" + "x" * 90 + "')\"",
]


@pytest.mark.parametrize("members", [1, 4, 20, 64])
def test_the_final_table_is_plain_text_of_80_columns(
    members: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    results = [Result(400.0 + m, "finished", 100_352, 50_000 + m if m % 2 else None) for m in range(members)]
    results[-1] = Result(NAN, "diverged", 4096, None)
    final_table(results, title="CartPole grpo", folder="runs/x", commands=COMMANDS)
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert "run   runs/x" in output
    assert all(command in output for command in COMMANDS)  # whole, on one line
    rest = [line for line in output.splitlines() if not any(command in line for command in COMMANDS)]
    assert max(map(len, rest)) <= 80 and all(line == line.rstrip() for line in rest)
    for result in results:
        assert f"{result.eval_return:.1f}" in output
    if members == 4:
        assert "     1      401.0  finished           100,352       50,001" in output
        assert "IQM 401.0   min 400.0   max 402.0   solved 1 of 4, at 50,001 steps (IQM)" in output
    if members == 64:
        assert "63 finished, 1 diverged !; 4,096 to 100,352 steps each" in output


@pytest.mark.parametrize(
    ("figures", "digits"),
    [([12_345.6, 2.0], 0), ([-155.4, 0.0], 1), ([9.99, NAN], 2), ([1.0, 0.674], 3), ([NAN, math.inf], 3), ([], 3)],
)
def test_the_largest_figure_decides_how_many_decimals_all_have(figures: list[float], digits: int) -> None:
    assert decimals(figures) == digits


def test_returns_between_zero_and_one_keep_their_decimals(capsys: pytest.CaptureFixture[str]) -> None:
    """FrozenLake's return is the share of episodes won."""
    results = [Result(0.67, "finished", 100, None), Result(1.0, "finished", 100, None)]
    final_table(results, title="t", folder="runs/x", show="plain")
    output = capsys.readouterr().out
    assert "     0      0.670  finished" in output and "     1      1.000  finished" in output
    assert "IQM 0.835   min 0.670   max 1.000" in output
    final_table(results * 20, title="t", folder="runs/x", show="plain")
    assert " 0 0.670    1 1.000 " in capsys.readouterr().out
    evaluation_table([0], np.array([[1.0, 0.0, 1.0, 1.0]]), np.full((1, 4), 12.0), title="t", show="plain")
    assert "     0      0.750     0.433      0.000      1.000       12.0\n" in capsys.readouterr().out


def test_the_final_table_says_why_a_member_stopped_early(capsys: pytest.CaptureFixture[str]) -> None:
    results = [Result(9.0, "stopped early", 70, None, "none of its last 10 evaluations was above 9.5")] * 2
    final_table(results, title="t", folder="runs/x", show="plain")
    output = capsys.readouterr().out
    assert "     0       9.00  stopped early           70            -\n" in output
    assert "\nmember 1 stopped early: none of its last 10 evaluations was above 9.5\n" in output
    final_table(results * 20, title="t", folder="runs/x", show="plain")
    assert "40 stopped early =; 70 steps each" in capsys.readouterr().out


def test_the_final_table_on_a_terminal_is_the_same_text_in_colour(capsys: pytest.CaptureFixture[str]) -> None:
    results = [Result(500.0, "solved", 100, 50), Result(9.0, "interrupted", 70, None)]
    texts = []
    for show in ("rich", "plain"):
        final_table(results, title="t", folder="runs/x", commands=COMMANDS, show=show)
        texts.append(capsys.readouterr().out)
    assert texts[0] != texts[1]
    assert re.sub(r"\x1b\[[0-9;]*m", "", texts[0]) == texts[1]
