"""What the planner takes kernels of layers with states for: their launches, and the bytes of places that each touches.

The interpreter runs the kernels and notes every address, so that nothing here is counted by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from engine.hybrids import triton_costs, triton_ops
from engine.hybrids.pieces import Pieces
from tests.kernels.comparing import interpreted_only
from tests.kernels.memory_checks import Accesses
from tests.support.sweeps import sampled

pytestmark = interpreted_only

LENGTHS = (64, 128)
TOKENS, HEADS, DIM = sum(LENGTHS), 2, 32


class Counter:
    """Counts launches, and the bytes of the places that each reads and writes."""

    def __init__(self) -> None:
        self.launches, self.nbytes = 0, 0


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    from triton.runtime.interpreter import GridExecutor

    from tests.kernels import memory_checks

    found, made = Counter(), []

    class Noted(Accesses):
        def __init__(self, kernel: str, arguments: Any) -> None:
            super().__init__(kernel, arguments)
            self.places: dict[bool, list[tuple[np.ndarray, int]]] = {True: [], False: []}
            made.append(self)

        def note(self, program: Any, pointers: Any, mask: Any, *, writes: bool) -> None:
            super().note(program, pointers, mask, writes=writes)
            size = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
            self.places[writes].append((pointers.data[mask.data.astype(bool)], size))

    launch = GridExecutor.__call__

    def counted(self: GridExecutor, *arguments: object, **options: object) -> None:
        launch(self, *arguments, **options)
        found.launches += 1
        for places in made[-1].places.values():
            for size in {size for _, size in places}:
                addresses = np.concatenate([one.ravel() for one, each in places if each == size])
                found.nbytes += np.unique(addresses).size * size

    monkeypatch.setattr(memory_checks, "Accesses", Noted)
    monkeypatch.setattr(GridExecutor, "__call__", counted)
    yield found


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def assert_counted(counter: Counter, name: str, *args: Any, beside: int = 0, moved: int = 0, **kwargs: Any) -> Any:
    """Compares a cost with what a call launches and touches; tables of pieces and partial sums are a few percent.

    Args:
        beside, moved: launches of torch, and their bytes.
    """
    counter.launches = counter.nbytes = 0
    run: Callable[..., Any] = getattr(triton_ops, name)
    out = run(*args, **kwargs)
    launches, nbytes, *_ = getattr(triton_costs, name)(*args, **kwargs)
    assert launches == counter.launches + beside, name
    assert nbytes - moved == pytest.approx(counter.nbytes, rel=0.02), name
    return out


@pytest.mark.parametrize("by_channel", sampled([False, True], [False]), ids=["heads", "channels"])
def test_delta_rule(counter: Counter, by_channel: bool) -> None:
    pieces = Pieces.of_lengths(LENGTHS, torch.device("cpu"), received=(1,), sent=(0,))
    decay = -normal(TOKENS, HEADS, *([DIM] if by_channel else [])).exp()
    given = (normal(TOKENS, 1, DIM), normal(TOKENS, 1, DIM), normal(TOKENS, HEADS, DIM), decay)
    given += (normal(TOKENS, HEADS).sigmoid(), pieces, normal(1, HEADS, DIM, DIM))
    out, final, kept = assert_counted(counter, "delta_forward", *given, scale=1.0, keep=True)
    # torch adds up the sums of k . Y of each block of the keys
    assert_counted(counter, "delta_backward", out, final, *given, scale=1.0, kept=kept, beside=int(by_channel))


def test_state_space(counter: Counter) -> None:
    pieces, heads, state = Pieces.of_lengths(LENGTHS, torch.device("cpu"), received=(1,), sent=(0,)), 4, 16
    x, b, c = normal(TOKENS, heads, DIM), normal(TOKENS, 2, state), normal(TOKENS, 2, state)
    dt, a = normal(TOKENS, heads).sigmoid(), -normal(heads).exp()
    given = (x, dt, a, b, c, normal(heads), pieces, normal(1, heads, DIM, state))
    turned = 2 * given[-1].nbytes
    y, final, kept = assert_counted(counter, "ssd_forward", *given, keep=True, beside=2, moved=2 * turned)
    # torch turns three states, and adds up what the heads of a group give, with a cast each
    sums = 2 * TOKENS * heads * state * 4 + 6 * b.nbytes
    assert_counted(counter, "ssd_backward", y, final, *given, kept=kept, beside=3 + 4, moved=3 * turned + sums)


def test_convolution_and_norm(counter: Counter) -> None:
    pieces, x, weight = (
        Pieces.of_lengths(LENGTHS, torch.device("cpu"), received=(1,)),
        normal(TOKENS, 64),
        normal(64, 4),
    )
    given = (x, weight, normal(64), pieces, normal(1, 3, 64))
    y = assert_counted(counter, "conv_forward", *given, activation="silu")
    sinks = {"weight_gradient": torch.zeros(64, 4), "bias_gradient": torch.zeros(64)}
    added = 3 * 5 * 64 * 4
    assert_counted(counter, "conv_backward", y, *given, activation="silu", **sinks, beside=2, moved=added)
    heads = normal(TOKENS, 2, DIM)
    assert_counted(counter, "gated_norm_backward", heads + 2, heads, heads + 1, normal(DIM), 1e-5, torch.zeros(DIM))
