"""Sums over each expert's own rows in one launch, where torch's product leaves the memory of an expert without rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.experts.ops import grouped_products
from engine.experts.ops.grouped_products import GradientBlock, RowGroups, add_grouped_gradients, add_grouped_sums
from engine.ops.gradients import GradientSink

ENDS = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
WHOLE = slice(None)


@pytest.fixture(autouse=True)
def blackwell(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A product as of compute capability 10: what was there before stays in the results of experts without rows."""
    real = torch.nn.functional.grouped_mm

    def leaves(left: Tensor, right: Tensor, *, offs: Tensor) -> Any:
        out = real(left, right, offs=offs)
        out[offs.diff(prepend=offs.new_zeros(1)) == 0] = float("nan")
        return out

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", leaves)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    grouped_products._leaves_empty_groups.cache_clear()
    check = grouped_products._leaves_empty_groups
    monkeypatch.setattr(grouped_products, "_leaves_empty_groups", lambda device: check(torch.device("cuda")))
    yield
    check.cache_clear()


def _blocks(*shape: int) -> tuple[list[GradientSink], list[list[GradientBlock]]]:
    sinks = [GradientSink(torch.Size(shape), torch.device("cpu")) for _ in ENDS]
    return sinks, [[GradientBlock(sink, WHOLE, WHOLE)] for sink in sinks]


def _rows(*shape: int) -> Tensor:
    return torch.randn(*shape).to(torch.bfloat16)


def test_gradients_of_experts_without_rows_are_zero() -> None:
    dy, x = _rows(8, 16), _rows(8, 24)
    sinks, blocks = _blocks(16, 24)
    add_grouped_gradients(dy, x, RowGroups(ENDS, None), blocks)
    for sink, first, end in zip(sinks, (0, 0, 3, 3), ENDS.tolist(), strict=True):
        torch.testing.assert_close(sink.buffer, dy[first:end].float().t() @ x[first:end].float(), rtol=1e-2, atol=1e-2)


def test_sums_of_experts_without_rows_are_zero() -> None:
    dy = _rows(8, 16)
    sinks, blocks = _blocks(16)
    add_grouped_sums(dy, RowGroups(ENDS, None), blocks, counts=True)
    for sink, first, end in zip(sinks, (0, 0, 3, 3), ENDS.tolist(), strict=True):
        torch.testing.assert_close(sink.buffer, dy[first:end].float().sum(0), rtol=1e-2, atol=1e-2)
