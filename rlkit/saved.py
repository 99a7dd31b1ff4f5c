"""A run as it lies on disk: its configuration and what its members have learned."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlkit.conf.schema import ALGO_SCHEMAS, Config, ConfigError

if TYPE_CHECKING:  # a report reads settings without torch
    from omegaconf import DictConfig, ListConfig
    from torch import Tensor

    from rlkit.policy import Policy

SETTINGS, OVERRIDES = Path(".hydra", "config.yaml"), Path(".hydra", "overrides.yaml")  # as Hydra names them

# which state of a run -> its file, and the column of summary.json that says which member is the best in it
CHECKPOINTS = {"last": ("checkpoint.pt", "eval_return"), "best": ("best.pt", "eval_peak")}


@dataclass(frozen=True)
class SavedRun:
    """A run that has a checkpoint, finished or not.

    Attributes:
        folder: the run directory.
        checkpoint: "last", or "best": each member at its best evaluation during training.
        state: the policies' state; the first axis of every tensor is the members'.
        summary: what `summary.json` holds; nothing where the run has not ended.
        env_steps: that each member had made in this state, [M]; empty where that is not known.
    """

    folder: Path
    checkpoint: str
    config: Config
    state: dict[str, Tensor]
    summary: dict[str, Any]
    env_steps: Sequence[int] = ()

    @classmethod
    def open(cls, path: str | Path, checkpoint: str = "last") -> SavedRun:
        """Read a run.

        Raises:
            FileNotFoundError: there is no run at `path`, or it has no such checkpoint.
            ValueError: a file is damaged, of another version, or of another environment.
        """
        from rlkit.keepers.checkpoint import DamagedError, load

        if checkpoint not in CHECKPOINTS:
            raise ValueError(f"checkpoint is {checkpoint!r}; it must be one of {', '.join(CHECKPOINTS)}")
        folder = Path(path)
        config, summary = read_config(folder), folder / "summary.json"
        try:
            known = json.loads(summary.read_text()) if summary.is_file() else {}
        except ValueError as error:
            raise ValueError(f"{summary} is damaged: {error}") from error
        if not isinstance(known, dict):
            raise ValueError(f"{summary} is damaged: it holds no names")
        file = folder / CHECKPOINTS[checkpoint][0]
        try:
            learner = load(file, env=config.env.id, algo=config.algo.name)["learner"]
        except DamagedError as error:
            raise DamagedError(f"{error}{_instead(folder, checkpoint)}") from error
        steps = learner["collector"]["env_steps"].tolist() if "collector" in learner else ()  # of an older best.pt
        return cls(folder, checkpoint, config, learner["policy"], known, steps)

    def member(self, wanted: int | str, others: str = "best") -> int:
        """Return the number of a member, given as it is or as "best": highest mean return in the final evaluation.

        For the checkpoint "best" that is the member with the highest evaluation during training.

        Args:
            others: words that may be given, for the error.

        Raises:
            FileNotFoundError: the best is wanted of a run that has not ended.
            ValueError: there is no such member.
        """
        members = self.config.members
        if wanted == "best":
            if not self.summary:
                file = self.folder / "summary.json"
                raise FileNotFoundError(f"{file} does not exist, so no member is known as best: give its number")
            returns = np.array(self.summary[CHECKPOINTS[self.checkpoint][1]], float)
            if np.isnan(returns).all():
                raise ValueError("no member is known as best, since no return is finite: give its number")
            return int(np.nanargmax(returns))
        if isinstance(wanted, bool) or not isinstance(wanted, int) or not 0 <= wanted < members:
            raise ValueError(f"member is {wanted!r}; it must be {others} or a number from 0 to {members - 1}")
        return wanted

    def steps(self, member: int) -> int | None:
        """Environment steps that a member had made in this state; None where that is not known."""
        return self.env_steps[member] if self.env_steps else None

    def state_of(self, member: int) -> str:
        """A member and the state it is in, in words."""
        steps = self.steps(member)
        at = "" if steps is None else f" at {steps:,} steps"
        return f"member {member} (seed {self.config.seed + member}), {self.checkpoint} checkpoint{at}"

    def parts(self) -> list[range]:
        """Members as the processes that trained them had them; each evaluated those of its own at once."""
        from rlkit.team import parts

        return parts(self.config.members, self.summary.get("processes", 1))

    def share(self, members: range) -> Config:
        """The configuration of some of the members, as if they were the run."""
        return replace(self.config, seed=self.config.seed + members.start, members=len(members))

    def policy(self, members: range) -> tuple[Policy, Any]:
        """Build the policy of some members as they were saved; return it with its action map.

        Raises:
            ConfigError: the checkpoint does not fit the environment or the networks of the configuration.
        """
        from rlkit.build import build_policy

        policy, actions = build_policy(self.share(members))
        fill(policy, self.state, members, str(self.folder / CHECKPOINTS[self.checkpoint][0]))
        return policy, actions


def _instead(folder: Path, damaged: str) -> str:
    """Say what can be read where a checkpoint is damaged."""
    from rlkit.keepers.checkpoint import load, older

    def whole(file: Path) -> bool:
        try:
            load(file)
        except (FileNotFoundError, ValueError):
            return False
        return True

    other = next(name for name in CHECKPOINTS if name != damaged)
    ways = [f"--checkpoint {other} reads {CHECKPOINTS[other][0]}"] if whole(folder / CHECKPOINTS[other][0]) else []
    kept = next(filter(whole, older(folder)), None) if damaged == "last" else None
    if kept is not None:
        ways.append(f"python -m rlkit.train resume={folder} goes on from {kept.name}")
    return "; ".join(["", *ways])


def add_options(parser: argparse.ArgumentParser, member: str) -> None:
    """Let a command line name a run, a member and a state of it.

    Args:
        member: the default, "best" or "all".
    """
    names = "a number, best, or all" if member == "all" else "a number, or best"
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("--member", type=_member, default=member, help=f"{names} ({member})")
    parser.add_argument(
        "--checkpoint", choices=tuple(CHECKPOINTS), default="last", help="which state of the run (last)"
    )


def _member(text: str) -> int | str:
    """A number where it is one; `SavedRun.member` says what is wrong with other words."""
    try:
        return int(text)
    except ValueError:
        return text


def read_settings(folder: Path) -> DictConfig:
    """What a run was made with, as it lies in its `.hydra/config.yaml`; whatever version wrote it.

    Raises:
        FileNotFoundError: there is no such file, hence no run.
        ConfigError: it is damaged.
    """
    from omegaconf import DictConfig

    file = folder / SETTINGS
    if not file.is_file():
        below = [place for depth in ("*", "*/*", "*/*/*") for place in sorted(folder.glob(f"{depth}/{SETTINGS}"))]
        hint = f"; {len(below)} lie below it, such as {below[-1].parent.parent}" if below else ""
        raise FileNotFoundError(f"there is no run at {folder}: {file} does not exist{hint}")
    settings = _read_yaml(file)
    if not isinstance(settings, DictConfig):
        raise ConfigError(f"{file} is damaged: it holds a list, where keys and values are due")
    if not settings:
        raise ConfigError(f"{file} is damaged: it is empty")
    return settings


def read_config(folder: Path) -> Config:
    """The configuration of a run, checked.

    Raises:
        FileNotFoundError: there is no run.
        ConfigError: its file is damaged, or holds what this version does not know or cannot run; a line for each fault.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from rlkit.build import to_config

    settings, file = read_settings(folder), folder / SETTINGS
    try:
        algo = OmegaConf.select(settings, "algo.name")
        env = OmegaConf.select(settings, "env.id")
    except OmegaConfBaseException:
        algo = env = None
    if algo not in ALGO_SCHEMAS or not isinstance(env, str):
        raise ConfigError(
            f"{file} is damaged: it names no environment or none of the algorithms {', '.join(ALGO_SCHEMAS)}"
        )
    try:
        return to_config(settings)
    except ConfigError as error:
        raise ConfigError("\n".join(f"{file}: {line}" for line in str(error).split("\n"))) from error


