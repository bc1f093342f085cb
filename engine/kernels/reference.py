"""The plain-torch specification of every op: forward and backward as ordinary functions, no autograd.

Faster backends are compared with these, and the CPU path starts from them. Statistics and reductions are fp32 (or
fp64 for fp64 inputs); results have the input's dtype.

Legend: T tokens, F features, H heads, D head dimension, V vocabulary rows held here, I input and O output features of a
linear, R rows of its stacked A.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.kernels.records import AdapterPlace, AdapterSection, InputUpdate


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype that statistics are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rmsnorm_forward(x_TF: Tensor, weight_F: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Computes y = x / sqrt(mean(x^2) + eps) * w (Zhang & Sennrich, arXiv 1910.07467).

    Returns:
        y [..., F] and the reciprocal root mean square [..., 1] that backward needs.
    """
    wide = x_TF.to(_wide(x_TF.dtype))
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * rstd).mul_(weight_F).to(x_TF.dtype), rstd


def rmsnorm_backward(dy_TF: Tensor, x_TF: Tensor, weight_F: Tensor, rstd_T1: Tensor) -> Tensor:
    """Computes dx = rstd * (g - xhat * mean(g * xhat)), g = dy * w, xhat = x * rstd, which is never written out."""
    wide = _wide(x_TF.dtype)
    x_wide = x_TF.to(wide)
    g = dy_TF.to(wide) * weight_F.to(wide)
    share_T1 = (g * x_wide).mean(-1, keepdim=True) * rstd_T1.square()
    return g.addcmul_(x_wide, share_T1, value=-1).mul_(rstd_T1).to(x_TF.dtype)


def rmsnorm_weight_gradient(dy_TF: Tensor, x_TF: Tensor, rstd_T1: Tensor) -> Tensor:
    """dw = sum over tokens of dy * xhat, in the wide dtype, [F]."""
    wide = _wide(x_TF.dtype)
    return (dy_TF.to(wide) * x_TF.to(wide) * rstd_T1).flatten(0, -2).sum(0)


def swiglu_forward(gate_up_T2F: Tensor) -> Tensor:
    """silu(gate) * up for [gate | up] side by side (Shazeer, arXiv 2002.05202)."""
    gate, up = gate_up_T2F.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)


def swiglu_backward(dy_TF: Tensor, gate_up_T2F: Tensor) -> Tensor:
    """Computes [dgate | dup]; silu'(g) = s (1 + g (1 - s)), s = sigmoid(g), rounded to the input's dtype once."""
    gate, up = gate_up_T2F.chunk(2, dim=-1)
    gate = gate.to(_wide(gate.dtype))
    out = torch.empty_like(gate_up_T2F)
    dgate, dup = out.chunk(2, dim=-1)
    torch.mul(dy_TF, torch.nn.functional.silu(gate), out=dup)
    dsilu = dy_TF.to(gate.dtype) * up
    # torch's own op: one pass over memory where the formula written out takes five
    dgate.copy_(torch.ops.aten.silu_backward.grad_input(dsilu, gate, grad_input=dsilu))
    return out


