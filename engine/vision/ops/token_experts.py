"""Tokens packed by expert, and put together again.

    x [T, F]  ->  x[language], x[vision]  ->  an expert each  ->  y [T, O]

Which token belongs to which expert comes from the host with the batch, so both lengths are known without waiting for
the device, and either may be 0. The two index lists are a partition of the tokens: nothing is added up.

The residual stream is the boundary where tensor-parallel ranks sum. Experts' linears leave their sums to it, so that
each boundary is one collective for both experts, with sequence parallelism:

| boundary         | forward        | backward       |
|------------------|----------------|----------------|
| from the stream  | all-gather     | reduce-scatter |
| to the stream    | reduce-scatter | all-gather     |

and without it nothing for the first, all-reduce for the second, each the other way round in backward. On an axis of one
rank, as between an attention's linears, they only move rows.

Legend: T tokens, F features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.distributed.collectives import all_gather, all_reduce, reduce_scatter
from engine.distributed.mesh import Axis
from engine.ops.attention.token_context import ContextPart


class PackedTokens(NamedTuple):
    """Some of the T tokens, one after the other.

    Args:
        index: int64 [N] where they are among the T.
        token_index: int64 [N], their dropout coordinates.
    """

    index: Tensor
    token_index: Tensor

    @property
    def count(self) -> int:
        """N, known on the host."""
        return self.index.shape[0]


@dataclass(frozen=True, slots=True)
class Experts(ContextPart):
    """The tokens of each expert: a partition of the T tokens."""

    language: PackedTokens
    vision: PackedTokens


def _packed(x_TF: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    if experts.vision.count == 0:
        return x_TF, x_TF.new_empty(0, x_TF.shape[1])
    return x_TF.index_select(0, experts.language.index), x_TF.index_select(0, experts.vision.index)


def _in_order(language: Tensor, vision: Tensor, experts: Experts) -> Tensor:
    if experts.vision.count == 0:
        return language
    width = vision.shape[1] if experts.language.count == 0 else language.shape[1]
    x = language.new_empty(experts.language.count + experts.vision.count, width)
    for part, tokens in ((language, experts.language), (vision, experts.vision)):
        if tokens.count:
            x.index_copy_(0, tokens.index, part)
    return x


def _summed(x_TF: Tensor, axis: Axis, *, splits_tokens: bool, own: bool) -> Tensor:
    """Returns the sum over the axis: of this rank's tokens, or of all.

    Args:
        own: `x_TF` has no other reader, so that the sum may take its place.
    """
    if axis.size == 1 or x_TF.numel() == 0:
        return x_TF
    if splits_tokens:
        return reduce_scatter(x_TF.contiguous(), axis)
    return all_reduce(x_TF if own and x_TF.is_contiguous() else x_TF.clone(), axis)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, experts: Experts, axis: Axis, splits_tokens: bool) -> tuple[Tensor, Tensor]:
        ctx.experts, ctx.axis, ctx.splits_tokens = experts, axis, splits_tokens
        language, vision = _packed(all_gather(x, axis) if splits_tokens else x, experts)
        return (language.view_as(language) if language is x else language), vision

    @staticmethod
    def backward(ctx: Any, d_language: Tensor, d_vision: Tensor) -> tuple[Any, ...]:
        dx = _in_order(d_language, d_vision, ctx.experts)
        own = dx is not d_language
        return _summed(dx, ctx.axis, splits_tokens=ctx.splits_tokens, own=own), None, None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, language: Tensor, vision: Tensor, experts: Experts, axis: Axis, splits_tokens: bool
    ) -> Tensor:
        ctx.experts, ctx.axis, ctx.splits_tokens = experts, axis, splits_tokens
        y = _in_order(language, vision, experts)
        y = _summed(y, axis, splits_tokens=splits_tokens, own=y is not language)
        return y.view_as(y) if y is language else y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        whole = all_gather(dy.contiguous(), ctx.axis) if ctx.splits_tokens else dy
        return *_packed(whole, ctx.experts), None, None, None


def split_by_expert(x_TF: Tensor, experts: Experts, axis: Axis, *, splits_tokens: bool) -> tuple[Tensor, Tensor]:
    """Returns the tokens of the language expert and those of the vision expert.

    Args:
        x_TF: all tokens, or this rank's [T / size, F] where `splits_tokens`.
        axis: its ranks' gradients are summed.
        splits_tokens: outside, each rank of the axis holds its own tokens.
    """
    return _Split.apply(x_TF, experts, axis, splits_tokens and axis.size > 1)


def join_experts(parts: tuple[Tensor, Tensor], experts: Experts, axis: Axis, *, splits_tokens: bool) -> Tensor:
    """Returns what the two experts gave, language first, in the order of the tokens: summed over `axis`, and of this
    rank's tokens alone where `splits_tokens`."""
    return _Join.apply(*parts, experts, axis, splits_tokens and axis.size > 1)
