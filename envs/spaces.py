"""What a policy must know of an action space, and how its raw actions become legal ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space

from rlkit.envs.streams import Array

MASK = "action_mask"  # the key of `info` that names the legal actions
_EDGE = 1e-6  # of the way from the middle to a bound: what tanh of a raw action stays short of it


@dataclass(frozen=True, eq=False)
class ActionSpec:
    """An action space as a policy sees it.

    A discrete space has one head for each dimension, whose raw action counts from 0; a continuous one has A =
    `size` raw numbers, bounded or not.
    """

    kind: Literal["discrete", "continuous"]
    space: Space[Any]
    sizes: tuple[int, ...]  # number of actions of each head; () when continuous
    size: int  # raw numbers of one action: heads, or A
    low: Array  # float32 [A], -inf where unbounded; [0] when discrete
    high: Array

    @classmethod
    def of(cls, space: Space[Any]) -> ActionSpec:
        """Return the specification of Box, Discrete, MultiDiscrete or MultiBinary.

        Raises:
            ValueError: another kind of space, a Box of integers, or one without an action.
        """
        if isinstance(space, (Box, MultiDiscrete, MultiBinary)) and not math.prod(space.shape):
            raise ValueError(f"the action space {space} holds no action")
        if isinstance(space, Box) and np.issubdtype(space.dtype, np.floating):
            with np.errstate(over="ignore"):  # a bound beyond float32 becomes infinite
                low, high = (bound.astype(np.float32).ravel() for bound in (space.low, space.high))
            return cls("continuous", space, (), math.prod(space.shape), low, high)
        if isinstance(space, Discrete):
            sizes: tuple[int, ...] = (int(space.n),)
        elif isinstance(space, MultiDiscrete):
            sizes = tuple(space.nvec.ravel().tolist())
        elif isinstance(space, MultiBinary):
            sizes = (2,) * math.prod(space.shape)
        else:
            raise ValueError(
                f"the action space {space} is none of Box (of floats), Discrete, MultiDiscrete, MultiBinary"
            )
        nothing = np.zeros(0, np.float32)
        return cls("discrete", space, sizes, len(sizes), nothing, nothing)

    @property
    def maskable(self) -> bool:
        """Whether single actions can be forbidden: those of Discrete and MultiDiscrete."""
        return isinstance(self.space, (Discrete, MultiDiscrete))

    def mask(self, given: Any, name: str = MASK) -> Array:
        """Return an action mask as bool [A], A the actions of all heads end to end; True is legal.

        Args:
            given: A numbers, 0 or 1, or a tuple with an array (or again a tuple) for each head.
            name: of the mask, for the error.

        Raises:
            ValueError: it has another size or other numbers, or forbids every action of a head.
        """
        if given is None or isinstance(given, str):
            raise ValueError(f"{name} is {given!r}; it must have {sum(self.sizes)} numbers, one for each action")
        numbers = _end_to_end(given)
        mask: Array = numbers == 1
        if len(mask) != sum(self.sizes):
            raise ValueError(f"{name} has {len(mask)} numbers; it must have {sum(self.sizes)}, one for each action")
        if not (known := mask | (numbers == 0)).all():
            first = int(np.argmin(known))
            raise ValueError(f"{name}[{first}] is {numbers[first]}; it must be 1 where the action is legal, else 0")
        ends = np.cumsum(self.sizes)
        for head, part in enumerate(np.split(mask, ends[:-1])):
            if not part.any():
                where = f" of dimension {head}" if len(self.sizes) > 1 else ""
                raise ValueError(f"{name} forbids every action{where}; it must allow one")
        return mask

    def check_squash(self) -> None:
        """Raise ValueError if there are no bounds that tanh could reach: discrete actions, or an infinite one."""
        if self.kind != "continuous":
            raise ValueError(f"policy.squash is true; the action space is {self.space}, which has nothing to squash")
        if not (np.isfinite(self.low).all() and np.isfinite(self.high).all()):
            raise ValueError(f"policy.squash=true needs finite action bounds, the action space is {self.space}")

    def legal(self, raw: Array, squash: bool = False) -> Array:
        """Return what the vector environment's step expects from raw actions [lanes, heads or A].

        Discrete: the index plus the space's start, [lanes]; several heads: [lanes, *shape]. Box: clipped to
        the bounds (an infinite side does not clip) or, with squash, low + (tanh(raw) + 1) / 2 * (high - low);
        [lanes, *shape].
        """
        raw = np.asarray(raw)
        space: Any = self.space
        if isinstance(space, Discrete):
            action = raw.reshape(-1).astype(np.int64, copy=False)
            return action + space.start if space.start else action
        if self.kind == "discrete":
            action = raw.reshape(-1, *space.shape).astype(space.dtype, copy=False)
            return action + space.start if isinstance(space, MultiDiscrete) and space.start.any() else action
        if squash:
            self.check_squash()
            raw = self.low + (np.tanh(raw) + 1) / 2 * (self.high - self.low)
        # Clipped after the cast and against the space's own bounds, so that rounding cannot leave them.
        action = raw.reshape(-1, *space.shape).astype(space.dtype, copy=False)
        return np.clip(action, space.low, space.high)

    def raw(self, action: Array, squash: bool = False) -> Array:
        """Return raw actions [n, heads or A] that `legal` turns into these of the environment, [n, *shape].

        Discrete: int64, counted from 0. Box: float32, the action itself or, with squash, arctanh of its place between
        the bounds, from -1 to 1; the outermost millionth is cut off, since arctanh of an end is infinite.

        Raises:
            ValueError: actions of another shape, or outside of the space.
        """
        action = np.asarray(action)
        if action.dtype.kind not in "biuf" or not action.ndim or action.size != len(action) * self.size:
            kind = f"of shape {action.shape} and type {action.dtype}"
            raise ValueError(f"the actions are {kind}; an action of {self.space} is {self.size} numbers a row")
        action = action.reshape(len(action), self.size)
        if self.kind == "discrete":
            index: Array = action - np.ravel(getattr(self.space, "start", 0))
            self._check_inside(action, (index >= 0) & (index < self.sizes) & (index % 1 == 0))
            return index.astype(np.int64)
        low, high = self.low.astype(np.float64), self.high.astype(np.float64)
        rounding = 1e-6 * (1 + np.abs([low, high]))
        inside = (action >= low - rounding[0]) & (action <= high + rounding[1])
        self._check_inside(action, inside & np.isfinite(action))
        raw: Array = action.clip(low, high)
        if squash:
            self.check_squash()
            raw = np.arctanh((2 * (raw - low) / (high - low) - 1).clip(-1 + _EDGE, 1 - _EDGE))
        return raw.astype(np.float32)

    def _check_inside(self, action: Array, inside: Array) -> None:
        outside = np.flatnonzero(~inside.all(1))
        if len(outside):
            first = outside[0]
            raise ValueError(f"the action of row {first} is {action[first].tolist()}, which is outside of {self.space}")


def _end_to_end(given: Any) -> Array:
    if isinstance(given, (tuple, list)) and any(isinstance(part, (tuple, list, np.ndarray)) for part in given):
        return np.concatenate([_end_to_end(part) for part in given])
    return np.ravel(given)
