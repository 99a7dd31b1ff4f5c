"""Train from the command line: `python -m rlkit.train env=CartPole algo=grpo`."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig

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


def execute(raw: DictConfig, folder: Path, show: str = "auto") -> Run:
    """Train the configuration `raw` in the directory `folder`.

    Args:
        raw: a composed configuration.
        folder: the run directory; it is made if need be.
        show: console output, "auto", "rich", "plain" or "off".

    Raises:
        rlkit.build.ConfigError: the configuration cannot run; nothing has been started.
        KeyboardInterrupt: after Ctrl-C, once checkpoint and summary are written.
    """
    from rlkit.build import build_evaluator, build_learner, reward_threshold, to_config
    from rlkit.metrics import Logger
    from rlkit.session import FINAL_EPISODES, Session, write_json

    config = to_config(raw)
    use_threads(config)
    learner = build_learner(config)
    evaluator = build_evaluator(config, FINAL_EPISODES)
    folder.mkdir(parents=True, exist_ok=True)
    title = f"{config.env.name} {config.algo.name}"
    logger = Logger(folder, members=config.members, total_steps=config.total_steps, title=title, show=show)
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
        )
        result = session.run()
        head = {
            "env": config.env.id,
            "algo": config.algo.name,
            "seed": config.seed,
            "members": config.members,
            "total_steps": config.total_steps,
        }
        summary = {**head, **result}
        write_json(folder / "summary.json", summary)
        logger.hparams(*_hparams(config, summary))
    finally:
        logger.close()
        learner.collector.close()
        evaluator.close()
    run = Run(folder, summary)
    if show != "off":
        report(run, show)
    if "interrupted" in summary["status"]:
        raise KeyboardInterrupt
    return run


def use_threads(config: Any) -> None:
    """Use one thread where the matrices of an update are too small to share: a second one then costs more than it does."""
    import torch

    torch.set_num_threads(1)


def report(run: Run, show: str) -> None:
    """Print the table at the end of a run and the commands that show more."""
    from rlkit.metrics import final_table

    final_table(run.summary, run.folder, show=show)


def _hparams(config: Any, summary: dict[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
    """The run's settings and final numbers for TensorBoard's HPARAMS tab."""
    from rlkit.conf.schema import keys
    from rlkit.metrics import interquartile_mean

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
    from omegaconf import open_dict
    from omegaconf.errors import OmegaConfBaseException

    from rlkit.build import ConfigError
    from rlkit.conf import schema

    schema.register()
    check_tuned(overrides)
    try:
        with initialize_config_module("rlkit.conf", version_base="1.3"):
            config = hydra_compose("config", overrides, return_hydra_config=True)
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

    overrides = [f"{name.replace('__', '.')}={_literal(value)}" for name, value in settings.items()]
    config, named = compose(overrides)
    target = Path(folder) if folder is not None else named
    (target / ".hydra").mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, target / ".hydra" / "config.yaml")
    OmegaConf.save(OmegaConf.create(overrides), target / ".hydra" / "overrides.yaml")
    return execute(config, target, show)


def _literal(value: Any) -> str:
    """Write a Python value in Hydra's override grammar."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_literal(v) for v in value) + "]"
    return str(value)


def check_tuned(overrides: list[str]) -> None:
    """Refuse a misspelt `tuned=`, which Hydra would pass over because the default entry is optional."""
    from rlkit.build import ConfigError
    from rlkit.conf.schema import options

    for override in overrides:
        name, _, value = override.partition("=")
        for wanted in value.split(",") if name == "tuned" else ():
            if wanted not in options("tuned"):
                raise ConfigError(_unknown("tuned", wanted, options("tuned")))


def _unknown(key: str, value: str, known: list[str]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(value, known, 1, 0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{key} is {value!r}; it must be one of {', '.join(known)}{hint}"


def sentence(error: Exception) -> str:
    """Say what Hydra or OmegaConf found wrong in one sentence: the key, the value, and what would do."""
    import re
    from difflib import get_close_matches

    from rlkit.conf.schema import Config, GRPOConfig, PPOConfig, keys, options

    text = str(error)
    cause = str(error.__cause__ or "")
    missing = re.search(r"Could not find '(?P<group>\w+)/(?P<name>[^']+)'", text)
    if missing and missing["group"] in ("env", "algo", "stabilizer", "tuned", "experiment"):
        return _unknown(missing["group"], missing["name"], options(missing["group"]))
    full_key = re.search(r"full_key: (\S+)", f"{text}\n{cause}")
    typed = re.search(r"Value '(?P<value>.*)' .*could not be converted to (?P<type>\w+)", f"{text}\n{cause}")
    if typed and full_key:
        return f"{full_key[1]} is {typed['value']!r}; it must be of type {typed['type'].lower()}"
    absent = re.search(r"Could not override '([^']+)'", text)
    if absent:
        known = {name for algo in (PPOConfig(), GRPOConfig()) for name, _, _ in keys(Config(algo=algo))}
        known |= {"env", "algo", "stabilizer", "tuned", "experiment"}
        near = get_close_matches(absent[1], sorted(known - {absent[1]}), 1, 0.6)
        hint = f"; did you mean {near[0]}?" if near else "; --help lists the keys"
        return f"{absent[1]} is not a key of this configuration{hint}"
    return text.strip().split("\n")[0]


HELP = """Train PPO or GRPO on a Gymnasium environment.

  python -m rlkit.train env=CartPole algo=grpo                    one run with the pair's tuned settings
  python -m rlkit.train env=CartPole algo=ppo members=20 seed=100 twenty independent seeds at once
  python -m rlkit.train env=gym env.id=LunarLander-v3 algo=ppo    any Gymnasium id, also module:Id-v0
  python -m rlkit.train -m env=CartPole algo=ppo,grpo             a sweep; --multirun is the long form
  python -m rlkit.train env=CartPole 'stabilizer=[ref_kl]' stabilizer.ref_kl.coef=0.05

Choices:
"""


def help_page() -> str:
    """The text of `--help`: examples, the choices of each group, every key."""
    from rlkit.conf.schema import help_text, options

    groups = "\n".join(
        f"  {group:<12} {', '.join(options(group))}" for group in ("env", "algo", "stabilizer", "tuned", "experiment")
    )
    notes = (
        "\n\nKeys (`name=default meaning (range)`; steps are environment steps of one member; tuned settings come before"
        "\nthe defaults shown here, and what you give on the command line before both):\n"
    )
    tail = "\n\nHydra's own options: --hydra-help. Exit status: 0 done, 1 a fault, 2 a wrong configuration, 130 Ctrl-C."
    return HELP + groups + notes + help_text() + tail


def main() -> int:
    """Entry point of `python -m rlkit.train`; returns the exit status."""
    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        print(help_page())
        return 0
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from rlkit.build import ConfigError
    from rlkit.collect import NonFiniteError
    from rlkit.conf import schema

    @hydra.main(version_base="1.3", config_path="pkg://rlkit.conf", config_name="config")
    def job(config: DictConfig) -> None:
        execute(config, Path(HydraConfig.get().runtime.output_dir))

    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra then raises, and the sentences below are ours
    schema.register()
    try:
        check_tuned(arguments)
        job()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        lines = str(error) if isinstance(error, ConfigError) else sentence(error)
        print("\n".join(f"rlkit: {line}" for line in lines.split("\n")), file=sys.stderr)
        return EXIT_CONFIG
    except NonFiniteError as error:
        print(f"rlkit: {error}", file=sys.stderr)
        return EXIT_FAULT
    return 0


if __name__ == "__main__":
    sys.exit(main())
