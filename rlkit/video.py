"""Episodes to look at: recorded as MP4 or GIF, or shown in a window. Gymnasium draws, moviepy's FFmpeg encodes."""

from __future__ import annotations

import itertools
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkit.conf.schema import Config
from rlkit.evaluate import Evaluator
from rlkit.faults import Fault
from rlkit.files import make_folder, replacing
from rlkit.policy import Policy

HINT = "pip install 'rlkit[video]'"
GIF_RATE = 25  # frames a second at most; browsers show no more than 50, and 25 look smooth
GIF_SECONDS = 60  # what comes later is left out


class VideoError(RuntimeError):
    """What keeps an episode from being recorded or shown; the message is one sentence."""


def _mp4(fps: float) -> tuple[str, list[str]]:
    """What browsers play: even numbers of rows and columns in the usual pixel format."""
    return "libx264", ["-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2", "-pix_fmt", "yuv420p", "-f", "mp4"]


def _gif(fps: float) -> tuple[str, list[str]]:
    """One palette, chosen from all frames, and no dithering: what is drawn has few colours."""
    colours = "split[a][b];[a]palettegen[p];[b][p]paletteuse=dither=none:diff_mode=rectangle"
    return "gif", ["-vf", f"fps={min(fps, GIF_RATE):g},{colours}", "-loop", "0", "-f", "gif"]


ENCODERS = {".mp4": _mp4, ".gif": _gif}  # ending of the file -> (frames a second -> FFmpeg's codec, its other options)


@contextmanager
def writing(path: Path, kind: str, fps: float) -> Iterator[Callable[[np.ndarray], None]]:
    """Give what takes frames, uint8 [height, width, 3], and encodes them as they come."""
    from moviepy.video.io.ffmpeg_writer import FFMPEG_VideoWriter

    codec, options = ENCODERS[kind](fps)
    most = GIF_SECONDS * fps if kind == ".gif" else math.inf
    numbers = itertools.count()
    writers: list[Any] = []  # opened by the first frame, whose size it takes

    def take(frame: np.ndarray) -> None:
        if not writers:
            size = frame.shape[1::-1]
            writers.append(FFMPEG_VideoWriter(str(path), size, fps, codec=codec, ffmpeg_params=options))
        if next(numbers) < most:
            writers[0].write_frame(frame)

    try:
        yield take
    finally:
        for writer in writers:
            writer.close()


def check(path: Path, name: str) -> None:
    """Refuse a file that cannot be written as a video.

    Args:
        name: what asks for it, with its value, for the message.

    Raises:
        VideoError: another ending than .mp4 or .gif, or moviepy is missing.
    """
    if path.suffix.lower() not in ENCODERS:
        raise VideoError(f"{name}; it must end in {' or '.join(ENCODERS)}")
    if find_spec("moviepy") is None:
        raise VideoError(f"{name}, which needs moviepy: {HINT}")


def check_display(name: str) -> None:
    """Refuse to open a window where there is no display.

    Raises:
        VideoError: so it is.
    """
    if not has_display():
        raise VideoError(f"{name} needs a display, and neither DISPLAY nor WAYLAND_DISPLAY is set; --video records")


def has_display() -> bool:
    """Whether a window can be opened; other systems than Linux always have where."""
    return sys.platform != "linux" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


