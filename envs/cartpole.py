"""CartPole-v1, batched."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from rlkit.envs.native import NativeVectorEnv
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


def cartpole(state: Any, action: Any, sutton_barto_reward: bool = False, xp: Any = None) -> tuple[Any, Any, Any]:
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

    Returns:
        next state [4, k]; reward [k] of the state's dtype; terminated bool [k], |x| > 2.4 m or |theta| > 12
        degrees.
    """
    xp = xp or array_namespace(state)
    theta, theta_dot = state[2], state[3]
    cos, sin = xp.cos(theta), xp.sin(theta)
    force = action * (2 * FORCE) - FORCE
    temp = (force + POLE_MASS_LENGTH * xp.square(theta_dot) * sin) / TOTAL_MASS
    theta_acc = (GRAVITY * sin - cos * temp) / (HALF_LENGTH * (4.0 / 3.0 - POLE_MASS * xp.square(cos) / TOTAL_MASS))
    rate = xp.empty_like(state)  # d state / dt
    rate[0], rate[2] = state[1], theta_dot
    rate[1] = temp - POLE_MASS_LENGTH * theta_acc * cos / TOTAL_MASS
    rate[3] = theta_acc
    state = state + TAU * rate
    terminated = (xp.abs(state[0]) > X_LIMIT) | (xp.abs(state[2]) > THETA_LIMIT)
    if sutton_barto_reward:
        reward = xp.where(terminated, -xp.ones_like(theta), xp.zeros_like(theta))
    else:
        reward = xp.ones_like(theta)
    return state, reward, terminated


class CartPoleVectorEnv(NativeVectorEnv):
    """Gymnasium's CartPole-v1 in lanes; see `NativeVectorEnv`. Takes `sutton_barto_reward`."""

    scalar_id = "CartPole-v1"
    start_size = 4

    def __init__(self, *args: Any, sutton_barto_reward: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, sutton_barto_reward=sutton_barto_reward, **kwargs)
        self._sutton_barto_reward = sutton_barto_reward

    def transition(self, state: Array, action: Array, lanes: Array) -> tuple[Array, Array, Array]:
        return cartpole(state, action, self._sutton_barto_reward, np)
