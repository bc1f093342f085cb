"""What stands beside the residual stream of Gemma 4's small models: an input of each layer, which is made from the
tokens alone, and the keys and values that later layers read.

One record holds both for a micro-batch, on one part of the model. Parts send on what later ones read, see `decoder.py`.

Legend: T tokens, W features of a layer's input on this tensor rank, K key and value heads here, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from engine.ops.attention.token_context import ContextPart, TokenContext


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside(ContextPart):
    """Rows beside the stream.

    Args:
        sources: the layers whose keys and values later ones read.
        ids_T: int64, the tokens.
        inputs: layer -> its input [T, W]; filled before the first layer.
        keys_values: source -> its keys and values, [T, K, D] each; filled where the layer is run.
    """

    sources: frozenset[int]
    ids_T: Tensor
    inputs: dict[int, Tensor] = field(default_factory=dict)
    keys_values: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def shared(self) -> tuple[Tensor, ...]:
        given = (tensor for pair in self.keys_values.values() for tensor in pair)
        return (*self.inputs.values(), *given)


def offer(layer: int, k_TKD: Tensor, v_TKD: Tensor, context: TokenContext) -> None:
    """Keeps a layer's keys and values where later layers read them, whose gradients so go to the layer's first run. A
    recomputation keeps none: in backward the later layers have been."""
    beside = context.part(Beside)
    if beside is not None and layer in beside.sources and not context.repeats:
        beside.keys_values[layer] = k_TKD, v_TKD


def beside_of(context: TokenContext) -> Beside:
    """Returns the rows beside the stream of a model that has some."""
    beside = context.part(Beside)
    assert beside is not None, "a model with rows beside its stream makes them in SharingDecoder.context"
    return beside
