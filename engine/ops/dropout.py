"""Dropout on the input of an adapter, as a pure function of coordinates."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.kernels.philox import dropout_scale
from engine.kernels.records import DropoutKey


@dataclass(frozen=True, kw_only=True, slots=True)
class DropoutSite:
    """The mask of one layer and input tensor: q, k and v share one, gate and up share one.

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

    def key(self, token_index: Tensor, num_features: int, step: Tensor) -> DropoutKey:
        """Returns the coordinates of the mask [T, num_features] of these tokens at this step."""
        return DropoutKey(
            token_index=token_index,
            step=step,
            seed=self.seed,
            site=self.site,
            probability=self.probability,
            num_features=num_features,
            feature_offset=self.feature_offset,
        )
