"""Gymnasium's Sync and Async vector environments with masked steps and forks.

Masked: `step(actions, mask)` leaves the lanes where the mask is False alone, as `NativeVectorEnv.step` does.
"""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import deepcopy
from multiprocessing.connection import wait
from typing import Any

import numpy as np
from gymnasium import Env
from gymnasium.spaces import Box, Space
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector.async_vector_env import AsyncState, _async_worker
from gymnasium.vector.utils import concatenate, iterate

from rlkit.envs.failure import EnvironmentFailure
from rlkit.envs.fork import check_copies, copied, lane_pairs
from rlkit.envs.native import Step, checked_mask
from rlkit.envs.spaces import MASK
from rlkit.envs.streams import Array, Seeds, lane_seeds
from rlkit.orphan import end_with_parent


class MaskedSyncVectorEnv(SyncVectorEnv[Any, Any]):
    """SyncVectorEnv whose `step` takes a mask and whose lanes can be forked."""

    members = 1
    action_mask: Array | None = None
    _copies_checked = False

    def reset(self, *, seed: Seeds = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """As SyncVectorEnv; a list of seeds may hold any integers."""
        try:
            obs, info = super().reset(seed=lane_seeds(seed, self.num_envs), options=own_options(options))
        except EnvironmentFailure as failure:
            raise self._placed(failure) from None
        note_masks(self.action_mask, info)
        return obs, info

    def _placed(self, failure: EnvironmentFailure) -> EnvironmentFailure:
        """Say in which lane an environment failed."""
        lane = [env.get_wrapper_attr("failed") for env in self.envs].index(True)
        return failure.in_lane(lane, self.num_envs, self.members)

    def step(self, actions: Any, mask: Array | None = None) -> Step:
        """Step the lanes where mask, bool [lanes], is True; the contract of `NativeVectorEnv.step`."""
        active = active_lanes(mask, self.num_envs)
        refuse_ended(self.autoreset_mode, self._autoreset_envs & active)
        waiting = self._autoreset_envs & ~active  # ended before, idle now: their reset stays due
        self._autoreset_envs &= active
        envs = self.envs
        stepped = [env if on else _Idle(obs) for env, on, obs in zip(envs, active, self._env_obs, strict=True)]
        self.envs = stepped  # type: ignore[assignment]
        try:
            obs, reward, terminated, truncated, info = super().step(actions)
        except EnvironmentFailure as failure:
            self.envs = envs
            raise self._placed(failure) from None
        finally:
            self.envs = envs
        self._autoreset_envs |= waiting
        note_masks(self.action_mask, info)
        return obs, reward, terminated, truncated, dense_final_obs(info, self.single_observation_space)

    def fork(self, source: Any, target: Any) -> Any:
        """Make the lanes `target` exact copies of the lanes `source`; the contract of `NativeVectorEnv.fork`.

        The first call checks, on environments made for that, that deepcopy copies them truly.

        Raises:
            ValueError: the environment cannot be copied, or the arrays do not name lanes.
            RuntimeError: before the first reset.
        """
        if any(obs is None for obs in self._env_obs):
            raise RuntimeError("call reset() before fork()")
        source, target = lane_pairs(source, target, self.num_envs)
        if not self._copies_checked:
            for make_env in {id(make_env): make_env for make_env in self.env_fns}.values():
                try:
                    check_copies(make_env)
                except EnvironmentFailure as failure:
                    how = "an environment, played at random to see whether it can be copied,"
                    raise failure.said_of(how) from None
            self._copies_checked = True
        # All are copied before any is replaced: a lane may be both source and target.
        copies = [(copied(self.envs[lane]), deepcopy(self._env_obs[lane])) for lane in source.tolist()]
        for lane, (env, obs) in zip(target.tolist(), copies, strict=True):
            self.envs[lane].close()
            self.envs[lane], self._env_obs[lane] = env, obs
        for values in (self._rewards, self._terminations, self._truncations, self._autoreset_envs):
            values[target] = values[source]
        if self.action_mask is not None:
            self.action_mask[target] = self.action_mask[source]
        self._observations = concatenate(self.single_observation_space, self._env_obs, self._observations)
        return deepcopy(self._observations)


class _Idle:
    """Stands in for an environment that is not to be stepped."""

    def __init__(self, obs: Any) -> None:
        self.obs = obs

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.obs, 0.0, False, False, {}


class MaskedAsyncVectorEnv(AsyncVectorEnv[Any, Any]):
    """AsyncVectorEnv whose `step` takes a mask; nothing is sent to the worker of an idle lane.

    An exception in a worker ends all workers and is raised here, an environment's own as an EnvironmentFailure.
    Workers ignore Ctrl-C: the main process decides when they end. Once it has gone they end without a word.
    """

    members = 1
    action_mask: Array | None = None

    def __init__(
        self,
        env_fns: list[Callable[[], Env[Any, Any]]],
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
    ) -> None:
        self._ended = np.zeros(len(env_fns), np.bool_)
        self._active = np.ones(len(env_fns), np.bool_)
        super().__init__(env_fns, worker=_worker, autoreset_mode=autoreset_mode)

    def reset(self, *, seed: Seeds = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """As AsyncVectorEnv; a list of seeds may hold any integers."""
        lanes = (options or {}).get("reset_mask", slice(None))
        try:
            answer = super().reset(seed=lane_seeds(seed, self.num_envs), options=own_options(options))
        except (EOFError, ConnectionError) as error:
            if self.closed:  # the environment's own error, raised from its worker
                raise
            raise self._worker_died() from error
        self._ended[lanes] = False
        note_masks(self.action_mask, answer[1])
        return answer

    def step(self, actions: Any, mask: Array | None = None) -> Step:
        """Step the lanes where mask, bool [lanes], is True; the contract of `NativeVectorEnv.step`."""
        active = active_lanes(mask, self.num_envs)
        refuse_ended(self.autoreset_mode, self._ended & active)
        try:
            self.step_async(actions, active)
            return self.step_wait()
        except (EOFError, ConnectionError) as error:
            if self.closed:  # the environment's own error, raised from its worker
                raise
            raise self._worker_died() from error

    def step_async(self, actions: Any, mask: Array | None = None) -> None:
        """Send the actions to the workers of the lanes where mask is True."""
        self._assert_is_running()
        self._active = active_lanes(mask, self.num_envs)
        each_action = iterate(self.action_space, actions)
        for pipe, action, on in zip(self.parent_pipes, each_action, self._active, strict=True):
            if on:
                pipe.send(("step", action))
        self._state = AsyncState.WAITING_STEP

    def step_wait(self, timeout: float | None = None) -> Step:
        """Collect the answers to `step_async`."""
        reward = np.zeros(self.num_envs)
        terminated, truncated = np.zeros((2, self.num_envs), np.bool_)
        info: dict[str, Any] = {}
        successes = []
        for lane in self._active.nonzero()[0].tolist():
            if timeout is not None and not self.parent_pipes[lane].poll(timeout):
                self._state = AsyncState.DEFAULT
                raise multiprocessing.TimeoutError(f"environment {lane} gave no answer to step within {timeout} s")
            answer, success = self.parent_pipes[lane].recv()
            successes.append(success)
            if success:
                _, reward[lane], terminated[lane], truncated[lane], lane_info = answer
                info = self._add_info(info, lane_info, lane)
        self._raise_if_errors(successes)
        self._state = AsyncState.DEFAULT
        self._ended[self._active] = (terminated | truncated)[self._active]
        note_masks(self.action_mask, info)
        info = dense_final_obs(info, self.single_observation_space)
        return deepcopy(self.observations), reward, terminated, truncated, info

    def fork(self, source: Any, target: Any) -> Any:
        """Refuse: an environment cannot be copied from one worker into another.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "env.backend=async cannot copy an environment in the middle of an episode; "
            "use env.backend=sync, or env.backend=native where there is one"
        )

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """As AsyncVectorEnv; workers whose answers nobody waits for, after a second Ctrl-C, are ended at once."""
        pending = self._state is not AsyncState.DEFAULT
        self._state = AsyncState.DEFAULT
        super().close_extras(timeout, terminate or pending)

    def _raise_if_errors(self, successes: Iterable[bool]) -> None:
        failures = sum(not success for success in successes)
        if not failures:
            return
        errors = [self.error_queue.get() for _ in range(failures)]
        for index, *_ in errors:
            self.parent_pipes[index].close()
            self.parent_pipes[index] = None  # type: ignore[call-overload]
        self._state = AsyncState.DEFAULT
        self.close()
        index, _, error, trace = min(errors, key=lambda item: int(item[0]))
        if isinstance(error, EnvironmentFailure):
            raise error.in_lane(index, self.num_envs, self.members)
        error.add_note(f"raised in environment {index} of {self.num_envs}:\n{trace}")
        raise error

    def _worker_died(self) -> EnvironmentFailure:
        """End the other workers; return the error that says which one is gone."""
        self._state = AsyncState.DEFAULT
        ended = wait([process.sentinel for process in self.processes], timeout=5.0)
        dead = [lane for lane, process in enumerate(self.processes) if process.sentinel in ended]
        for lane in dead:
            self.processes[lane].join()  # else its status is not known yet
        status = [self.processes[lane].exitcode for lane in dead]
        self.close(terminate=True)
        if not dead:
            return EnvironmentFailure("a worker process of the environments does not answer")
        more = f", and {len(dead) - 1} more with it" if dead[1:] else ""
        failure = EnvironmentFailure(f"lost its worker process, which ended with status {status[0]}{more}")
        return failure.in_lane(dead[0], self.num_envs, self.members)


def _worker(index: int, env_fn: Any, pipe: Any, parent_pipe: Any, memory: Any, errors: Any, *rest: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    try:
        try:
            env = env_fn()
        except Exception:
            pipe.recv()  # the first question; were nobody there to take it, that would hide why
            raise
        _async_worker(index, lambda: env, pipe, parent_pipe, memory, errors, *rest)
    except Exception as error:  # Gymnasium's worker sends all but what making and closing the environment raises
        errors.put((index, type(error), error, traceback.format_exc()))
        with suppress(OSError):  # the main process has gone, and there is nobody to tell
            pipe.send((None, False))


def note_masks(masks: Array | None, info: dict[str, Any]) -> None:
    """Write the action masks that some lanes gave into those of all, bool [lanes, A], if they are wanted."""
    if masks is not None and MASK in info:
        given = info[f"_{MASK}"]
        masks[given] = info[MASK][given]


def active_lanes(mask: Array | None, lanes: int) -> Array:
    """Return the mask, bool [lanes], checked; all lanes when it is None."""
    return np.ones(lanes, np.bool_) if mask is None else checked_mask(mask, lanes, "mask")


def own_options(options: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a copy of reset options, since Gymnasium removes the mask from the caller's."""
    return None if options is None else dict(options)


def refuse_ended(mode: AutoresetMode, ended: Array) -> None:
    """Raise if a lane that has ended would be stepped although resets are left to the caller."""
    if mode is AutoresetMode.DISABLED and ended.any():
        lane = ended.nonzero()[0][0]
        raise RuntimeError(f"lane {lane} has ended: reset it with options['reset_mask'] or mask it out")


def dense_final_obs(info: dict[str, Any], space: Space[Any]) -> dict[str, Any]:
    """Turn `final_obs` from an array of objects into one array [lanes, ...], zero where no episode ended."""
    if "final_obs" in info and isinstance(space, Box):
        ended = info["_final_obs"]
        dense = np.zeros((len(ended), *space.shape), space.dtype)
        dense[ended] = np.stack(list(info["final_obs"][ended]))
        info["final_obs"] = dense
    return info
