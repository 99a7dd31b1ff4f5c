"""From configuration to objects: the only room besides the entry points that sees a config."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields, is_dataclass
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from rlkit.advantage import CRITIC, ESTIMATORS, GROUPS, Estimator, find_estimator
from rlkit.aggregation import AGGREGATIONS
from rlkit.algos import ALGORITHMS
from rlkit.conf.schema import (
    ALGO_SCHEMAS,
    AlgoConfig,
    AnnealConfig,
    Config,
    ConfigError,
    GRPOConfig,
    PPOConfig,
    allowed,
    choice,
    conflicts,
    not_a_number,
    range_problems,
    within,
)
from rlkit.conf.typed import typed, whole
from rlkit.cores import critic_has_a_core
from rlkit.envs import MaskedVectorEnv
from rlkit.evaluate import Evaluator
from rlkit.exploration import EXPLORATIONS, Exploration
from rlkit.faults import missing, no_such_key, sentence
from rlkit.keepers import keep_best
from rlkit.keepers.keeper import Keeper
from rlkit.link import Chain, Link
from rlkit.loop import Learner, UpdateSettings
from rlkit.modules import load_module
from rlkit.normalize import Normalizer, RewardScale
from rlkit.optimizer import Adam
from rlkit.phases.phase import Phase
from rlkit.policy import Policy
from rlkit.schedules import SCHEDULES, Schedule
from rlkit.second_core import SecondCore
from rlkit.streams import Purpose, Streams

EVALUATION_LANES = 4096  # native evaluation environments at once, all members together
FOREIGN_EVALUATION_LANES = 16  # the same for Sync and Async, where each is an object or a process
NO_CLIP = 1e9  # a clip range that no ratio reaches; finite, since an infinite one times a zero advantage is nan
EVALUATION_LIMIT = 1_000  # steps of an evaluation episode where neither the environment nor a key has a limit
LONGEST_SHOWN = 2_000  # steps of an episode that is drawn


def to_config(raw: DictConfig) -> Config:
    """Turn a composed configuration into dataclasses and check it; no environment is made.

    Raises:
        ConfigError: with one line for each key that is unknown, out of range or at odds with another.
    """
    schema = ALGO_SCHEMAS.get(raw.algo.name, AlgoConfig)
    recipe = OmegaConf.get_type(raw, "algo")
    if recipe in ALGO_SCHEMAS.values() and schema in ALGO_SCHEMAS.values() and recipe is not schema:
        raise ConfigError(f"algo.name is {raw.algo.name}, but another algo is chosen; write algo={raw.algo.name}")
    try:
        merged = OmegaConf.merge(typed(Config(algo=schema())), raw)
        config: Config = OmegaConf.to_object(merged)  # type: ignore[assignment]
    except MissingMandatoryValue as error:
        raise ConfigError(missing(error.full_key)) from error
    except OmegaConfBaseException as error:
        raise ConfigError(sentence(error)) from error
    at_odds = (conflicts, _stabilizer_problems, _recipe_problems, _environment_problems)
    for checks in ((partial(_unknown_keys, raw),), (range_problems,), at_odds):
        faults = [fault for check in checks for fault in check(config)]
        if faults:  # later checks rely on those before them
            raise ConfigError("\n".join(faults))
    return config


def _unknown_keys(raw: DictConfig, known: Any, prefix: str = "") -> Iterator[str]:
    """Keys that `+key=value` or a YAML file of one's own added and that nothing reads."""
    for name in map(str, raw):
        if name not in {f.name for f in fields(known)}:
            yield no_such_key(f"{prefix}{name}")
        elif is_dataclass(getattr(known, name)):
            yield from _unknown_keys(raw[name], getattr(known, name), f"{prefix}{name}.")


def _stabilizer_problems(config: Config) -> Iterator[str]:
    for name, entry in config.stabilizer.items():
        if not isinstance(entry, dict):
            yield f"stabilizer.{name} is {entry!r}; it must hold keys and values"


