"""The specification, in plain torch, of what layers with states compute. Arithmetic is fp32, or wider where inputs are.

The gated delta rule (arXiv 2412.06464) of a head, with a state S [K, V]:

    S_t = (I - beta_t k_t k_t^T) exp(decay_t) S_{t-1} + beta_t k_t v_t^T        out_t = S_t^T q_t

where q and k were normalised and q scaled. exp(decay) is one number, or one for each of the K channels (arXiv
2510.26692). It is computed in chunks (section 3 there): with c the cumulative decay inside a chunk and
A_ij = beta_i (k_i exp(c_i - c_j)) k_j for j < i, the rows u = (I + A)^-1 beta (v - exp(c) k S) are added to the state.

Legend: T tokens, G key heads, N value heads (head n reads key head n // (N / G)), K, V features of a key and a value, C
channels, W taps, R received pieces, L tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import silu

from engine.hybrids.pieces import Pieces

CHUNK = 64
_CHANNEL_CHUNK = 16
"""Where each channel decays by itself, and products inside a chunk are made channel by channel."""
NORM_EPS = 1e-6
"""Of the norms of queries and keys."""


def delta_forward(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_TNV: Tensor,
    decay: Tensor,
    beta_TN: Tensor,
    pieces: Pieces,
    initial_RNKV: Tensor | None,
    *,
    scale: float,
    keep: bool,
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """Computes the gated delta rule within pieces.

    Args:
        q_TGK, k_TGK, v_TNV: before queries and keys are normalised; may be columns of a wider tensor.
        decay: fp32 [T, N] or [T, N, K], log of the factor that the state is multiplied by; no more than 0.
        beta_TN: fp32.
        pieces: of the T tokens.
        initial_RNKV: fp32, the initial states of `pieces.received`; None where none is received.
        scale: on normalised queries.
        keep: whether a backward follows.

    Returns:
        [T, N, V] in the dtype of v; fp32 [len(pieces.sent), N, K, V], the last states of those pieces, or None where
        none is asked for; tensors for `delta_backward`.
    """
    out, final = _delta(q_TGK, k_TGK, v_TNV, decay, beta_TN, pieces, initial_RNKV, scale)
    return out.to(v_TNV.dtype), final, ()


def delta_backward(
    d_out: Tensor,
    d_final: Tensor | None,
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_TNV: Tensor,
    decay: Tensor,
    beta_TN: Tensor,
    pieces: Pieces,
    initial_RNKV: Tensor | None,
    *,
    scale: float,
    kept: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Returns the gradients of q, k, v, decay, beta and the initial states.

    Args:
        d_out: [T, N, V].
        d_final: fp32, of the last states; None where they have none.
        kept: of the forward.
        (others): as of `delta_forward`.
    """
    inputs = [q_TGK, k_TGK, v_TNV, decay, beta_TN, *([] if initial_RNKV is None else [initial_RNKV])]

    def run(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, *initial: Tensor) -> list[Tensor]:
        out, final = _delta(q, k, v, decay, beta, pieces, initial[0] if initial else None, scale)
        return [out] if final is None or d_final is None else [out, final]

    gradients = by_autograd(run, inputs, [d_out] if d_final is None else [d_out, d_final])
    dq, dk, dv, ddecay, dbeta, *more = gradients
    return dq, dk, dv, ddecay, dbeta, more[0] if more else None


