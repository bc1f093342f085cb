"""A decoder whose head has one row: it scores each token, and the score of a text is that of its last one.

The head is the decoder's own, `lm_head`, for a vocabulary of one. Over tensor ranks it is split as a vocabulary is: the
first rank has the row, the others have padding. So whatever the decoder does with its head (sequence parallelism,
pipeline stages, sharded and offloaded weights) holds for this one too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from engine.batch import Batch
from engine.choices import EntropyUse
from engine.distributed.differentiable import reduce_from_all
from engine.models.decoder import Decoder
from engine.models.decoder_config import DecoderConfig
from engine.models.head_figures import TokenFigures
from engine.ops.attention.token_context import TokenContext
from engine.ops.block_loss import BlockLoss


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeConfig(DecoderConfig):
    """Sizes of a decoder with a head that scores."""

    body: ClassVar[str] = "engine.judges.decoder:Judge"
    scores: ClassVar[bool] = True
    always_trained: ClassVar[tuple[str, ...]] = ("lm_head",)

    @property
    def head_shape(self) -> tuple[int, int]:
        return 1, self.hidden


class Judge(Decoder):
    """The model, or a part of it; arguments as of `Decoder`."""

    def token_figures(
        self,
        x: Tensor,
        batch: Batch,
        context: TokenContext,
        *,
        temperature: float = 1.0,
        entropies: EntropyUse = "none",
        block_loss: BlockLoss | None = None,
    ) -> TokenFigures:
        """Returns each token's score, fp32 [T], in the place of its loss; equal on all tensor-parallel ranks."""
        assert temperature == 1.0 and entropies == "none" and block_loss is None, (
            "options of a distribution over tokens"
        )
        return TokenFigures(self._units[-1].run(lambda x: self._scores(x, context), x))

    def _scores(self, x: Tensor, context: TokenContext) -> Tensor:
        scores_T = self._uncapped_logits(x, context)[:, 0].float()
        if not self.vocab_spec.pieces:  # padding, whose part in the backward pass the other ranks wait for
            scores_T = scores_T.masked_fill(torch.ones_like(scores_T, dtype=torch.bool), 0.0)
        return reduce_from_all(scores_T, self.layout.tp)
