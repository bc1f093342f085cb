"""The message from one part of a model to the next: the residual stream, and below it the rows that stand beside it for
all layers, such as encoded images, as rows of the same width, padded.

Such rows are computed once, on the first stage. CogAgent's encoder is 7.6 TFLOP an image, and its rows are 13 MB in
16 bits: every stage that encoded by itself would compute for tens of milliseconds what arrives in one. One tensor is
one message whatever is in it, and its gradient comes back in the same places. Where the rows need no gradient, the
stream's alone is sent back.

Legend: R rows of the stream, H their width, K rows beside it, C their features.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad


def rows_below(num_carried: int, width: int, hidden: int) -> int:
    """Returns the rows of `hidden` numbers that hold `num_carried` rows of `width`."""
    return -(-num_carried * width // hidden)


def pack(x_RH: Tensor, carried: Iterable[Tensor | None]) -> Tensor:
    """Returns [R + rows_below, H] for tensors [K, C], where they are not None."""
    hidden, message = x_RH.shape[1], [x_RH]
    for rows_KC in carried:
        if rows_KC is not None:
            numbers = rows_KC.flatten()
            missing = rows_below(*rows_KC.shape, hidden) * hidden - numbers.numel()
            message.append(pad(numbers, (0, missing)).view(-1, hidden))
    return torch.cat(message)


def unpack(message: Tensor, shapes: Sequence[tuple[int, int]]) -> tuple[Tensor, list[Tensor | None]]:
    """Returns the stream and the rows beside it, tensors of these shapes or None, as views of a message."""
    carried: list[Tensor | None] = [None] * len(shapes)
    counts = [rows_below(*shape, message.shape[1]) for shape in shapes]
    if not sum(counts):
        return message, carried
    end = stream = message.shape[0] - sum(counts)
    for index, ((num_rows, width), count) in enumerate(zip(shapes, counts, strict=True)):
        if num_rows:
            carried[index] = message[end : end + count].flatten()[: num_rows * width].view(num_rows, width)
        end += count
    return message[:stream], carried