def _delta(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, pieces: Pieces, initial: Tensor | None, scale: float
) -> tuple[Tensor, Tensor | None]:
    by_channel = decay.dim() == 3
    chunks = pieces.chunks(_CHANNEL_CHUNK if by_channel else CHUNK)
    wide = torch.promote_types(v.dtype, torch.float32)
    heads, copies = v.shape[1], v.shape[1] // q.shape[1]

    def cut(x: Tensor) -> Tensor:
        """[T, n, ...] -> [chunks, N, L, ...], zeros beyond the end of a piece."""
        padded = torch.cat((x.to(wide), x.new_zeros((1, *x.shape[1:]), dtype=wide)))
        found = padded[chunks.tokens].transpose(1, 2)
        return found if found.shape[1] == heads else found.repeat_interleave(copies, dim=1)

    qc, kc = cut(normalised(q.to(wide)) * scale), cut(normalised(k.to(wide)))
    vc, bc, gc = cut(v), cut(beta)[..., None], cut(decay)
    total = (gc if by_channel else gc[..., None]).cumsum(dim=2)
    strictly = torch.ones(total.shape[2], total.shape[2], dtype=torch.bool, device=v.device).tril(-1)
    system = _pairs(kc * bc, kc, total, strictly)
    inside = _pairs(qc, kc, total, strictly | torch.eye(strictly.shape[0], dtype=torch.bool, device=v.device))
    right = torch.cat((vc * bc, kc * bc * total.exp()), dim=-1)
    identity = torch.eye(system.shape[-1], dtype=wide, device=v.device)
    solved = torch.linalg.solve_triangular(system + identity, right, upper=False, unitriangular=True)
    values, reads = solved.split([v.shape[2], k.shape[2]], dim=-1)
    qs, last = qc * total.exp(), total[:, :, -1:]
    ks, decays = kc * (last - total).exp(), last.exp().transpose(-1, -2)

    states = v.new_zeros((len(pieces.lengths), heads, k.shape[2], v.shape[2]), dtype=wide)
    places = {piece: place for place, piece in enumerate(chunks.order)}
    if initial is not None:
        states = states.index_copy(
            0, torch.tensor([places[piece] for piece in pieces.received], device=v.device), initial.to(wide)
        )
    outs, first = [], 0
    for count in chunks.counts:
        step, first = slice(first, first + count), first + count
        alive = states[:count]
        added = values[step] - reads[step] @ alive
        outs.append(qs[step] @ alive + inside[step] @ added)
        states = torch.cat((decays[step] * alive + ks[step].transpose(-1, -2) @ added, states[count:]))
    out = v.new_zeros((v.shape[0] + 1, heads, v.shape[2]), dtype=wide)
    out = out.index_put((chunks.tokens,), torch.cat(outs).transpose(1, 2))[:-1]
    if not pieces.sent:
        return out, None
    return out, states[torch.tensor([places[piece] for piece in pieces.sent], device=v.device)]


def _pairs(x: Tensor, y: Tensor, total: Tensor, mask: Tensor) -> Tensor:
    """Returns [.., i, j], the product of x_i exp(total_i - total_j) and y_j where the mask has it, else 0."""
    apart = (total[..., :, None, :] - total[..., None, :, :]).masked_fill(~mask[..., None], -torch.inf).exp()
    if total.shape[-1] == 1:
        return (x @ y.transpose(-1, -2)) * apart[..., 0]
    return torch.einsum("cnid,cnijd,cnjd->cnij", x, apart, y)


def normalised(x: Tensor) -> Tensor:
    """Returns x / |x| over the last dimension."""
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + NORM_EPS)


def conv_forward(
    x_TC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    pieces: Pieces,
    tail: Tensor | None,
    *,
    activation: str | None,
) -> Tensor:
    """Computes a causal convolution of each channel by itself, within pieces.

    Args:
        x_TC: may be columns of a wider tensor.
        weight_CW: the last tap is the token's own.
        tail: [R, W - 1, C], the inputs before each received piece; None where none is received.
        activation: "silu" on the output, or None.

    Returns:
        [T, C].
    """
    return _conv(x_TC, weight_CW, bias_C, pieces, tail, activation).to(x_TC.dtype)


