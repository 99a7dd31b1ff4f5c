"""Random streams: every number drawn in a run comes from a generator that belongs to one member and one purpose.

A stream is `SeedSequence([seed + m, purpose, index])`, so it can be opened again from three integers: a member draws
the same numbers alone as among sixteen others, and a resumed run needs no generator state, only its iteration
counter.
"""

from collections.abc import Sequence
from enum import IntEnum, unique

import numpy as np


@unique
class Purpose(IntEnum):
    """What a stream is for; the numbers are part of a run's identity and never change."""

    INIT = 0  # initial weights
    START = 1  # start states of environments
    ACTION = 2  # action noise
    ORDER = 3  # minibatch order
    EVALUATION = 4  # start states of evaluation episodes
    EVALUATION_ACTION = 5  # action noise of the stochastic evaluation
    EXPLORATION = 6  # offsets of the behaviour distribution
    BRANCH = 7  # the step of a trunk at which a vine branches
    TRUNK_ACTION = 8  # action noise of trunks
    TRUNK_EXPLORATION = 9  # offsets of trunks
    PILOT_START = 10  # start states of the pilot run
    PILOT_ACTION = 11  # its action noise
    PILOT_CHOICE = 12  # which of its start states episodes begin with
    DROPOUT = 13  # hidden units dropped in an iteration
    REPLAY = 14  # which stored segments come back
    DEMONSTRATION = 15  # start states of a teacher's episodes
    WARM_UP = 16  # order of demonstrations in the warm-up
    CLONING = 17  # demonstrations of each iteration


class Streams:
    """Opens the streams of M members whose seeds are `seeds`."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self.seeds = tuple(int(seed) for seed in seeds)

    @property
    def members(self) -> int:
        """M, the number of members."""
        return len(self.seeds)

    def open(self, purpose: int, index: int | Sequence[int]) -> list[np.random.Generator]:
        """Return one generator for each member, positioned at the start of its stream `(seed + m, purpose, index)`.

        Args:
            index: of all members, or one for each.
        """
        indices = [index] * self.members if isinstance(index, int) else index
        return [
            np.random.default_rng(np.random.SeedSequence([seed, purpose, i]))
            for seed, i in zip(self.seeds, indices, strict=True)
        ]

    def integers(self, purpose: int, index: int, num: int) -> np.ndarray:
        """Return `num` seeds below 2^31 for each member, int64 [M, num]."""
        return np.stack([rng.integers(0, 2**31, num) for rng in self.open(purpose, index)])