def _recipe_problems(config: Config) -> Iterator[str]:
    algo = config.algo
    try:
        estimator = find_estimator(algo.advantage)
    except ValueError as error:
        yield str(error)
        return
    offered = CRITIC if ALGORITHMS[algo.name].critic else GROUPS
    if offered not in estimator.needs:
        fitting = sorted(name for name, other in ESTIMATORS.items() if offered in other.needs)
        yield (
            f"algo.advantage is {algo.advantage}, which needs {' or '.join(sorted(estimator.needs))}; "
            f"with algo={algo.name} it must be one of {', '.join(fitting)}"
        )
    else:
        tuned = choice("tuned", f"{config.env.name}_{algo.name}").get("algo", {}).get("advantage_args", {})
        yield from _argument_problems(algo.advantage, estimator, algo.advantage_args, tuned)


def _argument_problems(
    name: str, estimator: Estimator, arguments: dict[str, Any], tuned: Mapping[str, Any]
) -> Iterator[str]:
    wanted = estimator.parameters
    for key, given in arguments.items():
        value = _as_int(given, wanted[key]) if key in wanted else given
        bounds = estimator.bounds.get(key, {})
        if key not in wanted and tuned.get(key) == value:
            continue  # of the tuned settings' estimator, where the command line chose another
        if key not in wanted:
            takes = ", ".join(wanted) or "none"
            yield f"algo.advantage_args.{key} is {value!r}, but {name} has no argument {key}; it takes {takes}"
        elif not _fits(value, wanted[key]):
            yield f"algo.advantage_args.{key} is {value!r}; it must be of type {_kind(wanted[key])}"
        elif unlike := not_a_number(value):
            yield f"algo.advantage_args.{key} is {value}; it must be {unlike} {allowed(bounds)}".rstrip()
        elif not within(value, bounds):
            yield f"algo.advantage_args.{key} is {value}; it must be {allowed(bounds)}"


def _environment_problems(config: Config) -> Iterator[str]:
    from rlkit.envs import NATIVE, spec_of

    try:
        evaluation_limit(config)
    except ConfigError as error:
        yield str(error)
        return
    id, name = config.env.id, config.env.name
    spec = spec_of(id)
    if choice("env", name).get("id", id) != id:  # its tuned settings and its folder are not another environment's
        yield f"env.id is {id} and env is {name}; choose another environment by env=gym env.id={id}"
    elif config.env.backend == "native" and spec.id.removeprefix("rlkit/") not in NATIVE:
        yield f"env.backend is native, which {id} has not (only {', '.join(NATIVE)}); it must be sync or async"
    if config.stop_when_solved and spec.reward_threshold is None:
        yield f"stop_when_solved is true, but {id} has no reward threshold that says when it is solved"


def time_limit(config: Config) -> int | None:
    """The time limit of an episode: `algo.max_episode_steps`, or the environment's own; None if there is none.

    Raises:
        ConfigError: the environment does not exist, or GRPO would play an episode without a limit.
    """
    from rlkit.envs import spec_of

    try:
        spec = spec_of(config.env.id)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    limit = getattr(config.algo, "max_episode_steps", None) or spec.max_episode_steps
    if limit is None and config.algo.name == "grpo":
        raise ConfigError(
            f"{config.env.id} has no time limit, and a GRPO episode must end: algo.max_episode_steps must say after "
            "how many steps"
        )
    return limit


def evaluation_limit(config: Config, name: str = "eval.max_episode_steps") -> int:
    """The steps at which an evaluation episode is cut: `eval.max_episode_steps`, or the time limit of an episode.

    Without either it is `EVALUATION_LIMIT`: PPO can learn from an episode that never ends, but it cannot be summed up.

    Args:
        name: of the key, for the error.

    Raises:
        ConfigError: the key is above the time limit; or see `time_limit`.
    """
    limit, wanted = time_limit(config), config.eval.max_episode_steps
    if limit and wanted and wanted > limit:
        raise ConfigError(f"{name} is {wanted}; it must be <= {limit}, the time limit of {config.env.id} in this run")
    return wanted or limit or EVALUATION_LIMIT


def reward_threshold(config: Config) -> float | None:
    """The return at which Gymnasium calls the environment solved, or None."""
    from rlkit.envs import spec_of

    return spec_of(config.env.id).reward_threshold


