"""MountainCarContinuous-v0, batched."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from array_api_compat import array_namespace
from gymnasium.envs.classic_control.utils import maybe_parse_reset_bounds

from rlkit.envs.compiled import LaneStep
from rlkit.envs.native import NativeVectorEnv
from rlkit.envs.streams import Array, Bound

POWER = 0.0015
GRAVITY = 0.0025
MIN_POSITION, MAX_POSITION, GOAL = -1.2, 0.6, 0.45
MAX_SPEED = 0.07


def mountain_car_continuous(
    state: Any, action: Any, goal_velocity: float = 0.0, xp: Any = None
) -> tuple[Any, Any, Any]:
    """Return (next state, reward, terminated) of the mountain car whose force is a number.

        x' <- clip(x' + 0.0015 clip(action, -1, 1) - 0.0025 cos 3x, -0.07, 0.07)
        x  <- clip(x + x', -1.2, 0.6)

    and the wall at -1.2 stops the car. Gymnasium's scalar environment keeps its state in float32 after the first step,
    and its start state in float64; in the dtype of the state and with a float32 action, the bits are the same. Any
    array library of the array API works (NumPy, torch).

    Args:
        state: float32 or float64 [2, k], rows position x and velocity x' (per step; the units are the task's own).
        action: float32 [k].
        goal_velocity: velocity needed at the goal.
        xp: the array library; found from the state when None.

    Returns:
        next state [2, k]; reward float64 [k], -0.1 action^2 and 100 more at the goal; terminated bool [k], x >= 0.45 at
        goal_velocity or faster.
    """
    xp = xp or array_namespace(state)
    slope = GRAVITY * xp.cos(xp.asarray(3 * state[0], dtype=xp.float64))
    change = action * POWER - xp.asarray(slope, dtype=action.dtype)
    clipped = xp.abs(action) > 1.0
    if xp.count_nonzero(clipped):  # a clipped force is a Python number in Gymnasium: the difference is one of float64
        change = xp.where(clipped, xp.sign(xp.asarray(action, dtype=xp.float64)) * POWER - slope, change)
    velocity = state[1] + xp.asarray(change, dtype=state.dtype)
    velocity = xp.minimum(xp.maximum(velocity, -MAX_SPEED), MAX_SPEED)
    position = xp.minimum(xp.maximum(state[0] + velocity, MIN_POSITION), MAX_POSITION)
    velocity[(position == MIN_POSITION) & (velocity < 0)] = 0.0
    state = xp.empty_like(state)
    state[0], state[1] = position, velocity
    terminated = (position >= GOAL) & (velocity >= goal_velocity)
    effort = xp.asarray(action, dtype=xp.float64)
    return state, 100.0 * xp.asarray(terminated, dtype=xp.float64) - effort * effort * 0.1, terminated


def mountain_car_continuous_lane(
    state: Array, action: Array, first: bool, settings: Array, obs: Array
) -> tuple[float, bool]:
    """Step one lane in place as `mountain_car_continuous` does, for the compiled loop; settings: goal_velocity.

    The first step is in float64 and its result rounded to float32, in which all others are.
    """
    single, double = np.float32, np.float64
    force, start = action[0], state[0]
    slope = GRAVITY * math.cos(3 * start if first else double(single(3) * single(start)))
    change = double(force * single(POWER) - single(slope))
    if abs(force) > 1.0:  # a clipped force is a Python number in Gymnasium
        change = double(math.copysign(POWER, force) - slope)
    velocity, goal, needed = state[1], GOAL, settings[0]
    fastest, lowest, highest = MAX_SPEED, MIN_POSITION, MAX_POSITION
    if first:
        velocity = min(max(velocity + change, -fastest), fastest)
        position = min(max(start + velocity, lowest), highest)
    else:
        fastest, lowest, highest = double(single(fastest)), double(single(lowest)), double(single(highest))
        goal, needed = double(single(goal)), double(single(needed))
        velocity = min(max(double(single(velocity) + single(change)), -fastest), fastest)
        position = min(max(double(single(start) + single(velocity)), lowest), highest)
    if position == lowest and velocity < 0:
        velocity = 0.0
    obs[0], obs[1] = position, velocity
    state[0], state[1] = obs[0], obs[1]
    terminated = position >= goal and velocity >= needed
    effort = double(force)
    return (100.0 if terminated else 0.0) - effort * effort * 0.1, terminated


class MountainCarContinuousVectorEnv(NativeVectorEnv):
    """Gymnasium's MountainCarContinuous-v0 in lanes; see `NativeVectorEnv`. Takes `goal_velocity`.

    Actions are [lanes, 1] and counted as float32, the dtype of the action space.
    """

    scalar_id = "MountainCarContinuous-v0"
    start_size = 1

    def __init__(self, *args: Any, goal_velocity: float = 0.0, **kwargs: Any) -> None:
        super().__init__(*args, goal_velocity=goal_velocity, **kwargs)
        self._goal_velocity = goal_velocity

    def one_lane(self) -> tuple[LaneStep, Array]:
        return mountain_car_continuous_lane, np.array((self._goal_velocity,))

    def transition(self, state: Array, action: Array, lanes: Array) -> tuple[Array, Array, Array]:
        force = action[:, 0].astype(np.float32, copy=False)
        single, reward, terminated = self._dynamics(state.astype(np.float32), force)
        after = single.astype(np.float64)
        first = self.at_start(lanes)
        if len(first):  # from the start state, which is float64, into float32
            double, reward[first], terminated[first] = self._dynamics(state[:, first], force[first])
            after[:, first] = double.astype(np.float32)
        return after, reward, terminated

    def _dynamics(self, state: Array, force: Array) -> tuple[Array, Array, Array]:
        return mountain_car_continuous(state, force, self._goal_velocity, np)

    def start_bounds(self, options: dict[str, Any]) -> tuple[Bound, Bound]:
        return maybe_parse_reset_bounds(options, -0.6, -0.4)

    def start(self, draws: Array) -> Array:
        return np.stack((draws[:, 0], np.zeros(len(draws))))
