"""One environment as the vector environments want it: flat observations, checked answers, failures that say where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from gymnasium import Env, Wrapper
from gymnasium.spaces import Box, Dict, Space, Text, Tuple
from gymnasium.spaces.utils import flatten, flatten_space

from rlkit.envs.failure import EnvironmentFailure, in_words
from rlkit.envs.fork import env_name
from rlkit.envs.spaces import MASK, ActionSpec
from rlkit.envs.streams import Array


class MissingMask(EnvironmentFailure):
    """An environment that must give masks of legal actions gave none."""


class Guarded(Wrapper[Array, Any, Any, Any]):
    """An environment that observes flat float32 vectors [D] of its own memory, and whose every fault has one form.

    A Discrete observation becomes one-hot, the parts of a Tuple or Dict are put end to end. Of `info` only the action
    mask is passed on, as bool [A]: nothing else is read, and keys of one environment may clash with those of another,
    or with those that a vector environment adds.

    Args:
        env: whole, with its own wrappers.
        flatten_images: accept images (a Box of rank 3), as one long vector.
        action_mask: demand a mask of legal actions in info["action_mask"].

    Raises:
        ValueError: the observation is (or holds) an image and flatten_images is False, it cannot be a vector of a fixed
            size, or the actions can have no mask.
    """

    def __init__(self, env: Env[Any, Any], flatten_images: bool = False, action_mask: bool = False) -> None:
        super().__init__(env)
        self.raw_space = env.observation_space
        self.observation_space = flat_space(env, flatten_images)
        self.actions = maskable(env) if action_mask else None
        self.steps = 0  # in this episode
        self.failed = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """Raises EnvironmentFailure."""
        self.steps = 0
        try:
            answer = self.env.reset(seed=seed, options=options)
        except (Exception, SystemExit) as error:  # whatever it is, the environment cannot be gone on with
            raise self._raised(error, "reset") from None
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise self._gave(f"{_shown(answer)} in reset, where (observation, info) is due")
        obs, info = answer
        return self._flat(obs, "reset"), self._info(info, "reset")

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """Raises EnvironmentFailure."""
        self.steps += 1
        try:
            answer = self.env.step(action)
        except (Exception, SystemExit) as error:
            raise self._raised(error, "step") from None
        if not isinstance(answer, tuple) or len(answer) != 5:
            due = "(observation, reward, terminated, truncated, info)"
            raise self._gave(f"{_shown(answer)} in step {self.steps}, where {due} is due")
        obs, reward, terminated, truncated, info = answer
        try:
            number, ended, cut = float(reward), bool(terminated), bool(truncated)
        except (TypeError, ValueError):
            given = f"the reward {_shown(reward)}, terminated {_shown(terminated)}, truncated {_shown(truncated)}"
            raise self._gave(f"{given} in step {self.steps}; they must be a number, a truth, a truth") from None
        flat = self._flat(obs, f"step {self.steps}")
        return flat, number, ended, cut, {} if ended or cut else self._info(info, f"step {self.steps}")

    def close(self) -> None:
        """Raises EnvironmentFailure."""
        try:
            self.env.close()
        except Exception as error:
            raise EnvironmentFailure.of(error, f"{env_name(self)} raised {in_words(error)} in close") from None

    def _flat(self, obs: Any, where: str) -> Array:
        try:
            return flattened(self.raw_space, obs)
        except ValueError as error:
            raise self._gave(f"an observation in {where} that is not of its space: {error}") from None

    def _info(self, info: Any, where: str) -> dict[str, Any]:
        if self.actions is None:
            return {}
        if not isinstance(info, Mapping) or MASK not in info:
            raise self._gave(f"no info['{MASK}'] in {where}; with env.action_mask=true it must", MissingMask)
        try:
            return {MASK: self.actions.mask(info[MASK], f"info['{MASK}']")}
        except ValueError as error:
            raise self._gave(f"an action mask in {where} that cannot be used: {error}") from None

    def _raised(self, error: BaseException, where: str) -> EnvironmentFailure:
        self.failed = True
        in_step = where == "step"
        hint = ""
        if isinstance(error, ValueError) and "values to unpack" in str(error):  # a wrapper of Gymnasium's says no more
            due = "(observation, reward, terminated, truncated, info)" if in_step else "(observation, info)"
            hint = f"; {where} must return {due}"
        place = f"step {self.steps}" if in_step else where
        return EnvironmentFailure.of(error, f"raised {in_words(error)} in {place}{hint}")

    def _gave(self, what: str, kind: type[EnvironmentFailure] = EnvironmentFailure) -> EnvironmentFailure:
        self.failed = True
        return kind(f"gave {what}")


def flat_space(env: Env[Any, Any], flatten_images: bool = False) -> Box:
    """Return the space of an environment's flattened observations, float32 [D].

    Raises:
        ValueError: see `Guarded`.
    """
    space, name = env.observation_space, env_name(env)
    parts = list(leaves(space))
    if any(isinstance(part, Box) and len(part.shape) == 3 for part in parts) and not flatten_images:
        raise ValueError(
            f"{name} observes images ({space}), which the networks here cannot see; "
            "env.flatten_images=true feeds their pixels as one vector"
        )
    flat = None if any(isinstance(part, Text) for part in parts) else flatten_space(space)
    if not isinstance(flat, Box):
        raise ValueError(f"{name} observes {space}, which has no fixed size and cannot be made a vector")
    if not flat.shape[0]:
        raise ValueError(f"{name} observes {space}, which holds no number")
    if flat.dtype == np.float32:
        return flat
    with np.errstate(over="ignore"):  # a bound beyond float32 becomes infinite
        return Box(flat.low.astype(np.float32), flat.high.astype(np.float32), dtype=np.float32)


def leaves(space: Space[Any]) -> Iterator[Space[Any]]:
    """Yield the parts that a space is made of: itself, unless it is a Dict or a Tuple."""
    if not isinstance(space, (Dict, Tuple)):
        yield space
        return
    for part in space.spaces.values() if isinstance(space, Dict) else space.spaces:
        yield from leaves(part)


def flattened(space: Space[Any], obs: Any) -> Array:
    """Return an observation as a new float32 vector [D], cast once; the bounds of a Box are not looked at.

    Raises:
        ValueError: it is not of the space.
    """
    if isinstance(space, Box):
        try:
            x = np.array(obs, dtype=np.float32)  # a copy: an environment may write its next observation into this one
        except (TypeError, ValueError):
            raise ValueError(f"{_shown(obs)} is not an array of numbers") from None
        if x.shape != space.shape:
            raise ValueError(f"its shape is {x.shape}, that of the space is {space.shape}")
        return x.ravel()
    if isinstance(space, Dict):
        if not isinstance(obs, Mapping) or obs.keys() != space.spaces.keys():
            raise ValueError(f"{_shown(obs)} has not the keys {', '.join(map(str, space.spaces))}")
        return np.concatenate([flattened(part, obs[name]) for name, part in space.spaces.items()])
    if isinstance(space, Tuple):
        if not isinstance(obs, (tuple, list)) or len(obs) != len(space.spaces):
            raise ValueError(f"{_shown(obs)} has not {len(space.spaces)} parts")
        return np.concatenate([flattened(part, x) for part, x in zip(space.spaces, obs, strict=True)])
    if not space.contains(obs):
        raise ValueError(f"{_shown(obs)} is not in {space}")
    return np.asarray(flatten(space, obs), dtype=np.float32)


def maskable(env: Env[Any, Any]) -> ActionSpec:
    """Return the action space of an environment whose actions can have a mask.

    Raises:
        ValueError: they cannot.
    """
    spec = ActionSpec.of(env.action_space)
    if not spec.maskable:
        raise ValueError(
            f"env.action_mask is true; {env_name(env)} acts in {env.action_space}, and only actions of Discrete and "
            "MultiDiscrete can have a mask"
        )
    return spec


def check_masks(env: Guarded) -> None:
    """Reset an environment that must give masks, and close it.

    Raises:
        ValueError: it gives none.
        EnvironmentFailure: it failed in another way.
    """
    try:
        env.reset(seed=0)
    except MissingMask:
        raise ValueError(f"env.action_mask is true; {env_name(env)} gives no info['{MASK}'] in reset") from None
    except EnvironmentFailure as failure:
        raise failure.said_of(env_name(env)) from None
    finally:
        env.close()


def _shown(x: Any) -> str:
    """A value in few words."""
    if isinstance(x, tuple):
        return f"{len(x)} values"
    text = " ".join(repr(x).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
