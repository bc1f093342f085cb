"""The figures of a micro-batch's tokens in the order in which a client sent them.

Context ranks hold parts of a row, and a row is padded so that ranks can divide its tokens. A loss is computed from
whole rows without padding, on each of the ranks that share the row, and so needs to know nothing of ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.distributed.differentiable import join_tokens
from engine.distributed.mesh import Axis
from engine.zigzag import ContextLayout


def whole_row(values_T: Tensor, length: int, context: Axis) -> Tensor:
    """Returns [length, ...], the figures of one row's tokens, equal on its context ranks. Collective over them.

    All ranks do the same with the result, so that their gradients are equal, and each keeps the part of its tokens.

    Args:
        values_T: [T, ...], of the tokens that this rank holds; as many on each.
        length: tokens of the row without its padding.
        context: the ranks that share the row.
    """
    if context.size > 1:
        joined, total = join_tokens(values_T, context), len(values_T) * context.size
        layout = ContextLayout.even(size=context.size, num_rows=1, row_length=total, document_lengths=(total,))
        values_T = torch.cat([joined[span.start : span.stop] for span in layout.plain_order()])
    return values_T[:length]
