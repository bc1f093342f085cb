"""States of rows while text is generated: of each row a layer's last state, and the last inputs of its convolution.

Legend: T tokens, C channels, W taps, P pieces of a pass.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.hybrids.kernels import HybridKernels
from engine.hybrids.ops.recurrence import Inputs, Rule
from engine.hybrids.pieces import Pieces
from engine.ops.attention.cache_protocol import KeyValueCache

Scan = Callable[[Tensor, Pieces, Tensor | None], tuple[Tensor, Tensor | None]]
"""(the convolution's output, pieces, the states that received pieces begin with) -> the output, and the last states."""


def cached_convolution(
    name: str,
    cache: KeyValueCache,
    pieces: Pieces,
    x_TC: Tensor,
    weight_C1W: Tensor,
    bias_C: Tensor | None,
    *,
    activation: str | None,
    kernels: HybridKernels,
    scan: Scan | None = None,
) -> Tensor:
    """Computes a pass's causal convolution, and what follows it, from what was kept of each row; keeps what comes next.

    Args:
        name: of the layer's mixer.
        pieces: of the pass: prompts, or a token of each row.
        scan: what follows; None for a mixer without further states.
    """
    width, starts = weight_C1W.shape[-1] - 1, cache.starts
    rows = [] if starts is not None else [cache.kept(name, slot) for slot in range(x_TC.shape[0])]
    known = next((row for row in rows if row is not None), None)
    before: list[Tensor] = []
    if known is not None:  # else all tokens are those of prompts, or fill up the pass
        before = [
            torch.stack([torch.zeros_like(none) if row is None else row[index] for row in rows])
            for index, none in enumerate(known)
        ]
    pieces = pieces.cached(continued=known is not None)
    tail = before[0] if before else None
    y = kernels.conv_forward(x_TC, weight_C1W.squeeze(1), bias_C, pieces, tail, activation=activation)
    final = None
    if scan is not None:
        y, final = scan(y, pieces, before[1] if before else None)
    for place, (first, length) in enumerate(zip(pieces.firsts, pieces.lengths, strict=True)):
        if starts is not None:
            slot = starts.get(first)
        else:
            slot = None if rows[place] is None else place
        if slot is None:  # a place that fills up the pass
            continue
        earlier = x_TC.new_zeros(width, x_TC.shape[1]) if tail is None else tail[place]
        last = torch.cat((earlier, x_TC[first : first + length]))[-width:]
        cache.keep(name, slot, (last.clone(),) if final is None else (last.clone(), final[place].clone()))
    return y


def scan_of(rule: Rule, inputs: Callable[[Tensor], Inputs]) -> Scan:
    """Returns the scan of a rule.

    Args:
        inputs: [T, C], the convolution's output -> the rule's inputs.
    """

    def scan(y_TC: Tensor, pieces: Pieces, initial: Tensor | None) -> tuple[Tensor, Tensor | None]:
        out, final, _ = rule.forward(inputs(y_TC), pieces, initial, keep=False)
        return out, final

    return scan
