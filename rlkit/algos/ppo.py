"""PPO (Schulman et al. 2017): windows of steps, a critic, GAE, and three losses."""

from __future__ import annotations

from gymnasium.vector import AutoresetMode

from rlkit.collect import ActionMap, Windows
from rlkit.envs import MaskedVectorEnv
from rlkit.exploration import Exploration
from rlkit.link import Chain
from rlkit.schedules import Schedule
from rlkit.stabilizers.entropy import Entropy
from rlkit.stabilizers.surrogate import Surrogate
from rlkit.stabilizers.value import Value
from rlkit.streams import Streams


class PPO:
    """The recipe `algo=ppo`."""

    critic = True
    autoreset = AutoresetMode.SAME_STEP

    @staticmethod
    def collector(
        envs: MaskedVectorEnv,
        actions: ActionMap,
        streams: Streams,
        num_steps: int,
        exploration: Exploration | None = None,
    ) -> Windows:
        """Collect `num_steps` steps of each environment."""
        return Windows(envs, actions, streams, num_steps, exploration)

    @staticmethod
    def chain(
        clip: Schedule,
        entropy_coef: Schedule,
        *,
        clip_high: float | None = None,
        ratio_bound: float | None = None,
        normalize_advantage: bool = True,
        value_coef: float = 1.0,
        value_clip: float | None = None,
    ) -> Chain:
        """Surrogate, value, entropy."""
        return Chain(
            surrogate=Surrogate(clip, clip_high, normalize_advantage, ratio_bound),
            value=Value(value_coef, value_clip),
            entropy=Entropy(entropy_coef),
        )
