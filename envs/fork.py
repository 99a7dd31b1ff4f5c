"""Copying an environment in the middle of an episode, and the check that its copies are true.

`copy.deepcopy` fails without a word: an environment built on EzPickle comes back freshly made, and one that
keeps its state in a class attribute or behind a handle shares it with its copy.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
from gymnasium import Env
from gymnasium.spaces import Space
from gymnasium.utils.env_checker import data_equivalence

from rlkit.envs.spaces import MASK, ActionSpec
from rlkit.envs.streams import Array

Outcome = dict[str, Any]  # an environment's answer to one action, by name

_SEED = 0
_EARLY = 10  # the copy is made within these first steps
_LONGEST = 1000  # an episode that has not ended by then is broken off
_ON = 10  # steps past the end of the episode that was copied


def env_name(env: Env[Any, Any]) -> str:
    """Return the environment's id, or its class when it is not registered."""
    return env.spec.id if env.spec else type(env.unwrapped).__name__


def lane_pairs(source: Any, target: Any, lanes: int) -> tuple[Array, Array]:
    """Return `source` and `target` as int64 arrays [k] after checking that they name lanes.

    Raises:
        ValueError: they differ in length, hold what is no lane, or `target` names a lane twice.
    """
    source, target = np.asarray(source), np.asarray(target)
    if source.ndim != 1 or source.shape != target.shape:
        raise ValueError(f"source has shape {source.shape} and target {target.shape}, the same (k,) is needed")
    for name, chosen in (("source", source), ("target", target)):
        if len(chosen) and (chosen.dtype.kind not in "iu" or chosen.min() < 0 or chosen.max() >= lanes):
            raise ValueError(f"{name}={chosen.tolist()} must hold lanes, integers from 0 to {lanes - 1}")
    if len(np.unique(target)) < len(target):
        raise ValueError(f"target={target.tolist()} names a lane twice")
    return source.astype(np.int64), target.astype(np.int64)


def copied(env: Env[Any, Any]) -> Env[Any, Any]:
    """Return a deep copy of an environment, its state, random state and wrappers included.

    Raises:
        ValueError: something in it cannot be copied.
    """
    try:
        return deepcopy(env)
    except Exception as error:  # whatever it is, the environment cannot be copied
        raise _refusal(env, f"deepcopy raises {_words(error)}") from error


def check_copies(make_env: Callable[[], Env[Any, Any]]) -> None:
    """Check, on environments of its own, that a deep copy goes on as its original would, and apart from it.

    A reference is played with random actions. An original follows it into an episode and is copied there; then
    the copy, and after it the original, must answer exactly as the reference did until past the end of that
    episode, the start of the next one included.

    Args:
        make_env: makes one environment; called twice.

    Raises:
        ValueError: names the environment and what differed first; steps are counted from the copying.
    """
    with make_env() as reference:
        actions, outcomes, fork = _played(reference)
    with make_env() as original:
        original.reset(seed=_SEED)
        _compare(original, "of two environments with equal seeds the second's", actions[:fork], outcomes[:fork])
        with copied(original) as copy:
            _compare(copy, "after deepcopy the copy's", actions[fork:], outcomes[fork:])
        _compare(original, "once its copy has been stepped the original's", actions[fork:], outcomes[fork:])


def _played(env: Env[Any, Any]) -> tuple[list[Any], list[Outcome], int]:
    """Return random actions (None: a reset), their outcomes, and after how many of them to copy."""
    space = deepcopy(env.action_space)  # the environment may draw from its own
    space.seed(_SEED)
    mask = env.reset(seed=_SEED)[1].get(MASK)
    rng = np.random.default_rng(_SEED)
    actions: list[Any] = []
    outcomes: list[Outcome] = []
    fork, end, ended = 0, _LONGEST, False
    while (step := len(actions)) <= end + _ON:
        action = None if ended or step == _LONGEST else _chosen(space, mask, rng)
        actions.append(action)
        outcomes.append(_outcome(env, action))
        mask = outcomes[-1].get(MASK)
        ended = outcomes[-1].get("terminated") or outcomes[-1].get("truncated", False)
        if ended and step >= _EARLY:
            end = min(end, step)
        elif not ended and step < _EARLY and action is not None:
            fork = step + 1
    return actions, outcomes, fork


def _chosen(space: Space[Any], mask: Array | None, rng: np.random.Generator) -> Any:
    """A random action, and where there is a mask, bool [A], one that it allows."""
    if mask is None:
        return space.sample()
    spec = ActionSpec.of(space)
    heads = np.split(np.where(mask, rng.random(len(mask)), -1.0), np.cumsum(spec.sizes)[:-1])
    return spec.legal(np.array([[head.argmax() for head in heads]]))[0]


def _outcome(env: Env[Any, Any], action: Any) -> Outcome:
    if action is None:
        obs, info = env.reset()
        outcome: Outcome = {}
    else:
        obs, reward, terminated, truncated, info = env.step(action)
        outcome = {"reward": reward, "terminated": terminated, "truncated": truncated}
    outcome |= {MASK: info[MASK]} if MASK in info else {}
    return {"observation": deepcopy(obs), **outcome}  # copied: environments may write it anew in place


def _compare(env: Env[Any, Any], whose: str, actions: list[Any], outcomes: list[Outcome]) -> None:
    """Raise a ValueError at the first outcome of the actions that is not as given."""
    for step, (action, expected) in enumerate(zip(actions, outcomes, strict=True), 1):
        try:
            outcome = _outcome(env, action)
        except Exception as error:  # a copy without its state may fail in any way
            raise _refusal(env, f"{whose} step {step} raises {_words(error)}") from error
        for name, value in expected.items():
            if not data_equivalence(outcome[name], value, exact=True):
                raise _refusal(env, f"{whose} {name} differs at step {step}")


def _refusal(env: Env[Any, Any], why: str) -> ValueError:
    return ValueError(
        f"{env_name(env)} cannot be copied in the middle of an episode: {why}; "
        "vine groups need a native environment or one that deepcopy copies"
    )


def _words(error: Exception) -> str:
    """Return an exception's class and the first line of its message, if it has one."""
    message = str(error).partition("\n")[0]
    return type(error).__name__ + (f" ({message})" if message else "")
