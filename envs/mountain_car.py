"""MountainCar-v0, batched."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from array_api_compat import array_namespace
from gymnasium.envs.classic_control.utils import maybe_parse_reset_bounds

from rlkit.envs.compiled import LaneStep
from rlkit.envs.native import NativeVectorEnv
from rlkit.envs.streams import Array, Bound

FORCE = 0.001
GRAVITY = 0.0025
MIN_POSITION, MAX_POSITION, GOAL = -1.2, 0.6, 0.5
MAX_SPEED = 0.07


def mountain_car(state: Any, action: Any, goal_velocity: float = 0.0, xp: Any = None) -> tuple[Any, Any, Any]:
    """Return (next state, reward, terminated) of Moore's (1990) car, too weak to drive straight up its hill.

        x' <- clip(x' + 0.001 (action - 1) - 0.0025 cos 3x, -0.07, 0.07)
        x  <- clip(x + x', -1.2, 0.6)

    and the wall at -1.2 stops the car. The order of operations is that of Gymnasium's scalar environment, so NumPy
    float64 gives the same bits. Any array library of the array API works (NumPy, torch).

    Args:
        state: float64 [2, k], rows position x and velocity x' (per step; the units are the task's own).
        action: int [k], 0 drives left, 1 not at all, 2 right.
        goal_velocity: velocity needed at the goal.
        xp: the array library; found from the state when None.

    Returns:
        next state [2, k]; reward [k] of the state's dtype, always -1; terminated bool [k], x >= 0.5 at goal_velocity or
        faster.
    """
    xp = xp or array_namespace(state)
    push = xp.asarray((-FORCE, 0.0, FORCE), dtype=state.dtype, device=state.device)[action]
    velocity = state[1] + (push + xp.cos(3 * state[0]) * -GRAVITY)
    velocity = xp.minimum(xp.maximum(velocity, -MAX_SPEED), MAX_SPEED)
    position = xp.minimum(xp.maximum(state[0] + velocity, MIN_POSITION), MAX_POSITION)
    velocity[(position == MIN_POSITION) & (velocity < 0)] = 0.0
    state = xp.empty_like(state)
    state[0], state[1] = position, velocity
    return state, xp.full_like(position, -1.0), (position >= GOAL) & (velocity >= goal_velocity)


def mountain_car_lane(state: Array, action: int, first: bool, settings: Array, obs: Array) -> tuple[float, bool]:
    """Step one lane in place as `mountain_car` does, for the compiled loop; settings: goal_velocity."""
    velocity = state[1] + ((action - 1) * FORCE + math.cos(3 * state[0]) * -GRAVITY)
    velocity = min(max(velocity, -MAX_SPEED), MAX_SPEED)
    position = min(max(state[0] + velocity, MIN_POSITION), MAX_POSITION)
    if position == MIN_POSITION and velocity < 0:
        velocity = 0.0
    state[0], state[1] = position, velocity
    obs[:] = state
    return -1.0, position >= GOAL and velocity >= settings[0]


class MountainCarVectorEnv(NativeVectorEnv):
    """Gymnasium's MountainCar-v0 in lanes; see `NativeVectorEnv`. Takes `goal_velocity`."""

    scalar_id = "MountainCar-v0"
    start_size = 1
    compile_up_to = 128

    def __init__(self, *args: Any, goal_velocity: float = 0.0, **kwargs: Any) -> None:
        super().__init__(*args, goal_velocity=goal_velocity, **kwargs)
        self._goal_velocity = goal_velocity

    def one_lane(self) -> tuple[LaneStep, Array]:
        return mountain_car_lane, np.array((self._goal_velocity,))

    def transition(self, state: Array, action: Array, lanes: Array) -> tuple[Array, Array, Array]:
        return mountain_car(state, action, self._goal_velocity, np)

    def start_bounds(self, options: dict[str, Any]) -> tuple[Bound, Bound]:
        return maybe_parse_reset_bounds(options, -0.6, -0.4)

    def start(self, draws: Array) -> Array:
        return np.stack((draws[:, 0], np.zeros(len(draws))))
