"""Random configurations: each trains for two updates or is refused in sentences, never with another exception."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
from conftest import demonstrations
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlkit.conf.schema import ALGO_SCHEMAS, Config, ConfigError, choice, keys, options, within
from rlkit.overrides import literal
from rlkit.train import compose, prepare

KEYS = {
    algo: {name: f for name, f, _ in keys(Config(algo=schema())) if name not in ("env.name", "algo.name")}
    for algo, schema in ALGO_SCHEMAS.items()
}
ENVS = {  # name -> how it is chosen
    "CartPole": ["env=CartPole"],
    "Pendulum": ["env=Pendulum"],
    "MountainCarContinuous": ["env=MountainCarContinuous"],
    "FrozenLake": ["env=gym", "env.id=FrozenLake-v1"],
    "Taxi": ["env=gym", "env.id=Taxi-v4"],
    "Blackjack": ["env=gym", "env.id=Blackjack-v1"],
}
NATIVE = {"CartPole": ("CartPole-v1", "native"), "Pendulum": ("Pendulum-v1", "native")}  # with demonstrations
# Small, and all that costs time has an upper bound that is not the key's own.
BASE = {
    "ppo": {"num_envs": 4, "algo.num_steps": 6},
    "grpo": {"num_envs": 4, "algo.group_size": 2, "algo.max_episode_steps": 6},
}
SMALL = {"policy.hidden": [4], "total_steps": 1000, "algo.num_epochs": 2, "algo.num_minibatches": 2}
MOST = {
    "members": 3,
    "num_envs": 8,
    "algo.num_steps": 8,
    "algo.num_epochs": 3,
    "algo.max_episode_steps": 9,
    "eval.episodes": 3,
}
FIXED = {"processes": [1, None, 0, -1, "two", 1.5]}  # more would take the time of starting them
MOST_OF_STABILIZERS = {"batch_size": 16, "capacity": 40, "episodes": 2, "horizon": 10**9, "share": 0.1}
WRONG = [None, True, "nonsense", -1, 0.5, [], [1, "a"], {}, {"a": 1}, "", "1e3", "${seed}", "???", "a b", "ä", 10**30]
REAL = [0.0, 1e-45, 1e-9, 0.3, 1.0, 1.0 + 1e-9, 3.0, 1e9, 1e38, 1e300, -0.5, -1e300, math.nan, math.inf, -math.inf]
INTEGERS = [0, 1, 2, 3, 7, 64, 1000, 2**31, 2**63, 2**64, 10**30, -1, -(2**63)]
WIDTHS = [[], [1], [4, 3], [0], [-1], [2.5], ["a"], [[4]], None, [3, 3, 3, 3, 3]]
BETAS = [[0.9, 0.999], [0, 0], [0.0, 0.5], [1.0, 0.5], [0.9], [], [0.1, 0.2, 0.3], [math.nan, 0.9], [-0.1, 0.9], "a"]


def edges(bounds: dict[str, Any], step: float) -> list[Any]:
    """Values at the bounds, next to them and beyond."""
    if "choices" in bounds:
        return [*bounds["choices"], "nonsense", ""]
    return [x for bound in bounds.values() for x in (bound, bound + step, bound - step)]


def values_of(name: str, kind: str, bounds: dict[str, Any], default: Any) -> list[Any]:
    """What a key is given."""
    if name in FIXED:
        return FIXED[name]
    found = {
        "int": INTEGERS,
        "float": REAL,
        "bool": [True, False],
        "list[int]": WIDTHS,
        "list[float]": BETAS,
        "dict[str, Any]": [{}],
        "str": [],
    }[kind.partition(" | ")[0]]
    most = MOST.get(name, math.inf)
    found = [
        *found,
        default,
        *edges(bounds, 1 if kind.startswith("int") else 1e-9),
        *([None] if "None" in kind else []),
    ]
    return [x for x in found if not (isinstance(x, (int, float)) and x > most)]


def stabilizer_values(name: str) -> dict[str, list[Any]]:
    """Keys of a stabiliser and what they are given."""
    found: dict[str, list[Any]] = {}
    for key, default in choice("stabilizer", name).get(name, {}).items():
        if key == "_target_":
            continue
        most = MOST_OF_STABILIZERS.get(key, math.inf)
        kinds = {bool: [True, False], int: INTEGERS, float: REAL, str: ["nonsense", default]}
        values = [*kinds.get(type(default), [None]), default, "uniform", "adaptive", "k3", "half", "proportional"]
        found[f"stabilizer.{name}.{key}"] = [x for x in values if not (isinstance(x, (int, float)) and x > most)]
    return found


STABILIZERS = {name: stabilizer_values(name) for name in options("stabilizer") if name != "recommended"}
ADVANTAGES = "gae n_step mixed return_to_go outcome outcome_no_std leave_one_out binned grouped_gae vine x a:b"
WORDS = {
    "algo.advantage": ADVANTAGES.split(),
    "env.id": ["CartPole-v1", "Nonsense-v0", "a:b:c", ":", "nomodule:X-v0"],
}
OPEN = {
    "algo.advantage_args": [
        {f"+algo.advantage_args.{key}": value for key, value in arguments.items()}
        for arguments in ({}, {"n": 3}, {"n": 0}, {"by": "state", "resolution": 0.5}, {"by": 1}, {"x": 1})
    ],
    "env.kwargs": [{}, {"+env.kwargs.nonsense": 1}, {"+env.kwargs.num_envs": 3}],
}


def chosen_of(values: list[Any], bounds: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Mostly a value that keeps the bounds, at times any of them, rarely one of another kind."""
    inside = [x for x in values if sane(x, bounds)] or values
    return st.integers(0, 29).flatmap(lambda n: st.sampled_from(WRONG if n == 29 else values if n > 26 else inside))


