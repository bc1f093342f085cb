"""Recorded calls on a CPU against the same functions as they are, on other numbers in the same tensors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from engine.kernels.native.convolution import conv_forward
from engine.kernels.native.norm import rmsnorm_forward
from engine.kernels.native.product import multiply_few_rows
from engine.kernels.native.recurrence import _table, run_table
from engine.layers.recorded_calls import CallCapture

Function = Callable[..., tuple[Tensor, ...]]


def _inputs(seed: int) -> tuple[Tensor, ...]:
    """Returns x [4, 6], pool [9, 6], places [4] and ids [4]."""
    generator = torch.Generator().manual_seed(seed)
    x, pool = (torch.randn(rows, 6, generator=generator) for rows in (4, 9))
    return x, pool, torch.randperm(9, generator=generator)[:4], torch.randint(9, (4,), generator=generator)


def _of_torch(x: Tensor, pool: Tensor, places: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    """Functions with one result and with two, in place, on views, of other dtypes and from nothing."""
    pool.index_copy_(0, places, x)
    looked_up = pool[ids].mul_((ids > 2)[:, None])
    total = torch.zeros(4, 6, dtype=torch.float64)
    total[:, 1:] = looked_up[:, 1:].double()
    ordered, order = (x + looked_up).sort(dim=1)
    x[0] += 1.0
    repeated = torch.repeat_interleave(x, torch.ones_like(ids), dim=0, output_size=4)
    some = torch.where(ids > 4, ids, -1)
    return total, ordered, order.to(torch.int32), some, x.t()[1] * 2.0 + torch.arange(4), repeated, x[:, ids % 6]


def _of_kernels(x: Tensor, pool: Tensor, places: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    """Compiled kernels, with operations between them that have launchers and that have none."""
    y, statistics = rmsnorm_forward(x, torch.arange(6.0), 1e-6)
    h = multiply_few_rows(y, pool.t()).mul_(0.3)
    pool.index_copy_(0, places, x + y)
    return torch.add(h[:, :6].contiguous(), y, out=torch.empty(4, 6)), statistics, h.tanh(), pool.clone()


def _in_bfloat16(x: Tensor, pool: Tensor, places: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    low, other = x.bfloat16(), pool[:4].bfloat16()
    y, _ = rmsnorm_forward(low + other, torch.ones(6, dtype=torch.bfloat16), 1e-6)
    return (y.mul_(1.7), low + x, torch.add(low, other, alpha=2.0))


@pytest.mark.parametrize("function", [_of_torch, _of_kernels, _in_bfloat16])
def test_a_replay_has_the_bits_of_the_function(function: Function) -> None:
    """Also where what was recorded writes into what it read: the arguments agree too."""
    held = _inputs(0)
    recorded = CallCapture().capture(lambda: function(*held), None)
    for seed in range(4):
        given = _inputs(seed)
        expected = function(*given)
        if seed:  # the recording has done the first replay's work
            for place, value in zip(held, _inputs(seed), strict=True):
                place.copy_(value)
        recorded.replay()
        for found, wanted in zip((*recorded.outputs, *held), (*expected, *given), strict=True):
            assert torch.equal(found, wanted) and found.dtype == wanted.dtype


def test_kernels_that_follow_each_other_are_one_step() -> None:
    x, weight, other = torch.randn(3, 8), torch.ones(8), torch.randn(16, 8)

    def run() -> tuple[Tensor, ...]:
        y = x
        for _ in range(5):
            y = y + rmsnorm_forward(y, weight, 1e-6)[0]
        return (multiply_few_rows(y, other.t()),)

    recorded = CallCapture().capture(run, None)
    assert len(recorded._steps) == 1
    x.mul_(2.0).add_(1.0)
    recorded.replay()
    recorded.replay()
    assert torch.equal(recorded.outputs[0], run()[0])


class _Runs(NamedTuple):
    lengths: tuple[int, ...]
    received: tuple[int, ...] = ()
    sent: tuple[int, ...] = ()


def test_tensors_that_calls_point_to_are_kept() -> None:
    """Also those of which torch hears nothing while they are recorded: a weight, and a table that is cached."""
    x, weights, runs = torch.randn(2, 8), [torch.randn(8, 3)], _Runs((1, 1))
    table, weight = weakref.ref(run_table(runs)), weakref.ref(weights[0])
    recorded = CallCapture().capture(lambda: (conv_forward(x, weights[0], None, runs, None, activation="silu"),), None)
    weights.clear()
    _table.cache_clear()
    gc.collect()
    assert table() is not None and weight() is not None
    del recorded
    gc.collect()
    assert table() is None and weight() is None


def test_rows_are_put_only_where_they_have_no_gaps() -> None:
    """Other layouts are left to torch: a pool of every second row, and another dimension."""
    pool, places = torch.zeros(8, 2, 3), torch.tensor([3, 0])
    rows, columns = torch.randn(2, 2, 3), torch.randn(8, 2, 3)

    def run() -> tuple[Tensor, ...]:
        pool[::2].index_copy_(0, places, rows)
        pool.index_copy_(1, places % 2, columns)
        return (pool.clone(),)

    recorded = CallCapture().capture(run, None)
    for one in (rows, columns, pool):
        one.normal_()
    before = pool.clone()
    recorded.replay()
    recorded.replay()
    found = recorded.outputs[0].clone()
    pool.copy_(before)
    assert torch.equal(found, run()[0])


@pytest.mark.parametrize(
    "read",
    [lambda x: x.sum().item(), lambda x: float(x[0]), lambda x: bool(x[0] > 0), lambda x: x.tolist(),
     lambda x: x.numpy(), lambda x: x.nonzero(), lambda x: x[x > 0], lambda x: torch.equal(x, x),
     lambda x: torch.allclose(x, x), lambda x: torch.tensor([*x]), lambda x: x.unique(), lambda x: x.long().bincount(),
     lambda x: x.repeat_interleave(x.long()), lambda x: x.unique_consecutive()],
)  # fmt: skip
def test_numbers_cannot_be_read(read: Callable[[Tensor], object]) -> None:
    """Each would make the recording one of these numbers."""
    x = torch.tensor([1.0, 2.0, 0.5, 1.5])

    def run() -> tuple[Tensor, ...]:
        read(x)
        return (x,)

    with pytest.raises(AssertionError, match="reads numbers"):
        CallCapture().capture(run, None)
