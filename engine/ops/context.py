"""What every layer needs to know about the tokens of the micro-batch it is working on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.zigzag import ContextPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenContext:
    """Coordinates of the T tokens of one micro-batch (T = rows * row length, row after row).

    Args:
        num_rows, row_length: of the micro-batch; T is their product.
        document_lengths: lengths of the documents along the tokens of the whole micro-batch.
        context_plan: who attends to whom where rows are split over context-parallel ranks; None where they are whole.
        cos, sin: fp32 [T, head_dim / 2] rotary tables.
        token_index: int64 [T], the dropout coordinate of every token.
        local_token_index: that of the tokens this rank holds under sequence parallelism (equal to `token_index`
            without).
        step: int64 0-dim device tensor, the optimizer step; the fourth dropout coordinate.
        training: False turns dropout off.
    """

    num_rows: int
    row_length: int
    document_lengths: tuple[int, ...]
    context_plan: ContextPlan | None
    cos: Tensor
    sin: Tensor
    token_index: Tensor
    local_token_index: Tensor
    step: Tensor
    training: bool
