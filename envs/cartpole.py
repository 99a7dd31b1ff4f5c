"""CartPole-v1, batched."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from rlkit.envs.compiled import LaneStep
from rlkit.envs.native import NativeVectorEnv, as_arrays
from rlkit.envs.streams import Array

GRAVITY = 9.8  # m/s^2
POLE_MASS = 0.1  # kg
TOTAL_MASS = 1.1  # kg, pole and cart
HALF_LENGTH = 0.5  # m, from the pivot to the pole's centre of mass
POLE_MASS_LENGTH = POLE_MASS * HALF_LENGTH
FORCE = 10.0  # N
TAU = 0.02  # s, one step of Euler's method
X_LIMIT = 2.4  # m
THETA_LIMIT = 12 * 2 * math.pi / 360  # rad
CONSTANTS = (GRAVITY, TOTAL_MASS, POLE_MASS_LENGTH, HALF_LENGTH * 4.0 / 3.0, TAU, X_LIMIT, THETA_LIMIT)


def cartpole(
    state: Any,
    action: Any,
    sutton_barto_reward: bool = False,
    xp: Any = None,
    constants: tuple[Any, ...] = CONSTANTS,
) -> tuple[Any, Any, Any]:
    """Return (next state, reward, terminated) of the cart and pole of Barto, Sutton and Anderson (1983).

    With force F = +-10 N, total mass m, pole mass mp, half length l (frictionless, equations as corrected by
    Florian):
        temp   = (F + mp l theta'^2 sin theta) / m
        theta'' = (g sin theta - cos theta temp) / (l (4/3 - mp cos^2 theta / m))
        x''     = temp - mp l theta'' cos theta / m
    and one explicit Euler step of 0.02 s. The order of operations is that of Gymnasium's scalar environment,
    so NumPy float64 gives the same bits. Any array library of the array API works (NumPy, torch).

    Args:
        state: float64 [4, k], rows x (m), x' (m/s), theta (rad), theta' (rad/s).
        action: int [k], 0 pushes left and 1 right.
        sutton_barto_reward: 0 a step and -1 at the fall, in place of 1 a step.
        xp: the array library; found from the state when None.
        constants: CONSTANTS, as they are or as 0-d arrays of the state's dtype, which cost NumPy less.

    Returns:
        next state [4, k]; reward [k] of the state's dtype; terminated bool [k], |x| > 2.4 m or |theta| > 12
        degrees.
    """
    xp = xp or array_namespace(state)
    gravity, total_mass, pole_mass_length, four_thirds_length, tau, x_limit, theta_limit = constants
    theta, theta_dot = state[2], state[3]
    cos, sin = xp.cos(theta), xp.sin(theta)
    force = xp.asarray((-FORCE, FORCE), dtype=state.dtype, device=state.device)[action]
    temp = (force + pole_mass_length * xp.square(theta_dot) * sin) / total_mass
    # Gymnasium multiplies the difference by the half length, which is a power of two: it may go inside, bit for bit.
    inertia = four_thirds_length - pole_mass_length * xp.square(cos) / total_mass
    theta_acc = (gravity * sin - cos * temp) / inertia
    rate = xp.empty_like(state)  # d state / dt
    rate[0], rate[2] = state[1], theta_dot
    rate[1] = temp - pole_mass_length * theta_acc * cos / total_mass
    rate[3] = theta_acc
    state = state + tau * rate
    terminated = (xp.abs(state[0]) > x_limit) | (xp.abs(state[2]) > theta_limit)
    reward = xp.empty_like(theta)
    reward[:] = 0.0 if sutton_barto_reward else 1.0
    if sutton_barto_reward:
        reward[terminated] = -1.0
    return state, reward, terminated


def cartpole_lane(state: Array, action: int, first: bool, settings: Array, obs: Array) -> tuple[float, bool]:
    """Step one lane in place as `cartpole` does, for the compiled loop; settings: sutton_barto_reward."""
    x, velocity, theta, theta_dot = state[0], state[1], state[2], state[3]
    cos, sin = math.cos(theta), math.sin(theta)
    temp = ((FORCE if action else -FORCE) + POLE_MASS_LENGTH * (theta_dot * theta_dot) * sin) / TOTAL_MASS
    theta_acc = (GRAVITY * sin - cos * temp) / (HALF_LENGTH * (4.0 / 3.0 - POLE_MASS * (cos * cos) / TOTAL_MASS))
    state[0] = x + TAU * velocity
    state[1] = velocity + TAU * (temp - POLE_MASS_LENGTH * theta_acc * cos / TOTAL_MASS)
    state[2] = theta + TAU * theta_dot
    state[3] = theta_dot + TAU * theta_acc
    obs[:] = state
    terminated = abs(state[0]) > X_LIMIT or abs(state[2]) > THETA_LIMIT
    if settings[0]:
        return (-1.0 if terminated else 0.0), terminated
    return 1.0, terminated


class CartPoleVectorEnv(NativeVectorEnv):
    """Gymnasium's CartPole-v1 in lanes; see `NativeVectorEnv`. Takes `sutton_barto_reward`."""

    scalar_id = "CartPole-v1"
    start_size = 4
    compile_up_to = 128

    def __init__(self, *args: Any, sutton_barto_reward: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, sutton_barto_reward=sutton_barto_reward, **kwargs)
        self._sutton_barto_reward = sutton_barto_reward
        self._constants = as_arrays(CONSTANTS)

    def one_lane(self) -> tuple[LaneStep, Array]:
        return cartpole_lane, np.array((float(self._sutton_barto_reward),))

    def transition(self, state: Array, action: Array, lanes: Array) -> tuple[Array, Array, Array]:
        return cartpole(state, action, self._sutton_barto_reward, np, self._constants)