def rope_tables(positions: Tensor, inverse_frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Returns cos and sin [T, D / 2] in fp32 for int64 positions (Su et al., arXiv 2104.09864).

    Args:
        positions: [T], or [T, D / 2] where frequencies turn by positions of their own.
        inverse_frequencies: fp32 [D / 2].
    """
    positions = positions if positions.dim() == 2 else positions[:, None]
    angles = positions.to(torch.float32) * inverse_frequencies[None, :]
    return angles.cos(), angles.sin()


def rope_rotate(x_THD: Tensor, cos: Tensor, sin: Tensor, out_THD: Tensor, *, inverse: bool = False) -> None:
    """Rotates the halves of each head into `out` (which may not alias `x`); `inverse` turns the other way."""
    half = x_THD.shape[-1] // 2
    first, second = x_THD[..., :half], x_THD[..., half:]
    cos, sin = cos[:, None, :], -sin[:, None, :] if inverse else sin[:, None, :]
    # cos and sin are fp32, so each sum is rounded to the result's dtype once
    out_THD[..., :half] = (first * cos).addcmul_(second, sin, value=-1)
    out_THD[..., half:] = (second * cos).addcmul_(first, sin)


def cross_entropy_statistics(logits_TV: Tensor, targets_T: Tensor, row_max_T: Tensor) -> tuple[Tensor, Tensor]:
    """Computes a vocabulary shard's part of the loss, given the maximum over the whole vocabulary.

    Overwrites `logits` with exp(logits - max), which backward reuses.

    Args:
        logits_TV: fp32 logits of the rows held here.
        targets_T: int64 target as a row of this shard; out of range where the target lies elsewhere.
        row_max_T: fp32 maximum over the whole vocabulary.

    Returns:
        sum of exponentials [T] and the shifted target logit [T] (0 where the target lies elsewhere).
    """
    logits_TV.sub_(row_max_T[:, None])
    here = (targets_T >= 0) & (targets_T < logits_TV.shape[1])
    index = torch.where(here, targets_T, 0)[:, None]
    target_logit = torch.where(here, logits_TV.gather(1, index)[:, 0], 0.0)
    logits_TV.exp_()
    return logits_TV.sum(-1), target_logit


def cross_entropy_backward(exponentials_TV: Tensor, targets_T: Tensor, total_T: Tensor, scale_T: Tensor) -> Tensor:
    """Computes d loss / d logits = (softmax - onehot) * scale, written over the exponentials that forward left."""
    here = (targets_T >= 0) & (targets_T < exponentials_TV.shape[1])
    index = torch.where(here, targets_T, 0)[:, None]
    exponentials_TV.mul_((scale_T / total_T)[:, None])
    return exponentials_TV.scatter_add_(1, index, torch.where(here, -scale_T, 0.0)[:, None])


def add_product(buffer: Tensor, left: Tensor, right: Tensor, scale: float = 1.0) -> None:
    """buffer += scale * left right, rounded to fp32 once where the operands are fp32."""
    if left.dtype == torch.float32:
        buffer.addmm_(left, right, alpha=scale)
    else:
        buffer.add_(left @ right, alpha=scale)


def _dropped(x_TI: Tensor, mask_TI: Tensor | None, keep_scale: float) -> Tensor:
    return x_TI if mask_TI is None else (x_TI * mask_TI).mul_(keep_scale)


def project(x_TI: Tensor, a_RI: Tensor, mask_TI: Tensor | None, keep_scale: float, out_TR: Tensor) -> None:
    """drop(x) A^T into `out`, without the adapters' scales (Hu et al., arXiv 2106.09685).

    Args:
        mask_TI: bool, the elements that dropout keeps; None without dropout.
        keep_scale: factor on kept elements, 1 / (1 - p).
    """
    torch.mm(_dropped(x_TI, mask_TI, keep_scale), a_RI.t(), out=out_TR)


def scaled_projection(
    projection: Callable[[Tensor, Tensor, Tensor | None, float, Tensor], None],
) -> Callable[..., None]:
    """Makes the op `project` of drop(x) A^T into `out` [T, R], which knows nothing of scales and padding."""

    def scaled(
        x: Tensor,
        a_RI: Tensor,
        mask: Tensor | None,
        keep_scale: float,
        adapters: Sequence[AdapterPlace],
        out: Tensor,
        copy: Tensor | None = None,
    ) -> None:
        num_ranks = a_RI.shape[0]
        if copy is not None:
            copy.copy_(x)
        if out.shape[1] > num_ranks or out.stride(0) > num_ranks:
            # H's columns too: 16-bit products on a CPU multiply up to 63 columns beyond x by zero, which a NaN there
            # outlives
            out.zero_()
        h_TR = out[:, :num_ranks]
        projection(x, a_RI, mask, keep_scale, h_TR)
        scale_projection(h_TR, adapters)

    return scaled


def scale_projection(h_TR: Tensor, adapters: Sequence[AdapterPlace]) -> Tensor:
    """Multiplies each adapter's columns of H, or of its gradient, by its scale, in place."""
    scales = {adapter.scale for adapter in adapters}
    if len(scales) == 1:
        scale = scales.pop()
        return h_TR if scale == 1.0 else h_TR.mul_(scale)
    for adapter in adapters:
        adapter.ranks(h_TR).mul_(adapter.scale)
    return h_TR


def a_gradient(
    dh_TR: Tensor, x_TI: Tensor, mask_TI: Tensor | None, keep_scale: float, sections: Sequence[AdapterSection]
) -> None:
    """dA = dH^T drop(x), added to each section's `da`."""
    dropped = _dropped(x_TI, mask_TI, keep_scale)
    for one in sections:
        if one.da is not None:
            add_product(one.da, one.ranks(dh_TR).t(), dropped)


def b_gradient(dy_TO: Tensor, h_TR: Tensor, sections: Sequence[AdapterSection]) -> None:
    """dB = dY^T H, added to each section's `db`."""
    for one in sections:
        if one.db is not None:
            add_product(one.db, one.columns(dy_TO).t(), one.ranks(h_TR))


def apply_update(dx_TI: Tensor, update: InputUpdate) -> Tensor:
    """dx + scale * mask * (dH A), in place."""
    if update.mask is None:
        return dx_TI.addmm_(update.dh_TR, update.a_RI, alpha=update.scale)
    return dx_TI.addcmul_(update.dh_TR @ update.a_RI, update.mask.to(dx_TI.dtype), value=update.scale)


def paged_attention(
    q_NHD: Tensor,
    keys_SKD: Tensor,
    values_SKD: Tensor,
    table_NP: Tensor,
    counts_N: Tensor,
    *,
    page: int,
    scale: float,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Computes softmax(scale * q k^T) v of one query a row, where key c of row n is at place
    page * table[n, c // page] + c % page.

    Args:
        q_NHD: [N, H, D]; keys_SKD, values_SKD: [S, K, D] with H a multiple of K.
        table_NP: int32, pages of each row.
        counts_N: int64, the number of keys of each row, at least 1.
        softcap: scores become softcap * tanh(score / softcap); None for none.
        sinks_H: a further score of each head, which takes its share of the softmax and has no value; None for none.

    Returns:
        [N, H, D].
    """
    out = torch.empty_like(q_NHD)
    for row, count in enumerate(counts_N.tolist()):
        columns = torch.arange(count, device=table_NP.device)
        places = page * table_NP[row].long()[columns // page] + columns % page
        keys, values = (pool[places].float().transpose(0, 1) for pool in (keys_SKD, values_SKD))
        q_KGD = q_NHD[row].float().unflatten(0, (keys.shape[0], -1))
        scores = (q_KGD @ keys.transpose(1, 2)) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks_H is not None:
            scores = torch.cat((scores, sinks_H.float().view(keys.shape[0], -1, 1)), -1)
        out[row] = (scores.softmax(-1)[..., :count] @ values).flatten(0, 1)
    return out


def combine_rows(y_NF: Tensor, rows_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
    """Computes out[t] = sum over k of w[t, k] y[rows[t, k]], in that order and in fp32.

    Args:
        y_NF: rows.
        rows_TK: int64, of `y_NF`.
        weights_TK: w; None for ones.

    Returns:
        [T, F] in the dtype of y.
    """
    total = y_NF.new_zeros(rows_TK.shape[0], y_NF.shape[1], dtype=torch.float32)
    for slot, rows_T in enumerate(rows_TK.unbind(1)):
        part = y_NF.index_select(0, rows_T).to(torch.float32)
        if weights_TK is None:
            total.add_(part)
        else:
            total.addcmul_(part, weights_TK[:, slot, None].to(torch.float32))
    return total.to(y_NF.dtype)