def sane(x: Any, bounds: dict[str, Any]) -> bool:
    if x is None or isinstance(x, bool):
        return True
    if isinstance(x, list):
        return bool(x) and all(isinstance(width, int) and width > 0 for width in x)
    if isinstance(x, dict):
        return not x
    if isinstance(x, str):
        return x in bounds.get("choices", (x,))
    return math.isfinite(x) and 0 <= x < 1e39 and within(x, bounds)


@st.composite
def configurations(draw: st.DrawFn) -> list[str]:
    """Overrides of the command line."""
    algo, env = draw(st.sampled_from(sorted(KEYS))), draw(st.sampled_from(sorted(ENVS)))
    chosen: dict[str, Any] = {**BASE[algo], **SMALL}
    for name in draw(st.lists(st.sampled_from(sorted(KEYS[algo])), max_size=8, unique=True)):
        f = KEYS[algo][name]
        if name in OPEN:
            chosen |= draw(st.sampled_from(OPEN[name]))
            continue
        values = WORDS.get(name) or values_of(name, str(f.type), f.metadata["bounds"], chosen.get(name))
        chosen[name] = draw(chosen_of(values, f.metadata["bounds"]))
    stabilizers = draw(st.lists(st.sampled_from(sorted(STABILIZERS)), max_size=3, unique=True))
    for name in stabilizers:
        if "demonstrations" in choice("stabilizer", name)[name]:
            chosen[f"stabilizer.{name}.demonstrations"] = "DEMONSTRATIONS"
        for key in draw(st.lists(st.sampled_from(sorted(STABILIZERS[name])), max_size=3, unique=True)):
            chosen[key] = draw(chosen_of(STABILIZERS[name][key], {"ge": 0}))
    tuned = draw(st.sampled_from([["tuned=none"], ["tuned=none"], []]))
    path = demonstrations(*NATIVE[env]) if env in NATIVE else "nowhere.npz"
    written = [f"{name}={path if value == 'DEMONSTRATIONS' else literal(value)}" for name, value in chosen.items()]
    return [*ENVS[env], f"algo={algo}", *tuned, f"stabilizer=[{','.join(stabilizers)}]", *written]


def check(overrides: list[str]) -> bool:
    """Train for two updates; or see that the refusal is made of sentences. Return whether it trained."""
    try:
        prepared = prepare(compose(overrides)[0])
    except ConfigError as error:
        names = [o.partition("=")[0].lstrip("+").split(".")[0] for o in overrides]
        for line in str(error).split("\n"):
            assert 10 < len(line) < 500, line
            assert any(name in line for name in names), line
        return False
    try:
        learner = prepared.learner
        for _ in range(2):
            learner.begin()
            if not bool(learner.running.any()):  # all have diverged, which absurd numbers may bring about
                break
            learner.iterate()
            learner.judge(prepared.evaluator(learner.policy, 2).mean(1))
    finally:
        prepared.close()
    return True


MANY = os.environ.get("RLKIT_EXAMPLES", "")
PLAIN = settings(
    derandomize=True,  # the same examples in every run
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@settings(PLAIN, max_examples=60)
@given(configurations())
def test_any_configuration_trains_or_is_refused_in_sentences(overrides):
    check(overrides)


@pytest.mark.slow
@settings(
    PLAIN, derandomize="RLKIT_EXAMPLES" not in os.environ, max_examples=int(os.environ.get("RLKIT_EXAMPLES", 150))
)
@given(configurations())
def test_many_configurations_train_or_are_refused_in_sentences(overrides):
    """With RLKIT_EXAMPLES=5000 as many, and others in every run."""
    check(overrides)


def test_some_configurations_train():
    """Else the tests above would hold whatever training does."""
    assert check(["env=CartPole", "algo=ppo", "tuned=none", *(f"{k}={v}" for k, v in (BASE["ppo"] | SMALL).items())])
    assert not check(["env=CartPole", "algo=ppo", "algo.clip=-1"])
