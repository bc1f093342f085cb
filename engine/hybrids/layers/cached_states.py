"""States of rows while text is generated: of each row a layer's last state, and the last inputs of its convolution.

Prompts are computed as documents are in training, and leave their last states in the cache's pools. A pass of one token
for each row has a kernel for the convolution and one for the recurrence, which update the states where they are.
Several new tokens of one row are a document that begins with the row's states.

Legend: T tokens, C channels, W taps, P pieces of a pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.hybrids.kernels import HybridKernels
from engine.hybrids.ops.recurrence import Inputs, Rule
from engine.hybrids.pieces import Pieces
from engine.ops.attention.cache_protocol import KeyValueCache


@dataclass(frozen=True, slots=True)
class Scan:
    """The recurrence that follows a convolution.

    Args:
        rule: what it computes.
        inputs: [T, C], the convolution's output -> the rule's inputs.
    """

    rule: Rule
    inputs: Callable[[Tensor], Inputs]


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
        pieces: of the pass: prompts, a token of each row, or the new tokens of one row.
        scan: what follows; None for a mixer without further states.
    """
    assert not pieces.parents, "documents that continue others are not generated"
    weight_CW = weight_C1W.squeeze(1)
    states = cache.states(name) if cache.starts is None else None
    if states is not None and not cache.continues:
        y = kernels.conv_step(x_TC, weight_CW, bias_C, states[0], activation=activation)
        return y if scan is None else scan.rule.step(scan.inputs(y), states[1])
    taps, tail, initial = weight_CW.shape[1] - 1, None, None
    kept = [_last_inputs(x_TC, pieces, taps)]
    if states is not None:  # the first piece continues a row, and what it leaves may begin before it
        pieces, tail, *more = pieces.first_received(), *states
        initial = more[0] if more else None
        kept[0][0] = torch.cat((tail[0], x_TC[: pieces.lengths[0]]))[-taps:]
    y = kernels.conv_forward(x_TC, weight_CW, bias_C, pieces, tail, activation=activation)
    if scan is not None:
        y, final, _ = scan.rule.forward(scan.inputs(y), pieces.all_sent(), initial, keep=False)
        assert final is not None
        kept.append(final)
    if cache.starts is not None or cache.continues:  # else all tokens only fill up the pass
        cache.keep_states(name, tuple(kept))
    return y


def _last_inputs(x_TC: Tensor, pieces: Pieces, count: int) -> Tensor:
    """Returns [P, count, C], the last inputs of each piece, zeros before its first one."""
    tokens, missing = pieces.last_tokens(count)
    return x_TC[tokens].masked_fill_(missing[..., None], 0)
