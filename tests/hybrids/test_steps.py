"""A token of each row, whose states are updated where they are, against pieces of one token whose states go on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.hybrids import reference, state_space_reference
from engine.hybrids.kernels import HybridKernels, hybrid_kernels
from engine.hybrids.pieces import Pieces
from engine.inference.state_pools import StatePools
from engine.ops.kernels import backend
from tests.kernels.native_support import needs_native

ROWS, FILLED = 3, 2
EVERY = tuple(range(ROWS))
BACKENDS = ["reference", pytest.param("native", marks=needs_native)]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def single() -> Pieces:
    return Pieces.of_lengths([1] * ROWS, torch.device("cpu"), received=EVERY, sent=EVERY)


def ops(name: str) -> HybridKernels:
    return hybrid_kernels(backend(name))


def assert_close(out: Tensor, states: Tensor, expected: Tensor, final: Tensor) -> None:
    torch.testing.assert_close(out[:ROWS], expected, rtol=1e-5, atol=1e-6)
    assert not out[ROWS:].any()
    torch.testing.assert_close(states, final, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("activation", ["silu", None])
def test_convolution(name: str, activation: str | None) -> None:
    x, weight, bias, tails = normal(5, 6, seed=1), normal(6, 4, seed=2), normal(6, seed=3), normal(ROWS, 3, 6, seed=4)
    expected = reference.conv_forward(x[:ROWS], weight, bias, single(), tails, activation=activation)
    after = torch.cat((tails[:, 1:], x[:ROWS, None]), dim=1)
    assert_close(ops(name).conv_step(x, weight, bias, tails, activation=activation), tails, expected, after)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("channels", [(), (8,)], ids=["heads", "channels"])
@pytest.mark.parametrize("width", [6, 150])
def test_delta_rule(name: str, channels: tuple[int, ...], width: int) -> None:
    q, k, v = normal(5, 2, 8, seed=1), normal(5, 2, 8, seed=2), normal(5, 4, width, seed=3)
    given = (q, k, v, -normal(5, 4, *channels, seed=4).exp(), normal(5, 4, seed=5).sigmoid())
    states = normal(ROWS, 4, 8, width, seed=6)
    first = (one[:ROWS] for one in given)
    expected, final, _ = reference.delta_forward(*first, single(), states.clone(), scale=0.4, keep=False)
    assert final is not None
    assert_close(ops(name).delta_step(*given, states, scale=0.4), states, expected, final)


@pytest.mark.parametrize("name", BACKENDS)
def test_state_space(name: str) -> None:
    x, b, c = normal(5, 4, 6, seed=1), normal(5, 2, 8, seed=2), normal(5, 2, 8, seed=3)
    dt, a, d = normal(5, 4, seed=4).sigmoid(), -normal(4, seed=5).exp(), normal(4, seed=6)
    states = normal(ROWS, 4, 6, 8, seed=7)
    rows = slice(ROWS)
    expected, final, _ = state_space_reference.ssd_forward(
        x[rows], dt[rows], a, b[rows], c[rows], d, single(), states.clone(), keep=False
    )
    assert final is not None
    assert_close(ops(name).ssd_step(x, dt, a, b, c, d, states), states, expected, final)


def test_the_last_inputs_of_pieces() -> None:
    tokens, missing = Pieces.of_lengths([1, 4, 2], torch.device("cpu")).last_tokens(3)
    found = torch.where(missing, -1, tokens)
    assert found.tolist() == [[-1, -1, 0], [2, 3, 4], [-1, 5, 6]]


def test_pools_move_and_share_states() -> None:
    pools = StatePools(4)
    assert pools.first("a", 2) is None
    states = (normal(2, 3, seed=1), normal(2, 2, 2, seed=2))
    pools.put("a", states, torch.tensor([1, 0, 0]), torch.tensor([0, 1, 3]))
    pools.move(1, 2)
    pools.copy(0, torch.tensor([1]))
    found = pools.first("a", 4)
    assert found is not None
    for pool, state in zip(found, states, strict=True):
        assert torch.equal(pool, state[torch.tensor([1, 1, 0, 0])])
        pool += 1  # where they are
    again = pools.first("a", 1)
    assert again is not None and torch.equal(again[0], states[0][1:] + 1)
    assert pools.num_bytes == 4 * (3 + 4) * 4 and pools.bytes_of(3) == 3 * (3 + 4) * 4
