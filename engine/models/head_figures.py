"""What the end of the model says of each token's label: its loss, and how sure the model was."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from engine.batch import BatchPart
from engine.choices import EntropyUse
from engine.distributed.sharding import ShardSpec
from engine.layers.linear import ColumnParallelLinear
from engine.layers.norm import RMSNorm
from engine.models.decoder_config import DecoderConfig
from engine.ops.attention.token_context import TokenContext
from engine.ops.block_loss import BlockLoss, HeldVocabulary, block_losses, frozen_head_block_losses
from engine.ops.capped_loss import capped_loss
from engine.ops.cross_entropy import cross_entropy, losses_and_entropies
from engine.ops.head_loss import frozen_head_losses
from engine.ops.inputs import NormInput
from engine.ops.operands import LinearOperands
from engine.ops.several_labels import several_label_losses


@dataclass(frozen=True, kw_only=True, slots=True)
class SeveralLabels(BatchPart):
    """Labels in place of those of the batch, where each token has several.

    Args:
        labels_KBS: int64 [K, B, S], or IGNORE_LABEL.
    """

    labels_KBS: Tensor


class TokenFigures(NamedTuple):
    """What an objective is made of; equal on all tensor-parallel ranks.

    Args:
        losses_T: fp32 negative log-likelihood of each label, differentiable; 0 where there is none. [T, K] where the
            micro-batch has `SeveralLabels`, [T, F] of a `BlockLoss`.
        entropies_T: fp32 entropy of the distribution over the vocabulary at each token, with a gradient where that was
            asked for; None where it was not.
    """

    losses_T: Tensor
    entropies_T: Tensor | None = None


def is_frozen(head: ColumnParallelLinear) -> bool:
    """Returns whether neither the head nor an adapter on it trains."""
    return head.operands.low_rank is None and not head.operands.trains_weight


def is_read_in_backward(head: ColumnParallelLinear) -> bool:
    """Returns whether backward reads the head's weight; else the loss has computed its gradient in forward."""
    return not is_frozen(head) or head.bias_storage is not None


def head_input(config: DecoderConfig, norm: RMSNorm, divisor: float) -> NormInput:
    """Returns what the head computes logits of, already divided by `divisor`, with.

    The division of [T, hidden] in place of [T, V] leaves out an adapter's bias, which the head is told to divide.
    """
    return norm.as_input(config.multipliers.head_input_divisor * divisor)


def scaled_logits(
    config: DecoderConfig, norm: RMSNorm, head: ColumnParallelLinear, x: Tensor, context: TokenContext
) -> Tensor:
    """Returns [T, V / tp] logits before the soft cap, of what the last layer gave."""
    divisor = config.multipliers.logits_divisor
    return head(x, head_input(config, norm, divisor), context, output_divisor=divisor)


def head_figures(
    x: Tensor,
    labels_T: Tensor,
    context: TokenContext,
    *,
    norm: RMSNorm,
    head: ColumnParallelLinear,
    vocab_spec: ShardSpec,
    config: DecoderConfig,
    temperature: float,
    entropies: EntropyUse,
    several: SeveralLabels | None = None,
    block_loss: BlockLoss | None = None,
) -> TokenFigures:
    """Returns what an objective is made of.

    Args:
        x: what the last layer gave.
        labels_T: int64 global ids, or IGNORE_LABEL.
        context: of the tokens.
        norm, head, vocab_spec, config: of the model; the head is split over the vocabulary as `vocab_spec` says.
        temperature: logits are divided by it.
        entropies: what is wanted of them; nothing together with several labels or a `block_loss`.
        several: labels in place of `labels_T`.
        block_loss: a loss in place of that of the labels, at temperature 1.
    """
    operands, divisor, cap = head.operands, config.multipliers.logits_divisor, config.logits_softcap
    if temperature != 1.0 and cap is not None:  # it divides what is capped
        loss = capped_loss(cap, operands.kernels.loss.tokens_multiple, temperature)
        operands = replace(operands, kernels=replace(operands.kernels, loss=loss))
    else:
        divisor *= temperature
    source = head_input(config, norm, divisor)
    pieces = vocab_spec.pieces
    held = HeldVocabulary(
        first_id=pieces[0].global_offset if pieces else config.vocab_size,
        num_ids=pieces[0].length if pieces else 0,
        axis=operands.axis,
    )
    chosen = () if context.choice is None else context.choice.leaves(operands.name)
    is_fused = not is_read_in_backward(head) and not chosen
    if block_loss is not None:
        assert temperature == 1.0 and entropies == "none" and several is None
        if is_fused:
            losses_T = frozen_head_block_losses(
                x, source, operands, block_loss, held=held, cap=cap, leaves=source.leaves()
            )
        else:
            logits = head(x, source, context, output_divisor=divisor)
            losses_T = block_losses(logits, block_loss, gathers=operands.gathers, held=held, cap=cap)
    elif several is not None:
        assert entropies == "none"
        losses_T = several_label_losses(
            head(x, source, context, output_divisor=divisor),
            several.labels_KBS.flatten(1),
            first_id=held.first_id,
            num_ids=held.num_ids,
            axis=held.axis,
            kernels=operands.kernels,
            cap=cap,
            temperature=temperature,
        )
    else:
        logits = None if is_fused else head(x, source, context, output_divisor=divisor)
        return _label_figures(x, labels_T, source, operands, logits, held=held, entropies=entropies)
    return TokenFigures(losses_T)


def _label_figures(
    x: Tensor,
    labels_T: Tensor,
    source: NormInput,
    operands: LinearOperands,
    logits: Tensor | None,
    *,
    held: HeldVocabulary,
    entropies: EntropyUse,
) -> TokenFigures:
    """Returns the losses of one label for each token, and entropies where they are wanted.

    Args:
        x, labels_T, entropies: as of `head_figures`.
        source, operands: of the head.
        logits: [T, V / tp]; None where the head and its loss are computed together.
        held: this rank's part of the vocabulary.
    """
    differentiable = entropies == "gradient" and torch.is_grad_enabled()
    entropies_T: Tensor | None = None
    if entropies != "none" and not differentiable:
        entropies_T = torch.empty(labels_T.shape, dtype=torch.float32, device=x.device)
    if logits is None:
        found = frozen_head_losses(
            x,
            source,
            operands,
            labels_T,
            first_id=held.first_id,
            num_ids=held.num_ids,
            leaves=source.leaves(),
            entropies_T=entropies_T,
            differentiable=differentiable,
        )
        return TokenFigures(*found) if isinstance(found, tuple) else TokenFigures(found, entropies_T)
    if differentiable:
        both = losses_and_entropies(
            logits,
            labels_T,
            first_id=held.first_id,
            num_ids=held.num_ids,
            axis=held.axis,
            kernels=operands.kernels,
        )
        return TokenFigures(*both)
    losses_T = cross_entropy(
        logits,
        labels_T,
        first_id=held.first_id,
        num_ids=held.num_ids,
        axis=held.axis,
        kernels=operands.kernels,
        entropies_T=entropies_T,
    )
    return TokenFigures(losses_T, entropies_T)
