"""What one part of a model sends to the next: the residual stream, and below it the encoded images that layers attend
to, as rows of the same width, padded.

The images are encoded once, on the first stage. CogAgent's encoder is 7.6 TFLOP an image, and what it gives 13 MB in
16 bits: every stage that encoded by itself would compute for tens of milliseconds what arrives in one. One tensor is
one message whatever is in it, and its gradient comes back in the same places. Where the encoder is frozen, nobody has a
use for the gradient of the encoded images, and the stream's alone is sent back.

Legend: R rows of the stream, H their width, K encoded rows, C their features.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def rows_below(num_encoded: int, width: int, hidden: int) -> int:
    """Returns the rows of `hidden` numbers that hold `num_encoded` rows of `width`."""
    return -(-num_encoded * width // hidden)


def pack(x_RH: Tensor, encoded_KC: Tensor | None) -> Tensor:
    """Returns [R + rows_below, H]; the stream itself where there are no encoded images."""
    if encoded_KC is None:
        return x_RH
    hidden = x_RH.shape[1]
    numbers = encoded_KC.flatten()
    missing = rows_below(*encoded_KC.shape, hidden) * hidden - numbers.numel()
    return torch.cat([x_RH, pad(numbers, (0, missing)).view(-1, hidden)])


def unpack(message: Tensor, num_encoded: int, width: int) -> tuple[Tensor, Tensor | None]:
    """Returns the stream and the encoded images of a message, both as views of it."""
    if not num_encoded:
        return message, None
    rows = message.shape[0] - rows_below(num_encoded, width, message.shape[1])
    encoded = message[rows:].flatten()[: num_encoded * width]
    return message[:rows], encoded.view(num_encoded, width)
