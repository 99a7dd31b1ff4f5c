"""Train from the command line: `python -m rlkit.train env=CartPole algo=grpo`."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlkit import __version__

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from rlkit.conf.schema import Config
    from rlkit.loop import Learner
    from rlkit.team import Team

EXIT_FAULT = 1  # an environment or a job failed
EXIT_CONFIG = 2  # the configuration cannot run
EXIT_INTERRUPTED = 130  # Ctrl-C


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


def prepare(raw: DictConfig) -> Prepared:
    """Check a composed configuration and build what it describes; nothing is written yet.

    Raises:
        rlkit.build.ConfigError: the configuration cannot run.
    """
    from rlkit.build import build_evaluator, build_learner, to_config
    from rlkit.session import FINAL_EPISODES
    from rlkit.team import Team, num_processes

    config = to_config(raw)
    use_threads()
    processes = num_processes(config)
    with ExitStack() as opened:
        learner: Learner | Team
        if processes > 1:
            learner = Team(config, processes)
            opened.callback(learner.close)
            evaluator: Any = learner.evaluator
        else:
            learner = build_learner(config)
            opened.callback(learner.close)
            evaluator = build_evaluator(config, FINAL_EPISODES)
            opened.callback(evaluator.close)
        recorder = None
        if config.eval.video:
            from rlkit.video import Recorder

            recorder = Recorder(config)
            opened.callback(recorder.close)
        return Prepared(config, learner, evaluator, recorder, opened.pop_all().close)


def check_folder(folder: Path) -> None:
    """Refuse a folder that holds a run, which would be overwritten, or that cannot be made.

    Raises:
        rlkit.build.ConfigError: either.
    """
    from rlkit.conf.schema import ConfigError

    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise ConfigError(f"hydra.run.dir is {folder}, but {nearest} is not a folder that can be written to")
    if (folder / "metrics.csv").exists() or (folder / "checkpoint.pt").exists():
        raise ConfigError(f"hydra.run.dir is {folder}, which already holds a run; it must be a new folder")


def execute(prepared: Prepared, folder: Path, show: str = "auto") -> Run:
    """Train what is prepared in the directory `folder`.

    Args:
        folder: the run directory; it is made if need be.
        show: console output, "auto", "rich", "plain" or "off".

    Raises:
        rlkit.build.ConfigError: the folder holds a run already.
        KeyboardInterrupt: after Ctrl-C, once checkpoint and summary are written.
    """
    from rlkit.build import reward_threshold
    from rlkit.diagnose import Diagnosis
    from rlkit.evaluate import Evaluator
    from rlkit.metrics import Logger
    from rlkit.session import Session
    from rlkit.team import Team

    config, learner, evaluator = prepared.config, prepared.learner, prepared.evaluator
    check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    title = f"{config.env.name} {config.algo.name}"
    logger = Logger(folder, members=config.members, total_steps=config.total_steps, title=title, show=show)
    if isinstance(evaluator, Evaluator):
        evaluator.progress = lambda share: logger.busy(f"evaluation {share:.0%}")
    try:
        session = Session(
            learner=learner,
            evaluator=evaluator,
            logger=logger,
            folder=folder,
            eval_every=config.eval.every,
            eval_episodes=config.eval.episodes,
            checkpoint_every=config.checkpoint.every,
            log_every=config.log.every,
            threshold=reward_threshold(config),
            stop_when_solved=config.stop_when_solved,
            diagnosis=Diagnosis(config.members) if config.log.diagnose else None,
            recorder=prepared.recorder,
            about={
                "env": config.env.id,
                "algo": config.algo.name,
                "seed": config.seed,
                "members": config.members,
                "processes": len(learner.parts) if isinstance(learner, Team) else 1,
                "total_steps": config.total_steps,
                "version": __version__,
                "machine": machine(),
            },
        )
        summary = session.run()
        logger.hparams(*_hparams(config, summary))
    finally:
        logger.close()
        prepared.close()
    run = Run(folder, summary)
    if show != "off":
        report(run, learner.obs_size, show)
    if "interrupted" in summary["status"]:
        raise KeyboardInterrupt
    return run


def machine() -> str:
    """The kind of machine and the versions that results depend on."""
    import platform

    import torch

    python = platform.python_version()
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {python}, torch {torch.__version__}"


def use_threads() -> None:
    """Use one thread a process: matrices are so small that a second one costs more than it does."""
    import torch
    from threadpoolctl import threadpool_limits

    torch.set_num_threads(1)
    threadpool_limits(1, "blas")  # NumPy's


def report(run: Run, obs_size: int, show: str) -> None:
    """Print the table at the end of a run and the commands that show more of it."""
    import shutil

    from rlkit.results import Result, final_table

    summary = run.summary
    found = shutil.which("python")
    python = "python" if found and os.path.samefile(found, sys.executable) else shlex.quote(sys.executable)
    act = f'import rlkit; print(rlkit.load("{run.folder}").act([0] * {obs_size}))'
    columns = (summary[name] for name in ("eval_return", "status", "env_steps", "solved_at_steps"))
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


def compose(overrides: list[str]) -> tuple[DictConfig, Path]:
    """Compose a configuration from overrides such as `algo=ppo`; return it and the run directory it names.

    Raises:
        rlkit.build.ConfigError: a name or a value is wrong; one sentence says which.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module
    from hydra.errors import HydraException
    from omegaconf import OmegaConf, open_dict
    from omegaconf.errors import OmegaConfBaseException

    from rlkit.conf import schema
    from rlkit.conf.schema import ConfigError
    from rlkit.faults import check_arguments, sentence

    schema.register()
    check_arguments(overrides)
    try:
        with initialize_config_module("rlkit.conf", version_base="1.3"):
            config = hydra_compose("config", overrides, return_hydra_config=True)
            if OmegaConf.is_missing(config.env, "id"):  # before the folder, which is named after it
                raise ConfigError("env.id must be given, as in env=gym env.id=LunarLander-v3")
            folder = Path(config.hydra.run.dir)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(sentence(error)) from error
    with open_dict(config):
        del config["hydra"]
    return config, folder


