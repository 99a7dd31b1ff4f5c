"""The batched base of the classic-control environments: many lanes as a structure of NumPy arrays.

A subclass gives the dynamics (`transition`), the observation (`observe`) and the start states. What the
vector API asks for is here once: three autoreset modes, masks, time limits, seeds, final observations, state,
rendering.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.envs.classic_control.utils import maybe_parse_reset_bounds
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from rlkit.envs.compiled import LaneStep, compiled_loop
from rlkit.envs.fork import lane_pairs
from rlkit.envs.streams import Array, Bound, LaneStreams, Seeds, lane_seeds

Step = tuple[Array, Array, Array, Array, dict[str, Any]]
Outcome = tuple[Array, Array, Array, Array]  # a step without its info


class NativeVectorEnv(VectorEnv[Array, Array, Array]):
    """`num_envs` lanes of one environment, stepped together and bit-equal to Gymnasium's scalar environment.

    Args:
        num_envs: number of lanes.
        max_episode_steps: time limit in steps; None is the one Gymnasium registers.
        autoreset_mode: what happens to a lane whose episode has ended: reset at the next step (NEXT_STEP),
            reset within the same step with the last observation in `info["final_obs"]` (SAME_STEP), nothing
            (DISABLED).
        render_mode: None or "rgb_array".
        **kwargs: arguments of Gymnasium's scalar environment.
    """

    scalar_id: ClassVar[str]  # Gymnasium's id: spaces, registered time limit and renderer come from there
    start_size: ClassVar[int]  # doubles that one start state takes from the random stream
    compile_after: int = 20_000  # steps; compiling takes about as long as these
    compile_up_to: ClassVar[int] = 1 << 30  # lanes; with more NumPy is faster, where it takes sines by the vector
    draws_in_step = False  # whether `transition` draws from the lanes' streams
    action_mask = None  # all actions are legal in every state

    def __init__(
        self,
        num_envs: int = 1,
        max_episode_steps: int | None = None,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        render_mode: str | None = None,
        **kwargs: Any,
    ) -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs={num_envs} must be 1 or more")
        if max_episode_steps is not None and max_episode_steps < 1:
            raise ValueError(f"max_episode_steps={max_episode_steps} must be 1 or more")
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f"render_mode={render_mode!r} must be None or 'rgb_array' for a native environment")
        spec = gymnasium.spec(self.scalar_id)
        scalar = gymnasium.make(spec, render_mode=render_mode, disable_env_checker=True, **kwargs)
        self.scalar: Any = scalar.unwrapped
        self.num_envs = num_envs
        limit = max_episode_steps or spec.max_episode_steps
        self.max_episode_steps = np.iinfo(np.int64).max if limit is None else limit
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.render_mode = render_mode
        fps = self.scalar.metadata["render_fps"]
        self.metadata = {
            "render_modes": ["rgb_array"],
            "render_fps": fps,
            "autoreset_mode": self.autoreset_mode,
        }
        self.single_observation_space = self.scalar.observation_space
        self.single_action_space = self.scalar.action_space
        self._actions_shape = (num_envs, *(self.single_action_space.shape or ()))
        self._choices = int(getattr(self.single_action_space, "n", 0))  # 0: a continuous action
        self._limit, self._bound = np.array(self.max_episode_steps), np.array(self._choices, np.uint64)  # see as_arrays
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.streams = LaneStreams(num_envs, self.start_size, *self.start_bounds({}))
        self._lanes = np.arange(num_envs)
        self._state: Array | None = None  # [S, lanes], None before the first reset
        self._steps = np.zeros(num_envs, dtype=np.int64)
        self._pending = np.zeros(num_envs, dtype=np.bool_)  # ended and not reset yet
        self._calls = 0  # of `step`
        self._loop: Callable[..., None] | None = None  # once it has been compiled

    @abstractmethod
    def transition(self, state: Array, action: Array, lanes: Array) -> tuple[Array, Array, Array]:
        """Return (next state [S, k], reward float64 [k], terminated bool [k]) as new arrays.

        Args:
            state: state [S, k] of the lanes stepped; not to be written to.
            action: their actions [k, ...], already checked.
            lanes: their indices [k], for dynamics that draw from `streams`.
        """

    def observe(self, state: Array, lanes: Array) -> Array:
        """Return new float32 observations [k, D] of the lanes' states [S, k]; the state itself unless overridden."""
        return state.T.astype(np.float32, order="C")

    @abstractmethod
    def one_lane(self) -> tuple[LaneStep, Array]:
        """Return `transition` and `observe` for one lane, bit for bit, to be compiled; and the settings it takes."""

    def at_start(self, lanes: Array) -> Array:
        """Return where in `lanes` those are that have not been stepped since their reset, as indices."""
        if np.count_nonzero(self._steps) == self.num_envs:  # the usual case
            return self._lanes[:0]
        return np.flatnonzero(self._steps[lanes] == 0)

    def start_bounds(self, options: dict[str, Any]) -> tuple[Bound, Bound]:
        """Return the bounds of the start draws; options may carry `low` and `high`."""
        return maybe_parse_reset_bounds(options, -0.05, 0.05)

    def start(self, draws: Array) -> Array:
        """Return start states [S, k] from draws [k, start_size]."""
        return draws.T

    def show(self, state: Array) -> None:
        """Put one lane's state [S] into the scalar environment, whose renderer then draws it."""
        self.scalar.state = state

    def reset(self, *, seed: Seeds = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """Start new episodes.

        Args:
            seed: None: every lane goes on with its own random stream; an int: lane i gets seed + i; a list:
                one seed (or None) for each lane. Lanes of equal seeds start alike, now and at later resets.
            options: `reset_mask`, bool [lanes]: the lanes to reset (all, when absent); `low`, `high`: bounds
                of this reset's start states.

        Returns:
            Observations [lanes, D] float32 of all lanes, and an empty info.
        """
        options = options or {}
        lanes = self._lanes
        if "reset_mask" in options:
            lanes = checked_mask(options["reset_mask"], self.num_envs, "options['reset_mask']").nonzero()[0]
            if not len(lanes):
                raise ValueError("options['reset_mask'] must choose at least one lane")
        if self._state is None and len(lanes) < self.num_envs:
            raise RuntimeError("the first reset must be of all lanes, without options['reset_mask']")
        seeds = lane_seeds(seed, self.num_envs)
        if seed is not None:
            self.streams.seed(lanes.tolist(), [seeds[lane] for lane in lanes.tolist()])
        if set(options) - {"reset_mask"}:
            draws = self.streams.uniform(lanes, *self.start_bounds(options), self.start_size)
        else:
            draws = self.streams.starts(lanes)
        if self._state is None:
            self._state = np.empty((len(self.start(draws)), self.num_envs))
        self._begin(lanes, draws)
        return self.observe(self._state, self._lanes), {}

    def step(self, actions: Array, mask: Array | None = None) -> Step:
        """Step the lanes once.

        Args:
            actions: [lanes, ...]; those of idle lanes are not looked at.
            mask: bool [lanes]; lanes where it is False are idle: their observation stays, reward 0, both
                flags False.

        Returns:
            obs [lanes, D] float32, reward [lanes] float64, terminated and truncated [lanes] bool (both may be
            True), and info: under SAME_STEP, when a lane ended, `final_obs` [lanes, D] (zero in the other
            rows) and `_final_obs`, bool [lanes].

        Raises:
            ValueError: an action is out of range, or an array has the wrong shape.
            RuntimeError: before the first reset; under DISABLED, when a lane that has ended is stepped again.
        """
        if self._state is None:
            raise RuntimeError("call reset() before step()")
        actions = np.asarray(actions)
        if actions.shape != self._actions_shape:
            raise ValueError(f"actions have shape {actions.shape}, {self._actions_shape} is needed")
        if self._calls == self.compile_after and self._may_compile():
            lane_step, self._settings = self.one_lane()
            self._loop = compiled_loop(lane_step)
        self._calls += 1
        packed = self.draws_in_step or self.autoreset_mode is AutoresetMode.DISABLED
        if self._loop and (self._choices or actions.dtype == np.float32):
            obs, reward, terminated, truncated = self._step_compiled(self._loop, actions, mask)
        elif mask is None and not (packed and np.count_nonzero(self._pending)):
            obs, reward, terminated, truncated = self._step_all(actions)
        else:
            obs, reward, terminated, truncated = self._step_some(actions, mask)
        ended = terminated | truncated
        if not np.count_nonzero(ended):
            return obs, reward, terminated, truncated, {}
        if self.autoreset_mode is not AutoresetMode.SAME_STEP:
            self._pending |= ended
            return obs, reward, terminated, truncated, {}
        lanes = ended.nonzero()[0]
        final_obs = np.zeros(obs.shape, np.float32)
        final_obs[lanes] = obs[lanes]
        obs[lanes] = self.observe(self._begin(lanes, self.streams.starts(lanes)), lanes)
        return obs, reward, terminated, truncated, {"final_obs": final_obs, "_final_obs": ended}

    def _step_all(self, actions: Array) -> Outcome:
        actions = self._checked(actions)
        self._state, reward, terminated = self.transition(self._state, actions, self._lanes)  # type: ignore[arg-type]
        self._steps += 1
        due = self._pending.nonzero()[0]
        if len(due):  # NEXT_STEP: stepping also the few lanes due for reset costs less than packing the rest
            self._begin(due, self.streams.starts(due))
            reward[due] = 0.0
            terminated[due] = False
        return self.observe(self._state, self._lanes), reward, terminated, self._steps >= self._limit

    def _step_some(self, actions: Array, mask: Array | None) -> Outcome:
        """Step the lanes that are neither idle nor (under NEXT_STEP) due for their reset, packed together."""
        assert self._state is not None
        lanes = self._lanes_to_step(mask)
        reward = np.zeros(self.num_envs)
        terminated, truncated = np.zeros((2, self.num_envs), dtype=np.bool_)
        if len(lanes):
            chosen = self._checked(actions[lanes])
            state, reward[lanes], terminated[lanes] = self.transition(self._state.take(lanes, 1), chosen, lanes)
            self._state[:, lanes] = state
            steps = self._steps[lanes] + 1
            self._steps[lanes] = steps
            truncated[lanes] = steps >= self._limit
        return self.observe(self._state, self._lanes), reward, terminated, truncated

    def _step_compiled(self, loop: Callable[..., None], actions: Array, mask: Array | None) -> Outcome:
        """Step as `_step_some` does, in one loop over the lanes."""
        assert self._state is not None
        lanes = self._lanes_to_step(mask)
        if len(lanes) < self.num_envs:
            actions, obs = actions[lanes], self.observe(self._state, self._lanes)
        else:
            obs = np.empty(self.observation_space.shape, np.float32)  # type: ignore[arg-type]
        reward = np.zeros(self.num_envs)
        terminated, truncated = np.zeros((2, self.num_envs), dtype=np.bool_)
        chosen = np.ascontiguousarray(self._checked(actions))
        loop(
            self._state,
            lanes,
            chosen,
            self._steps,
            self.max_episode_steps,
            self._settings,
            obs,
            reward,
            terminated,
            truncated,
        )
        return obs, reward, terminated, truncated

    def _may_compile(self) -> bool:
        return self.num_envs <= self.compile_up_to and not self.draws_in_step and self.render_mode is None

    def _lanes_to_step(self, mask: Array | None) -> Array:
        """Return which lanes [k] are neither idle nor due for their reset, after resetting those that are.

        Raises:
            RuntimeError: under DISABLED, a lane that has ended would be stepped.
        """
        lanes = self._lanes if mask is None else checked_mask(mask, self.num_envs, "mask").nonzero()[0]
        due = self._pending[lanes]
        if np.count_nonzero(due):
            if self.autoreset_mode is AutoresetMode.DISABLED:
                raise RuntimeError(
                    f"lane {lanes[due][0]} has ended: reset it with options['reset_mask'] or mask it out"
                )
            self._begin(lanes[due], self.streams.starts(lanes[due]))
            lanes = lanes[~due]
        return lanes

    def _begin(self, lanes: Array, draws: Array) -> Array:
        """Put the lanes at the start of an episode; return their states [S, k]."""
        assert self._state is not None
        self._state[:, lanes] = start = self.start(draws)
        self._steps[lanes] = 0
        self._pending[lanes] = False
        return start

    def _checked(self, actions: Array) -> Array:
        """Return the actions after checking that they are in range; discrete ones become int64."""
        choices = self._choices
        if choices:
            if actions.dtype != np.int64:
                if actions.dtype.kind not in "iu":
                    raise ValueError(f"actions are {actions.dtype}, integers from 0 to {choices - 1} are needed")
                actions = actions.astype(np.int64)
            # As unsigned numbers the negative ones are huge, so one comparison finds both kinds of fault.
            if np.count_nonzero(actions.view(np.uint64) >= self._bound):
                wrong = actions[(actions < 0) | (actions >= choices)][0]
                raise ValueError(f"action {wrong} is out of range: {self.scalar_id} takes 0 to {choices - 1}")
        return actions

    def get_state(self) -> dict[str, Array]:
        """Return all that decides the future, as new arrays whose first axis is the lane.

        `state` [lanes, S] float64, `steps` [lanes] int64 since the episode began, `pending` [lanes] bool
        (ended, not reset), `stream` [lanes, 4] int64 (position in the random stream, where start states drawn
        ahead count as not drawn). Taking rows, state[name][index], copies lanes onto others: a restored
        mid-episode state for a group.
        """
        if self._state is None:
            raise RuntimeError("call reset() before get_state()")
        return {
            "state": self._state.T.copy(),
            "steps": self._steps.copy(),
            "pending": self._pending.copy(),
            "stream": self.streams.get_state(),
        }

    def set_state(self, state: dict[str, Any]) -> Array:
        """Go on exactly from where `get_state` was called; return the observations [lanes, D].

        Raises:
            ValueError: the state is of another number of lanes.
        """
        arrays = {name: np.asarray(value) for name, value in state.items()}
        for name, value in arrays.items():
            if len(value) != self.num_envs:
                raise ValueError(f"state[{name!r}] is of {len(value)} lanes, this environment has {self.num_envs}")
        self._state = np.array(arrays["state"].T, dtype=np.float64, order="C")
        self._steps = np.array(arrays["steps"], dtype=np.int64)
        self._pending = np.array(arrays["pending"], dtype=np.bool_)
        self.streams.set_state(arrays["stream"])
        return self.observe(self._state, self._lanes)

    def fork(self, source: Any, target: Any) -> Array:
        """Make lanes exact copies of others: state, steps and random stream.

        Args:
            source: the lanes to copy [k], as they are before the call.
            target: the lanes to overwrite [k].

        Returns:
            Observations [lanes, D] float32 of all lanes.

        Raises:
            ValueError: the arrays differ in length, hold what is no lane, or `target` names a lane twice.
            RuntimeError: before the first reset.
        """
        if self._state is None:
            raise RuntimeError("call reset() before fork()")
        source, target = lane_pairs(source, target, self.num_envs)
        self._state[:, target] = self._state[:, source]
        self._steps[target] = self._steps[source]
        self._pending[target] = self._pending[source]
        self.streams.fork(source, target)
        return self.observe(self._state, self._lanes)

    def render(self, lane: int = 0) -> tuple[Array, ...] | None:
        """Return one frame, uint8 [height, width, 3], of one lane, drawn by Gymnasium's own renderer."""
        if self.render_mode is None:
            raise RuntimeError("render() needs render_mode='rgb_array' when the environment is made")
        if self._state is None:
            raise RuntimeError("call reset() before render()")
        self.show(self._state[:, lane])
        return (self.scalar.render(),)

    def close_extras(self, **kwargs: Any) -> None:
        """Close the scalar environment and with it the renderer."""
        self.scalar.close()


def as_arrays(constants: Iterable[float]) -> tuple[Array, ...]:
    """Return numbers as 0-d arrays: from a Python number NumPy makes one in every operation, which doubles its cost."""
    return tuple(np.array(constant) for constant in constants)


def checked_mask(mask: Any, lanes: int, name: str) -> Array:
    """Return a mask as an array after checking that it is bool [lanes]."""
    mask = np.asarray(mask)
    if mask.dtype != np.bool_ or mask.shape != (lanes,):
        raise ValueError(f"{name} has dtype {mask.dtype} and shape {mask.shape}, bool and ({lanes},) is needed")
    return mask  # type: ignore[no-any-return]
