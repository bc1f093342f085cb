"""How evenly routers spread tokens over experts, in each step's figures.

Mixtures count the rows of each expert on the device (`RoutedMLP.rows_E`). A step sums these counts over the ranks that
have other tokens, and makes three numbers of them, without waiting for the device. Rows are all that the router sent:
padding's and those of tokens without a loss too. A layer that backward recomputes counts its rows twice, which changes
none of the three.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from engine.distributed.collectives import all_reduce
from engine.distributed.mesh import Mesh
from engine.layers.routed_experts import RoutedMLP
from engine.models.decoder import Decoder

NAMES = ("expert_entropy", "expert_imbalance", "idle_experts")
"""Names of the figures: the entropy of experts' shares over that of equal ones, mean over layers; the rows of the
busiest expert over the mean, the largest of any layer; experts without a row, of all layers together."""


class RouterLoad:
    """The load of the experts of this rank's layers.

    Args:
        parts: of the model on this rank.
        mesh: the axes.
        device: of the model.
    """

    def __init__(self, parts: Iterable[Decoder], mesh: Mesh, device: torch.device) -> None:
        self._mesh = mesh
        self._most, self._sums = torch.zeros(1, device=device), torch.zeros(3, device=device)
        self._mixtures = [one for part in parts for one in part.modules() if isinstance(one, RoutedMLP)]

    @torch.no_grad()
    def figures(self) -> Tensor:
        """Returns the figures of the steps since the last call, fp32 [3], the same on all ranks. Collective."""
        sums, most = self._sums.clone(), self._most.clone()
        if self._mixtures:
            rows_LE = torch.stack([mixture.rows_E for mixture in self._mixtures])
            for mixture in self._mixtures:
                mixture.rows_E.zero_()
            all_reduce(rows_LE, self._mesh.dp_cp)
            if not self._mesh.grid.cuts_experts:  # tensor ranks have tokens of their own
                all_reduce(rows_LE, self._mesh.tp)
            share_LE = rows_LE / rows_LE.sum(dim=1, keepdim=True).clamp(min=1)
            entropy_L = torch.special.entr(share_LE).sum(dim=1) / math.log(max(2, rows_LE.shape[1]))
            sums = torch.stack((entropy_L.sum(), (rows_LE == 0).sum(), torch.ones_like(entropy_L).sum()))
            most = (share_LE.max(dim=1).values * rows_LE.shape[1]).max().view(1)
        entropy, idle, layers = all_reduce(sums, self._mesh.pp).unbind()
        imbalance = all_reduce(most, self._mesh.pp, dist.ReduceOp.MAX)[0]
        return torch.stack((entropy / layers.clamp(min=1.0), imbalance, idle))
