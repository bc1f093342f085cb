"""Published speeds of attention, by the length of documents, the size of heads, and the direction.

The figures are those of FlashAttention-3 (arXiv 2407.08608, figures 5 and 6): an H100 SXM5 at 16,384 tokens and 2,048
features, in fp16, for cuDNN and for FlashAttention-2. A causal mask halves the operations there, as it does in
`engine.planning.launches`. Published of backward are heads of 64 and 128 without a mask: with one it is taken to lose
what forward loses, and heads of 256 to stand to those of 128 as they do forward. Of an A100, FlashAttention-2
(arXiv 2307.08691) reports up to 73% of the data sheet forward and 63% backward; the lengths are taken to matter as they
do on an H100.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
HEADS = (64, 128, 256)
BLOCK = 128
"""Queries that one multiprocessor attends for at a time."""

_Row = tuple[float, ...]
"""TFLOP/s at LENGTHS."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionShape:
    """What decides how fast a launch of attention is.

    Args:
        length: tokens of a document; of several, the mean over their pairs of tokens.
        head_dim: features of a head.
        blocks: of at most BLOCK queries of one head.
        causal: whether a token attends to earlier ones alone.
    """

    length: float
    head_dim: int
    blocks: int
    causal: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpeeds:
    """One implementation on one kind of device.

    Args:
        causal, whole: speeds of forward with a causal mask and without, a row for each of HEADS.
        backward: without a mask, of heads of 64 and 128.
    """

    causal: tuple[_Row, _Row, _Row]
    whole: tuple[_Row, _Row, _Row]
    backward: tuple[_Row, _Row]

    def tflops(self, shape: AttentionShape, *, backward: bool) -> float:
        """Returns the TFLOP/s of a device that is full of blocks."""
        forward = _between(self.causal if shape.causal else self.whole, shape)
        if not backward:
            return forward
        whole = _between(self.whole, shape)
        wide = self.backward[1]
        widest = tuple(speed * of_256 / of_128 for speed, of_128, of_256 in zip(wide, *self.whole[1:], strict=True))
        return _between((*self.backward, widest), shape) * forward / whole

    def scaled(self, forward: float, backward: float) -> AttentionSpeeds:
        """Returns those of a device that is so many times as fast."""

        def times(rows: tuple[_Row, ...], factor: float) -> tuple[_Row, ...]:
            return tuple(tuple(factor * speed for speed in row) for row in rows)

        return AttentionSpeeds(
            causal=times(self.causal, forward),  # type: ignore[arg-type]
            whole=times(self.whole, forward),  # type: ignore[arg-type]
            backward=times(self.backward, backward),  # type: ignore[arg-type]
        )


def _between(rows: tuple[_Row, ...], shape: AttentionShape) -> float:
    """Returns the speed between the published ones, along the logarithms of length and size.

    Documents shorter than all of LENGTHS go on losing as they do from the second to the first, longer ones gain
    nothing. Heads smaller than all of HEADS are as much slower as they are smaller, since the softmax limits them.
    """
    speeds = [_at_length(row, shape.length) for row in rows]
    place = log2(shape.head_dim / HEADS[0])
    if place <= 0:
        return speeds[0] * 2**place
    low = min(int(place), len(HEADS) - 2)
    share = min(1.0, place - low)
    return speeds[low] + share * (speeds[low + 1] - speeds[low])


def _at_length(row: _Row, length: float) -> float:
    place = log2(max(1.0, length) / LENGTHS[0])
    if place < 0:
        return float(row[0] * (row[1] / row[0]) ** place)
    low = min(int(place), len(LENGTHS) - 2)
    share = min(1.0, place - low)
    return row[low] + share * (row[low + 1] - row[low])


CUDNN_ON_HOPPER = AttentionSpeeds(
    causal=((225, 288, 334, 363, 379, 388), (315, 410, 484, 518, 529, 539), (308, 391, 450, 483, 497, 509)),
    whole=((335, 373, 395, 408, 412, 413), (497, 574, 617, 609, 600, 595), (470, 546, 580, 581, 580, 581)),
    backward=((266, 348, 395, 417, 432, 433), (305, 408, 465, 499, 518, 516)),
)
FLASH2_ON_HOPPER = AttentionSpeeds(
    causal=((180, 229, 262, 284, 295, 299), (191, 260, 298, 319, 333, 335), (208, 251, 278, 293, 297, 298)),
    whole=((282, 306, 318, 321, 322, 324), (309, 350, 362, 368, 370, 370), (275, 313, 321, 323, 324, 326)),
    backward=((198, 238, 264, 279, 287, 291), (214, 260, 291, 310, 318, 322)),
)


def flash2_elsewhere(sheet: float) -> AttentionSpeeds:
    """Returns FlashAttention-2 on a device whose data sheet names so many TFLOP/s, at an A100's shares of it."""
    return FLASH2_ON_HOPPER.scaled(
        0.73 * sheet / max(FLASH2_ON_HOPPER.whole[1]), 0.63 * sheet / max(FLASH2_ON_HOPPER.backward[1])
    )
