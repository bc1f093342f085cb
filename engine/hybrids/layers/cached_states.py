"""States of rows while text is generated: of each row a layer's last state, and the last inputs of its convolution.

Legend: T tokens, N heads, K, V features of a key and a value, C channels, W taps, P pieces of a pass.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.hybrids.kernels import HybridKernels
from engine.hybrids.pieces import Pieces
from engine.kernels.records import Documents
from engine.ops.attention.cache_protocol import KeyValueCache


def cached_convolution(
    name: str,
    cache: KeyValueCache,
    documents: Documents,
    x_TC: Tensor,
    weight_C1W: Tensor,
    bias_C: Tensor | None,
    *,
    activation: str | None,
    kernels: HybridKernels,
) -> tuple[Tensor, Pieces, list[Tensor] | None, Callable[[Tensor | None], None]]:
    """Computes a pass's causal convolution, which goes on from the inputs that were kept of each row.

    Args:
        name: of the layer's mixer.
        documents: of the pass.

    Returns:
        [T, C]; the pass's pieces; the states that they go on from, None for each that has none yet; and the function
        that keeps their last states, [P, ...], and inputs.
    """
    width = weight_C1W.shape[-1] - 1
    starts, device = cache.starts, x_TC.device
    if starts is None:
        count = x_TC.shape[0]
        every = tuple(range(count))
        pieces = Pieces.of_lengths([1] * count, device, received=every, sent=every)
        rows = [cache.kept(name, slot) for slot in every]
        slots: dict[int, int] = {place: slot for place, slot in enumerate(every) if rows[slot] is not None}
    else:
        lengths = documents.lengths
        pieces = Pieces.of_lengths(lengths, device, sent=tuple(range(len(lengths))))
        rows = []
        slots = {place: starts[first] for place, first in enumerate(pieces.firsts) if first in starts}
    tail = None
    if rows:
        none = x_TC.new_zeros(width, x_TC.shape[1])
        tail = torch.stack([none if row is None else row[0] for row in rows])
    y = kernels.conv_forward(x_TC, weight_C1W.squeeze(1), bias_C, pieces, tail, activation=activation)

    def keep(final: Tensor | None) -> None:
        for place, slot in slots.items():
            first, length = pieces.firsts[place], pieces.lengths[place]
            before = x_TC.new_zeros(width, x_TC.shape[1]) if tail is None else tail[place]
            last = torch.cat((before, x_TC[first : first + length]))[-width:]
            cache.keep(name, slot, (last.clone(),) if final is None else (last.clone(), final[place].clone()))

    states = None
    if rows and (known := next((row for row in rows if row is not None and len(row) > 1), None)) is not None:
        states = [torch.zeros_like(known[1]) if row is None else row[1] for row in rows]
    return y, pieces, states, keep


def cached_delta_rule(
    name: str,
    cache: KeyValueCache,
    documents: Documents,
    mixed_TC: Tensor,
    weight_C1W: Tensor,
    heads: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]],
    decay: Tensor,
    beta_TN: Tensor,
    *,
    scale: float,
    kernels: HybridKernels,
) -> Tensor:
    """Computes the convolution and the delta rule of a pass, which go on from what was kept of each row.

    Args:
        mixed_TC: the convolution's input.
        heads: [T, C] -> q, k [T, G, K] and v [T, N, V].

    Returns:
        [T, N, V].
    """
    mixed, pieces, states, keep = cached_convolution(
        name, cache, documents, mixed_TC, weight_C1W, None, activation="silu", kernels=kernels
    )
    q, k, v = heads(mixed)
    initial = None if states is None else torch.stack(states)
    if initial is None and pieces.received:  # a pass without rows, which fills up
        initial = beta_TN.new_zeros(len(pieces.received), v.shape[1], k.shape[2], v.shape[2])
    out, final, _ = kernels.delta_forward(q, k, v, decay, beta_TN, pieces, initial, scale=scale, keep=False)
    keep(final)
    return out


def cached_state_space(
    name: str,
    cache: KeyValueCache,
    documents: Documents,
    mixed_TC: Tensor,
    weight_C1W: Tensor,
    bias_C: Tensor | None,
    heads: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]],
    dt_TN: Tensor,
    a_N: Tensor,
    d_N: Tensor,
    *,
    kernels: HybridKernels,
) -> Tensor:
    """Computes the convolution and Mamba2's state space of a pass, which go on from what was kept of each row.

    Args:
        mixed_TC: the convolution's input.
        heads: [T, C] -> x [T, N, P], b and c [T, G, S].

    Returns:
        [T, N, P].
    """
    mixed, pieces, states, keep = cached_convolution(
        name, cache, documents, mixed_TC, weight_C1W, bias_C, activation="silu", kernels=kernels
    )
    x, b, c = heads(mixed)
    initial = None if states is None else torch.stack(states)
    if initial is None and pieces.received:  # a pass without rows, which fills up
        initial = dt_TN.new_zeros(len(pieces.received), *x.shape[1:], b.shape[2])
    y, final, _ = kernels.ssd_forward(x, dt_TN, a_N, b, c, d_N, pieces, initial, keep=False)
    keep(final)
    return y
