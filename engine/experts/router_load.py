"""How evenly routers spread tokens over experts, in each step's figures.

Mixtures count the rows of each expert on the device (`RoutedMLP.rows_E`). A step sums these counts over the ranks that
have other tokens or other layers, and makes a few numbers of them, without waiting for the device. The counts
themselves are accumulated on the device until read. They include padding and tokens without a loss.

Legend: L layers with a mixture, E experts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from engine.config.run import RunConfig
from engine.distributed.collectives import all_reduce
from engine.distributed.mesh import Mesh
from engine.errors import UserError
from engine.experts.layers.routed_experts import RoutedMLP, RoutedSizes
from engine.experts.ops.load_balance import LoadBalance
from engine.layers.host_copies import HostCopy
from engine.models.decoder import Decoder
from engine.models.decoder_config import DecoderConfig
from engine.optim.loss_scale import LossScale
from engine.telemetry.metrics import MetricsWriter, Value
from engine.training.observer import LaunchedStep, Observer, StepReport

_BY_LAYER = ("expert_entropy", "expert_imbalance", "idle_experts")
"""Names of the figures that each layer has: the entropy of experts' shares over that of equal ones; the rows of the
busiest expert over the mean; experts without a row. Of all layers these are the mean, the largest and the sum."""
_BALANCE = "router_aux_loss"
"""Name of the auxiliary loss, before it is multiplied by its coefficient."""


class RouterLoad(Observer):
    """The load of the model's experts.

    Args:
        config: of the model, which has a mixture of experts.
        parts: of the model on this rank.
        mesh: the axes.
        device: of the model.
        balance: the auxiliary loss; None without one.
        metrics: gets the rows of each expert with each checkpoint; None writes none.
    """

    def __init__(
        self,
        config: DecoderConfig,
        parts: Iterable[Decoder],
        mesh: Mesh,
        device: torch.device,
        balance: LoadBalance | None = None,
        metrics: MetricsWriter | None = None,
    ) -> None:
        sizes = config.variant(RoutedSizes)
        assert sizes is not None
        self._mesh, self._balance, self._metrics = mesh, balance, metrics
        self._copies: deque[tuple[int, HostCopy]] = deque()
        """The figures of steps that are not reported yet, on their way to the host."""
        self._layers = [index for index in range(config.num_layers) if sizes.applies(index)]
        self._mixtures = [
            (self._layers.index(index), layer.mlp)
            for part in parts
            for index, layer in enumerate(part.layers, part.part.first)
            if isinstance(layer.mlp, RoutedMLP)
        ]
        shape = len(self._layers), sizes.num_experts
        self._total_LE = torch.zeros(shape, dtype=torch.int64, device=device)

    def before(self, step: int) -> None:
        """Drops what was counted since the step before: by warm-up steps, or where a step was computed again."""
        for _, mixture in self._mixtures:
            mixture.rows_E.zero_()

    def after(self, launched: LaunchedStep) -> None:
        """Launches the figures of the step. Collective."""
        self._copies.append((launched.step, HostCopy(self.measured())))

    def figures(self, report: StepReport) -> dict[str, Value]:
        """Returns the figures of the step by name."""
        while self._copies[0][0] < report.step:
            self._copies.popleft()
        return self.named(self._copies.popleft()[1].read().tolist())

    def save(self, step: int) -> None:
        """Writes how many rows each expert had since the last checkpoint."""
        if self._metrics is not None:
            self._metrics.write({"step": step, "expert_rows": self.take_rows()})

    @torch.no_grad()
    def measured(self) -> Tensor:
        """Returns the figures of the step that was just launched, fp32, in the order of `named` and the same on all
        ranks. Collective."""
        rows_LE = torch.zeros_like(self._total_LE)
        for place, mixture in self._mixtures:
            rows_LE[place] = mixture.rows_E
        apart = () if self._mesh.grid.shards_experts else (self._mesh.tp,)  # tensor ranks have tokens of their own
        for axis in (self._mesh.dp_cp, *apart, self._mesh.pp):
            all_reduce(rows_LE, axis)
        self._total_LE += rows_LE
        share_LE = rows_LE / rows_LE.sum(dim=1, keepdim=True).clamp(min=1)
        entropy_L = torch.special.entr(share_LE).sum(dim=1) / math.log(max(2, rows_LE.shape[1]))
        imbalance_L = share_LE.max(dim=1).values * rows_LE.shape[1]
        idle_L = (rows_LE == 0).sum(dim=1).to(torch.float32)
        found = [entropy_L.mean(), imbalance_L.max(), idle_L.sum()]
        if self._balance is not None:
            found.append(self._balance.loss)
        return torch.cat((torch.stack(found), entropy_L, imbalance_L, idle_L))

    def named(self, figures: Sequence[float]) -> dict[str, Value]:
        """Returns the numbers of `measured` by name; `layer_` is before the names of those of each layer."""
        names = _BY_LAYER if self._balance is None else (*_BY_LAYER, _BALANCE)
        by_layer, count = figures[len(names) :], len(self._layers)
        return {**dict(zip(names, figures, strict=False))} | {
            f"layer_{name}": list(by_layer[index * count : (index + 1) * count]) for index, name in enumerate(_BY_LAYER)
        }

    def take_rows(self) -> dict[str, list[int]]:
        """Returns each layer's rows of each expert since the last call, by the layer's index; waits for the device."""
        rows = dict(zip(map(str, self._layers), self._total_LE.tolist(), strict=True))
        self._total_LE.zero_()
        return rows


def check_balance(config: RunConfig, decoder: DecoderConfig) -> None:
    """Checks that the model has the auxiliary loss that is asked for.

    Raises:
        UserError: it has none.
    """
    coefficient, routed = config.train.router_aux_loss_coef, decoder.variant(RoutedSizes)
    if not coefficient or (routed is not None and routed.balanced_by is not None):
        return
    why = "has no experts that a router chooses"
    if routed is not None:
        why = "has no such loss in transformers"
        if routed.rule.has_correction:
            why = "balances its experts by corrections of the routers' scores, which stay as they are"
    raise UserError(
        f"train.router_aux_loss_coef is {coefficient:g}, but this {decoder.family} model {why}: leave "
        "train.router_aux_loss_coef out."
    )


def balance_sentence(config: RunConfig, decoder: DecoderConfig, num_micro_batches: int) -> str | None:
    """Returns what is to be said of the auxiliary loss: that the model asks for it, or what it costs."""
    coefficient, routed = config.train.router_aux_loss_coef, decoder.variant(RoutedSizes)
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


def build_balance(
    config: RunConfig,
    decoder: DecoderConfig,
    mesh: Mesh,
    device: torch.device,
    loss_scale: LossScale | None,
    num_micro_batches: int,
    say: Callable[[str], None],
) -> LoadBalance | None:
    """Returns the auxiliary loss of routers, where it is asked for; says what it costs, or that the model asks for
    one."""
    if (sentence := balance_sentence(config, decoder, num_micro_batches)) is not None:
        say(sentence)
    if not decoder.num_experts or not config.train.router_aux_loss_coef:
        return None
    apart = () if mesh.grid.shards_experts else (mesh.tp,)
    return LoadBalance(
        config.train.router_aux_loss_coef,
        decoder.num_experts,
        axes=(mesh.dp_cp, *apart, mesh.pp),
        device=device,
        loss_scale=None if loss_scale is None else loss_scale.value,
    )
