"""How evenly routers spread tokens over experts, in each step's figures.

Mixtures count the rows of each expert on the device (`RoutedMLP.rows_E`). A step sums these counts over the ranks that
have other tokens, and makes three numbers of them, without waiting for the device. Rows are all that the router sent:
padding's and those of tokens without a loss too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from engine.config.run import RunConfig
from engine.distributed.collectives import all_reduce
from engine.distributed.mesh import Mesh
from engine.errors import UserError
from engine.layers.routed_experts import RoutedMLP
from engine.models.decoder import Decoder
from engine.models.decoder_config import DecoderConfig
from engine.ops.load_balance import LoadBalance

NAMES = ("expert_entropy", "expert_imbalance", "idle_experts", "router_aux_loss")
"""Names of the figures: the entropy of experts' shares over that of equal ones, mean over layers; the rows of the
busiest expert over the mean, the largest of any layer; experts without a row, of all layers together; and where there
is one, the auxiliary loss before it is multiplied by its coefficient."""


class RouterLoad:
    """The load of the experts of this rank's layers.

    Args:
        parts: of the model on this rank.
        mesh: the axes.
        device: of the model.
        balance: the auxiliary loss; None without one.
    """

    def __init__(
        self, parts: Iterable[Decoder], mesh: Mesh, device: torch.device, balance: LoadBalance | None = None
    ) -> None:
        self._mesh, self._balance = mesh, balance
        self._most, self._sums = torch.zeros(1, device=device), torch.zeros(3, device=device)
        self._mixtures = [one for part in parts for one in part.modules() if isinstance(one, RoutedMLP)]

    @torch.no_grad()
    def figures(self) -> Tensor:
        """Returns the figures of the steps since the last call, fp32 [3], or [4] with an auxiliary loss, the same on
        all ranks. Collective."""
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
        found = [entropy / layers.clamp(min=1.0), imbalance, idle]
        return torch.stack(found if self._balance is None else [*found, self._balance.loss])


def check_balance(config: RunConfig, decoder: DecoderConfig) -> None:
    """Checks that the model has the auxiliary loss that is asked for.

    Raises:
        UserError: it has none.
    """
    coefficient = config.train.router_aux_loss_coef
    if not coefficient or (decoder.routed is not None and decoder.routed.balanced_by is not None):
        return
    why = "has no experts that a router chooses"
    if decoder.routed is not None:
        why = "balances its experts by corrections of the routers' scores, which stay as they are, and has no such loss"
    raise UserError(
        f"train.router_aux_loss_coef is {coefficient:g}, but this {decoder.family} model {why}: leave "
        "train.router_aux_loss_coef out."
    )


def balance_sentence(config: RunConfig, decoder: DecoderConfig, num_micro_batches: int) -> str | None:
    """Returns what is to be said of the auxiliary loss: that the model asks for it, or what it costs."""
    coefficient, routed = config.train.router_aux_loss_coef, decoder.routed
    if routed is None:
        return None
    if not coefficient:
        if not routed.balanced_by:
            return None
        return (
            "config.json asks for the auxiliary loss of routers (output_router_logits), which is left out: "
            f"train.router_aux_loss_coef {routed.balanced_by:g} adds it"
        )
    passes = (
        ""
        if num_micro_batches == 1 and config.parallel.pipeline == 1
        else ("; every micro-batch goes forward twice, since routers' choices are counted over the whole batch first")
    )
    return f"routers: auxiliary loss over the global batch, times {coefficient:g}{passes}"