def conv_backward(
    dy: Tensor,
    x_TC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    pieces: Pieces,
    tail: Tensor | None,
    *,
    activation: str | None,
    weight_gradient: Tensor | None,
    bias_gradient: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Returns the gradients of x and of the tail, and adds those of weight and bias to fp32 buffers where given."""
    inputs = [x_TC, weight_CW, *([] if bias_C is None else [bias_C]), *([] if tail is None else [tail])]

    def run(x: Tensor, weight: Tensor, *more: Tensor) -> list[Tensor]:
        bias = None if bias_C is None else more[0]
        return [_conv(x, weight, bias, pieces, None if tail is None else more[-1], activation)]

    dx, d_weight, *others = by_autograd(run, inputs, [dy], wide=True)
    if weight_gradient is not None:
        weight_gradient.add_(d_weight)
    if bias_gradient is not None:
        bias_gradient.add_(others[0])
    return dx.to(x_TC.dtype), None if tail is None else others[-1].to(tail.dtype)


def _conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, pieces: Pieces, tail: Tensor | None, activation: str | None
) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = [x.to(wide), x.new_zeros((1, x.shape[1]), dtype=wide)]
    if tail is not None:
        rows.append(tail.to(wide).flatten(0, 1))
    table, taps = torch.cat(rows), pieces.taps(weight.shape[1])
    out = sum(table[taps[tap]] * weight[:, tap].to(wide) for tap in range(weight.shape[1]))
    assert isinstance(out, Tensor)
    if bias is not None:
        out = out + bias.to(wide)
    return silu(out) if activation == "silu" else out


Gate = Callable[[Tensor], Tensor]


def gated_norm_forward(x_TNV: Tensor, z_TNV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """Returns x / rms(x) * weight * silu(z), normalised over V; z may be columns of a wider tensor."""
    return _gated_norm(x_TNV, z_TNV, weight_V, eps, silu).to(x_TNV.dtype)


def gated_norm_backward(
    dy: Tensor, x_TNV: Tensor, z_TNV: Tensor, weight_V: Tensor, eps: float, weight_gradient: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and z, and adds that of the weight to an fp32 buffer where given."""
    return _gated_norm_gradients(dy, x_TNV, z_TNV, weight_V, eps, weight_gradient, silu)


def sigmoid_norm_forward(x_TNV: Tensor, z_TNV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """Returns x / rms(x) * weight * sigmoid(z), as `gated_norm_forward`."""
    return _gated_norm(x_TNV, z_TNV, weight_V, eps, torch.sigmoid).to(x_TNV.dtype)


def sigmoid_norm_backward(
    dy: Tensor, x_TNV: Tensor, z_TNV: Tensor, weight_V: Tensor, eps: float, weight_gradient: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and z, and adds that of the weight to an fp32 buffer where given."""
    return _gated_norm_gradients(dy, x_TNV, z_TNV, weight_V, eps, weight_gradient, torch.sigmoid)


def _gated_norm_gradients(
    dy: Tensor, x_TNV: Tensor, z_TNV: Tensor, weight_V: Tensor, eps: float, weight_gradient: Tensor | None, gate: Gate
) -> tuple[Tensor, Tensor]:
    def run(x: Tensor, z: Tensor, weight: Tensor) -> list[Tensor]:
        return [_gated_norm(x, z, weight, eps, gate)]

    dx, dz, d_weight = by_autograd(run, [x_TNV, z_TNV, weight_V], [dy], wide=True)
    if weight_gradient is not None:
        weight_gradient.add_(d_weight)
    return dx.to(x_TNV.dtype), dz.to(z_TNV.dtype)


def _gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float, gate: Gate) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    x, z = x.to(wide), z.to(wide)
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight.to(wide) * gate(z)


def by_autograd(
    run: Callable[..., list[Tensor]], inputs: list[Tensor], gradients: list[Tensor], *, wide: bool = False
) -> list[Tensor]:
    """Returns the gradients of inputs, by autograd of a function that runs again.

    Args:
        run: of the inputs.
        gradients: of its results.
        wide: whether the inputs are made fp32 first, so that their gradients are.
    """

    def leaf(x: Tensor) -> Tensor:
        x = x.detach()
        return (x.to(torch.promote_types(x.dtype, torch.float32)) if wide else x).requires_grad_()

    with torch.enable_grad():
        leaves = [leaf(x) for x in inputs]
        results = run(*leaves)
        found = torch.autograd.grad(
            results, leaves, [d.to(result.dtype) for d, result in zip(gradients, results, strict=True)],
            allow_unused=True,
        )  # fmt: skip
    return [torch.zeros_like(x) if d is None else d for d, x in zip(found, leaves, strict=True)]
