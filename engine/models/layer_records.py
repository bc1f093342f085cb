"""Records that layers are described by and that need no other one: the factors of the residual stream, how layers
differ, the sites of their dropout, and the sizes of rows that the planner makes up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Multipliers:
    """The numbers that the residual stream is multiplied by, or divided, in some families.

    Args:
        embedding: on looked-up embeddings, rounded to the compute dtype.
        branch: on what attention and MLP add to the stream.
        logits_divisor: logits are divided by it.
        head_input_divisor: what the head takes is divided by it. An adapter's bias on the head tells the two apart.
    """

    embedding: float = 1.0
    branch: float = 1.0
    logits_divisor: float = 1.0
    head_input_divisor: float = 1.0


PLAIN_MULTIPLIERS = Multipliers()


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerKind:
    """The ways in which layers differ.

    Args:
        window: a position sees itself and the window - 1 positions before it; None for all before it.
        second_rope: it takes the config's second rotary embedding.
    """

    window: int | None = None
    second_rope: bool = False


PLAIN_LAYER = LayerKind()


SITES_PER_LAYER = 4
"""Dropout sites of a layer: attention's input, its output projection's, the MLP's input, its down projection's.

The head's comes after those of all layers, and then three for each layer's branch in between, or its shared expert."""
INNER_SITES = 1 << 22
"""First site of the linears inside attention, two for each layer."""
LATENT_SITES = 1 << 23
"""First site of the linears before and behind experts, two for each layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExampleRows:
    """A micro-batch that the planner makes up, as one context-parallel rank has it.

    Args:
        shape: its rows and columns.
        document_lengths: of the whole rows.
        tiles: of images, in patches.
        ranks: context-parallel ones.
    """

    shape: tuple[int, int]
    document_lengths: tuple[int, ...]
    tiles: tuple[tuple[int, ...], ...]
    ranks: int
