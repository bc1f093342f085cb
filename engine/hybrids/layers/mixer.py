"""What mixers have in common: a linear on the input, one on the output, and small parameters between them."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from engine.distributed.sharding import ShardSpec
from engine.hybrids.kernels import hybrid_kernels
from engine.hybrids.pieces import Pieces
from engine.layers.branch import Around, Branch, LinearShape
from engine.layers.context import LayerContext
from engine.layers.module import Fresh, ShardedModule, ShardEntry
from engine.ops.attention.token_context import TokenContext


def spread_rates(shape: tuple[int, ...]) -> Tensor:
    """Returns fresh values of A_log: rates of forgetting from 1 to 16 over heads, whence transformers draws them."""
    return torch.linspace(1.0, 16.0, prod(shape)).log().view(shape)


class SmallParameters(ShardedModule):
    """The parameters of a mixer beside its linears.

    Args:
        prefix: engine module name of the mixer.
    """

    def __init__(self, prefix: str, *, build: LayerContext) -> None:
        super().__init__()
        self._prefix, self._build = prefix, build

    def owned(
        self,
        name: str,
        spec: ShardSpec,
        leaf: str = "weight",
        *,
        decays: bool | None = None,
        fresh: Fresh | None = None,
    ) -> ShardEntry:
        """Makes the parameter `leaf` of the module of this name inside the mixer, which trains where the plan says."""
        module, build = f"{self._prefix}.{name}", self._build
        trains, storage = build.plan.trains(module), build.empty(spec.local_shape)
        return self.own(f"{module}.{leaf}", storage, spec, trainable=trains, decays=decays, fresh=fresh)

    def owned_convolutions(self, specs: Mapping[str, ShardSpec]) -> tuple[list[ShardEntry], Tensor]:
        """Makes the weights [C, 1, W] of the modules of these names in one storage, and returns also that, which is the
        weight of one convolution of all channels."""
        build, entries, first = self._build, [], 0
        counts = [spec.local_shape[0] for spec in specs.values()]
        joined = build.empty((sum(counts), *next(iter(specs.values())).local_shape[1:]))
        for (name, spec), count in zip(specs.items(), counts, strict=True):
            module = f"{self._prefix}.{name}"
            part = joined[first : first + count]
            entries.append(self.own(f"{module}.weight", part, spec, trainable=build.plan.trains(module)))
            first += count
        return entries, joined


class Mixer(Branch):
    """A branch in the place of attention that carries a state.

    Args:
        prefix: engine module name, such as `layers.3.linear_attention`.
    """

    in_proj: Any
    """The linear on the mixer's input, and that on its output, which a subclass makes."""
    out_proj: Any

    def __init__(self, prefix: str, *, build: LayerContext) -> None:
        super().__init__()
        self.prefix, self.layout = prefix, build.layout
        self.kernels = hybrid_kernels(build.layout.kernels, shapes=build.device.type == "meta")

    @property
    def linear_shapes(self) -> tuple[LinearShape, ...]:
        return (*self.in_proj.shapes, *self.out_proj.shapes)

    def keep_inputs(self, around: Around) -> None:
        self.in_proj = self.in_proj.wrapped(around)

    def end_region(self, around: Around) -> None:
        self.out_proj = self.out_proj.wrapped(around)

    def pieces(self, context: TokenContext) -> Pieces:
        """Returns the runs of tokens along which states are carried."""
        found = context.part(Pieces)
        assert found is not None
        return found
