"""The compiled merge of a low-rank update against torch in fp64 and the sum in fp32."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.native.merge import can_merge, merge_rows
from tests.kernels.native_support import ON_EVERY_INSTRUCTION_SET, assert_accurate, widened

pytestmark = ON_EVERY_INSTRUCTION_SET

SHAPES = ((1, 1, 1), (5, 64, 3), (6, 130, 16), (13, 257, 8), (7, 33, 0), (0, 8, 4))
"""(rows, columns, rank)"""


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize(("rows", "columns", "rank"), SHAPES)
def test_merge(rows: int, columns: int, rank: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows + columns)
    weight = torch.randn(rows, columns, generator=generator).to(dtype)
    b, a = torch.randn(rows, rank, generator=generator), torch.randn(rank, columns, generator=generator)
    out = widened(torch.zeros(rows, columns, dtype=dtype))
    most, squared_error, squared_value = merge_rows(widened(weight), widened(b), widened(a), out)
    exact = weight.double() + b.double() @ a.double()
    assert_accurate(out.float(), (weight.float() + b @ a).to(dtype).float(), exact)
    error = out.double() - exact
    assert squared_value == pytest.approx(float(exact.square().sum()), rel=1e-5)
    if dtype == torch.float32:
        assert most == squared_error == 0.0  # nothing is rounded away of the sum in fp32
    else:
        assert most == pytest.approx(float(error.abs().max()) if error.numel() else 0.0, rel=1e-3, abs=1e-6)
        assert squared_error == pytest.approx(float(error.square().sum()), rel=1e-2, abs=1e-9)
    beside = out.as_strided((rows, 5), (columns + 5, 1), columns)
    assert beside.isnan().all(), "nothing is written beside the result"
    in_place = weight.clone()
    merge_rows(in_place, b, a, in_place)
    assert torch.equal(in_place, out)


def test_what_it_takes() -> None:
    assert can_merge(torch.bfloat16) and can_merge(torch.float32) and not can_merge(torch.float16)
