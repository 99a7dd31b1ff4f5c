"""Pendulum-v1, batched."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from array_api_compat import array_namespace
from gymnasium.envs.classic_control.utils import verify_number_and_cast

from rlkit.envs.compiled import LaneStep
from rlkit.envs.native import NativeVectorEnv
from rlkit.envs.rounding import scalar_square
from rlkit.envs.streams import Array, Bound

GRAVITY = 10.0  # m/s^2
MAX_SPEED = 8.0  # rad/s
MAX_TORQUE = 2.0  # N m
DT = 0.05  # s, one step of the semi-implicit Euler method


def pendulum(state: Any, action: Any, g: float = GRAVITY, xp: Any = None) -> tuple[Any, Any, Any]:
    """Return (next state, reward, terminated) of a rod of 1 kg and 1 m, to be swung up and held upright.

        u      = clip(action, -2, 2)
        reward = -(theta^2 + 0.1 theta'^2 + 0.001 u^2), theta taken into [-pi, pi)
        theta' <- clip(theta' + (3/2 g sin theta + 3 u) dt, -8, 8)
        theta  <- theta + theta' dt

    The order of operations is that of Gymnasium's scalar environment, so NumPy float64 gives the same bits (with a
    float32 action as there). Any array library of the array API works (NumPy, torch).

    Args:
        state: float64 [2, k], rows theta (rad, 0 is upright) and theta' (rad/s).
        action: float32 [k], torque in N m.
        g: acceleration of gravity, m/s^2.
        xp: the array library; found from the state when None.

    Returns:
        next state [2, k]; reward [k] of the state's dtype; terminated bool [k], always False.
    """
    xp = xp or array_namespace(state)
    theta, velocity = state[0], state[1]
    u = xp.minimum(xp.maximum(action, -MAX_TORQUE), MAX_TORQUE)
    angle = xp.remainder(theta + math.pi, 2 * math.pi) - math.pi
    cost = scalar_square(angle) + 0.1 * scalar_square(velocity) + 0.001 * scalar_square(u)
    velocity = velocity + (3 * g / 2.0 * xp.sin(theta) + 3.0 * u) * DT
    velocity = xp.minimum(xp.maximum(velocity, -MAX_SPEED), MAX_SPEED)
    state = xp.empty_like(state)
    state[0], state[1] = theta + velocity * DT, velocity
    return state, -cost, xp.zeros(theta.shape, dtype=xp.bool, device=theta.device)


def pendulum_lane(state: Array, action: Array, first: bool, settings: Array, obs: Array) -> tuple[float, bool]:
    """Step one lane in place as `pendulum` does, for the compiled loop; settings: g, and the exponent 2.

    The exponent is an argument because a compiler makes a product of a square, whose last bit is not that of pow.
    """
    single = np.float32
    theta, velocity, square = state[0], state[1], settings[1]
    u = min(max(action[0], single(-MAX_TORQUE)), single(MAX_TORQUE))
    angle = (theta + math.pi) % (2 * math.pi) - math.pi
    cost = angle**square + 0.1 * velocity**square + single(0.001) * u ** single(square)
    velocity = velocity + (3 * settings[0] / 2.0 * math.sin(theta) + single(3.0) * u) * DT
    velocity = min(max(velocity, -MAX_SPEED), MAX_SPEED)
    state[0], state[1] = theta + velocity * DT, velocity
    obs[0], obs[1], obs[2] = math.cos(state[0]), math.sin(state[0]), velocity
    return -cost, False


class PendulumVectorEnv(NativeVectorEnv):
    """Gymnasium's Pendulum-v1 in lanes; see `NativeVectorEnv`. Takes `g`, the acceleration of gravity (m/s^2).

    Actions are [lanes, 1]. The options of `reset` are `x_init` and `y_init`, the largest angle and velocity of a start
    state, in place of `low` and `high`.
    """

    scalar_id = "Pendulum-v1"
    start_size = 2

    def __init__(self, *args: Any, g: float = GRAVITY, **kwargs: Any) -> None:
        super().__init__(*args, g=g, **kwargs)
        self._g = g
        self._torque = np.zeros(self.num_envs, np.float32)  # last applied, for the renderer's arrow

    def one_lane(self) -> tuple[LaneStep, Array]:
        return pendulum_lane, np.array((self._g, 2.0))

    def transition(self, state: Array, action: Array, lanes: Array) -> tuple[Array, Array, Array]:
        if self.render_mode is not None:
            self._torque[lanes] = action[:, 0].clip(-MAX_TORQUE, MAX_TORQUE)
        return pendulum(state, action[:, 0], self._g, np)

    def observe(self, state: Array, lanes: Array) -> Array:
        """Return [cos theta, sin theta, theta'], [k, 3]."""
        obs = np.empty((state.shape[1], 3), np.float32)
        obs[:, 0], obs[:, 1], obs[:, 2] = np.cos(state[0]), np.sin(state[0]), state[1]
        return obs

    def start_bounds(self, options: dict[str, Any]) -> tuple[Bound, Bound]:
        x = verify_number_and_cast(options.get("x_init", math.pi))
        y = verify_number_and_cast(options.get("y_init", 1.0))
        high = np.array((x, y))
        return -high, high

    def render(self, lane: int = 0) -> tuple[Array, ...] | None:
        """Return one frame of one lane, with an arrow for the torque of its last step."""
        self.scalar.last_u = self._torque[lane] if self._steps[lane] else None
        return super().render(lane)
