"""Forward and backward of micro-batches in which tokens of several tenants are multiplied with the base together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.batch import Batch
from engine.layers.module import AdaptedModule
from engine.models.decoder import Decoder
from engine.objectives.language_modeling import LanguageModeling
from engine.objectives.objective import Objective
from engine.ops.attention.token_context import AdapterChoice
from engine.tenants.joined_batch import Joined, join
from engine.tenants.span_adapters import Peers, SpanChoice
from engine.training.rank_stages import Stages
from engine.training.stage import ModelStage


class Work(NamedTuple):
    """A tenant's micro-batch.

    Args:
        tenant: its number.
        batch: on the device.
        scale: 0-dim fp32 factor of the loss: one by the sum of the loss weights over the tenant's global batch.
    """

    tenant: int
    batch: Batch
    scale: Tensor


class _JointLoss(LanguageModeling):
    """The losses of all parts of a joined micro-batch, each by its tenant's objective.

    Its figures are sums over tenants, and mean nothing; those of each are in `sums_of`.
    """

    def __init__(self, objectives: Mapping[int, Objective]) -> None:
        super().__init__()
        self._objectives = objectives
        self._scales: Mapping[int, Tensor] = {}
        self.sums_of: dict[int, Tensor] = {}

    def begin(self, scales: Mapping[int, Tensor]) -> None:
        """Begins the passes of these tenants.

        Args:
            scales: the factor of each one's loss.
        """
        self._scales = scales
        self.sums_of = {
            number: scale.new_zeros(1 + len(self._objectives[number].metrics)) for number, scale in scales.items()
        }

    def loss_sum(self, token_losses_T: Tensor, batch: Batch) -> Tensor:
        joined = batch.part(Joined)
        assert joined is not None
        losses = []
        for span, own in zip(joined.spans, joined.batches, strict=True):
            found = self._objectives[span.tenant].sums(token_losses_T[span.first : span.last], own, None)
            losses.append(found.loss * self._scales[span.tenant])
            self.sums_of[span.tenant] = self.sums_of[span.tenant] + found.figures
        return torch.stack(losses).sum()


class JointPass:
    """The passes of joined micro-batches through the base.

    Args:
        base: this rank's stages of the model without adapters.
        tenants: number -> its stages, which read the same base.
    """

    def __init__(self, base: Stages, tenants: Mapping[int, Stages]) -> None:
        self._tenants = dict(tenants)
        self._loss = _JointLoss({number: stages.objective for number, stages in tenants.items()})
        peers = peers_of({number: stages.models() for number, stages in tenants.items()})

        def choose(batch: Batch) -> AdapterChoice | None:
            joined = batch.part(Joined)
            if joined is None:
                return None
            return SpanChoice(joined.spans, peers, lambda number: self._tenants[number].step, batch.num_tokens)

        self.stages = base.rebuilt(
            lambda stage: ModelStage(
                stage.model, self._loss, base.step.device, gives_gradient=True, step=base.step, choose=choose
            )
        )

    def gradients(self, micro_batches: Sequence[Sequence[Work]]) -> dict[int, Tensor]:
        """Adds the gradients of these micro-batches to those of their tenants.

        Args:
            micro_batches: the parts of each; as many, of the same sizes, on all ranks of a copy of the model.

        Returns:
            Tenant -> fp32 sums of its loss and its objective's metrics on this rank: 0 where it has no last stage.
        """
        if not micro_batches:
            return {}
        self._loss.begin({work.tenant: work.scale for parts in micro_batches for work in parts})
        joined = [join([(work.tenant, work.batch) for work in parts]) for parts in micro_batches]
        one = torch.ones((), dtype=torch.float32, device=self.stages.step.device)
        self.stages.gradients(joined, one, before_last_backward=lambda entries: None)
        return self._loss.sums_of


def peers_of(tenants: Mapping[int, Sequence[Decoder]]) -> dict[str, Peers]:
    """Returns the linears of each name that have adapters, or count their rows, in any tenant."""
    found: dict[str, Peers] = {}
    for number, models in tenants.items():
        for model in models:
            for module in model.modules():
                if isinstance(module, AdaptedModule):
                    operands = module.operands
                    if operands.low_rank is None and module.counted is None:
                        continue
                    peers = found.setdefault(operands.name, Peers({}, {}, {}))
                    if operands.low_rank is not None:
                        peers.operands[number] = operands
                        peers.leaves[number] = module.trained_leaves
                    if module.counted is not None:
                        peers.counted[number] = module.counted
    return found
