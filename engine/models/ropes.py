"""Records of rotary embeddings: base, scaling with length, and which features turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """Frequency scaling of rotary embeddings.

    Args:
        kind: "linear" (position interpolation, arXiv 2306.15595), "llama3" (Llama 3.1's smooth band-wise scaling),
            "yarn" (band-wise by pairs of features, arXiv 2309.00071) or "longrope" (a factor for each frequency, arXiv
            2402.13753).
        factor: how much longer the new context is; unused by "longrope".
        low_freq_factor, high_freq_factor, original_length: the band edges of "llama3" and "yarn", in turns over the
            length of pretraining; unused by the others.
        factors: of "longrope", one for each pair of features.
        table_scale: of "longrope" and "yarn": cos and sin are multiplied by it.
        whole_pairs: of "yarn": band edges are moved out to whole pairs of features.
    """

    kind: Literal["linear", "llama3", "longrope", "yarn"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192
    factors: tuple[float, ...] = ()
    table_scale: float = 1.0
    whole_pairs: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryGrowth:
    """How queries grow with their position p: they are multiplied by 1 + factor log(1 + floor(p / length)), as those of
    Llama 4 are."""

    factor: float
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """One rotary embedding.

    Args:
        theta: base of the wavelengths; None turns nothing.
        scaling: of its frequencies.
        axes: the kind of position that each pair of features is turned by: 0 in time, 1 in height, 2 in width; empty
            where positions are of one kind.
        width: features that its tables are of; None for the config's.
        turned_pairs: the first pairs of features, which are turned as wide heads are, while others are not; None for
            all.
        growth: it is for queries alone, which it multiplies too.
    """

    theta: float | None
    scaling: RopeScaling | None = None
    axes: tuple[int, ...] = ()
    width: int | None = None
    turned_pairs: int | None = None
    growth: QueryGrowth | None = None
