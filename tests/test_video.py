"""Episodes recorded and shown: what the files hold, without a display, and what is missing said before it all."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import warnings
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

import rlkit
import rlkit.video
from rlkit.build import ConfigError, build_policy, to_config
from rlkit.evaluate import main
from rlkit.keepers import checkpoint
from rlkit.saved import SavedRun
from rlkit.scores import scores
from rlkit.train import compose
from rlkit.video import GIF_SECONDS, Recorder, Stage, VideoError

SETTINGS = {
    "env": "CartPole",
    "algo": "ppo",
    "members": 2,
    "tuned": "none",
    "num_envs": 4,
    "algo.num_steps": 64,
    "policy.hidden": [8],
    "total_steps": 1024,
    "eval.every": 256,
    "eval.episodes": 2,
    "log.every": 0,
}


class Flat(gymnasium.Env):
    """Has nothing to show."""

    observation_space, action_space = gymnasium.spaces.Box(0, 1, (1,), np.float32), gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 1.0, False, False, {}


class Counter(Flat):
    """Shows a square whose grey is the number of steps; its sides are odd, as few encoders like."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 50}  # noqa: RUF012

    def __init__(self, render_mode=None):
        self.render_mode, self.steps = render_mode, 0

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return super().reset(seed=seed)

    def step(self, action):
        self.steps += 1
        return super().step(action)

    def render(self):
        return np.full((33, 47, 3), self.steps, np.uint8)


gymnasium.register("Flat-v0", Flat, max_episode_steps=9)
gymnasium.register("Counter-v0", Counter, max_episode_steps=99)
gymnasium.register("Endless-v0", Counter)


