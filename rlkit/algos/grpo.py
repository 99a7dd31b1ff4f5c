"""GRPO (Shao et al. 2024): groups of whole episodes from one start state, no critic, and two losses.

The KL to a reference policy that GRPO is often shown with is the link `ref_kl`: `stabilizer=[ref_kl]`.
"""

from __future__ import annotations

from gymnasium.vector import AutoresetMode

from rlkit.collect import ActionMap, Episodes
from rlkit.envs import MaskedVectorEnv
from rlkit.exploration import Exploration
from rlkit.link import Chain
from rlkit.pilot import Pilots
from rlkit.schedules import Schedule
from rlkit.stabilizers.entropy import Entropy
from rlkit.stabilizers.surrogate import Surrogate
from rlkit.streams import Streams
from rlkit.vine import Vines


class GRPO:
    """The recipe `algo=grpo`."""

    critic = False
    autoreset = AutoresetMode.DISABLED

    @staticmethod
    def collector(
        envs: MaskedVectorEnv,
        actions: ActionMap,
        streams: Streams,
        group_size: int,
        exploration: Exploration | None = None,
        groups: str = "start",
    ) -> Episodes:
        """Play one episode in each environment, in groups from one start state, from midway, or from like starts."""
        kind = {"start": Episodes, "vine": Vines, "pilot": Pilots}[groups]
        return kind(envs, actions, streams, group_size, exploration)

    @staticmethod
    def chain(
        clip: Schedule,
        entropy_coef: Schedule,
        *,
        clip_high: float | None = None,
        ratio_bound: float | None = None,
        normalize_advantage: bool = False,
    ) -> Chain:
        """Surrogate, entropy."""
        return Chain(
            surrogate=Surrogate(clip, clip_high, normalize_advantage, ratio_bound), entropy=Entropy(entropy_coef)
        )