def make_envs(
    config: Config, num_envs: int, mode: AutoresetMode, limit: int | None, render_mode: str | None = None
) -> MaskedVectorEnv:
    """Make `num_envs` environments of the configured kind; one that is looked at is always Gymnasium's own."""
    from rlkit.envs import make

    try:
        return make(
            config.env.id,
            num_envs,
            backend="sync" if render_mode else config.env.backend,
            autoreset_mode=mode,
            max_episode_steps=limit,
            flatten_images=config.env.flatten_images,
            action_mask=config.env.action_mask,
            members=min(config.members, num_envs),
            render_mode=render_mode,
            **config.env.kwargs,
        )
    except (ValueError, gymnasium.error.Error) as error:  # the latter where a package of the environment is missing
        raise ConfigError(f"env.id is {config.env.id}: {error}") from error
    except TypeError as error:
        if not config.env.kwargs:
            raise
        raise ConfigError(f"env.kwargs is {config.env.kwargs}: {error}") from error


def build_learner(config: Config) -> Learner:
    """Build the learner of a checked configuration, with its training environments."""
    from rlkit.envs.spaces import ActionSpec

    recipe: Any = ALGORITHMS[config.algo.name]
    algo = config.algo
    limit = time_limit(config)
    streams = Streams([config.seed + m for m in range(config.members)])
    envs = make_envs(config, config.members * config.num_envs, recipe.autoreset, limit)
    try:
        actions = ActionSpec.of(envs.single_action_space)
        if config.policy.squash:
            actions.check_squash()
        policy = make_policy(config, envs.single_observation_space.shape[0], actions, streams)  # type: ignore[index]
        schedules = {
            name: _schedule(getattr(algo.schedule, name), initial, config.members)
            for name, initial in (
                ("learning_rate", algo.learning_rate),
                ("clip", NO_CLIP if algo.clip is None else algo.clip),
                ("entropy_coef", algo.entropy_coef),
            )
        }
        context = {
            "policy": policy,
            "streams": streams,
            "members": config.members,
            "num_envs": config.num_envs,
            "total_steps": config.total_steps,
            "actions": actions,
            "num_epochs": algo.num_epochs,
            "num_minibatches": algo.num_minibatches,
            "initial_learning_rate": algo.learning_rate,
            "rollout_steps": algo.num_steps * config.num_envs if isinstance(algo, PPOConfig) else None,
            "episode_limit": limit,  # steps, or None
        }
        pieces = {name: _stabilizer(name, entry, context) for name, entry in config.stabilizer.items()}
        keepers: dict[str, Keeper] = {name: piece for name, piece in pieces.items() if isinstance(piece, Keeper)}
        if keepers and not config.eval.every:
            raise ValueError(
                f"eval.every is 0; with stabilizer={[*keepers][0]}, which judges evaluations, it must be >= 1"
            )
        if config.checkpoint.best and config.eval.every:
            keepers[keep_best.NAME] = keep_best.KeepBest(config.members)
        chain = _chain(config, recipe, schedules, pieces)
        optimizer = Adam(policy, betas=(algo.adam_betas[0], algo.adam_betas[1]), max_grad_norm=algo.max_grad_norm)
        horizon = algo.num_steps if isinstance(algo, PPOConfig) else limit
        settings = UpdateSettings(
            num_epochs=algo.num_epochs,
            num_minibatches=algo.num_minibatches,
            target_kl=algo.target_kl,
            gamma=algo.gamma,
            gae_lambda=algo.gae_lambda,
            aggregation=AGGREGATIONS[algo.aggregation],
            horizon=horizon or EVALUATION_LIMIT,
            clip_high=algo.clip_high,
            rho_max=algo.rho_max,
        )
        exploration = _exploration(config, policy)
        if exploration is not None:
            schedules["exploration"] = exploration.scale
        shape: dict[str, Any] = {}
        if isinstance(algo, PPOConfig):
            shape = {"num_steps": algo.num_steps}
        elif isinstance(algo, GRPOConfig):
            shape = {"group_size": algo.group_size, "groups": algo.groups}
        collector = recipe.collector(envs, actions, streams, exploration=exploration, **shape)
        second = _second_core(config, policy)
    except Exception as error:
        envs.close()
        if isinstance(error, ValueError):
            raise ConfigError(str(error)) from error
        raise
    return Learner(
        policy=policy,
        optimizer=optimizer,
        chain=chain,
        collector=collector,
        estimator=_estimator(algo),
        schedules=schedules,
        settings=settings,
        streams=streams,
        total_steps=config.total_steps,
        second=second,
        sync_every=algo.sync_every,
        keepers=keepers,
        phases={name: piece for name, piece in pieces.items() if isinstance(piece, Phase)},
    )


