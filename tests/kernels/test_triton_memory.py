"""Interpreted launches are refused where a GPU's memory and race checkers would speak up (`memory_checks`)."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from tests.kernels.comparing import interpreted_only

pytestmark = interpreted_only


@InterpretedFunction
def _copy_kernel(from_ptr, to_ptr, size, read_from, wraps, BLOCK: tl.constexpr):
    """Each program copies its block of `from` shifted by `read_from`, to places modulo `wraps`."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(from_ptr + at + read_from, mask=at < size)
    tl.store(to_ptr + at % wraps, value, mask=at < size)


def _copy(source: torch.Tensor, target: torch.Tensor, size: int, *, read_from: int = 0, wraps: int = 1000) -> None:
    _copy_kernel[(triton.cdiv(size, 8),)](source, target, size, read_from, wraps, BLOCK=8)


def test_what_stays_inside_passes() -> None:
    x, y = torch.arange(20.0), torch.zeros(20)
    _copy(x, y, 20)
    assert torch.equal(x, y)
    _copy(x, x, 20)
    _copy(x[5:], y[:15], 20 - 5)  # a view may reach what lies beside it in its storage
    assert torch.equal(y[:15], x[5:])
    _copy(x, y, 8, wraps=4)  # one program, which may overwrite itself


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"size": 21}, "_copy_kernel reads outside its tensors at 1 places"),
        ({"size": 5, "read_from": -2}, "_copy_kernel reads outside its tensors at 2 places"),
        ({"size": 20, "wraps": 12}, "_copy_kernel: two programs write 8 of the same places"),
    ],
)
def test_mistakes_are_found(arguments: dict[str, int], said: str) -> None:
    with pytest.raises(Exception, match=said):
        _copy(torch.arange(20.0), torch.zeros(100), **arguments)


def test_a_store_beyond_the_end_is_found() -> None:
    with pytest.raises(Exception, match="_copy_kernel writes outside its tensors at 1 places"):
        _copy(torch.arange(20.0), torch.zeros(19), 20)


def test_reading_what_another_program_writes_is_found() -> None:
    x = torch.arange(40.0)
    with pytest.raises(AssertionError, match="_copy_kernel: a program reads 4 places that another writes"):
        _copy(x, x, 12, read_from=4)