def run(*, folder: str | Path | None = None, show: str = "off", **settings: Any) -> Run:
    """Train from Python: `run(env="CartPole", algo="grpo", total_steps=50_000)`.

    Args:
        folder: the run directory; None makes one under `runs/`, as the command line does.
        show: console output, "auto", "rich", "plain" or "off".
        settings: configuration keys; a dotted one is written with double underscores (`algo__clip=0.1`), or the whole
            dictionary is unpacked: `**{"algo.clip": 0.1}`. A list selects stabilisers: `stabilizer=["ref_kl"]`.

    Raises:
        rlkit.build.ConfigError: a name or a value is wrong; one sentence says which.
    """
    from omegaconf import OmegaConf

    overrides = [f"{name.replace('__', '.')}={literal(value)}" for name, value in settings.items()]
    config, named = compose(overrides)
    target = Path(folder) if folder is not None else named
    check_folder(target)
    prepared = prepare(config)
    (target / ".hydra").mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, target / ".hydra" / "config.yaml")
    OmegaConf.save(OmegaConf.create(overrides), target / ".hydra" / "overrides.yaml")
    return execute(prepared, target, show)


def literal(value: Any) -> str:
    """Write a Python value in Hydra's override grammar."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(literal(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{literal(v)}" for name, v in value.items()) + "}"
    if isinstance(value, str) and not re.fullmatch(r"[\w.:/-]+", value):
        return "'" + re.sub(r"(\\*)'", r"\1\1\'", value) + "'"
    return str(value)


HELP = """Train PPO or GRPO on a Gymnasium environment.

  python -m rlkit.train env=CartPole algo=grpo                    one run with the pair's tuned settings
  python -m rlkit.train env=CartPole algo=ppo members=20 seed=100 twenty independent seeds at once
  python -m rlkit.train env=gym env.id=FrozenLake-v1 algo=ppo     any Gymnasium id, also module:Id-v0
  python -m rlkit.train -m env=CartPole algo=ppo,grpo             a sweep; --multirun is the long form
  python -m rlkit.train -m algo=ppo,grpo hydra/launcher=joblib    its jobs at once, one for each core
  python -m rlkit.train env=CartPole 'stabilizer=[ref_kl]' stabilizer.ref_kl.coef=0.05

