"""Mamba2 and attention side by side: both read the same normalised stream, and what they give is added.

    y = a_m mamba(b_m x) + a_a attention(b_a x)        x = norm(u)

Each branch makes its input of u by itself, so that x is never kept; the norm's weight so has two gradients, which add
up. The numbers a and b are the config's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.hybrids.layers.mamba2 import MambaSizes
from engine.layers.attention import Attention, CachedAttention
from engine.layers.branch import Around, Branch, LinearShape
from engine.layers.context import LayerContext
from engine.models.decoder_config import DecoderConfig, LayerPlace
from engine.models.decoder_layer import plain_attention
from engine.ops.attention.token_context import TokenContext
from engine.ops.inputs import LinearInput, NormInput


@dataclass(frozen=True, kw_only=True, slots=True)
class BranchFactors:
    """The numbers on what a branch takes, and on what it gives."""

    input: float
    output: float

    def of(self, source: LinearInput) -> LinearInput:
        """Returns the branch's input, of that which both branches have."""
        if self.input == 1.0:
            return source
        assert isinstance(source, NormInput), "a layer with norms on inputs"
        return replace(source, divisor=source.divisor / self.input)


@dataclass(frozen=True, kw_only=True, slots=True)
class MambaBesideAttention(MambaSizes):
    """Layers that have Mamba2 beside attention.

    Args:
        mamba, attends: the numbers around the two.
    """

    mamba: BranchFactors
    attends: BranchFactors

    def norm_context(self, build: LayerContext, norm: str) -> LayerContext:
        return replace(build, norm_readers=2) if norm == "input_norm" else build

    def attention(self, place: LayerPlace) -> Branch:
        return SideBySide(place, self)

    def attention_parameters(self, config: DecoderConfig) -> int:
        attention = 2 * config.hidden * config.head_dim * (config.num_heads + config.num_kv_heads)
        return MambaSizes.attention_parameters(self, config) + attention

    def fused_places(self, fused: str) -> tuple[str, ...]:
        return (fused,)


class SideBySide(Branch):
    """Mamba2 beside attention, u: [T, hidden] (or [T / tp, hidden]) -> the same shape.

    Raises:
        UserError: the heads of one of them do not fit the layout.
    """

    reads_once = False

    def __init__(self, place: LayerPlace, sizes: MambaBesideAttention) -> None:
        super().__init__()
        self.mamba = sizes.mixer(place, place.inner_site)
        self.attention: Attention = plain_attention(place)
        self._mamba_factors, self._attention_factors = sizes.mamba, sizes.attends

    @property
    def parts(self) -> tuple[Branch, ...]:
        return (self.mamba, self.attention)

    @property
    def cached(self) -> CachedAttention:
        """What a cache of keys and values keeps of it; states are kept beside these."""
        return self.attention.cached

    @property
    def linear_shapes(self) -> tuple[LinearShape, ...]:
        return (*self.mamba.linear_shapes, *self.attention.linear_shapes)

    def keep_inputs(self, around: Around) -> None:
        for part in self.parts:
            part.keep_inputs(around)

    def end_region(self, around: Around) -> None:
        for part in self.parts:  # neither's output is read before the region has ended
            part.end_region(around)

    def forward(self, u: Tensor, source: LinearInput, context: TokenContext) -> Tensor:
        mixed = self.mamba(u, self._mamba_factors.of(source), context)
        attended = self.attention(u, self._attention_factors.of(source), context)
        if self._mamba_factors.output != 1.0:
            mixed = mixed * self._mamba_factors.output
        return torch.add(mixed, attended, alpha=self._attention_factors.output)
