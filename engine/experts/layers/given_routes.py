"""Experts that are given to routers, in place of their own choice: those by which another program sampled the tokens.

A router still computes its logits, and takes from them the weights of the experts that it is given, which have their
gradients as its own choice would. A token whose experts are not known keeps the router's own.

Legend: T tokens, M layers with a router, k experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch import Batch, Routes
from engine.distributed.collectives import local_part
from engine.distributed.mesh import Axis
from engine.ops.attention.token_context import ContextPart


@dataclass(frozen=True, slots=True)
class GivenRoutes(ContextPart):
    """The experts of a micro-batch's tokens; the fields are those of `engine.batch.Routes`.

    Args:
        experts_MKT: see there.
        layers: see there.
        differing: see there.
    """

    experts_MKT: Tensor
    layers: tuple[int, ...]
    differing: Tensor | None = None

    @classmethod
    def of_batch(cls, batch: Batch) -> GivenRoutes | None:
        """Returns those of a micro-batch; None where it has none."""
        routes = batch.part(Routes)
        return None if routes is None else cls(routes.experts_MKBS.flatten(2), routes.layers, routes.differing)

    def shared(self) -> tuple[Tensor, ...]:
        return (self.experts_MKT,)

    def of_layer(self, layer: int, axis: Axis | None = None) -> LayerRoutes:
        """Returns those of one layer.

        Args:
            layer: its number in the whole model.
            axis: of the ranks that each have a part of the tokens; None where the router sees all of them.
        """
        experts_TK = self.experts_MKT[self.layers.index(layer)].t()
        return LayerRoutes(experts_TK if axis is None else local_part(experts_TK, axis), self.differing)


@dataclass(frozen=True, slots=True)
class LayerRoutes:
    """The experts that a router is given.

    Args:
        experts_TK: of each token that it sees.
        differing: as of `GivenRoutes`.
    """

    experts_TK: Tensor
    differing: Tensor | None

    def instead_of(self, own_TK: Tensor) -> Tensor:
        """Returns int64 [T, k], the experts to compute, for those that the router chose."""
        known_TK = self.experts_TK != torch.iinfo(self.experts_TK.dtype).max
        given_TK = torch.where(known_TK, self.experts_TK.to(own_TK.dtype), own_TK)
        if self.differing is not None:
            other_T = (given_TK.sort(dim=1).values != own_TK.sort(dim=1).values).any(dim=1)
            self.differing.add_(torch.stack((other_T.sum(), known_TK[:, 0].sum())))
        return given_TK