Choices:
"""


def help_page() -> str:
    """The text of `--help`: examples, the choices of each group, every key."""
    import textwrap

    from rlkit.conf.schema import help_text, options

    groups = "\n".join(
        textwrap.fill(f"{group:<12} {', '.join(options(group))}", 110, initial_indent="  ", subsequent_indent=" " * 15)
        for group in ("env", "algo", "stabilizer", "tuned", "experiment")
    )
    notes = (
        "\n\nKeys (`name=default meaning (range)`; steps are environment steps of one member; tuned settings come"
        "\nbefore the defaults shown here, and what you give on the command line before both):\n"
    )
    tail = (
        "\n\nHydra's own options: --hydra-help. Exit status: 0 done, 1 a fault or a failed job of a sweep,"
        "\n2 a wrong configuration (nothing ran), 130 Ctrl-C."
    )
    return HELP + groups + notes + help_text() + tail


def main() -> int:
    """Entry point of `python -m rlkit.train`; returns the exit status."""
    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        print(help_page())
        return 0
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from rlkit.conf.schema import ConfigError
    from rlkit.faults import check_arguments, sentence

    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra then raises, and the sentences below are ours
    sys.argv[1:] = sorted(arguments, key=lambda a: a not in ("-m", "--multirun"))  # argparse wants overrides together
    try:
        check_arguments(arguments)
        return _run_hydra(arguments)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except ConfigError as error:
        return complain(str(error), EXIT_CONFIG)
    except (HydraException, OmegaConfBaseException) as error:
        return complain(sentence(error), EXIT_CONFIG)
    except BrokenPipeError:  # the reader of the output has gone, as `head` does; Python's last flush is to stay quiet
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return complain("the output cannot be written: its reader has closed the pipe", EXIT_FAULT)


def _run_hydra(arguments: list[str]) -> int:
    """Train one run, or, with an option of Hydra's such as -m, do what it asks for.

    Hydra makes the run directory before it calls the job, so a single run is checked and built before that.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig

    from rlkit import sweep
    from rlkit.conf import schema

    schema.register()
    sweep.check_launcher(arguments)
    asks = any(argument in ("-c", "-i") or argument.startswith(("--cfg", "--info")) for argument in arguments)
    if sweep.is_sweep(arguments) and not asks:
        return sweep.launch()

    from rlkit.collect import NonFiniteError  # not sooner: it loads torch, which a sweep needs in its jobs alone

    failures: list[Exception] = []
    prepared: Prepared | None = None
    if not any(argument.startswith("-") for argument in arguments):
        config, folder = compose(arguments)
        check_folder(folder)
        prepared = prepare(config)

    @hydra.main(version_base="1.3", config_path="pkg://rlkit.conf", config_name="config")
    def job(config: DictConfig) -> None:
        try:
            execute(prepared or prepare(config), Path(HydraConfig.get().runtime.output_dir))
        except Exception as error:  # raised below: Hydra would print a line of its own
            failures.append(error)

    job()
    if failures and isinstance(failures[0], NonFiniteError):
        return complain(str(failures[0]), EXIT_FAULT)
    if failures:
        raise failures[0]
    return 0


def complain(faults: str, status: int) -> int:
    """Print faults, one on a line, to standard error; return the exit status."""
    print("\n".join(f"rlkit: {line}" for line in faults.split("\n")), file=sys.stderr)
    return status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before anything has begun
        sys.exit(EXIT_INTERRUPTED)
