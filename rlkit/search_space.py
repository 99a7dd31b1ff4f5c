"""What a search varies and what it keeps: the composed configuration, the search space, and what both must obey."""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    distribution_to_json,
)
from yaml import YAMLError  # type: ignore[import-untyped]

from rlkit.build import to_config
from rlkit.conf.schema import ALGO_SCHEMAS, Config, ConfigError, allowed, keys, type_in_words, within
from rlkit.faults import GROUPS, no_such_key
from rlkit.train import compose

MEMBERS = 8  # seeds that judge a configuration, unless `members` is given
FIRST_PUBLISHED_SEED = 100  # results are measured on seeds from here on, so a search never sees them
# What is the same in all trials of a study, or they would not compare: a key, or a room with all its keys.
# fmt: off
FIXED = (
    "env.name", "env.id", "env.kwargs", "algo.name", "seed", "members", "total_steps", "device", "stop_when_solved",
    "eval", "log", "checkpoint",
)
# What a file of settings leaves to the command line that uses it.
NOT_SETTINGS = ("env.name", "env.id", "algo.name", "seed", "members", "device", "eval", "log", "checkpoint")
# fmt: on
FORM = "{low: ..., high: ...}, with log: true or step: ..., or {choices: [...]}"


@dataclass(frozen=True)
class Plan:
    """What a study searches and how it judges; only calls with equal plans may share one.

    Args:
        config: the composed configuration, of which trials vary the keys in `space`.
        defaults: that of the environment and the algorithm alone, without tuned settings.
        metric: the entry of a run's summary whose interquartile mean over members is a trial's value.
    """

    config: DictConfig
    defaults: DictConfig
    space: dict[str, BaseDistribution]
    metric: str

    @property
    def seeds(self) -> str:
        """The seeds of the members in words."""
        first, count = self.config.seed, self.config.members
        return f"seeds {first} to {first + count - 1}" if count > 1 else f"seed {first}"

    def configure(self, parameters: dict[str, Any]) -> DictConfig:
        """The configuration of a trial."""
        config = copy.deepcopy(self.config)
        for key, value in parameters.items():
            OmegaConf.update(config, key, _decoded(value), merge=False)
        return config

    def settings(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """What a trial sets, by full key: all that was searched or is not as in the defaults, and its total_steps."""
        defaults = _flat(self.defaults)
        return {
            key: value
            for key, value in _flat(self.configure(parameters)).items()
            if not _within(key, NOT_SETTINGS)
            and (key in self.space or key == "total_steps" or key not in defaults or defaults[key] != value)
        }

    def facts(self) -> dict[str, Any]:
        """All that two trials must share to compare, ready for JSON: each key's value, or how it is searched."""
        searched = {key: json.loads(distribution_to_json(entry)) for key, entry in self.space.items()}
        return {**_flat(self.config), **searched, "--metric": self.metric}


def make_plan(overrides: Sequence[str], space: Path | None, metric: str) -> Plan:
    """Compose the configuration, read the search space, and check both. A key that the overrides give is not searched.

    Raises:
        ConfigError: a name or a value is wrong; one sentence says which.
    """
    names = [override.partition("=")[0].lstrip("+~") for override in overrides]
    config, _ = compose([*([] if "members" in names else [f"members={MEMBERS}"]), *overrides])
    basis = [o for o, name in zip(overrides, names, strict=True) if name in ("env", "algo", "env.id")]
    defaults, _ = compose([*basis, "tuned=none"])
    _check_seeds(config)
    given = [name for name in names if name not in GROUPS]
    entries = {key: entry for key, entry in _read(space, config.algo.name).items() if not _within(key, given)}
    if not entries:
        raise ConfigError("nothing is left to search: the command line gives every key of the search space")
    plan = Plan(config, defaults, {key: distribution(key, entry, config) for key, entry in entries.items()}, metric)
    try:  # a fault both here and below is one that no trial can be without
        to_config(plan.configure({key: _first(entry) for key, entry in plan.space.items()}))
    except ConfigError:
        to_config(config)
    return plan


def _check_seeds(config: DictConfig) -> None:
    last = config.seed + config.members - 1
    if last >= FIRST_PUBLISHED_SEED:
        raise ConfigError(
            f"seed is {config.seed} and members is {config.members}, which takes seeds up to {last}; a search must "
            f"stay below {FIRST_PUBLISHED_SEED}, since published results are measured from there on"
        )


def _read(path: Path | None, algo: str) -> dict[str, Any]:
    """Read a search space, key -> entry; that of the algorithm if there is no path."""
    file = path or files("rlkit.conf").joinpath("search", f"{algo}.yaml")
    try:
        entries = OmegaConf.to_container(OmegaConf.create(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"--space is {path}, which cannot be read: {error.strerror}") from error
    except (UnicodeError, YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"--space is {path}, which cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(entries, dict):
        raise ConfigError(f"--space is {path}, which holds a list; it must hold a line `key: {{...}}` for each key")
    return {str(key): entry for key, entry in entries.items()}


def distribution(key: str, entry: Any, config: DictConfig) -> BaseDistribution:
    """An entry of a search space in Optuna's form, checked against the type and the range of the key.

    Raises:
        ConfigError: with a sentence that names the key.
    """
    if _within(key, FIXED):
        raise ConfigError(f"{key} is in the search space, but trials compare only if it is the same in all of them")
    names = set(entry) if isinstance(entry, dict) else set()
    listed = names == {"choices"} and isinstance(entry["choices"], list)
    if not listed and not {"low", "high"} <= names <= {"low", "high", "log", "step"}:
        raise ConfigError(f"{key} is {entry} in the search space; it must be {FORM}")
    values = entry["choices"] if listed else [entry["low"], entry["high"]]
    held = [_checked(key, value, config) for value in values]
    if not listed and not all(isinstance(value, (int, float)) for value in held):
        raise ConfigError(
            f"{key} is {entry} in the search space, but words have no order; it must be {{choices: [...]}}"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Optuna would go on with another range
            if listed:
                return CategoricalDistribution([json.dumps(v) if isinstance(v, list) else v for v in values])
            return (IntDistribution if all(isinstance(v, int) for v in held) else FloatDistribution)(**entry)
    except UserWarning as error:
        rule = "choices are words, numbers, true, false, null, or lists" if listed else "step must divide high - low"
        raise ConfigError(f"{key} is {entry} in the search space; {rule}") from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{key} is {entry} in the search space: {error}") from error


def _checked(key: str, value: Any, config: DictConfig) -> Any:
    """A value of a search space as the key holds it; ConfigError if the key, its type or its range forbids it."""
    fields = {name: f for name, f, _ in keys(Config(algo=ALGO_SCHEMAS[config.algo.name]()))}
    varied = copy.deepcopy(config)
    try:
        OmegaConf.update(varied, key, value, merge=False)
    except (ConfigKeyError, ConfigAttributeError) as error:
        raise ConfigError(f"in the search space, {no_such_key(key)}") from error
    except OmegaConfBaseException as error:
        kind = type_in_words(fields[key]) if key in fields else "of another type"
        raise ConfigError(f"{key} is {value!r} in the search space; it must be {kind}") from error
    held = OmegaConf.select(varied, key)
    bounds = fields[key].metadata["bounds"] if key in fields else {}
    if isinstance(held, float) and not math.isfinite(held):
        raise ConfigError(f"{key} is {value} in the search space; it must be finite")
    if held is not None and not within(held, bounds):
        raise ConfigError(f"{key} is {value} in the search space; it must be {allowed(bounds)}")
    return held


def _decoded(value: Any) -> Any:
    """A parameter as the configuration holds it: Optuna stores a list as text."""
    return json.loads(value) if isinstance(value, str) and value.startswith("[") else value


def _first(entry: Any) -> Any:
    """The first choice, or the least value."""
    return entry.choices[0] if isinstance(entry, CategoricalDistribution) else entry.low


def _within(key: str, names: Sequence[str]) -> bool:
    """Whether a key is one of the names, or in the room of one."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _flat(config: DictConfig) -> dict[str, Any]:
    """Every leaf of a configuration by its full key, in plain types."""

    def leaves(node: dict[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, value in node.items():
            if isinstance(value, dict) and value:
                yield from leaves(value, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", value

    container = OmegaConf.to_container(config, resolve=True)
    assert isinstance(container, dict)
    return dict(leaves(container, ""))
