"""Whole distributions of teachers, as the part of a micro-batch: the last layer's output of each teacher, of which
logits are computed some tokens at a time, beside the model's own.

A row of the output has as many numbers as the teacher is wide, where a row of logits has as many as the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from engine.batch import Batch, BatchPart, Routes
from engine.distributed.collectives import all_gather
from engine.models.decoder import Decoder
from engine.ops.attention.token_context import TokenContext
from engine.ops.block_loss import Block, HeldVocabulary
from engine.training.rank_stages import Stages

BlockLogits = Callable[[Block, HeldVocabulary], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherStates(BatchPart):
    """The outputs of teachers of a micro-batch, on the rank of the last pipeline stage.

    Args:
        batch: without the part.
        heads: the part of each teacher that has its head.
        outputs: of the last layer of each, [T, hidden], or [T / tp, hidden] with sequence parallelism.
        vocab_size: of the model that learns.
    """

    graphs_ignore: ClassVar[bool] = True
    for_loss_alone: ClassVar[bool] = True
    batch: Batch
    heads: tuple[Decoder, ...]
    outputs: tuple[Tensor, ...]
    vocab_size: int

    def teachers(self) -> list[BlockLogits]:
        """Returns the logits of each teacher at the tokens of a block."""
        return [_logits(self, head, out) for head, out in zip(self.heads, self.outputs, strict=True)]


def _logits(states: TeacherStates, head: Decoder, out: Tensor) -> BlockLogits:
    step = torch.zeros((), dtype=torch.int64, device=out.device)
    with torch.no_grad():
        context = head.context(states.batch, step, training=False)
    whole: list[Tensor] = []

    def compute(block: Block, held: HeldVocabulary) -> Tensor:
        with torch.no_grad():
            if head.has_resident_weights:
                return held_logits(head, head.logits(out[block.local], context), states.vocab_size, held)
            # each gathering of weights is met by those of other ranks, which may have other numbers of blocks
            if not whole:
                whole.append(head.logits(out, context))
            return held_logits(head, whole[0][block.tokens], states.vocab_size, held)

    return compute


def held_logits(head: Decoder, logits_CV: Tensor, vocab_size: int, held: HeldVocabulary) -> Tensor:
    """Returns those of a teacher's logits whose ids this rank holds of the model that learns, [C, num_ids].

    A larger vocabulary is split elsewhere: its logits are gathered, and those of further ids left out.

    Args:
        logits_CV: of the teacher's vocabulary here, with padding.
        vocab_size: of the model that learns.
        held: its ids here.
    """
    if held.axis.size > 1 and head.config.vocab_size != vocab_size:
        logits_CV = all_gather(logits_CV.t().contiguous(), held.axis).t()
        return logits_CV[:, held.first_id : held.first_id + held.num_ids]
    return logits_CV[:, : held.num_ids]


def keep_output(model: Decoder, out: Tensor, batch: Batch, context: TokenContext) -> Tensor:
    """Returns the last layer's output: an `engine.training.stage.ReadHead`."""
    return out


class TeacherPasses:
    """The teachers of a run on its devices, and their passes before those of the model. Collective.

    Args:
        teachers: their stages, in the order of distillation.teachers.
        vocab_size: of the model that learns.
    """

    def __init__(self, teachers: list[Stages], vocab_size: int) -> None:
        self._teachers, self._vocab_size = teachers, vocab_size

    def taught(self, batches: list[Batch]) -> list[Batch]:
        """Returns micro-batches with the teachers' outputs, where this rank has the last stage."""
        plain = [batch.without(Routes) for batch in batches]  # a teacher's routers choose for themselves
        found = [teacher.read_head(plain, keep_output) for teacher in self._teachers]
        if any(outputs is None for outputs in found):
            return batches
        heads = tuple(teacher.models()[-1] for teacher in self._teachers)
        return [
            batch.with_parts(TeacherStates(batch=own, heads=heads, outputs=outputs, vocab_size=self._vocab_size))
            for batch, own, outputs in zip(batches, plain, zip(*(one or () for one in found), strict=True), strict=True)
        ]
