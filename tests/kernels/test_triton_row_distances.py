"""Rows any distance apart: so far that a place is no 32-bit number, and so that few vectors of 16 bytes begin in them.

Elements lie more than 2^31 behind the first in the widest activations of long batches: 131,072 tokens of 28,672
features are 2^31.8. The memory between the rows is never touched, so that it is not there.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from engine.kernels.records import AdapterSection, InputUpdate
from engine.kernels.triton import cross_entropy, lora, quantize, rmsnorm, rope, swiglu
from engine.kernels.triton.output_gradients import output_gradients
from tests.kernels.comparing import interpreted_only, random_rows

APART = {"far": 2**30, "odd": 397}
"""Elements from a row to the next. 2^30 is a stride of 32 bits, and the third row's place is not."""
ROWS, WIDTH, RANKS = 3, 96, 16

Given = Callable[..., Tensor]
"""Draws [ROWS, columns], or [rows, columns], of bfloat16."""


def _norm(far: Given, near: Given) -> list[Tensor]:
    return list(rmsnorm.rmsnorm_forward(far(WIDTH), near(WIDTH, rows=1)[0], 1e-5))


def _norm_backward(far: Given, near: Given) -> list[Tensor]:
    update = InputUpdate(dh_TR=far(RANKS), a_RI=near(WIDTH, rows=RANKS), h_TR=far(RANKS))
    weight, rstd = near(WIDTH, rows=1)[0], near(1).float().abs()
    given = far(WIDTH), far(WIDTH), weight, rstd
    return [rmsnorm.rmsnorm_backward(*given), rmsnorm.rmsnorm_backward(*given, update=update)]


def _swiglu(far: Given, near: Given) -> list[Tensor]:
    update = InputUpdate(dh_TR=far(RANKS), a_RI=near(WIDTH, rows=RANKS))
    given = far(WIDTH), far(2 * WIDTH)
    return [swiglu.swiglu_forward(given[1]), swiglu.swiglu_backward(*given, update=update)]


def _project(far: Given, near: Given) -> list[Tensor]:
    return [lora.project(far(WIDTH), near(WIDTH, rows=RANKS))]


def _a_gradient(far: Given, near: Given) -> list[Tensor]:
    da = torch.zeros(RANKS, WIDTH)
    lora.a_gradient(far(RANKS), far(WIDTH), None, da)
    return [da]


def _add_input_gradient(far: Given, near: Given) -> list[Tensor]:
    return [lora.add_input_gradient(near(WIDTH), InputUpdate(dh_TR=far(RANKS), a_RI=near(WIDTH, rows=RANKS)))]


def _output_gradients(far: Given, near: Given) -> list[Tensor]:
    place = {"first_column": 0, "num_columns": WIDTH, "first_row": 0, "num_ranks": RANKS}
    section = AdapterSection(**place, b=near(RANKS, rows=WIDTH), db=torch.zeros(WIDTH, RANKS))
    dh = torch.empty(ROWS, RANKS, dtype=torch.bfloat16)
    output_gradients(far(WIDTH), far(RANKS), [section], dh_out=dh)
    assert section.db is not None
    return [dh, section.db]


def _statistics(far: Given, near: Given) -> list[Tensor]:
    return list(cross_entropy.local_statistics(far(WIDTH), torch.arange(ROWS)))


def _rope(far: Given, near: Given) -> list[Tensor]:
    return list(rope.rope_split(far(4 * 16), near(8).float(), near(8).float(), 2, 1, 16))


def _codes(far: Given, near: Given) -> list[Tensor]:
    return [one.view(torch.uint8) for one in quantize.quantize_rows(far(WIDTH))]


def _transposed(far: Given, near: Given) -> list[Tensor]:
    return [quantize.transpose_codes(far(WIDTH).view(torch.uint8))]


CASES = [
    _norm, _norm_backward, _swiglu, _project, _a_gradient, _add_input_gradient, _output_gradients, _statistics, _rope,
    _codes, _transposed,
]  # fmt: skip


@interpreted_only
@pytest.mark.parametrize("compute", CASES, ids=lambda one: one.__name__.strip("_"))
@pytest.mark.parametrize(
    "apart", [APART["far"], pytest.param(APART["odd"], marks=pytest.mark.slow)], ids=["far", "odd"]
)
@pytest.mark.parametrize("place", [("cpu", torch.bfloat16)], ids=["cpu-bfloat16"])
def test_rows_are_read_like_dense_ones(
    place: tuple[str, torch.dtype], apart: int, compute: Callable[[Given, Given], list[Tensor]]
) -> None:
    """Odd distances matter where kernels are compiled (tests.ptx): they decide which accesses may be vectors, and with
    these in which order a row is summed."""

    def near(columns: int, *, rows: int = ROWS) -> Tensor:
        return random_rows(place, rows, columns, seed=columns)

    def spread(columns: int) -> Tensor:
        whole = torch.from_numpy(np.empty((ROWS - 1) * apart + columns, np.int16)).view(place[1])
        return whole.as_strided((ROWS, columns), (apart, 1)).copy_(near(columns))

    for ours, expected in zip(compute(spread, near), compute(near, near), strict=True):
        assert ours.shape == expected.shape
        torch.testing.assert_close(ours, expected, rtol=0 if apart % 16 == 0 else 2.0**-7, atol=0)