@pytest.fixture(autouse=True)
def headless(monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def missing(monkeypatch):
    """A function that makes a package look as if it were not installed."""
    find = importlib.util.find_spec

    def hide(name: str) -> None:
        monkeypatch.setattr(rlkit.video, "find_spec", lambda other: None if other == name else find(other))

    return hide


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return rlkit.run(folder=tmp_path_factory.mktemp("runs") / "run", **SETTINGS)


def mp4(path: Path) -> tuple[list[np.ndarray], float]:
    """Frames of a file, and how many are shown in a second."""
    import imageio_ffmpeg

    reader = imageio_ffmpeg.read_frames(str(path))
    about = next(reader)
    width, height = about["size"]
    return [np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in reader], about["fps"]


def gif(path: Path) -> tuple[list[np.ndarray], list[int]]:
    """Frames of a file, and for how many milliseconds each is shown."""
    from PIL import Image, ImageSequence

    with Image.open(path) as image:
        shown = [(np.array(frame.convert("RGB")), frame.info["duration"]) for frame in ImageSequence.Iterator(image)]
    return [frame for frame, _ in shown], [duration for _, duration in shown]


def stage_of(id: str) -> tuple[Stage, object]:
    config = to_config(compose(["env=gym", f"env.id={id}", "algo=ppo"])[0])
    return Stage(config, "rgb_array"), build_policy(config)[0]


def test_an_mp4_holds_a_frame_for_the_start_and_one_for_each_step(tmp_path):
    stage, policy = stage_of("Counter-v0")
    assert stage.record(policy, tmp_path / "deep" / "a.mp4") == 99.0
    stage.close()
    frames, fps = mp4(tmp_path / "deep" / "a.mp4")
    assert fps == 50 and len(frames) == 100
    assert [f.shape for f in frames[:1]] == [(34, 48, 3)]  # one row and one column more, for players
    middle = np.array([frame[5:30, 5:40].mean() for frame in frames])
    np.testing.assert_allclose(middle, np.arange(100), atol=2.5)  # the codec rounds
    assert os.listdir(tmp_path / "deep") == ["a.mp4"]


def test_a_gif_holds_every_second_frame_of_fifty_and_loops(tmp_path):
    stage, policy = stage_of("Counter-v0")
    stage.record(policy, tmp_path / "a.gif")
    stage.close()
    frames, durations = gif(tmp_path / "a.gif")
    shown = [int(frame[0, 0, 0]) for frame, ms in zip(frames, durations, strict=True) for _ in range(ms // 40)]
    assert sum(durations) == 2000 and len(shown) == 50  # equal frames are one that is shown for longer
    np.testing.assert_allclose(shown, range(0, 100, 2), atol=1)


def test_a_gif_ends_after_a_minute(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (2, 150, 150, 3), dtype=np.uint8)
    with rlkit.video.writing(tmp_path / "a.gif", ".gif", 1.0) as take:
        for k in range(3 * GIF_SECONDS):  # more than a pipe holds
            take(noise[k % 2])
    assert sum(gif(tmp_path / "a.gif")[1]) == 1000 * GIF_SECONDS


def test_an_episode_without_an_end_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr("rlkit.build.LONGEST_SHOWN", 30)
    stage, policy = stage_of("Endless-v0")
    assert stage.record(policy, tmp_path / "a.mp4") == 30.0
    stage.close()
    assert len(mp4(tmp_path / "a.mp4")[0]) == 31


def test_the_line_of_a_video_says_that_its_episode_was_cut(tmp_path, monkeypatch, capsys):
    run = rlkit.run(folder=tmp_path / "run", **{**SETTINGS, "env": "gym", "env.id": "Counter-v0", "eval.every": 0})
    monkeypatch.setattr("rlkit.build.LONGEST_SHOWN", 30)
    assert main([str(run.folder), "--episodes", "1", "--member", "0", "--video", str(tmp_path / "a.mp4")]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == f"video  {tmp_path / 'a.mp4'} (member 0, return 30.0, cut at 30 steps)"
    assert "99.0" in said and "still going" not in said  # the episode that was judged was whole


def test_the_recorded_episode_is_the_first_of_the_evaluation(trained, tmp_path, capsys):
    for kind, options in (("deterministic", []), ("sampled", ["--stochastic"])):
        file = tmp_path / f"{kind}.gif"
        assert main([str(trained.folder), "--episodes", "4", "--num-envs", "1", "--video", str(file), *options]) == 0
        saved = SavedRun.open(trained.folder)
        own = scores(saved, range(2), 4, num_envs=1, stochastic=bool(options))
        line = capsys.readouterr().out.splitlines()[-1]
        assert line == f"video  {file} (member {own.best}, return {own.returns[own.best - own.members[0], 0]:,.1f})"
        steps = int(own.lengths[own.best, 0])
        frames, durations = gif(file)
        assert abs(sum(durations) - 20 * (steps + 1)) <= 20  # 50 steps a second
        assert frames[0].shape == (400, 600, 3)
        assert {tuple(c) for c in frames[0].reshape(-1, 3)} >= {(255, 255, 255), (0, 0, 0), (202, 152, 101)}  # pole


def test_video_without_a_path_lies_in_the_run_s_folder(trained, capsys):
    assert main([str(trained.folder), "--episodes", "1", "--member", "1", "--checkpoint", "best", "--video"]) == 0
    assert len(mp4(trained.folder / "videos" / "member_1_best.mp4")[0]) > 5


def test_a_recording_needs_no_display(trained, tmp_path):
    env = {name: value for name, value in os.environ.items() if "DISPLAY" not in name and not name.startswith("SDL")}
    command = [sys.executable, "-m", "rlkit.evaluate", str(trained.folder), "--episodes", "1", "--video", str(tmp_path)]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, cwd=root)
    assert done.returncode == 0, done.stderr
    assert [path.suffix for path in tmp_path.iterdir()] == [".mp4"]


@pytest.mark.parametrize(
    ("package", "file", "sentence"),
    [
        ("moviepy", "a.mp4", "a.mp4, which needs moviepy: pip install 'rlkit[video]'"),
        ("moviepy", "a.gif", "a.gif, which needs moviepy: pip install 'rlkit[video]'"),
        ("", "a.avi", "a.avi; it must end in .mp4 or .gif"),
    ],
)
def test_what_a_video_lacks_is_said_before_an_episode_is_played(
    trained, missing, tmp_path, capsys, package, file, sentence
):
    missing(package)
    assert main([str(trained.folder), "--video", str(tmp_path / file)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err == f"rlkit: --video is {tmp_path}/{sentence}\n"


def test_an_environment_that_draws_nothing_is_refused_before_an_episode_is_played(tmp_path, capsys):
    run = rlkit.run(folder=tmp_path / "run", **{**SETTINGS, "env": "gym", "env.id": "Flat-v0", "eval.every": 0})
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert main([str(run.folder), "--video"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("rlkit: Flat-v0 cannot be drawn: ") and said.err.count("\n") == 1
    assert [warning for warning in warned if "render" in str(warning.message)] == []  # Gymnasium's own


def test_a_missing_pygame_is_said_with_what_brings_it(trained, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pygame", None)
    assert main([str(trained.folder), "--video"]) == 2
    said = capsys.readouterr()
    assert "pygame is missing" in said.err and said.err.rstrip().endswith("pip install 'rlkit[video]'")
    assert said.out == "" and said.err.count("\n") == 1


def test_a_window_without_a_display_is_one_sentence(trained, capsys):
    assert main([str(trained.folder), "--render", "human"]) == 2
    assert "--render human needs a display" in capsys.readouterr().err


def test_a_window_shows_the_best_member_s_episodes(trained, monkeypatch, capsys):
    monkeypatch.setenv("DISPLAY", ":99")  # of no server: SDL's dummy driver opens the window
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    shown: list[int] = []
    play = Stage.play
    monkeypatch.setattr(Stage, "play", lambda *args: shown.append(len(play(*args))))
    assert main([str(trained.folder), "--episodes", "2", "--render", "human"]) == 0
    assert shown == [2] and "plays 2 episodes" in capsys.readouterr().out


def test_a_recording_that_fails_leaves_nothing_and_is_a_fault(trained, tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("moviepy.video.io.ffmpeg_writer.FFMPEG_VideoWriter.write_frame", full)
    assert main([str(trained.folder), "--episodes", "1", "--video", str(tmp_path / "a.mp4")]) == 1
    said = capsys.readouterr().err
    assert "a.mp4 was not recorded: " in said and "a.mp4 cannot be written: No space left on device" in said
    assert list(tmp_path.iterdir()) == []


# --- while it trains -----------------------------------------------------------------------------------------------


def test_videos_of_a_training_change_nothing_else(trained, tmp_path):
    run = rlkit.run(folder=tmp_path / "run", **SETTINGS, **{"eval.video": 2})
    assert sorted(path.name for path in (run.folder / "videos").iterdir()) == ["step_1024.mp4", "step_512.mp4"]
    assert len(mp4(run.folder / "videos" / "step_512.mp4")[0]) > 5
    one, two = (checkpoint.load(r.folder / "checkpoint.pt")["learner"]["policy"] for r in (run, trained))
    assert all(torch.equal(x, two[name]) for name, x in one.items())
    assert run.eval_return == trained.eval_return


def test_a_team_s_training_is_recorded_too(tmp_path):
    run = rlkit.run(folder=tmp_path / "run", **SETTINGS, **{"eval.video": 4, "processes": 2})
    assert [path.name for path in (run.folder / "videos").iterdir()] == ["step_1024.mp4"]


def test_without_the_key_nothing_of_it_is_loaded(trained):
    assert not (trained.folder / "videos").joinpath("step_256.mp4").exists()
    code = "import sys, rlkit.session, rlkit.build, rlkit.train; print({'moviepy', 'pygame', 'PIL'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr


@pytest.mark.parametrize("package", ["moviepy", "pygame"])
def test_a_package_that_videos_need_is_missed_before_the_training_begins(missing, monkeypatch, tmp_path, package):
    missing(package)
    if package == "pygame":
        monkeypatch.setitem(sys.modules, "pygame", None)
    with pytest.raises(ConfigError, match=rf"^eval.video is 1, .*{package}.*pip install 'rlkit\[video\]'$"):
        rlkit.run(folder=tmp_path / "run", **SETTINGS, **{"eval.video": 1})
    assert list(tmp_path.iterdir()) == []


def test_videos_without_evaluations_are_refused():
    with pytest.raises(ConfigError, match="eval.every is 0; with eval.video=1 it must be >= 1"):
        to_config(compose(["eval.video=1", "eval.every=0"])[0])


def test_training_survives_a_video_that_fails(monkeypatch, tmp_path, capsys):
    def fail(*_):
        raise RuntimeError("the lens\nis cracked")

    monkeypatch.setattr("moviepy.video.io.ffmpeg_writer.FFMPEG_VideoWriter.write_frame", fail)
    run = rlkit.run(folder=tmp_path / "run", show="plain", **SETTINGS, **{"eval.video": 2})
    said = capsys.readouterr().out
    assert said.count("no video of this evaluation: ") == 2 and said.count("RuntimeError: the lens\n") == 2
    assert run.summary["status"] == ["finished", "finished"]
    assert list((run.folder / "videos").iterdir()) == []


def test_the_member_recorded_is_the_best(tmp_path):
    config = to_config(compose(["env=gym", "env.id=Counter-v0", "algo=ppo", "members=3", "eval.video=1"])[0])
    policy, _ = build_policy(config)
    recorder = Recorder(config)
    returns = torch.tensor([1.0, torch.nan, 3.0])
    file = recorder.record(policy.state_dict(), returns, torch.tensor([10, 20, 30]), tmp_path)
    recorder.close()
    assert file == tmp_path / "videos" / "step_30.mp4" and file.is_file()
    assert recorder.policy is not None
    assert torch.equal(recorder.policy.actor.weights[0][0], policy.actor.weights[0][2])


def test_what_cannot_be_drawn_raises_a_sentence():
    with pytest.raises(VideoError, match="^Flat-v0 cannot be drawn: "):
        stage_of("Flat-v0")
