"""Parts of one document, whose states wait in a cache between them, against the whole document."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.hybrids.layers.cached_states import Scan, cached_convolution
from engine.hybrids.ops.recurrence import Inputs
from engine.hybrids.ops.rules import DeltaRule
from engine.hybrids.pieces import Pieces
from engine.inference.key_value_cache import KeyValues
from engine.ops.attention.cache_protocol import KeyValueCache
from engine.ops.kernels import backend
from tests.hybrids.test_steps import BACKENDS, normal, ops

CPU = torch.device("cpu")
CHANNELS = 24
PARTS = (5, 1, 2, 7, 3)
"""Tokens of a prompt, and of what follows it: fewer and more than the four taps of the convolution."""
FILL = 2


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("scans", [False, True])
def test_parts_of_a_document(name: str, scans: bool) -> None:
    """Tokens that only fill up a pass follow each part; and the row lies in another slot each time."""
    kernels, total = ops(name), sum(PARTS)
    x, weight = normal(total, CHANNELS, seed=1), normal(CHANNELS, 1, 4, seed=2)
    decay, beta = -normal(total + FILL, 2, seed=3).exp(), normal(total + FILL, 2, seed=4).sigmoid()
    rule = DeltaRule(scale=0.4, kernels=kernels)

    def inputs(y: Tensor, tokens: slice) -> Inputs:
        return (*(one.unflatten(1, (2, 4)) for one in y.chunk(3, dim=1)), decay[tokens], beta[tokens])

    pieces = Pieces.of_lengths([total], CPU)
    whole = kernels.conv_forward(x, weight.squeeze(1), None, pieces, None, activation="silu")
    if scans:
        whole, _, _ = rule.forward(inputs(whole, slice(0, total)), pieces, None, keep=False)

    cache = KeyValues([], backend(name), slots=3, length=total, device=CPU, dtype=torch.float32)
    found, start = list[Tensor](), 0
    for number, count in enumerate(PARTS):
        slot, tokens = number % 3, slice(start, start + count + FILL)
        if number == 0:
            cache.begin([slot], count, total, waits=False)
            one: KeyValueCache = cache.first_pass([slot], [count], fill=FILL)
        else:
            cache.move((number - 1) % 3, slot)
            one = cache.continue_row(slot, start, count, fill=FILL)
        given = torch.cat((x[start : start + count], normal(FILL, CHANNELS, seed=9)))
        y = cached_convolution(
            "mixer", one, Pieces.of_lengths([count, FILL], CPU), given, weight, None, activation="silu",
            kernels=kernels, scan=Scan(rule, lambda y, tokens=tokens: inputs(y, tokens)) if scans else None,
        )  # fmt: skip
        found.append(y[:count])
        start += count
    torch.testing.assert_close(torch.cat(found), whole, rtol=1e-5, atol=1e-6)
