"""Every configuration key: its type, default, meaning and allowed range.

The YAML files of this folder are merged into these dataclasses, which check names and types; `problems` checks ranges
and what keys demand of each other. `python -m rlkit.train --help` is generated from here.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

LARGEST_FLOAT = 3.4028234e38  # what networks and coefficients are stored in is float32
LARGEST_INT = 2**63 - 1


class ConfigError(ValueError):
    """A configuration that cannot run; the message is one sentence for each fault, one on a line."""


def key(default: Any, doc: str, **bounds: Any) -> Any:
    """A dataclass field with a meaning and bounds: gt, ge, lt, le (numbers), choices (a tuple of values)."""
    metadata = {"doc": doc, "bounds": bounds}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    if dataclasses.is_dataclass(default) and isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class EnvConfig:
    name: str = key("???", "name of the environment's folder under runs/")
    id: str = key("???", "Gymnasium id, also `module:Id-v0`; choose `env=gym` to set it")
    backend: str = key("native", "who steps it", choices=("native", "sync", "async"))
    normalize_observation: bool = key(False, "divide observations by running statistics of each member")
    normalize_reward: bool = key(False, "divide rewards by the running deviation of the discounted return")
    flatten_images: bool = key(False, "accept images as observations, their pixels as one long vector")
    action_mask: bool = key(False, "take only actions that info['action_mask'] allows (Discrete, MultiDiscrete)")
    kwargs: dict[str, Any] = key({}, "arguments of the environment's constructor")


@dataclass
class EvalConfig:
    every: int = key(10_000, "steps of one member between evaluations; 0: only at the end", ge=0)
    episodes: int = key(20, "episodes of each evaluation during training (100 at the end)", ge=1)
    max_episode_steps: int | None = key(
        None,
        "steps at which an evaluation episode is cut; null: at the time limit (algo.max_episode_steps, or the "
        "environment's own), or at 1,000 where there is none",
        ge=1,
    )
    video: int = key(0, "record an episode of the best member at every n-th evaluation; 0: never", ge=0)


@dataclass
class CheckpointConfig:
    every: int = key(50_000, "steps of one member between checkpoints; 0: only at the end", ge=0)
    keep: int = key(1, "checkpoints kept: checkpoint.pt, and the last before it as checkpoint_<steps>.pt", ge=1)
    best: bool = key(True, "also keep best.pt: the policy of each member's best evaluation during training")


@dataclass
class LogConfig:
    every: int = key(2_000, "steps of one member between log entries; 0: evaluations only", ge=0)
    diagnose: bool = key(True, "tell, while it trains and at the end, what is wrong with the run and what helps")


@dataclass
class AnnealConfig:
    name: str = key("linear", "the rule", choices=("constant", "linear", "exponential"))
    final: float = key(0.0, "value at the end (linear), or in the limit (exponential)")
    until: float = key(1.0, "share of the run at which `final` is reached (linear)", gt=0, le=1)
    rate: float = key(
        3.0, "k of exp(-k progress) (exponential), of exp(k (target - entropy)) an iteration (target_entropy)", gt=0
    )


@dataclass
class ScheduleConfig(AnnealConfig):
    name: str = key(
        "constant",
        "the rule",
        choices=("constant", "linear", "exponential", "kl_driven", "kl_adaptive", "target_entropy"),
    )
    target: float = key(
        0.01,
        "KL at which the clip is 1 (kl_driven), KL aimed at (kl_adaptive), entropy aimed at (target_entropy), nats",
    )
    floor: float = key(0.02, "lowest value (kl_driven)", gt=0)
    min_factor: float = key(0.01, "lowest value as a multiple of the first (kl_adaptive, target_entropy)", gt=0, le=1)
    max_factor: float = key(10.0, "highest value as a multiple of the first (kl_adaptive, target_entropy)", ge=1)


@dataclass
class ExplorationConfig:
    """Offsets to the behaviour distribution (`rlkit.exploration`)."""

    name: str = key("none", "what offsets the policy while it collects", choices=("none", "linear", "correlated"))
    scale: float = key(3.0, "standard deviation of the offset, in nats of logit or units of raw action", ge=0)
    time_constant: float = key(10.0, "steps in which the correlation falls to 1/e (correlated)", gt=0)
    schedule: AnnealConfig = key(AnnealConfig, "of exploration.scale")


@dataclass
class SchedulesConfig:
    learning_rate: ScheduleConfig = key(ScheduleConfig, "of algo.learning_rate")
    clip: ScheduleConfig = key(ScheduleConfig, "of algo.clip")
    entropy_coef: ScheduleConfig = key(ScheduleConfig, "of algo.entropy_coef")


@dataclass
class AlgoConfig:
    """Keys that PPO and GRPO share."""

    name: str = key("", "the recipe", choices=("ppo", "grpo"))
    num_epochs: int = key(10, "passes over each batch", ge=1)
    num_minibatches: int = key(4, "parts each pass is cut into", ge=1)
    learning_rate: float = key(3e-4, "Adam's step size at the start", gt=0)
    gamma: float = key(0.99, "discount", gt=0, le=1)
    gae_lambda: float = key(0.95, "lambda of gae, grouped_gae and mixed", ge=0, le=1)
    clip: float | None = key(0.2, "clip range of the ratio; null: no clip (the plain policy gradient)", gt=0)
    clip_high: float | None = key(None, "upper clip range; null: as clip", gt=0)
    ratio_bound: float | None = key(
        None, "largest ratio that counts where the advantage is negative; null: unbounded", gt=1
    )
    entropy_coef: float = key(0.0, "weight of the entropy bonus", ge=0)
    normalize_advantage: bool = key(True, "standardise advantages in each minibatch")
    max_grad_norm: float | None = key(0.5, "largest gradient norm of a member; null: no limit", gt=0)
    target_kl: float | None = key(None, "end a member's update where KL exceeds 1.5 times this; null: never", gt=0)
    advantage: str = key(
        "gae",
        "gae, n_step, mixed (PPO); return_to_go, outcome, outcome_no_std, leave_one_out, binned, grouped_gae, vine, "
        "mixed (GRPO); `module:function`",
    )
    advantage_args: dict[str, Any] = key({}, "n of n_step; by and resolution of binned and grouped_gae")
    aggregation: str = key("row", "how rows become one loss", choices=("row", "episode", "constant"))
    rho_max: float = key(1.0, "largest importance weight of a row that another policy collected", ge=1)
    sync_every: int = key(1, "iterations for which the policy that collects stays as it is", ge=1)
    adam_betas: list[float] = key([0.9, 0.999], "Adam's decay rates, two numbers in [0, 1)")
    schedule: SchedulesConfig = key(SchedulesConfig, "how coefficients change over the run")


@dataclass
class PPOConfig(AlgoConfig):
    num_steps: int = key(128, "steps of each environment in a rollout", ge=1)
    value_coef: float = key(1.0, "weight of the value loss (V - return)^2 / 2", ge=0)
    value_clip: float | None = key(
        None,
        "range V may move in an update, in units of return (of its deviation with policy.value_normalization); "
        "null: free",
        gt=0,
    )


@dataclass
class GRPOConfig(AlgoConfig):
    group_size: int = key(8, "episodes from one state", ge=2)
    groups: str = key(
        "start",
        "what a group shares: a start state, one in the middle of an episode, or what a pilot run got from it",
        choices=("start", "vine", "pilot"),
    )
    max_episode_steps: int | None = key(None, "time limit of an episode; null: the environment's own", ge=1)


@dataclass
class PolicyConfig:
    hidden: list[int] = key([64, 64], "widths of the actor's hidden layers")
    critic_hidden: list[int] | None = key(None, "widths of the critic's; null: as the actor's (PPO)")
    activation: str = key("tanh", "of hidden layers", choices=("tanh", "relu", "silu"))
    shared_trunk: bool = key(False, "actor and critic share their hidden layers (PPO)")
    log_std: str = key("free", "deviation of continuous actions", choices=("free", "state"))
    log_std_init: float = key(0.0, "initial log standard deviation of continuous actions", ge=-20, le=2)
    squash: bool = key(False, "continuous actions are tanh(sample) rescaled to the bounds")
    layer_norm: bool = key(False, "normalise the pre-activations of each hidden layer, with learned gain and shift")
    dropout: float = key(
        0.0,
        "probability of dropping a hidden unit of the actor, one mask an iteration; evaluation drops none",
        ge=0,
        lt=1,
    )
    value_normalization: str = key(
        "none",
        "the critic predicts returns, or returns standardised by running statistics of its targets: a change of these "
        "changes V (running) or rescales the output layer so that it does not (popart) (PPO)",
        choices=("none", "running", "popart"),
    )


@dataclass
class Config:
    env: EnvConfig = key(EnvConfig, "the environment")
    algo: AlgoConfig = key(AlgoConfig, "the algorithm")
    policy: PolicyConfig = key(PolicyConfig, "the networks")
    exploration: ExplorationConfig = key(ExplorationConfig, "exploration beyond action noise")
    seed: int = key(0, "seed of member 0; member m has seed + m", ge=0)
    members: int = key(1, "independent learners trained at once", ge=1, le=10_000)
    total_steps: int = key(100_000, "environment steps of one member", ge=1)
    num_envs: int = key(8, "environments of one member (GRPO: a multiple of algo.group_size)", ge=1)
    processes: int | None = key(
        None,
        "processes that the members are shared out to; null: one for each core, of four members or more, and a core "
        "that is left goes through PPO's critic",
        ge=1,
    )
    device: str = key("cpu", "where networks live", choices=("cpu",))
    stop_at: int | None = key(
        None, "end here and save, schedules still being those of total_steps; resume= goes on; null: no", ge=1
    )
    stop_when_solved: bool = key(False, "freeze a member that held the reward threshold for two evaluations")
    eval: EvalConfig = key(EvalConfig, "evaluation during training")
    checkpoint: CheckpointConfig = key(CheckpointConfig, "checkpoints")
    log: LogConfig = key(LogConfig, "TensorBoard and metrics.csv")
    stabilizer: dict[str, Any] = key(
        {}, "keys of the selected ones; stabilizer=[ref_kl,rollback] selects two, stabilizer=none none"
    )


SCHEDULED = ("learning_rate", "clip", "entropy_coef")  # keys of algo.schedule
OWN_RULES = {"learning_rate": "kl_adaptive", "clip": "kl_driven", "entropy_coef": "target_entropy"}
ALGO_SCHEMAS: dict[str, type[AlgoConfig]] = {"ppo": PPOConfig, "grpo": GRPOConfig}


def keys(config: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """Yield (full key, field, value) of every leaf of a config dataclass."""
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            yield from keys(value, f"{prefix}{f.name}.")
        else:
            yield f"{prefix}{f.name}", f, value


TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a word",
    "list[int]": "a list of whole numbers",
    "list[float]": "a list of numbers",
    "dict[str, Any]": "keys and values",
}


def type_in_words(f: dataclasses.Field[Any]) -> str:
    """Say the type of a field: "a whole number", "a number or null" ..."""
    name, _, optional = str(f.type).partition(" | ")
    return TYPES[name] + (" or null" if optional else "")


def allowed(bounds: dict[str, Any]) -> str:
    """Say bounds in words: "> 0", "between 0 and 1", "one of a, b"."""
    if "choices" in bounds:
        return ("one of " if bounds["choices"][1:] else "") + ", ".join(bounds["choices"])
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    return " and ".join(f"{signs[name]} {bound:g}" for name, bound in bounds.items())


def range_problems(config: Config) -> Iterator[str]:
    """Yield one sentence for each value out of range."""
    for name, f, value in keys(config):
        bounds = f.metadata["bounds"]
        if isinstance(value, list) and any(isinstance(x, (list, dict)) for x in value):  # OmegaConf lets them pass
            yield f"{name} is {value}; it must be {type_in_words(f)}"
            return
        unlike = not_a_number(value)
        if unlike:
            yield f"{name} is {value}; it must be {unlike} {allowed(bounds)}".rstrip()
        elif value is not None and not within(value, bounds):
            yield f"{name} is {value}; it must be {allowed(bounds)}"
    for name, widths in (
        ("policy.hidden", config.policy.hidden),
        ("policy.critic_hidden", config.policy.critic_hidden),
    ):
        if widths is not None and any(width < 1 for width in widths):
            yield f"{name} is {list(widths)}; every width must be >= 1"
    betas = config.algo.adam_betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        yield f"algo.adam_betas is {list(betas)}; it must be two numbers, each >= 0 and < 1"


def conflicts(config: Config) -> Iterator[str]:
    """Yield one sentence for each value at odds with another; all must be in range."""
    if config.policy.shared_trunk and not config.policy.hidden:
        yield "policy.shared_trunk is true and policy.hidden is []; a shared trunk needs at least one layer"
    for name, own in OWN_RULES.items():
        rule = getattr(config.algo.schedule, name).name
        if rule not in (general := ("constant", "linear", "exponential")) and rule != own:
            home = next(key for key, rules in OWN_RULES.items() if rules == rule)
            yield (
                f"algo.schedule.{name}.name is {rule}, a rule for {home}; "
                f"it must be one of {', '.join((*general, own))}"
            )
        elif rule.startswith("kl_") and getattr(config.algo.schedule, name).target <= 0:
            yield f"algo.schedule.{name}.target is {getattr(config.algo.schedule, name).target:g}; it must be > 0"
    if config.algo.schedule.entropy_coef.name == "target_entropy" and not config.algo.entropy_coef:
        yield "algo.entropy_coef is 0, and target_entropy multiplies it; it must be > 0"
    high = config.algo.clip_high if config.algo.clip_high is not None else config.algo.clip
    if config.algo.ratio_bound is not None and high is not None and config.algo.ratio_bound <= 1 + high:
        yield f"algo.ratio_bound is {config.algo.ratio_bound:g}; it must be above 1 + the upper clip, {1 + high:g}"
    if config.policy.dropout and not config.policy.hidden:
        yield f"policy.dropout is {config.policy.dropout:g} and policy.hidden is []; without hidden units it must be 0"
    if config.algo.clip is None and (config.algo.clip_high is not None or config.algo.schedule.clip.name != "constant"):
        yield "algo.clip is null (no clip); then algo.clip_high must be null and algo.schedule.clip.name constant"
    schedules = {f"algo.schedule.{name}": getattr(config.algo.schedule, name) for name in SCHEDULED}
    for name, schedule in (schedules | {"exploration.schedule": config.exploration.schedule}).items():
        if schedule.final < 0:
            yield f"{name}.final is {schedule.final:g}; it must be >= 0"
    if config.stop_when_solved and not config.eval.every:
        yield "eval.every is 0; with stop_when_solved=true it must be >= 1, since evaluations say what is solved"
    if config.eval.video and not config.eval.every:
        yield f"eval.every is 0; with eval.video={config.eval.video} it must be >= 1, since evaluations are recorded"
    if isinstance(config.algo, PPOConfig):
        yield from _ppo_problems(config, config.algo)
    if isinstance(config.algo, GRPOConfig):
        yield from _grpo_problems(config, config.algo)


def _ppo_problems(config: Config, algo: PPOConfig) -> Iterator[str]:
    rows = algo.num_steps * config.num_envs
    if config.total_steps < rows:
        yield (
            f"total_steps is {config.total_steps}; it must be >= {rows}, one rollout "
            f"(algo.num_steps {algo.num_steps} x num_envs {config.num_envs})"
        )
    if algo.num_minibatches > rows:
        yield (
            f"algo.num_minibatches is {algo.num_minibatches}; it must be <= {rows}, the rows of a rollout "
            f"(algo.num_steps {algo.num_steps} x num_envs {config.num_envs})"
        )
    elif algo.normalize_advantage and rows < 2 * algo.num_minibatches:
        yield (
            f"algo.num_minibatches is {algo.num_minibatches}, which leaves minibatches of one row; "
            f"with algo.normalize_advantage=true it must be <= {rows // 2}"
        )


def _grpo_problems(config: Config, algo: GRPOConfig) -> Iterator[str]:
    kind = config.policy.value_normalization
    if kind != "none":
        yield f"policy.value_normalization is {kind}; with algo=grpo, which has no critic, it must be none"
    if algo.advantage == "vine" and algo.groups != "vine":
        yield f"algo.advantage is vine and algo.groups is {algo.groups}; that advantage needs algo.groups=vine"
    if config.num_envs % algo.group_size:
        yield (
            f"num_envs is {config.num_envs}; with algo=grpo it must be a multiple of "
            f"algo.group_size, which is {algo.group_size}"
        )
    if config.total_steps < config.num_envs:
        yield (
            f"total_steps is {config.total_steps}; it must be >= {config.num_envs}, since a rollout is an episode "
            "in each of num_envs environments"
        )
    if algo.num_minibatches > config.num_envs:
        yield (
            f"algo.num_minibatches is {algo.num_minibatches}; with algo=grpo it must be <= num_envs, which is "
            f"{config.num_envs}, since an episode may have a single step"
        )


def not_a_number(value: Any) -> str:
    """What a number must be that nothing here can count with, nan for one; empty for every other value."""
    if isinstance(value, list):  # numbers with a fraction have checks of their own there
        return next(filter(None, (not_a_number(x) for x in value if isinstance(x, int))), "")
    if isinstance(value, float) and not math.isfinite(value):
        return "a finite number"
    if isinstance(value, float) and abs(value) > LARGEST_FLOAT:
        return "a finite number in float32"
    if isinstance(value, int) and not -LARGEST_INT <= value <= LARGEST_INT:
        return "a number of 64 bits"
    return ""


def within(value: Any, bounds: dict[str, Any]) -> bool:
    """Whether a value keeps the bounds of `key`."""
    if "choices" in bounds:
        return value in bounds["choices"]
    tests: dict[str, Callable[[Any], bool]] = {
        "gt": lambda b: value > b,
        "ge": lambda b: value >= b,
        "lt": lambda b: value < b,
        "le": lambda b: value <= b,
    }
    return all(tests[name](bound) for name, bound in bounds.items())


def register() -> None:
    """Tell Hydra of the dataclasses, as `schema`, `algo/schema_ppo` and `algo/schema_grpo`."""
    from hydra.core.config_store import ConfigStore

    from rlkit.conf.typed import typed

    store = ConfigStore.instance()
    store.store(name="schema", node=typed(Config()))
    for name, schema in ALGO_SCHEMAS.items():
        store.store(group="algo", name=f"schema_{name}", node=typed(schema()))


def options(group: str) -> list[str]:
    """Names that `group=` accepts: the YAML files of the group's folder."""
    from importlib.resources import files

    folder = files(__package__).joinpath(group)
    found = folder.iterdir() if folder.is_dir() else ()  # a group without a file has no folder in a fresh clone
    return sorted(file.name.removesuffix(".yaml") for file in found if file.name.endswith(".yaml"))


