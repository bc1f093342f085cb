"""Cross-entropy over a vocabulary that may be split: statistics of a shard, then the gradient in place.

    loss = log(sum_v exp(l_v - m)) - (l_target - m),   dl_v = (exp(l_v - m) / sum - [v is the target]) * scale

`local_statistics` reads the logits once, keeping a running maximum (Milakov & Gimelshein, arXiv 1805.02867), and gives
three numbers a token; the caller combines them over the shards:

    m = max over shards of max;  total = sum over shards of sum * exp(max - m);  target = sum over shards of target

`local_gradient` then overwrites the logits. No collective is called here. Specification:
`engine.kernels.reference_fused.local_statistics` and `local_gradient`.

Rows whose scale is 0 (tokens without a label) are not read in `local_gradient`: their gradient is 0.

Legend: T tokens, V vocabulary rows held here.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.launch import ceil_div, kernel, num_warps, power_of_2

_LARGEST_BLOCK = 8192


@kernel
def _local_statistics_kernel(
    logits_ptr, logits_stride, targets_ptr, max_ptr, sum_ptr, target_ptr, num_columns, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + token * logits_stride
    # one running value a program, so that each logit costs one exponential
    highest = float("-inf")
    total = 0.0
    for start in range(0, num_columns, BLOCK):
        columns_V = start + tl.arange(0, BLOCK)
        logit_V = tl.load(logits + columns_V, mask=columns_V < num_columns, other=float("-inf")).to(tl.float32)
        new = tl.maximum(highest, tl.max(logit_V, 0))
        shift = tl.where(new == float("-inf"), 0.0, new)  # nothing but -inf so far: exp(-inf - 0) is 0
        total = total * tl.exp(highest - shift) + tl.sum(tl.exp(logit_V - shift), 0)
        highest = new
    target = tl.load(targets_ptr + token)
    here = (target >= 0) & (target < num_columns)
    tl.store(max_ptr + token, highest)
    tl.store(sum_ptr + token, total)
    tl.store(target_ptr + token, tl.load(logits + target, mask=here, other=0.0).to(tl.float32))


@kernel
def _gradient_kernel(
    logits_ptr, logits_stride, targets_ptr, max_ptr, total_ptr, scale_ptr, num_columns, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns_V = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok_V = columns_V < num_columns
    scale = tl.load(scale_ptr + token)
    num_read = tl.where(scale != 0.0, num_columns, 0)
    factor = scale / tl.load(total_ptr + token)
    logits = logits_ptr + token * logits_stride + columns_V
    value_V = tl.load(logits, mask=columns_V < num_read, other=0.0).to(tl.float32)
    exponential_V = tl.exp(value_V - tl.load(max_ptr + token))
    gradient_V = tl.where(columns_V < num_read, exponential_V * factor, 0.0)
    gradient_V = tl.where(columns_V == tl.load(targets_ptr + token), gradient_V - scale, gradient_V)
    tl.store(logits, gradient_V, mask=ok_V)


def local_statistics(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a vocabulary shard's statistics of the loss, from one read of its logits, which stay as they are.

    Args:
        logits_TV: any float dtype; contiguous columns, rows any distance apart.
        targets_T: int64 target as a column of this shard; out of range where the target lies elsewhere.

    Returns:
        fp32 [T]: maximum, sum of exp(logit - maximum), and the target's logit (0 where the target lies elsewhere).
    """
    num_tokens, num_columns = logits_TV.shape
    results = torch.empty(3, num_tokens, dtype=torch.float32, device=logits_TV.device)
    if num_tokens > 0:
        block = power_of_2(num_columns, 1, _LARGEST_BLOCK)
        _local_statistics_kernel[(num_tokens,)](
            logits_TV,
            logits_TV.stride(0),
            targets_T,
            results[0],
            results[1],
            results[2],
            num_columns,
            BLOCK=block,
            num_warps=num_warps(block),
        )
    return results[0], results[1], results[2]


def local_gradient(
    logits_TV: Tensor, targets_T: Tensor, local_max_T: Tensor, max_T: Tensor, total_T: Tensor, scale_T: Tensor
) -> Tensor:
    """Computes (softmax - onehot) * scale, written over the logits.

    Args:
        logits_TV, targets_T: as given to `local_statistics`.
        local_max_T: this shard's maximum; not needed here, for the logits are still themselves.
        max_T, total_T: fp32, over the whole vocabulary.
        scale_T: fp32 gradient of each token's loss; 0 where there is no label.

    Returns:
        `logits_TV`.
    """
    num_tokens, num_columns = logits_TV.shape
    if logits_TV.numel() > 0:
        block = power_of_2(num_columns, 1, 4096)
        _gradient_kernel[(num_tokens, ceil_div(num_columns, block))](
            logits_TV,
            logits_TV.stride(0),
            targets_T,
            max_T,
            total_T,
            scale_T,
            num_columns,
            BLOCK=block,
            num_warps=num_warps(block),
        )
    return logits_TV


def bytes_moved(num_tokens: int, num_columns: int, itemsize: int) -> dict[str, int]:
    """Returns the compulsory bytes: statistics read the logits once; the gradient reads and writes them once."""
    logits = num_tokens * num_columns * itemsize
    return {"statistics": logits + 20 * num_tokens, "gradient": 2 * logits + 20 * num_tokens}
