"""The planner's own results of operations on the meta device, against those of the same operations on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.planning.recording import Recording

_INDEX = torch.tensor([0, 2, 1, 1])

CASES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mm": lambda x, w, _: x @ w.T,
    "mm into": lambda x, w, _: torch.mm(x, w.T, out=x.new_empty(3, 5)),
    "addmm_": lambda x, w, _: x.new_zeros(3, 5).addmm_(x, w.T),
    "rows by index": lambda x, _, index: x[index],
    "broadcast": lambda x, _, index: x[None] * x[:, None, :1],
    "promoted": lambda x, w, index: x.to(torch.bfloat16) * w[0],
    "whole numbers by a fraction": lambda x, _, index: index * 0.5,
    "whole numbers by a scalar tensor": lambda x, _, index: index - index[0],
    "compared": lambda x, _, index: (index >= 1) & (index < 3),
    "remainder": lambda x, _, index: index % 3,
    "where": lambda x, _, index: torch.where(x > 0, x, 0.0),
    "in place": lambda x, _, index: x.clone().mul_(2.0),
    "into": lambda x, _, index: torch.add(x, 1.0, out=torch.empty_like(x)),
    "cosine of whole numbers": lambda x, _, index: index.cos(),
    "like it in another dtype": lambda x, _, index: torch.ones_like(x, dtype=torch.float64),
}


@pytest.mark.parametrize("case", CASES)
def test_shape_and_dtype_are_those_of_a_cpu(case: str) -> None:
    x, w = torch.randn(3, 7), torch.randn(5, 7)
    expected = CASES[case](x, w, _INDEX)
    with Recording():
        found = CASES[case](x.to("meta"), w.to("meta"), _INDEX.to("meta"))
    assert (found.shape, found.dtype, found.device.type) == (expected.shape, expected.dtype, "meta")
    assert found.untyped_storage().nbytes() == expected.untyped_storage().nbytes()
