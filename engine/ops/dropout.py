"""Dropout on the input of an adapter, as a pure function of coordinates."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.ops.kernels import DrawMask, Mask
from triton_kernels.philox import dropout_scale


@dataclass(frozen=True, kw_only=True, slots=True)
class DropoutSite:
    """Which mask: one per layer and input tensor, so q, k and v share one and gate and up share one.

    Args:
        probability: of dropping an element; rounded to 1/65536, and the scale follows the rounded value.
        seed: the run's seed.
        site: number of the layer's input tensor.
        feature_offset: global index of the first feature held here.
    """

    probability: float
    seed: int
    site: int
    feature_offset: int = 0

    @property
    def scale(self) -> float:
        return dropout_scale(self.probability)

    def mask(self, draw: DrawMask, token_index: Tensor, num_features: int, step: Tensor) -> Mask:
        """Which of [T, num_features] are kept, in the form of the backend that draws it."""
        return draw(
            token_index,
            feature_offset=self.feature_offset,
            num_features=num_features,
            probability=self.probability,
            seed=self.seed,
            site=self.site,
            step=step,
        )