def _second_core(config: Config, policy: Policy) -> SecondCore | None:
    """The process that goes through the critic in updates, where it has a core."""
    if policy.critic is None or not isinstance(config.algo, PPOConfig) or not critic_has_a_core(config):
        return None
    return SecondCore(policy.critic, config.algo.num_steps * config.num_envs)


def evaluation_lanes(config: Config, episodes: int) -> int:
    """How many environments of each member are useful for `episodes` episodes of an evaluation."""
    most = EVALUATION_LANES if config.env.backend == "native" else FOREIGN_EVALUATION_LANES
    return int(np.clip(most // config.members, 1, episodes))


def build_evaluator(
    config: Config, episodes: int, lanes: int | None = None, render_mode: str | None = None
) -> Evaluator:
    """Build the evaluator, with environments of its own.

    Args:
        episodes: how many it will usually play.
        lanes: environments of each member; None: as many as are useful for `episodes`.
        render_mode: "rgb_array" or "human", of environments that are looked at; their episodes end after
            `LONGEST_SHOWN` steps at the latest.
    """
    from rlkit.envs.spaces import ActionSpec

    lanes = lanes or evaluation_lanes(config, episodes)
    limit = min(evaluation_limit(config), LONGEST_SHOWN if render_mode else sys.maxsize)
    envs = make_envs(config, config.members * lanes, AutoresetMode.DISABLED, limit, render_mode)
    cut_at = None if limit == time_limit(config) else limit
    return Evaluator(envs, ActionSpec.of(envs.single_action_space), config.members, cut_at)


def build_policy(config: Config) -> tuple[Policy, Any]:
    """Build the untrained policy of a configuration and its action map, without training environments."""
    from rlkit.envs.spaces import ActionSpec

    envs = make_envs(config, 1, AutoresetMode.DISABLED, time_limit(config))
    actions = ActionSpec.of(envs.single_action_space)
    obs_size = envs.single_observation_space.shape[0]  # type: ignore[index]
    envs.close()
    return make_policy(config, obs_size, actions, Streams([config.seed + m for m in range(config.members)])), actions


def make_policy(config: Config, obs_size: int, actions: Any, streams: Streams) -> Policy:
    """Make the stacked networks for observations [D = obs_size] and an action space."""
    settings = asdict(config.policy)
    critic_hidden = settings.pop("critic_hidden")
    critic = ALGORITHMS[config.algo.name].critic
    return Policy(
        obs_size,
        actions,
        streams.integers(Purpose.INIT, 0, 1)[:, 0].tolist(),
        critic_hidden=(critic_hidden or settings["hidden"]) if critic else None,
        normalizer=Normalizer(config.members, obs_size) if config.env.normalize_observation else None,
        **settings,
    )


def _schedule(config: AnnealConfig, initial: float, members: int) -> Schedule:
    rule: Callable[..., Schedule] = SCHEDULES[config.name]
    wanted = inspect.signature(rule).parameters
    return rule(initial, members, **{k: v for k, v in asdict(config).items() if k in wanted})


def _estimator(algo: AlgoConfig) -> Estimator:
    """The chosen estimator with those of the arguments that are its own."""
    estimator = find_estimator(algo.advantage)
    wanted = estimator.parameters
    return estimator.given(**{k: _as_int(v, wanted[k]) for k, v in algo.advantage_args.items() if k in wanted})


def _exploration(config: Config, policy: Policy) -> Exploration | None:
    """The chosen exploration; its scale is a schedule that the learner calls."""
    c = config.exploration
    if c.name == "none":
        return None
    kind = EXPLORATIONS[c.name]
    own = {key: value for key, value in asdict(c).items() if key in inspect.signature(kind).parameters}
    own["scale"] = _schedule(c.schedule, c.scale, config.members)
    return kind(
        members=config.members,
        num_envs=config.num_envs,
        obs_size=policy.obs_size,
        action_size=policy.action_size,
        **own,
    )


def _chain(config: Config, recipe: Any, schedules: dict[str, Schedule], pieces: Mapping[str, Any]) -> Chain:
    """The recipe's links, before them the reward links, after them those of the selected stabilisers."""
    algo = config.algo
    extra = {"value_coef": algo.value_coef, "value_clip": algo.value_clip} if isinstance(algo, PPOConfig) else {}
    chain: Chain = recipe.chain(
        schedules["clip"],
        schedules["entropy_coef"],
        clip_high=algo.clip_high,
        ratio_bound=algo.ratio_bound,
        normalize_advantage=algo.normalize_advantage,
        **extra,
    )
    links: dict[str, Link] = {}
    if config.env.normalize_reward:
        links["reward_scale"] = RewardScale(config.members, algo.gamma)
    links |= chain.links
    links |= {name: piece for name, piece in pieces.items() if isinstance(piece, Link)}
    return Chain(**dict(sorted(links.items(), key=lambda entry: entry[1].adds_rows)))  # rewards first, then rows


def _stabilizer(name: str, entry: dict[str, Any], context: dict[str, Any]) -> Link | Keeper | Phase:
    """Build one `stabilizer` entry: its `_target_` gets the entry's keys and what it names of the context."""
    entry = dict(entry)
    path = entry.pop("_target_", None)
    if path is None:
        raise ValueError(f"stabilizer.{name} has no _target_, the class of the link")
    module, _, class_name = str(path).rpartition(".")
    try:
        target = getattr(load_module(module), class_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"stabilizer.{name}._target_ is {path}, which cannot be imported: {error}") from error
    if not (isinstance(target, type) and issubclass(target, (Link, Keeper, Phase))):
        raise ValueError(f"stabilizer.{name} is a {path}, which is not a Link, a Keeper or a Phase")
    wanted = inspect.signature(target).parameters
    unknown = set(entry) - set(wanted)
    if unknown:
        raise ValueError(f"stabilizer.{name} has no key {', '.join(sorted(unknown))}; it has {', '.join(wanted)}")
    entry = {key: _as_int(value, wanted[key]) for key, value in entry.items()}
    for key, value in entry.items():
        if not _fits(value, wanted[key]):
            raise ValueError(f"stabilizer.{name}.{key} is {value!r}; it must be of type {_kind(wanted[key])}")
        if unlike := not_a_number(value):
            must = f"{unlike} {allowed(target.bounds.get(key, {}))}".rstrip()
            raise ValueError(f"stabilizer.{name}.{key} is {value}; it must be {must}")
        if value is not None and not within(value, target.bounds.get(key, {})):
            raise ValueError(f"stabilizer.{name}.{key} is {value}; it must be {allowed(target.bounds[key])}")
    given = {k: v for k, v in context.items() if k in wanted} | entry
    try:
        piece: Link | Keeper | Phase = target(**given)
    except ValueError as error:
        raise ValueError(f"stabilizer.{name}: {error}") from error
    return piece


def _kind(parameter: inspect.Parameter) -> str:
    """The type that a parameter says it has, or its default, in one word: `float` of `float | None`."""
    said = parameter.annotation if parameter.annotation is not parameter.empty else type(parameter.default)
    return said.__name__ if isinstance(said, type) else str(said).partition(" | ")[0]


def _as_int(value: Any, parameter: inspect.Parameter) -> Any:
    """A float without a fraction as an int, where the parameter is one: 1e2 is 100."""
    return whole(value) if _kind(parameter) == "int" else value


def _fits(value: Any, parameter: inspect.Parameter) -> bool:
    """Whether a value is of the kind of a parameter; a whole number is a number, true and false are not."""
    kind = _kind(parameter)
    if kind not in ("bool", "int", "float", "str"):
        return True
    if value is None:
        return parameter.default is None
    return type(value).__name__ == kind or (kind == "float" and type(value) is int)
