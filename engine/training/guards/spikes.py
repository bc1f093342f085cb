"""Spikes of the loss and of the gradient norm, relative to the median of recent steps.

The limits are numbers of the host, made of figures that have been read, and lie in 0-dim tensors on the device, where
the optimizer compares each step's loss and norm with them. So a step is skipped without a host wait; the
host compares the same fp32 numbers when it reads them, one report later, and reports the step.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from statistics import median

LEAST_LOSS = 1.0
"""Nats above the median up to which a loss is never a spike."""
LEAST_NORM = 4.0
"""Multiple of the median up to which a norm is never a spike."""
NO_LIMIT = 3.4028234663852886e38
"""The largest fp32 number: only non-finite numbers lie above it."""
_ROBUST = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""


def as_float32(value: float) -> float:
    """Returns the fp32 number nearest to `value`, with which the device compares."""
    return float(struct.unpack("f", struct.pack("f", min(value, NO_LIMIT)))[0])


class RunningLimit:
    """The median of recent figures, and the largest distance above it that is no spike.

    Args:
        window: figures that are remembered; at least half as many are needed before there is a limit.
        deviations: robust standard deviations above the median.
        least: the deviation that is always allowed: added to the median, or, for logarithms, a factor on it.
        logarithms: judge the logarithm, as suits figures that vary by factors.
    """

    def __init__(self, *, window: int, deviations: float, least: float, logarithms: bool) -> None:
        self._figures: deque[float] = deque(maxlen=window)
        self._needed, self._deviations = window // 2, deviations
        self._logarithms, self._least = logarithms, math.log(least) if logarithms else least

    def add(self, figure: float) -> None:
        """Adds a figure; a non-finite one is ignored. A spike counts as well, so that a lasting level becomes the
        usual one."""
        if math.isfinite(figure) and (figure > 0 or not self._logarithms):
            self._figures.append(math.log(figure) if self._logarithms else figure)

    def middle(self) -> float:
        """The median."""
        value = median(self._figures)
        return math.exp(value) if self._logarithms else value

    def limit(self) -> float:
        """The fp32 number above which a figure is a spike; the largest one while there are too few figures."""
        if len(self._figures) < self._needed:
            return NO_LIMIT
        middle = median(self._figures)
        spread = _ROBUST * median(abs(figure - middle) for figure in self._figures)
        value = middle + max(self._deviations * spread, self._least)
        if self._logarithms:
            value = math.exp(value) if value < math.log(NO_LIMIT) else NO_LIMIT
        return as_float32(value)
