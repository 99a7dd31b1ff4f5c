"""Evaluate a run: `python -m rlkit.evaluate RUN` plays 100 episodes of each member.

python -m rlkit.evaluate RUN                         the numbers that the run ended with, again
python -m rlkit.evaluate RUN --checkpoint best       each member as it was at its best evaluation
python -m rlkit.evaluate RUN --episodes 1000 --seed 1 --json scores.json
python -m rlkit.evaluate RUN --video [PATH]          also record the best member's first episode, .mp4 or .gif
python -m rlkit.evaluate RUN --render human          also show its episodes in a window, until Ctrl-C
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlkit import __version__
from rlkit.conf.schema import ConfigError
from rlkit.decimals import number
from rlkit.faults import Fault
from rlkit.files import check_place, make_folder, write_text
from rlkit.interquartile import interquartile_mean
from rlkit.job import use_threads
from rlkit.results import evaluation_table
from rlkit.saved import SavedRun, add_options
from rlkit.train import EXIT_CONFIG, EXIT_FAULT, EXIT_INTERRUPTED, complain, fail, quiet_pipe
from rlkit.video import Stage, VideoError, check, check_display

EPILOG = """\
Every member plays the same start states. Which episodes count is fixed before the first step, so short ones are not
counted too often. Statistics of normalised observations stay as they were saved.

Exit status: 0 done, 1 a fault while it played or wrote, 2 nothing was played: there is no such run or member, its
checkpoint is damaged, its environment cannot be made, an option is wrong or needs a package; 130 Ctrl-C,
141 nobody reads the output."""


@dataclass(frozen=True)
class Scores:
    """Episodes of some members of a run.

    Attributes:
        returns: undiscounted, [K, episodes].
        lengths: in steps, [K, episodes].
        cut: bool [K, episodes]; they would have gone on after the steps that evaluation plays at most.
    """

    run: SavedRun
    members: range
    stochastic: bool
    seed: int
    returns: np.ndarray
    lengths: np.ndarray
    cut: np.ndarray

    @property
    def means(self) -> np.ndarray:
        """Mean return of each member, [K], summed in the order in which the end of a training sums."""
        return np.asarray(torch.from_numpy(self.returns).mean(1))

    @property
    def best(self) -> int:
        """Number of the member with the highest mean return."""
        return self.members[int(np.nan_to_num(self.means, nan=-np.inf).argmax())]

    def title(self) -> str:
        """What was played, in one line."""
        config, kind = self.run.config, "sampled actions" if self.stochastic else "deterministic policy"
        state = "" if self.run.checkpoint == "last" else f", {self.run.checkpoint} checkpoint"
        starts = f", start states of seed {self.seed}" if self.seed else ""
        return f"{config.env.id} {config.algo.name}: {self.returns.shape[1]} episodes, {kind}{state}{starts}"

    def as_json(self) -> dict[str, Any]:
        """All numbers, with what it takes to get them again."""
        from rlkit.build import evaluation_limit
        from rlkit.evaluate import start_seeds

        config, means = self.run.config, self.means
        return {
            "run": str(self.run.folder),
            "checkpoint": self.run.checkpoint,
            "env": config.env.id,
            "algo": config.algo.name,
            "version": __version__,
            "trained_with_version": self.run.summary.get("version"),
            "stochastic": self.stochastic,
            "seed": self.seed,
            "start_seeds": start_seeds(self.returns.shape[1], self.seed),
            "members": list(self.members),
            "member_seeds": [config.seed + m for m in self.members],
            "mean": means.tolist(),
            "std": self.returns.std(1).tolist(),
            "min": self.returns.min(1).tolist(),
            "max": self.returns.max(1).tolist(),
            "mean_length": self.lengths.mean(1).tolist(),
            "max_episode_steps": evaluation_limit(config),
            "cut": self.cut.sum(1).tolist(),
            "interquartile_mean": float(interquartile_mean(means)),
            "returns": self.returns.tolist(),
            "lengths": self.lengths.tolist(),
        }


def scores(
    run: SavedRun,
    members: range,
    episodes: int = 100,
    *,
    stochastic: bool = False,
    seed: int = 0,
    num_envs: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> Scores:
    """Play episodes of a run's members; 100 with nothing else given are those of the end of its training.

    The numbers are then the same to the last bit: as many environments are stepped at once, and the members of each of
    the training's processes by themselves.

    Args:
        seed: of the start states and of the sampled actions.
        num_envs: environments of each member at once; None: as many as in training.
        progress: called with the share of episodes that have ended, in [0, 1].

    Raises:
        rlkit.conf.schema.ConfigError: the environments cannot be made, or the checkpoint is of others.
    """
    from rlkit.build import build_evaluator, evaluation_lanes

    played = []
    for part in run.parts():
        own = range(max(part.start, members.start), min(part.stop, members.stop))
        if not own:
            continue
        lanes = min(num_envs, episodes) if num_envs else evaluation_lanes(run.share(part), episodes)
        policy, _ = run.policy(own)
        evaluator = build_evaluator(run.share(own), episodes, lanes)
        if progress is not None:
            evaluator.progress = _of_all(progress, own, members)
        try:
            played.append(evaluator.play(policy, episodes, stochastic, seed))
        finally:
            evaluator.close()
    parts = zip(*((e.returns, e.lengths, e.cut) for e in played), strict=True)
    return Scores(run, members, stochastic, seed, *map(np.concatenate, parts))


def _of_all(progress: Callable[[float], None], own: range, members: range) -> Callable[[float], None]:
    """Turn the progress of some members into that of all."""
    return lambda share: progress((own.start - members.start + share * len(own)) / len(members))


@contextmanager
def _progress_bar() -> Iterator[Callable[[float], None]]:
    """A bar on standard error while the block runs, where that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("evaluation", total=1.0)
        yield lambda share: bar.update(task, completed=share)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m rlkit.evaluate",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(made, member="all")
    made.add_argument("--episodes", type=int, default=100, metavar="N", help="of each member (100)")
    made.add_argument("--stochastic", action="store_true", help="sample actions instead of taking the most likely")
    made.add_argument("--seed", type=int, default=0, help="of the start states; 0: those of every training (0)")
    made.add_argument("--num-envs", type=int, metavar="N", help="environments of a member at once (as in training)")
    made.add_argument("--max-episode-steps", type=int, metavar="N", help="cut episodes there (eval.max_episode_steps)")
    made.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write all numbers; without FILE print them")
    made.add_argument(
        "--video",
        nargs="?",
        const="",
        metavar="PATH",
        help="record the member that is best here: a file, or a folder (RUN/videos)",
    )
    made.add_argument("--render", choices=("human",), help="show episodes in a window")
    return made


