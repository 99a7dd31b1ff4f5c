"""A job: a configuration that is checked, built, trained in a folder and reported."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlkit import __version__

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from rlkit.conf.schema import Config
    from rlkit.loop import Learner
    from rlkit.resume import Resumed
    from rlkit.team import Team


@dataclass(frozen=True)
class Run:
    """A finished run: its folder and its summary (what `summary.json` holds)."""

    folder: Path
    summary: dict[str, Any]

    @property
    def eval_return(self) -> list[float]:
        """Mean deterministic return of each member over 100 episodes."""
        return list(self.summary["eval_return"])


@dataclass
class Prepared:
    """A run that can start: its checked configuration and all it needs but a folder."""

    config: Config
    learner: Learner | Team
    evaluator: Any  # `rlkit.session.Evaluate`
    recorder: Any  # `rlkit.session.Record`, or None
    close: Callable[[], None]  # ends environments and processes
    processes: int = 1


def prepare(raw: DictConfig, processes: int | None = None, threads: int = 1) -> Prepared:
    """Check a composed configuration and build what it describes; nothing is written yet.

    Args:
        processes: that the members are shared out to; None for as many as the configuration and the machine say.
        threads: of each process.

    Raises:
        rlkit.build.ConfigError: the configuration cannot run.
        rlkit.envs.EnvironmentFailure: the environment cannot be made or reset.
    """
    from rlkit.build import build_evaluator, build_learner, to_config
    from rlkit.conf.schema import ConfigError
    from rlkit.cores import num_processes
    from rlkit.evaluate import Evaluator
    from rlkit.session import FINAL_EPISODES
    from rlkit.team import Team

    config = to_config(raw)
    use_threads(threads)
    number = num_processes(config if processes is None else replace(config, processes=processes))
    with ExitStack() as opened:
        learner: Learner | Team
        try:
            learner = Team(config, number) if number > 1 else build_learner(config)
            opened.callback(learner.close)
            evaluator: Any = learner.evaluator if isinstance(learner, Team) else build_evaluator(config, FINAL_EPISODES)
            if isinstance(evaluator, Evaluator):
                opened.callback(evaluator.close)
        except (MemoryError, RuntimeError) as error:
            if out_of_memory(error):
                raise ConfigError(out_of_memory(error)) from error
            raise
        recorder = None
        if config.eval.video:
            from rlkit.video import Recorder

            recorder = Recorder(config)
            opened.callback(recorder.close)
        return Prepared(config, learner, evaluator, recorder, opened.pop_all().close, number)


def out_of_memory(error: Exception) -> str:
    """Say that there is not enough memory, if that is what an error of NumPy or torch says; else nothing."""
    if not isinstance(error, MemoryError) and "allocate memory" not in str(error):
        return ""
    reason = str(error).split("\n")[0]
    return f"there is not enough memory ({reason}); members, num_envs, algo.num_steps or policy.hidden must be smaller"


def check_folder(folder: Path) -> None:
    """Refuse a folder that holds a run, which would be overwritten, or that cannot be made.

    Raises:
        rlkit.build.ConfigError: either.
    """
    from rlkit.conf.schema import ConfigError
    from rlkit.files import check_place

    check_place(folder, "hydra.run.dir", file=False)
    if holds_run(folder):
        raise ConfigError(f"hydra.run.dir is {folder}, which already holds a run; it must be a new folder")


def holds_run(folder: Path) -> bool:
    """Whether a run was begun in a folder."""
    return (folder / "metrics.csv").exists() or (folder / "checkpoint.pt").exists()


def execute(prepared: Prepared, folder: Path, show: str = "auto") -> Run:
    """Train what is prepared in the directory `folder`, and close it.

    Args:
        folder: the run directory; it is made if need be.
        show: console output, "auto", "rich", "plain" or "off".

    Raises:
        rlkit.build.ConfigError: the folder holds a run already.
        rlkit.faults.Fault: something ended the run.
        KeyboardInterrupt: after Ctrl-C or SIGTERM, once checkpoint and summary are written.
    """
    from rlkit.files import locked, make_folder

    try:
        check_folder(folder)
        make_folder(folder)
        with locked(folder):
            return conduct(prepared, folder, show)
    finally:
        prepared.close()


def conduct(prepared: Prepared, folder: Path, show: str, resumed: Resumed | None = None) -> Run:
    """Train in a folder that is ours, from the beginning or from where a checkpoint has brought the learner."""
    from rlkit.build import evaluation_limit, reward_threshold
    from rlkit.diagnose import Diagnosis
    from rlkit.evaluate import Evaluator, cut_note
    from rlkit.metrics import Logger
    from rlkit.recorded import leaves
    from rlkit.session import Session

    config, learner = prepared.config, prepared.learner
    logger = Logger(
        folder,
        members=config.members,
        total_steps=config.total_steps,
        title=f"{config.env.name} {config.algo.name}",
        show=show,
        resumed=None if resumed is None else resumed.state.get("log", {}),
    )
    source: Any = learner  # a team, which evaluates by itself
    if isinstance(prepared.evaluator, Evaluator):
        source = prepared.evaluator
        source.progress = lambda share: logger.busy(f"evaluation {share:.0%}")

    def tell_of_cuts(cut: int, episodes: int) -> None:
        source.on_cut = None  # once
        logger.message(cut_note(cut, episodes, evaluation_limit(config), "eval.max_episode_steps"))

    source.on_cut = tell_of_cuts
    try:
        session = Session(
            learner=learner,
            evaluator=prepared.evaluator,
            logger=logger,
            folder=folder,
            eval_every=config.eval.every,
            eval_episodes=config.eval.episodes,
            checkpoint_every=config.checkpoint.every,
            checkpoint_keep=config.checkpoint.keep,
            log_every=config.log.every,
            threshold=reward_threshold(config),
            stop_when_solved=config.stop_when_solved,
            stop_at=config.stop_at,
            diagnosis=Diagnosis(config.members, dict(leaves(asdict(config)))) if config.log.diagnose else None,
            recorder=prepared.recorder,
            about=about(prepared),
        )
        if resumed is not None:
            resumed.tell(session)
        summary = session.run()
        logger.hparams(*_hparams(config, summary))
    finally:
        logger.close()
    run = Run(folder, summary)
    if show != "off":
        report(run, learner.obs_size, show, config.env.action_mask)
    if session.ended_by is not None and "interrupted" in summary["status"]:
        raise session.ended_by
    return run


def about(prepared: Prepared) -> dict[str, Any]:
    """What a run is and where it runs: the head of its summary and of its checkpoints."""
    import torch

    config = prepared.config
    return {
        "env": config.env.id,
        "algo": config.algo.name,
        "seed": config.seed,
        "members": config.members,
        "total_steps": config.total_steps,
        "version": __version__,
        "machine": machine(),
        "processes": prepared.processes,
        "threads": torch.get_num_threads(),
    }


def machine() -> str:
    """The kind of machine and the versions that results depend on."""
    import platform

    import torch

    python = platform.python_version()
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {python}, torch {torch.__version__}"


def use_threads(number: int = 1) -> None:
    """Use so many threads a process: one, since matrices are so small that a second one costs more than it does."""
    import torch
    from threadpoolctl import threadpool_limits

    torch.set_num_threads(number)
    threadpool_limits(number, "blas")  # NumPy's


def report(run: Run, obs_size: int, show: str, masked: bool = False) -> None:
    """Print the table at the end of a run and the commands that show more of it.

    Args:
        masked: whether the policy acts with masks of legal actions.
    """
    import shutil

    from rlkit.results import Result, final_table

    summary = run.summary
    found = shutil.which("python")
    python = "python" if found and os.path.samefile(found, sys.executable) else shlex.quote(sys.executable)
    act = f'import rlkit; print(rlkit.load("{run.folder}").act([0] * {obs_size}))'
    if masked:
        mask = "action_mask=[1] * agent.policy.action_size"
        act = f'import rlkit; agent = rlkit.load("{run.folder}"); print(agent.act([0] * {obs_size}, {mask}))'
    columns = (summary[name] for name in ("eval_return", "status", "env_steps", "solved_at_steps", "stopped_early"))
    final_table(
        [Result(*row) for row in zip(*columns, strict=True)],
        title=f"{summary['env']} {summary['algo']}: mean return of 100 episodes, deterministic policy",
        folder=run.folder,
        findings=list(summary.get("findings", {}).values()),
        commands=[
            f"{python} -m tensorboard.main --logdir {shlex.quote(str(run.folder))}",
            f"{python} -c {shlex.quote(act)}",
        ],
        show=show,
    )


def _hparams(config: Any, summary: dict[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
    """The run's settings and final numbers for TensorBoard's HPARAMS tab."""
    from rlkit.conf.schema import keys
    from rlkit.interquartile import interquartile_mean

    settings = {
        name: value if isinstance(value, (bool, int, float, str)) else str(value) for name, _, value in keys(config)
    }
    numbers = {
        f"final/{name}": float(interquartile_mean(summary[name])) for name in ("eval_return", "eval_return_stochastic")
    }
    return settings, numbers
