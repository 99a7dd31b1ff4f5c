"""One random stream for each lane, with start states drawn ahead in blocks.

Drawing start states one reset at a time costs as much as the physics at 1,024 lanes. A block of k uniform
draws of size S from a PCG64 generator holds exactly the numbers of k separate draws, so it changes the cost
and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.utils import seeding

Array = npt.NDArray[Any]
Bound = float | Array
Seeds = int | Sequence[int | None] | None

_BLOCK = 32  # start states drawn at once for one lane
_LOW_64 = (1 << 64) - 1


class LaneStreams:
    """Uniform draws for each lane from its own `gymnasium.utils.seeding.np_random(seed)`.

    Generators are made when first needed. Of the lanes seeded alike in one call one draws its block; the
    others copy its first row and make a generator of their own only when they need a second.

    Args:
        lanes: number of lanes.
        size: doubles one start state takes from the stream, S.
        low, high: bounds of the start states drawn ahead, a number or [S].
    """

    def __init__(self, lanes: int, size: int, low: Bound, high: Bound) -> None:
        self.size, self.low, self.high = size, low, high
        self._seeds: list[int | None] = [None] * lanes
        # A lane without a generator has drawn one row from its seed's stream.
        self._generators: list[np.random.Generator | None] = [None] * lanes
        self._block = np.empty((lanes, _BLOCK, size))
        self._next = np.full(lanes, _BLOCK)  # first unused row of a lane's block; _BLOCK when all are used

    def seed(self, lanes: Sequence[int], seeds: Sequence[int | None]) -> None:
        """Begin a new stream in each of the lanes; a lane whose seed is None goes on with its own."""
        first: dict[int, int] = {}  # seed -> the lane that drew its block
        copies: list[int] = []
        sources: list[int] = []
        for lane, seed in zip(lanes, seeds, strict=True):
            if seed is None:
                continue
            self._seeds[lane] = seed
            if seed in first:
                self._generators[lane] = None
                copies.append(lane)
                sources.append(first[seed])
            else:
                first[seed] = lane
                self._generators[lane] = seeding.np_random(seed)[0]
                self._refill(lane)
        self._block[copies, -1] = self._block[sources, 0]
        self._next[copies] = _BLOCK - 1

    def starts(self, lanes: Array) -> Array:
        """Return the lanes' next start draws between `low` and `high`, [len(lanes), S]."""
        row = self._next[lanes]
        try:
            draws = self._block[lanes, row]
        except IndexError:  # a block is used up; looking for it beforehand would cost every call
            for lane in lanes[row == _BLOCK].tolist():
                self._refill(lane)
            row = self._next[lanes]
            draws = self._block[lanes, row]
        self._next[lanes] = row + 1
        return draws  # type: ignore[no-any-return]

    def uniform(self, lanes: Array, low: Bound, high: Bound, size: int) -> Array:
        """Return other draws of the lanes, [len(lanes), size]; what was drawn ahead is given back first."""
        draws = [self._rewound(lane).uniform(low, high, size) for lane in lanes.tolist()]
        return np.array(draws).reshape(len(draws), size)

    def get_state(self) -> Array:
        """Return each lane's position in its stream, int64 [lanes, 4]: its generator's two 128-bit words."""
        words = np.empty((len(self._seeds), 4), dtype=np.uint64)
        for lane, row in enumerate(words):
            number = self._rewound(lane).bit_generator.state["state"]
            for i, value in enumerate((number["state"], number["inc"])):
                row[2 * i], row[2 * i + 1] = value >> 64, value & _LOW_64
        return words.view(np.int64)

    def set_state(self, words: Array) -> None:
        """Put every lane's stream where `get_state` found it."""
        unsigned = np.ascontiguousarray(words, dtype=np.int64).view(np.uint64)
        for lane, (a, b, c, d) in enumerate(unsigned.tolist()):
            bits = np.random.PCG64(0)
            number: Any = {"state": a << 64 | b, "inc": c << 64 | d}
            bits.state = {"bit_generator": "PCG64", "state": number, "has_uint32": 0, "uinteger": 0}
            self._generators[lane] = np.random.Generator(bits)
        self._next[:] = _BLOCK

    def _generator(self, lane: int) -> np.random.Generator:
        rng = self._generators[lane]
        if rng is None:
            rng = self._generators[lane] = seeding.np_random(self._seeds[lane])[0]
            _move(rng, self.size)
        return rng

    def _refill(self, lane: int) -> None:
        self._block[lane] = self._generator(lane).uniform(self.low, self.high, (_BLOCK, self.size))
        self._next[lane] = 0

    def _rewound(self, lane: int) -> np.random.Generator:
        """Return a lane's generator at the place in its stream where the scalar environment would be."""
        rng = self._generator(lane)
        unused = _BLOCK - int(self._next[lane])
        if unused:
            _move(rng, -unused * self.size)
            self._next[lane] = _BLOCK
        return rng


def _move(rng: np.random.Generator, doubles: int) -> None:
    """Move a generator along its stream; a double takes one step of PCG64."""
    rng.bit_generator.advance(doubles)  # type: ignore[attr-defined]


def lane_seeds(seed: Seeds, lanes: int) -> list[int | None]:
    """Return one seed for each lane: None for all, seed + i, or the given list, checked."""
    if seed is None:
        return [None] * lanes
    if isinstance(seed, (int, np.integer)):
        seed = range(int(seed), int(seed) + lanes)
    seeds = [None if s is None else int(s) for s in seed]
    if len(seeds) != lanes:
        raise ValueError(f"seed has {len(seeds)} entries, one for each of {lanes} lanes is needed")
    if any(s is not None and s < 0 for s in seeds):
        raise ValueError(f"seed {min(s for s in seeds if s is not None)} is negative, seeds are 0 or more")
    return seeds
