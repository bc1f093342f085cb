"""What the Triton kernels of layers with states allocate, on the meta device: results and buffers, no numbers."""

from __future__ import annotations

from torch import Tensor

from engine.hybrids.pieces import Pieces
from engine.ops.kernels.op import like, wide

_DELTA_CHUNK = 64
_CONV_CHUNK = 32
_CHANNEL_BLOCK = 16


def _chunks(tokens: int, pieces: Pieces, length: int) -> int:
    return tokens // length + min(len(pieces.lengths), tokens)


def _walk(k: Tensor, v: Tensor, pieces: Pieces) -> tuple[Tensor, ...]:
    """Allocates W, U, and a state for each chunk."""
    tokens, heads, values = v.shape
    states = v.new_empty(_chunks(tokens, pieces, _DELTA_CHUNK), heads, k.shape[2], values)
    return v.new_empty(tokens, heads, k.shape[2]), like(v), states


def delta_forward(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, pieces: Pieces, initial: Tensor | None, *,
    scale: float, keep: bool,
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:  # fmt: skip
    """Allocates what the rule does, with one decay for a head or for each channel."""
    tokens, heads, values = v.shape
    normalised = like(q), like(k)
    if decay.dim() == 3:
        decayed = _decayed(k, decay)
        solved = v.new_empty(tokens, heads, _DELTA_CHUNK), v.new_empty(tokens, heads, _DELTA_CHUNK)
    else:
        decayed = ()
        solved = v.new_empty(tokens, heads, _DELTA_CHUNK), wide(v, (tokens, heads))
    buffers = _walk(k, v, pieces)
    final = wide(v, (len(pieces.sent), heads, k.shape[2], values)) if pieces.sent else None
    out = like(v)
    del normalised, decayed, buffers
    return out, final, solved if keep else ()


def _decayed(k: Tensor, decay: Tensor) -> tuple[Tensor, ...]:
    """Allocates sums of decays of channels, and what decayed of queries and keys."""
    return wide(k, decay.shape), *(k.new_empty(decay.shape) for _ in range(3))


def delta_backward(
    d_out: Tensor, d_final: Tensor | None, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, pieces: Pieces,
    initial: Tensor | None, *, scale: float, kept: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Allocates what the rule does, with one decay for a head or for each channel."""
    tokens, heads, _ = v.shape
    if decay.dim() == 3:
        return _channel_delta_backward(q, k, v, decay, pieces, initial)
    buffers = like(q), like(k), *_walk(k, v, pieces)
    gradients = like(v), like(buffers[-1])
    d_initial = None if initial is None else wide(v, initial.shape)
    by_head = wide(v, (tokens, heads, k.shape[2])), wide(v, (tokens, heads, k.shape[2]))
    results = like(v), like(decay), like(beta)
    dq, dk = like(q), like(k)
    del buffers, gradients, by_head
    return dq, dk, *results, d_initial


def _channel_delta_backward(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, pieces: Pieces, initial: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    tokens, heads, keys = decay.shape
    buffers = like(q), like(k), *_decayed(k, decay), *_walk(k, v, pieces)
    gradients = like(v), like(buffers[-1])
    d_initial = None if initial is None else wide(v, initial.shape)
    by_head = wide(v, decay.shape), wide(v, decay.shape)
    pairs = v.new_empty(tokens, heads, _DELTA_CHUNK), v.new_empty(tokens, heads, _DELTA_CHUNK)
    sums = wide(v, (1 - (-keys // _CHANNEL_BLOCK), tokens, heads)), wide(v, buffers[-1].shape[:3])
    dv, ddecay, dbeta = like(v), wide(v, decay.shape), sums[0].sum(0)
    del buffers, gradients, pairs
    dq, dk = like(q), like(k)
    del by_head, sums
    return dq, dk, dv, ddecay, dbeta, d_initial


def conv_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, pieces: Pieces, tail: Tensor | None, *,
    activation: str | None, weight_gradient: Tensor | None, bias_gradient: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Allocates the gradients, and the partial sums of those of weight and bias."""
    dx, d_tail = like(x), None if tail is None else like(tail)
    if weight_gradient is not None or bias_gradient is not None:
        channels, width = weight.shape
        wide(x, (_chunks(x.shape[0], pieces, _CONV_CHUNK), width + 1, channels))
    return dx, d_tail


def ssd_forward(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, pieces: Pieces, initial: Tensor | None, *,
    keep: bool,
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:  # fmt: skip
    """Allocates y, the last states, and a state for each chunk."""
    buffers = _weighed(x, b, c, pieces)
    final = wide(x, (len(pieces.sent), *x.shape[1:], b.shape[2])) if pieces.sent else None
    y = like(x)
    del buffers
    return y, final, ()


def ssd_backward(
    dy: Tensor, d_final: Tensor | None, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None,
    pieces: Pieces, initial: Tensor | None, *, kept: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Allocates the gradients, those of b and c for each head first, and two states for each chunk."""
    tokens, heads, _ = x.shape
    buffers = _weighed(x, b, c, pieces)
    gradients = like(x), like(buffers[-1])
    d_initial = None if initial is None else wide(x, initial.shape)
    by_head = wide(x, (tokens, heads, b.shape[2])), wide(x, (tokens, heads, b.shape[2])), wide(x, dt.shape)
    results = like(x), wide(x, dt.shape), wide(x, (heads,)), like(b), like(c)
    del buffers, gradients, by_head
    return *results, None if d is None else like(d), d_initial


def _weighed(x: Tensor, b: Tensor, c: Tensor, pieces: Pieces) -> tuple[Tensor, ...]:
    """Allocates N, sums of decays, dense copies of columns, and a state for each chunk."""
    tokens, heads, features = x.shape
    copies = [like(one) for one in (b, c) if not one.is_contiguous()]
    states = x.new_empty(_chunks(tokens, pieces, _DELTA_CHUNK), heads, b.shape[2], features)
    return like(x), wide(x, (tokens, heads)), *copies, states
