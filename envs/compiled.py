"""The loop over lanes, compiled by numba where it is installed (the extra `compiled`).

NumPy pays about half a microsecond for each operation, however few the lanes, and a step is twenty to two hundred
operations. A compiled loop over lanes pays for the arithmetic alone. Compiling takes about a second, so an environment
asks for it after it has been stepped many times (`NativeVectorEnv.compile_after`); the bits are the same before and
after.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from rlkit.envs.streams import Array

# Of one lane: (state [S], action, whether this is the first step of the episode, settings, obs [D]) -> (reward,
# terminated). The state and obs are written to.
LaneStep = Callable[[Array, Any, bool, Array, Array], tuple[float, bool]]


@cache
def compiled_loop(lane_step: LaneStep) -> Callable[..., None] | None:
    """Return `loop_over_lanes` of one lane's step, to be compiled at its first call; None without numba."""
    try:
        from numba import njit
    except ImportError:
        return None
    # Division is IEEE's, as NumPy's; not fastmath: no operation may be reordered or contracted.
    compile = njit(error_model="numpy")
    return compile(loop_over_lanes(compile(lane_step)))


def loop_over_lanes(lane_step: LaneStep) -> Callable[..., None]:
    """Return what steps some lanes, one after the other, in place.

    It takes state [S, lanes], the lanes [k] and their action [k, ...], steps [lanes] since the episode began, the time
    limit, the settings of `lane_step`, and writes obs [lanes, D], reward, terminated and truncated [lanes].
    """

    def loop(
        state: Array,
        lanes: Array,
        action: Array,
        steps: Array,
        limit: int,
        settings: Array,
        obs: Array,
        reward: Array,
        terminated: Array,
        truncated: Array,
    ) -> None:
        for k, lane in enumerate(lanes):
            reward[lane], terminated[lane] = lane_step(state[:, lane], action[k], steps[lane] == 0, settings, obs[lane])
            steps[lane] += 1
            truncated[lane] = steps[lane] >= limit

    return loop
