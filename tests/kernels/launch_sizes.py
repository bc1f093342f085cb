"""Sizes of models whose kernels are launched, and the record of a launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from engine.ops.kernels import backend

TRITON = backend("triton")


EPS = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """A model's widths, and the tokens of a micro-batch."""

    name: str
    tokens: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int


ONES = Sizes(name="ones", tokens=1, hidden=1, intermediate=1, heads=1, kv_heads=1, head_dim=2, vocabulary=1)
"""Sizes of 1, which turn into constants."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapters:
    """Adapters on all linears.

    Args:
        rank: of each; q, k, v share an input, and so do gate and up.
        folded: B lies beside W.
        dropped: with dropout.
        first_feature: of the mask.
    """

    rank: int
    folded: bool = True
    dropped: bool = True
    first_feature: int = 0

    def __str__(self) -> str:
        return f"r={self.rank}{' folded' if self.folded else ''}{' dropped' if self.dropped else ''}"


class Case(NamedTuple):
    """The launches under a name, from the compute capability `since` on."""

    name: str
    launch: Callable[[], object]
    since: int = 80


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """The heads of attention to a cache in pages, on one rank."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    softcap: float | None = None
    sinks: bool = False


LLAMA_HEADS = Heads(name="8b", heads=32, kv_heads=8, head_dim=128)


PAGE = 16
"""As in engine.inference.pages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class States:
    """The sizes of a layer with states."""

    name: str
    tokens: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    width: int = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """A mixture's widths, and the tokens of a micro-batch."""

    name: str
    tokens: int
    hidden: int
    intermediate: int
    experts: int
    per_token: int
