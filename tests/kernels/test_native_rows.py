"""The compiled sum of rows against its plain-torch specification, on every instruction set this processor has."""

from __future__ import annotations

import pytest
import torch

from engine.kernels import reference
from engine.kernels.native.rows import combine_rows
from tests.kernels.native_support import ON_EVERY_INSTRUCTION_SET, assert_same_on_any_threads, widened

pytestmark = ON_EVERY_INSTRUCTION_SET


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "slots", "features"), [(5, 3, 1), (1, 1, 64), (9, 8, 123), (0, 2, 7), (3, 0, 5)])
def test_combine_rows(dtype: torch.dtype, tokens: int, slots: int, features: int) -> None:
    """Takes rows of a wider matrix, some of them read twice; with weights and without."""
    y = widened(torch.randn(tokens * slots + 2, features).to(dtype))
    rows = torch.randint(tokens * slots + 2, (tokens, slots))
    for weights in (None, torch.rand(tokens, slots), torch.rand(tokens, slots).to(torch.bfloat16)):
        expected = reference.combine_rows(y, rows, weights)
        tolerance = 2**-8 if dtype is torch.bfloat16 else 1e-6
        torch.testing.assert_close(combine_rows(y, rows, weights), expected, rtol=tolerance, atol=tolerance)


def test_any_number_of_threads() -> None:
    y, rows, weights = torch.randn(60, 77), torch.randint(60, (20, 3)), torch.rand(20, 3)
    assert_same_on_any_threads(lambda: (combine_rows(y, rows, weights),))