def problem(options: argparse.Namespace) -> str | None:
    """Say which option cannot be met, if one cannot."""
    for name, value, least in (
        ("episodes", options.episodes, 1),
        ("num-envs", options.num_envs, 1),
        ("max-episode-steps", options.max_episode_steps, 1),
        ("seed", options.seed, 0),
    ):
        if value is not None and value < least:
            return f"--{name} is {value}; it must be >= {least}"
    return None


def video_file(options: argparse.Namespace, member: int = 0) -> Path:
    """The file that `--video` names for a member's episode."""
    path = Path(options.video) if options.video else options.run / "videos"
    if path.suffix and not path.is_dir():
        return path
    return path / f"member_{member}{'' if options.checkpoint == 'last' else '_' + options.checkpoint}.mp4"


def _open(options: argparse.Namespace, stages: ExitStack) -> tuple[SavedRun, range, Stage | None, Stage | None]:
    """The run, its members and what draws them: all that can turn out to be impossible before an episode is played."""
    from rlkit.build import evaluation_limit

    if (fault := problem(options)) is not None:
        raise ConfigError(fault)
    own = (options.run / "summary.json").absolute()
    if options.json not in (None, "-"):
        if Path(options.json).suffix != ".json" or Path(options.json).absolute() == own:
            raise ConfigError(f"--json is {options.json}; it must end in .json, and not be the run's own summary.json")
        check_place(Path(options.json), "--json")
    if options.video is not None:
        check(video_file(options), f"--video is {options.video or video_file(options)}")
        check_place(video_file(options), "--video")
    if options.render:
        check_display(f"--render {options.render}")
    run = SavedRun.open(options.run, options.checkpoint)
    if options.max_episode_steps:
        shorter = replace(run.config.eval, max_episode_steps=options.max_episode_steps)
        run = replace(run, config=replace(run.config, eval=shorter))
        evaluation_limit(run.config, "--max-episode-steps")
    members = range(run.config.members)
    if options.member != "all":
        number = run.member(options.member, "all, best")
        members = range(number, number + 1)
    camera, window = (
        stages.enter_context(closing(Stage(run.config, mode))) if wanted else None
        for mode, wanted in (("rgb_array", options.video is not None), ("human", options.render))
    )
    return run, members, camera, window


def _show(options: argparse.Namespace, result: Scores, camera: Stage | None, window: Stage | None) -> None:
    """Print and write the numbers, record and show the best member."""
    from rlkit.build import evaluation_limit
    from rlkit.evaluate import cut_note

    text = "{\n" + ",\n".join(f'  "{k}": {json.dumps(v)}' for k, v in result.as_json().items()) + "\n}\n"
    if options.json == "-":
        print(text, end="", flush=True)
    else:
        evaluation_table(result.members, result.returns, result.lengths, title=result.title())
        if options.json:
            make_folder(Path(options.json).parent)
            write_text(Path(options.json), text)
    best = result.best
    note = partial(print, file=sys.stderr if options.json == "-" else sys.stdout, flush=True)
    if result.cut.any():
        limit = evaluation_limit(result.run.config)
        note(f"\n{cut_note(int(result.cut.sum()), result.cut.size, limit, '--max-episode-steps')}")
    if camera is not None:
        policy, _ = result.run.policy(range(best, best + 1))
        file = video_file(options, best)
        gained = camera.record(policy, file, options.stochastic, options.seed)
        end = f", cut at {camera.evaluator.cut_at:,} steps" if camera.cut else ""
        note(f"\nvideo  {file} (member {best}, return {number(gained)}{end})")
    if window is not None:
        policy, _ = result.run.policy(range(best, best + 1))
        note(f"\nmember {best} plays {options.episodes} episodes; Ctrl-C ends it")
        window.play(policy, options.stochastic, options.seed, options.episodes)


@quiet_pipe
def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate as the command line says; return the exit status."""
    options = parser().parse_args(arguments)
    use_threads()  # as in training: sums differ with the number of threads
    with ExitStack() as stages:
        try:
            run, members, camera, window = _open(options, stages)
        except (ValueError, FileNotFoundError, VideoError) as error:
            return complain(str(error), EXIT_CONFIG)
        try:
            with _progress_bar() as progress:
                result = scores(
                    run,
                    members,
                    options.episodes,
                    stochastic=options.stochastic,
                    seed=options.seed,
                    num_envs=options.num_envs,
                    progress=progress,
                )
            _show(options, result, camera, window)
        except ConfigError as error:
            return complain(str(error), EXIT_CONFIG)
        except VideoError as error:
            return complain(str(error), EXIT_FAULT)
        except Fault as fault:  # of the environment, or the disk
            return fail(fault)
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
    return 0