class Stage:
    """One environment that is drawn, in which a member plays.

    Args:
        config: of the run.
        mode: Gymnasium's render mode, "rgb_array" or "human".

    Raises:
        VideoError: the environment cannot be drawn.
    """

    def __init__(self, config: Config, mode: str) -> None:
        from rlkit.build import build_evaluator

        if not has_display():  # pygame opens no window then, and needs none
            os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
            os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
        self.id = config.env.id
        evaluator: Evaluator | None = None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Gymnasium's: it is drawn all the same, or not, as is said below
                evaluator = build_evaluator(replace(config, members=1), 1, 1, mode)
                evaluator.envs.reset(seed=[0])
                if mode == "rgb_array":
                    self.frame(evaluator)
        except Exception as error:  # a renderer raises what it likes where a package, a driver or a display is missing
            if evaluator is not None:
                evaluator.close()
            raise VideoError(f"{self.id} cannot be drawn: {_said(error)}") from error
        self.evaluator = evaluator
        self.cut = False  # whether an episode of the last play was cut
        self.fps = float(evaluator.envs.metadata.get("render_fps") or 30)

    def frame(self, evaluator: Evaluator) -> np.ndarray:
        """The picture of the environment as it stands, uint8 [height, width, 3]."""
        (frame,) = evaluator.envs.render() or (None,)
        if np.ndim(frame) != 3:
            raise VideoError(f"it has no render mode rgb_array that gives a picture, but {type(frame).__name__}")
        return np.array(frame, dtype=np.uint8)  # a copy: some draw the next one into the same memory

    def play(self, policy: Policy, stochastic: bool = False, seed: int = 0, episodes: int = 1) -> np.ndarray:
        """Let the only member of a policy play; return the return of each episode."""
        played = self.evaluator.play(policy, episodes, stochastic, seed)
        self.cut = bool(played.cut.any())
        return played.returns[0].numpy()

    def record(self, policy: Policy, path: Path, stochastic: bool = False, seed: int = 0) -> float:
        """Record the first evaluation episode, whole or not at all; return its return.

        Raises:
            VideoError: drawing or writing fails.
        """
        try:
            make_folder(path.parent)
            with replacing(path) as temporary, writing(temporary, path.suffix.lower(), self.fps) as take:
                self.evaluator.watch = lambda: take(self.frame(self.evaluator))
                return float(self.play(policy, stochastic, seed)[0])
        except Exception as error:  # whatever a renderer or an encoder raises
            raise VideoError(f"{path} was not recorded: {_said(error)}") from error
        finally:
            self.evaluator.watch = None

    def close(self) -> None:
        self.evaluator.close()


def _said(error: Exception) -> str:
    """What an error says, in one line, and what helps if that is known."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    kind = type(error).__name__
    told = isinstance(error, (VideoError, Fault, ValueError)) or lines[0] == kind  # the message says it all
    text = lines[0] if told else f"{kind}: {lines[0]}"
    if "pygame" in text:
        return f"pygame is missing or broken ({text}): {HINT}"
    if re.search(r"OpenGL|\bgl[A-Z]|EGL|OSMesa|GLFW|mujoco", text):
        chosen = os.environ.get("MUJOCO_GL")
        hint = f"MUJOCO_GL is {chosen}" if chosen else "set MUJOCO_GL=egl (or osmesa) where there is no display"
        return f"{text}; {hint}"
    return text


class Recorder:
    """Records an episode of the best member at every n-th evaluation of a run, for `eval.video`.

    Args:
        config: of the run; `eval.video` is n.

    Raises:
        rlkit.conf.schema.ConfigError: a package is missing, or the environment cannot be drawn.
    """

    def __init__(self, config: Config) -> None:
        from rlkit.conf.schema import ConfigError

        self.every, self.evaluations, self.config = config.eval.video, 0, config
        key = f"eval.video is {self.every}"
        try:
            check(Path("step.mp4"), key)
            self.stage = Stage(config, "rgb_array")
        except VideoError as error:
            text = str(error)
            raise ConfigError(text if text.startswith(key) else f"{key}, but {text}") from error
        self.policy: Policy | None = None  # of one member, made when it is first needed

    def due(self) -> bool:
        """Count an evaluation; say whether it is one to record."""
        self.evaluations += 1
        return self.evaluations % self.every == 0

    def record(self, state: dict[str, Tensor], returns: Tensor, env_steps: Tensor, folder: Path) -> Path:
        """Record the member with the highest return as `videos/step_N.mp4`, N its steps; return the file.

        Args:
            state: of the policies of all members.
            returns, env_steps: [M].

        Raises:
            VideoError: drawing or writing fails.
        """
        from rlkit.build import build_policy
        from rlkit.saved import fill

        best = int(torch.nan_to_num(returns, nan=-torch.inf).argmax())
        if self.policy is None:
            self.policy, _ = build_policy(replace(self.config, members=1))
        fill(self.policy, state, range(best, best + 1))
        path = folder / "videos" / f"step_{int(env_steps[best])}.mp4"
        self.stage.record(self.policy, path)
        return path

    def close(self) -> None:
        self.stage.close()
