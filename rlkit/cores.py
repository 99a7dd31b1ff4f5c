"""How many cores there are, and what a run uses them for."""

from __future__ import annotations

import multiprocessing
import os
import sys

from rlkit.conf.schema import Config, PPOConfig

MEMBERS_EACH = 4  # a process of its own pays from so many members on
SECOND_ROWS = 256  # a second core for the critic pays from so many rows of a minibatch on, all members together


def cores() -> int:
    """Cores this process may use: those it is bound to, or fewer if OMP_NUM_THREADS says so."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return min(bound, int(wanted)) if wanted.isdigit() and int(wanted) else bound


def num_processes(config: Config) -> int:
    """How many processes the members of a run are shared out to."""
    if multiprocessing.current_process().daemon:  # a worker of a multiprocessing.Pool may have no processes of its own
        return 1
    if config.processes is not None:
        return min(config.processes, config.members)
    return max(1, min(cores(), config.members // MEMBERS_EACH))


def critic_has_a_core(config: Config) -> bool:
    """Whether the critic's passes in updates are made by a process beside this one (`rlkit.second_core`).

    So it is where a core is left, minibatches are large enough, and a process can be forked: elsewhere than on Linux it
    would take a guard in the user's script.
    """
    if sys.platform != "linux" or multiprocessing.current_process().daemon:
        return False
    if not isinstance(config.algo, PPOConfig) or config.policy.shared_trunk:
        return False
    rows = config.members * config.num_envs * config.algo.num_steps // config.algo.num_minibatches
    return rows >= SECOND_ROWS and (config.processes or cores()) > num_processes(config)
