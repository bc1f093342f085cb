"""The calls of torch's flash ops, which take all documents of a micro-batch, or all blocks of a level, at once.

The ops are torch's own and private; whichever kernel is active computes them (`engine.ops.attention.flash`). Boundaries
lie on the device, and the host gives only upper bounds of lengths. Legend: T tokens, H query heads, K key/value heads,
D head size; N queries and M keys of a level.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.records import DocumentLevel

_BLOCK = 128
"""Queries of a block of threads of the flash kernels."""
_ENDS = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal")
_ARGUMENTS = {
    "_flash_attention_forward": ("query", "key", "value", *_ENDS, "return_debug_mask"),
    "_flash_attention_backward": ("grad_out", "query", "key", "value", "out", "logsumexp", *_ENDS),
}
"""The first arguments of torch's flash ops, as they are called here; torch may change them, the ops are private."""
_RESULTS = {"_flash_attention_forward": 2, "_flash_attention_backward": 3}
"""The least number of results of each."""


def flash_varlen(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, offsets: Tensor, longest: int, scale: float) -> Tensor:
    """Runs torch's flash op.

    Not through torch.nn.attention.varlen: that may choose another library's kernel, and its spelling of a causal mask,
    a window of (-1, 0), FlashAttention-4 reads as a window in torch 2.11. Fewer key/value heads go down as they are,
    because the kernels index them by group, forward and backward; so the tensors that autograd keeps are not expanded.
    """
    out, *_ = torch.ops.aten._flash_attention_forward(
        q_THD, k_TKD, v_TKD, offsets, offsets, longest, longest, 0.0, True, return_debug_mask=False, scale=scale
    )
    return out


def flash_varlen_forward(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, offsets: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Runs `flash_varlen` outside of autograd; returns the log sum exp of scores too, fp32 [T, H]."""
    out, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
        q_THD, k_TKD, v_TKD, offsets, offsets, longest, longest, 0.0, True, return_debug_mask=False, scale=scale
    )
    return out, lse_HT.t()


def flash_varlen_backward(
    dout_THD: Tensor, saved: tuple[Tensor, ...], offsets: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dq, dk, dv.

    Args:
        saved: q, k, v, and out [T, H, D] in their dtype and log sum exp [T, H], which may be those of more keys than
            these, merged.
    """
    return _backward(dout_THD, saved, (offsets, offsets, longest, longest), causal=True, scale=scale)


def _backward(
    dout: Tensor, saved: tuple[Tensor, ...], ends: tuple[Tensor, Tensor, int, int], *, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, lse_TH = saved
    # the kernel reads a dense [H, T]; without dropout it draws nothing, but its state must be a tensor
    no_state = torch.empty(2, dtype=torch.uint64, device=q.device)
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        dout.contiguous(), q, k, v, out, lse_TH.t().contiguous(), *ends, 0.0, causal, no_state, no_state, scale=scale
    )
    return gradients


def whole_blocks(longest: int) -> int:
    """Returns the bound of documents' lengths that a flash kernel is given.

    The grid has a block for each document, head and 128 queries of the bound, so a tight bound saves idle blocks. Never
    1: FlashAttention-2 takes that for decoding, and moves the query heads of a group into the sequence.
    """
    return -(-longest // _BLOCK) * _BLOCK


def flash_level_forward(
    q_NHD: Tensor, k_MKD: Tensor, v_MKD: Tensor, level: DocumentLevel, scale: float
) -> tuple[Tensor, Tensor]:
    """Computes full blocks, of which each query sees all keys of its own, outside of autograd; returns the log sum exp
    of scores too, fp32 [N, H]."""
    out, lse_HN, *_ = torch.ops.aten._flash_attention_forward(
        q_NHD, k_MKD, v_MKD, *_ends(level), 0.0, False, return_debug_mask=False, scale=scale
    )
    return out, lse_HN.t()


def flash_level_backward(
    dout_NHD: Tensor, saved: tuple[Tensor, ...], level: DocumentLevel, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns these blocks' share of dq, dk, dv; `saved` as for `flash_varlen_backward`."""
    return _backward(dout_NHD, saved, _ends(level), causal=False, scale=scale)


def _ends(level: DocumentLevel) -> tuple[Tensor, Tensor, int, int]:
    bounds = whole_blocks(level.longest_query), whole_blocks(level.longest_key)
    return level.query_offsets, level.key_offsets, *bounds


def why_not_torchs_ops() -> str | None:
    """Returns why this torch's flash ops cannot be called as they are here; None where they can."""
    for name, arguments in _ARGUMENTS.items():
        op = getattr(torch.ops.aten, name, None)
        schema = None if op is None else op.default._schema
        found = () if schema is None else tuple(argument.name for argument in schema.arguments)
        fits = found[: len(arguments)] == arguments and "scale" in found
        if schema is None or not fits or len(schema.returns) < _RESULTS[name]:
            return f"torch {torch.__version__} has another aten.{name} than torch 2.11 to 2.13, which this engine calls"
    return None