def choice(group: str, name: str) -> dict[str, Any]:
    """What `group=name` sets, values that it leaves open aside; nothing if there is no such choice."""
    from importlib.resources import files

    from omegaconf import OmegaConf

    file = files(__package__).joinpath(group, f"{name}.yaml")
    node: Any = OmegaConf.create(file.read_text() if file.is_file() else "{}")
    return {key: value for key, value in node.items_ex(resolve=False) if value != "???"}


def sections() -> Iterator[tuple[str, list[tuple[str, dataclasses.Field[Any], Any]]]]:
    """Yield (title, rows of `keys`): what every algorithm has, then what is each one's own."""
    seen = {"env.name", "algo.name"}
    for title, config in (
        ("Every algorithm", Config()),
        ("algo=ppo", Config(algo=PPOConfig())),
        ("algo=grpo", Config(algo=GRPOConfig())),
    ):
        rows = [row for row in keys(config) if row[0] not in seen]
        seen |= {name for name, _, _ in rows}
        yield title, rows


def shown(value: Any) -> str:
    """A value as the command line takes it: null, true, 0.2, [64,64]."""
    if isinstance(value, list):
        return "[" + ",".join(shown(each) for each in value) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else f"{value}"


def pieces(name: str) -> tuple[list[str], dict[str, Any]]:
    """What `stabilizer=[name]` is made of: other stabilisers, where it is a preset, and what it sets, by entry."""
    content = choice("stabilizer", name)
    return [other for other in content.pop("defaults", []) if other != "_self_"], content


def comments(name: str) -> dict[str, str]:
    """What the YAML file of a stabiliser says of each of its keys: "(type, range): meaning"."""
    from importlib.resources import files

    text = files(__package__).joinpath("stabilizer", f"{name}.yaml").read_text()
    return dict(re.findall(r"^ +(\w+): .*?  # (\(.*)$", text, re.M))


def type_and_range(f: dataclasses.Field[Any]) -> str:
    """Say what a field may hold: "number or null, > 0", "one of a, b"."""
    bounds, kind = allowed(f.metadata["bounds"]), type_in_words(f).removeprefix("a ")
    return bounds if "choices" in f.metadata["bounds"] else ", ".join(filter(None, (kind, bounds)))
