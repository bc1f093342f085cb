"""Additions to rows and columns that are named more than once: against fp64, and the same bits each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from engine.ops.gradients import GradientSink, add_one_by_one, add_sorted

ROWS, WIDTH, TOKENS, DIFFERENT = 300, 129, 4096, 40
"""Each of the 40 different rows gets about 100 addends: enough for several threads to meet in one of them."""

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def _index_and_values(device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    index_T = torch.randint(0, DIFFERENT, (TOKENS,), generator=generator) * (ROWS // DIFFERENT)
    return index_T.to(device), torch.randn(TOKENS, WIDTH, generator=generator, dtype=dtype).to(device)


def _sum_of_rows(index_T: Tensor, values_TH: Tensor) -> Tensor:
    sums_VH = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    return sums_VH.index_add_(0, index_T.cpu(), values_TH.cpu().double())


def _added_to_rows(index_T: Tensor, values_TH: Tensor) -> Tensor:
    sink = GradientSink(torch.Size((ROWS, WIDTH)), values_TH.device)
    sink.add_rows(index_T, values_TH)
    return sink.buffer


def _added_to_columns(index_T: Tensor, values_TH: Tensor) -> Tensor:
    sink = GradientSink(torch.Size((WIDTH, ROWS)), values_TH.device)
    sink.add_columns(index_T, values_TH.t())
    return sink.buffer.t()


ADDITIONS = pytest.mark.parametrize("added", [_added_to_rows, _added_to_columns])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@ADDITIONS
def test_repeated_indices_add_up_in_fp32(added: Callable[..., Tensor], dtype: torch.dtype, device: str):
    index_T, values_TH = _index_and_values(device, dtype)
    result = added(index_T, values_TH)
    assert result.dtype == torch.float32
    # About 100 addends of size 1 each: their sum stays below 64, and each addition is off by 2^-24 of it at most.
    torch.testing.assert_close(result.cpu().double(), _sum_of_rows(index_T, values_TH), rtol=0, atol=100 * 64 * 2**-24)


@pytest.mark.parametrize("device", DEVICES)
@ADDITIONS
def test_repeated_calls_give_the_same_bits(added: Callable[..., Tensor], device: str):
    index_T, values_TH = _index_and_values(device)
    first = added(index_T, values_TH)
    assert all(torch.equal(first, added(index_T, values_TH)) for _ in range(20))


@pytest.mark.gpu
@ADDITIONS
def test_the_host_does_not_wait(added: Callable[..., Tensor]):
    index_T, values_TH = _index_and_values("cuda")
    added(index_T, values_TH)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        added(index_T, values_TH)
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("dim", [0, 1])
def test_both_ways_to_add_are_one_sum(dim: int):
    """What a GPU runs, on a CPU: one thread there adds in the same order, so the bits are equal."""
    torch.set_num_threads(1)
    index_T, values_TH = _index_and_values("cpu")
    values = values_TH if dim == 0 else values_TH.t().contiguous()
    buffers = [torch.ones((ROWS, WIDTH) if dim == 0 else (WIDTH, ROWS)) for _ in range(2)]
    for add, buffer in zip((add_one_by_one, add_sorted), buffers, strict=True):
        add(buffer, dim, index_T, values)
    assert torch.equal(*buffers)
