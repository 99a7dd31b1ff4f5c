"""Vector environments: batched native ones, and any Gymnasium id through Sync and Async, from one `make`."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from typing import Any, Protocol

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import Space
from gymnasium.vector import AutoresetMode

from rlkit.envs.failure import EnvironmentFailure, in_words
from rlkit.envs.spaces import ActionSpec
from rlkit.modules import load_module

BACKENDS = ("native", "sync", "async")
NATIVE = {  # Gymnasium id -> batched class
    "CartPole-v1": "rlkit.envs.cartpole:CartPoleVectorEnv",
    "Acrobot-v1": "rlkit.envs.acrobot:AcrobotVectorEnv",
    "MountainCar-v0": "rlkit.envs.mountain_car:MountainCarVectorEnv",
    "MountainCarContinuous-v0": "rlkit.envs.mountain_car_continuous:MountainCarContinuousVectorEnv",
    "Pendulum-v1": "rlkit.envs.pendulum:PendulumVectorEnv",
}

__all__ = ["BACKENDS", "NATIVE", "EnvironmentFailure", "MaskedVectorEnv", "make", "register", "spec_of"]


class MaskedVectorEnv(Protocol):
    """What `make` returns, as types: a Gymnasium VectorEnv with masked steps, lists of seeds and forked lanes."""

    num_envs: int
    action_mask: Any  # bool [lanes, A], the legal actions of each lane now; None where all are always legal
    metadata: dict[str, Any]
    single_observation_space: Space[Any]
    single_action_space: Space[Any]
    spec: EnvSpec | None

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]: ...

    def step(self, actions: Any, mask: Any = None) -> tuple[Any, Any, Any, Any, dict[str, Any]]: ...

    def fork(self, source: Any, target: Any) -> Any: ...

    def render(self) -> tuple[Any, ...] | None: ...

    def close(self) -> None: ...


def make(
    id: str,
    num_envs: int,
    *,
    backend: str = "native",
    autoreset_mode: str | AutoresetMode = AutoresetMode.SAME_STEP,
    max_episode_steps: int | None = None,
    render_mode: str | None = None,
    flatten_images: bool = False,
    action_mask: bool = False,
    members: int = 1,
    **kwargs: Any,
) -> MaskedVectorEnv:
    """Make `num_envs` lanes of an environment, observed as flat float32 vectors [lanes, D].

    Whatever the backend, `reset` takes a list of seeds and `options["reset_mask"]`, `step(actions, mask)`
    leaves the lanes alone where the mask is False, and `info["final_obs"]` is dense; nothing else of an environment's
    own `info` is passed on.

    Args:
        id: a Gymnasium id, or `my_module:MyEnv-v0`, which imports my_module first.
        backend: "native" (batched NumPy), "sync" (a loop over copies) or "async" (a process for each copy).
        autoreset_mode: when a lane whose episode has ended starts anew.
        max_episode_steps: time limit in steps; None is the registered one.
        render_mode: given to the environment.
        flatten_images: accept image observations, as one long vector.
        action_mask: keep in `action_mask` what each lane gives as info["action_mask"], which it then must.
        members: owners of the lanes, in equal parts; a failure names the one whose environment it is.
        **kwargs: arguments of the environment's constructor.

    Raises:
        ValueError: an unknown id or backend, an id without a native class, observations that are no vectors, or
            actions, an environment or a backend without masks.
        EnvironmentFailure: the environment's constructor raised something that is not about its arguments.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} must be one of {', '.join(BACKENDS)}")
    if num_envs < 1:
        raise ValueError(f"num_envs={num_envs} must be 1 or more")
    spec = spec_of(id)
    if backend == "native":
        native = NATIVE.get(spec.id.removeprefix("rlkit/"))
        if native is None:
            raise ValueError(
                f"{id} has no native backend (only {', '.join(NATIVE)}); use backend=sync or backend=async"
            )
        if action_mask:
            raise ValueError(
                "env.action_mask is true; native environments give no masks, since all actions are legal there; "
                "it must be false"
            )
        module, name = native.split(":")
        native_class = getattr(importlib.import_module(module), name)
        envs: MaskedVectorEnv = native_class(num_envs, max_episode_steps, autoreset_mode, render_mode, **kwargs)
        envs.spec = spec
        return envs

    from rlkit.envs.guard import Guarded, check_masks
    from rlkit.envs.gym import MaskedAsyncVectorEnv, MaskedSyncVectorEnv

    if render_mode is not None:  # not every environment knows the argument
        kwargs["render_mode"] = render_mode

    def copy() -> Guarded:
        env = made(id, spec, max_episode_steps, kwargs)
        return Guarded(env, flatten_images, action_mask)

    if action_mask:
        check_masks(copy())
    vector_class = MaskedSyncVectorEnv if backend == "sync" else MaskedAsyncVectorEnv
    vector = vector_class([copy] * num_envs, autoreset_mode=autoreset_mode)
    vector.spec, vector.members = spec, members
    if action_mask:
        vector.action_mask = np.ones((num_envs, sum(ActionSpec.of(vector.single_action_space).sizes)), bool)
    return vector


def made(id: str, spec: EnvSpec, limit: int | None, kwargs: dict[str, Any]) -> gymnasium.Env[Any, Any]:
    """Make one environment of Gymnasium's.

    Raises:
        ValueError, TypeError: arguments were given, and this is what the constructor says of them.
        gymnasium.error.Error: a package is missing, for one.
        EnvironmentFailure: whatever else it raised.
    """
    try:
        return gymnasium.make(spec, max_episode_steps=limit, **kwargs)
    except gymnasium.error.Error:
        raise
    except (Exception, SystemExit) as error:
        if kwargs and isinstance(error, (ValueError, TypeError)):
            raise
        raise EnvironmentFailure.of(error, f"{id} cannot be made: it raised {in_words(error)}") from None


def spec_of(id: str) -> EnvSpec:
    """Return the registered specification (time limit, reward threshold ...) of an id, as `make` takes it.

    Raises:
        ValueError: the module cannot be imported, or the id is not registered; the nearest ones are named.
    """
    module, _, name = id.rpartition(":")
    if module:
        try:
            load_module(module)
        except ImportError as error:
            raise ValueError(f"env.id={id}: the module {module} cannot be imported ({error})") from error
    if not id:
        raise ValueError("env.id is empty; it must be the id of an environment, as in env.id=LunarLander-v3")
    if name not in gymnasium.registry:
        known = [other for other in gymnasium.registry if not other.startswith("rlkit/") or name.startswith("rlkit")]
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        hint = f"; the nearest are {', '.join(near)}" if near else ""
        raise ValueError(f"env.id={id} is not a registered environment{hint}")
    return gymnasium.registry[name]


def register() -> None:
    """Register each native class with Gymnasium as `rlkit/<id>`, beside Gymnasium's scalar environment."""
    for id, native in NATIVE.items():
        scalar = gymnasium.registry[id]
        if f"rlkit/{id}" not in gymnasium.registry:
            gymnasium.register(
                f"rlkit/{id}",
                entry_point=scalar.entry_point,
                reward_threshold=scalar.reward_threshold,
                max_episode_steps=scalar.max_episode_steps,
                vector_entry_point=native,
            )


register()
