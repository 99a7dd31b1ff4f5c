"""Acrobot-v1, batched."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from array_api_compat import array_namespace
from gymnasium.envs.classic_control.utils import maybe_parse_reset_bounds

from rlkit.envs.compiled import LaneStep
from rlkit.envs.native import NativeVectorEnv, as_arrays
from rlkit.envs.rounding import scalar_square
from rlkit.envs.streams import Array, Bound

GRAVITY = 9.8  # m/s^2
DT = 0.2  # s, one step of the fourth-order Runge-Kutta method
MAX_VELOCITY_1 = 4 * math.pi  # rad/s
MAX_VELOCITY_2 = 9 * math.pi  # rad/s
DYNAMICS = ("book", "nips")
CENTRE = 0.5  # m, from a link's joint to its centre of mass; length, mass and moment of inertia are 1 (m, kg, kg m^2)
CONSTANTS = (CENTRE, CENTRE**2, 1.0, 1.0 + CENTRE**2, CENTRE * GRAVITY, (CENTRE + 1.0) * GRAVITY, math.pi / 2)


def acrobot(
    state: Any,
    action: Any,
    noise: Any = 0.0,
    book_or_nips: str = "book",
    xp: Any = None,
    constants: tuple[Any, ...] = CONSTANTS,
) -> tuple[Any, Any, Any]:
    """Return (next state, reward, terminated) of Sutton's (1996) two links, driven at the joint between them.

    One Runge-Kutta step of 0.2 s of `derivative`; then the angles are wrapped into [-pi, pi] and the velocities clipped
    at 4 pi and 9 pi rad/s. The order of operations is that of Gymnasium's scalar environment, so NumPy float64 gives
    the same bits. Any array library of the array API works (NumPy, torch).

    Args:
        state: float64 [4, k], rows theta1 (rad, 0 hangs down), theta2 (rad, relative to the first link), theta1',
            theta2' (rad/s).
        action: int [k], 0, 1, 2 are torques of -1, 0, 1 N m.
        noise: added to the torque, N m; a number or [k].
        book_or_nips: equations of Sutton and Barto's book, or of the paper, which lack one term.
        xp: the array library; found from the state when None.
        constants: CONSTANTS, as they are or as 0-d arrays of the state's dtype, which cost NumPy less.

    Returns:
        next state [4, k]; reward [k] of the state's dtype, -1 and 0 at the goal; terminated bool [k], the tip is more
        than 1 m above the fixed joint.
    """
    xp = xp or array_namespace(state)
    torque = xp.asarray((-1.0, 0.0, 1.0), dtype=state.dtype, device=state.device)[action] + noise
    book = book_or_nips == "book"
    k1 = derivative(state, torque, book, xp, constants)
    k2 = derivative(state + DT / 2.0 * k1, torque, book, xp, constants)
    k3 = derivative(state + DT / 2.0 * k2, torque, book, xp, constants)
    k4 = derivative(state + DT * k3, torque, book, xp, constants)
    state = state + DT / 6.0 * (k1 + 2 * k2 + 2 * k3 + k4)
    state[:2] = wrap(state[:2], xp)
    state[2] = xp.minimum(xp.maximum(state[2], -MAX_VELOCITY_1), MAX_VELOCITY_1)
    state[3] = xp.minimum(xp.maximum(state[3], -MAX_VELOCITY_2), MAX_VELOCITY_2)
    terminated = xp.cos(state[0]) + xp.cos(state[1] + state[0]) < -1.0
    return state, xp.asarray(terminated, dtype=state.dtype) - 1.0, terminated


def derivative(state: Any, torque: Any, book: bool, xp: Any, constants: tuple[Any, ...] = CONSTANTS) -> Any:
    """Return d state / dt [4, k] under a torque [k].

    Both links have length, mass and moment of inertia 1 (m, kg, kg m^2) and their centre of mass in the middle:
        d1   = 0.5^2 + (1 + 0.5^2 + cos theta2) + 2
        d2   = 0.5^2 + cos theta2 / 2 + 1
        phi2 = g / 2 cos(theta1 + theta2 - pi/2)
        phi1 = -theta2'^2 sin theta2 / 2 - theta2' theta1' sin theta2 + 3/2 g cos(theta1 - pi/2) + phi2
        theta2'' = (torque + d2 / d1 phi1 - theta1'^2 sin theta2 / 2 - phi2) / (1.25 - d2^2 / d1)
        theta1'' = -(d2 theta2'' + phi1) / d1
    The paper's theta2'' is without the term in theta1'^2.
    """
    half, quarter, inertia, squares_sum, weight2, weight1, quarter_turn = constants
    theta1, theta2, velocity1, velocity2 = state[0], state[1], state[2], state[3]
    cos, sin = xp.cos(theta2), xp.sin(theta2)
    d1 = quarter + (squares_sum + cos) + inertia + inertia
    d2 = quarter + half * cos + inertia
    rate = xp.empty_like(state)
    rate[:2], rate[2] = state[2:], d2
    squares = scalar_square(rate[:3])  # of theta1', theta2' and d2 in one call
    phi2 = weight2 * xp.cos(theta1 + theta2 - quarter_turn)
    half_squares = squares[:2] * (half * sin)  # halving rounds nothing
    phi1 = weight1 * xp.cos(theta1 - quarter_turn) - (half_squares[1] + velocity2 * velocity1 * sin) + phi2
    push = torque + d2 / d1 * phi1
    if book:
        push = push - half_squares[0]
    acceleration2 = (push - phi2) / (squares_sum - squares[2] / d1)
    rate[2], rate[3] = -(d2 * acceleration2 + phi1) / d1, acceleration2
    return rate


def wrap(angle: Any, xp: Any) -> Any:
    """Return the angles in [-pi, pi]: turns are taken away one at a time, which rounds otherwise than a remainder."""
    outside = xp.abs(angle) > math.pi
    while xp.count_nonzero(outside):
        angle = xp.where(outside, angle - xp.sign(angle) * (2 * math.pi), angle)
        outside = xp.abs(angle) > math.pi
    return angle


def acrobot_lane(state: Array, action: int, first: bool, settings: Array, obs: Array) -> tuple[float, bool]:
    """Step one lane in place as `acrobot` does without noise, for the compiled loop; settings: book, the exponent 2.

    The exponent is an argument because a compiler makes a product of a square, whose last bit is not that of pow.
    """
    half, quarter, inertia, squares_sum, weight2, weight1, quarter_turn = CONSTANTS
    book, square = settings[0], settings[1]
    torque = float(action - 1)
    theta1, theta2, velocity1, velocity2 = state[0], state[1], state[2], state[3]
    sum1 = sum2 = sum3 = sum4 = 0.0  # k1 + 2 k2 + 2 k3 + k4 of each number of the state
    at1, at2, at3, at4 = theta1, theta2, velocity1, velocity2
    for stage in range(4):
        cos, sin = math.cos(at2), math.sin(at2)
        d1 = quarter + (squares_sum + cos) + inertia + inertia
        d2 = quarter + half * cos + inertia
        phi2 = weight2 * math.cos(at1 + at2 - quarter_turn)
        phi1 = weight1 * math.cos(at1 - quarter_turn) - (at4**square * (half * sin) + at4 * at3 * sin) + phi2
        push = torque + d2 / d1 * phi1
        if book:
            push -= at3**square * (half * sin)
        rate4 = (push - phi2) / (squares_sum - d2**square / d1)
        rate3, rate2, rate1 = -(d2 * rate4 + phi1) / d1, at4, at3
        weight = 2.0 if stage in (1, 2) else 1.0
        sum1, sum2 = sum1 + weight * rate1, sum2 + weight * rate2
        sum3, sum4 = sum3 + weight * rate3, sum4 + weight * rate4
        ahead = DT if stage == 2 else DT / 2.0
        at1, at2 = theta1 + ahead * rate1, theta2 + ahead * rate2
        at3, at4 = velocity1 + ahead * rate3, velocity2 + ahead * rate4
    theta1, theta2 = theta1 + DT / 6.0 * sum1, theta2 + DT / 6.0 * sum2
    while abs(theta1) > math.pi:
        theta1 -= math.copysign(2 * math.pi, theta1)
    while abs(theta2) > math.pi:
        theta2 -= math.copysign(2 * math.pi, theta2)
    velocity1 = min(max(velocity1 + DT / 6.0 * sum3, -MAX_VELOCITY_1), MAX_VELOCITY_1)
    velocity2 = min(max(velocity2 + DT / 6.0 * sum4, -MAX_VELOCITY_2), MAX_VELOCITY_2)
    state[0], state[1], state[2], state[3] = theta1, theta2, velocity1, velocity2
    cos1 = math.cos(theta1)
    obs[0], obs[1], obs[2], obs[3] = cos1, math.sin(theta1), math.cos(theta2), math.sin(theta2)
    obs[4], obs[5] = velocity1, velocity2
    terminated = cos1 + math.cos(theta2 + theta1) < -1.0
    return (0.0 if terminated else -1.0), terminated


class AcrobotVectorEnv(NativeVectorEnv):
    """Gymnasium's Acrobot-v1 in lanes; see `NativeVectorEnv`.

    Args:
        book_or_nips: the equations, "book" or "nips"; see `derivative`.
        torque_noise_max: uniform noise up to this is added to the torque (N m), drawn from each lane's own stream.
        *args, **kwargs: see `NativeVectorEnv`.

    Raises:
        ValueError: book_or_nips is another word, or torque_noise_max is negative.
    """

    scalar_id = "Acrobot-v1"
    start_size = 4

    def __init__(self, *args: Any, book_or_nips: str = "book", torque_noise_max: float = 0.0, **kwargs: Any) -> None:
        if book_or_nips not in DYNAMICS:
            raise ValueError(f"book_or_nips={book_or_nips!r} must be one of {', '.join(DYNAMICS)}")
        if not 0 <= torque_noise_max < math.inf:
            raise ValueError(f"torque_noise_max={torque_noise_max} must be a finite number, 0 or more")
        super().__init__(*args, **kwargs)
        self.book_or_nips, self.torque_noise_max = book_or_nips, torque_noise_max
        self.draws_in_step = torque_noise_max > 0
        self._constants = as_arrays(CONSTANTS)

    def one_lane(self) -> tuple[LaneStep, Array]:
        return acrobot_lane, np.array((float(self.book_or_nips == "book"), 2.0))

    def transition(self, state: Array, action: Array, lanes: Array) -> tuple[Array, Array, Array]:
        noise: Bound = 0.0
        if self.draws_in_step:
            noise = self.streams.uniform(lanes, -self.torque_noise_max, self.torque_noise_max, 1)[:, 0]
        return acrobot(state, action, noise, self.book_or_nips, np, self._constants)

    def observe(self, state: Array, lanes: Array) -> Array:
        """Return [cos theta1, sin theta1, cos theta2, sin theta2, theta1', theta2'], [k, 6]."""
        obs = observation(state)
        first = self.at_start(lanes)
        if len(first):  # Gymnasium's start states are float32, and so are their sines
            obs[first] = observation(state[:, first].astype(np.float32))
        return obs

    def start_bounds(self, options: dict[str, Any]) -> tuple[Bound, Bound]:
        return maybe_parse_reset_bounds(options, -0.1, 0.1)

    def start(self, draws: Array) -> Array:
        return draws.T.astype(np.float32)


def observation(state: Array) -> Array:
    """Return float32 observations [k, 6] of states [4, k], calculated in the state's dtype."""
    obs = np.empty((state.shape[1], 6), np.float32)
    columns = obs.T
    columns[0:4:2], columns[1:4:2], columns[4:] = np.cos(state[:2]), np.sin(state[:2]), state[2:]
    return obs