def read_overrides(folder: Path) -> list[str]:
    """The overrides that a run was begun with; none where they are not known.

    Raises:
        ConfigError: the file of them is damaged.
    """
    from omegaconf import ListConfig

    file = folder / OVERRIDES
    overrides = _read_yaml(file) if file.is_file() else None
    if overrides and not isinstance(overrides, ListConfig):
        raise ConfigError(f"{file} is damaged: it holds keys and values, where a list is due")
    return [str(override) for override in overrides or []]


def _read_yaml(file: Path) -> DictConfig | ListConfig:
    """What a YAML file holds.

    Raises:
        ConfigError: it cannot be read.
    """
    from omegaconf import OmegaConf

    try:
        return OmegaConf.load(file)
    except Exception as error:  # YAML and OmegaConf raise many kinds
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        if getattr(error, "problem", None) and getattr(error, "problem_mark", None):  # YAML's own, over several lines
            reason = f"{error.problem}, line {error.problem_mark.line + 1}"  # type: ignore[attr-defined]
        raise ConfigError(f"{file} is damaged: {reason}") from error


def fill(policy: Policy, state: dict[str, Tensor], members: range, name: str = "the state") -> None:
    """Give a policy of some members what a state of all holds of them.

    Args:
        name: what is read from, for the error.

    Raises:
        ConfigError: the state is one of other networks or observations.
    """
    try:
        policy.load_state_dict({key: x[members.start : members.stop] for key, x in state.items()})
    except RuntimeError as error:
        said = [line.strip() for line in str(error).splitlines()]
        reason = said[1] if said[1:] else said[0]
        raise ConfigError(f"{name} does not fit the networks that the configuration describes: {reason}") from error
