"""Segments of random lengths, so that a text is not cut at the same places in every epoch.

Merity, Keskar and Socher 2017 (AWD-LSTM, arXiv:1708.02182), "variable length backpropagation
sequences", as the published Transformer-XL has it: the learning rate stays as it is.
"""

from typing import NamedTuple

import numpy as np

_HALF_AS_LONG = 0.05  # the part of the segments that are drawn around half of the length
_SHORTEST = 5
_DEVIATIONS = 3  # by which a segment may be longer than the length it is drawn around


class Jitter(NamedTuple):
    """How the lengths of segments vary: standard deviation in tokens, and what they are drawn with.

    All workers, and a run that is resumed, draw the same lengths from a seed and an epoch.
    """

    deviation: int
    seed: int
    epoch: int

    def draw_starts(self, length: int, segment_length: int) -> np.ndarray:
        """Return where K segments start, and where the last one would end, at ``length`` or later.

        A length is drawn around ``segment_length``, or, one in twenty, around half of it, and is at
        least 5 and at most three deviations longer than ``segment_length``.

        Args:
            length: tokens of a stream, which the segments cover.
            segment_length: in tokens.

        Returns:
            (K + 1,).
        """
        shortest = min(_SHORTEST, segment_length)
        longest = longest_segment(segment_length, self.deviation)
        generator = np.random.default_rng([self.seed, self.epoch])
        count = -(-length // shortest)
        halved = generator.random(count) < _HALF_AS_LONG
        around = np.where(halved, segment_length / 2, segment_length)
        drawn = generator.normal(around, self.deviation).astype(np.int64)
        ends = drawn.clip(shortest, longest).cumsum()
        return np.concatenate([[0], ends[: int(ends.searchsorted(length)) + 1]])


def longest_segment(segment_length: int, deviation: int) -> int:
    """Return the most tokens that a segment may have."""
    return segment_length + _DEVIATIONS * deviation
