"""One random stream for each lane, with start states drawn ahead in blocks.

Drawing start states one reset at a time costs as much as the physics at 1,024 lanes. A block of k uniform
draws of size S from a PCG64 generator holds exactly the numbers of k separate draws, so it changes the cost
and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        # Until a lane needs its generator: a PCG64 state, or None when it has drawn one row from its seed's stream.
        self._generators: list[np.random.Generator | Mapping[str, Any] | None] = [None] * lanes
        self._rows = np.empty((lanes * _BLOCK, size))  # one lane's block after the other
        self._end = np.arange(1, lanes + 1) * _BLOCK  # where a lane's block ends
        self._next = self._end.copy()  # first unused row of a lane's block; its end when all are used

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
        last = self._end[copies] - 1
        self._rows[last] = self._rows[self._end[sources] - _BLOCK]
        self._next[copies] = last

    def starts(self, lanes: Array) -> Array:
        """Return the lanes' next start draws between `low` and `high`, [len(lanes), S]."""
        rows = self._next[lanes]
        used_up = rows == self._end[lanes]
        if np.count_nonzero(used_up):
            for lane in lanes[used_up].tolist():
                self._refill(lane)
            rows = self._next[lanes]
        self._next[lanes] = rows + 1
        return self._rows.take(rows, axis=0)

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
            number = {"state": a << 64 | b, "inc": c << 64 | d}
            self._generators[lane] = {"bit_generator": "PCG64", "state": number, "has_uint32": 0, "uinteger": 0}
        self._next[:] = self._end

    def fork(self, source: Array, target: Array) -> None:
        """Make the streams of the lanes `target` go on as those of the lanes `source` will, apart from them."""
        lanes = source.tolist()
        seeds, generators = [self._seeds[lane] for lane in lanes], [self._generators[lane] for lane in lanes]
        for lane, seed, rng in zip(target.tolist(), seeds, generators, strict=True):
            self._seeds[lane] = seed
            self._generators[lane] = rng.bit_generator.state if isinstance(rng, np.random.Generator) else rng
        blocks = self._rows.reshape(-1, _BLOCK, self.size)
        blocks[target] = blocks[source]
        self._next[target] = self._next[source] - self._end[source] + self._end[target]

    def _generator(self, lane: int) -> np.random.Generator:
        rng = self._generators[lane]
        if not isinstance(rng, np.random.Generator):
            position = rng
            rng = self._generators[lane] = seeding.np_random(self._seeds[lane])[0]
            if position is None:
                _move(rng, self.size)
            else:
                rng.bit_generator.state = position
        return rng

    def _refill(self, lane: int) -> None:
        begin = self._next[lane] = self._end[lane] - _BLOCK
        self._rows[begin : begin + _BLOCK] = self._generator(lane).uniform(self.low, self.high, (_BLOCK, self.size))

    def _rewound(self, lane: int) -> np.random.Generator:
        """Return a lane's generator at the place in its stream where the scalar environment would be."""
        rng = self._generator(lane)
        unused = int(self._end[lane] - self._next[lane])
        if unused:
            _move(rng, -unused * self.size)
            self._next[lane] = self._end[lane]
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
