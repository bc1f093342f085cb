"""Which backend encodes and decodes: what was asked for, where it can run; and that all give the same bits."""

from __future__ import annotations

from dataclasses import replace
from numbers import Number
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.kernels import reference_quantize
from engine.kernels.native.loader import native_status
from engine.ops.quantized_backends import choose_quantized
from engine.ops.quantized_products import PLAIN_OPERANDS
from engine.ops.scaled_products import plain_multiply
from engine.quantization.encoding import ENCODING_NAMES, encoding

CPU = torch.device("cpu")


def test_what_is_asked_for_is_taken() -> None:
    assert choose_quantized("reference", CPU).arithmetic.name == "reference"
    assert choose_quantized("auto", torch.device("meta")).arithmetic.name == "reference"
    expected = "native" if native_status().available else "reference"
    for wanted in ("auto", "native", "apex"):
        backend = choose_quantized(wanted, CPU)
        assert (
            backend.arithmetic.name == expected
            and replace(backend.operands, multiply_groups=plain_multiply) == PLAIN_OPERANDS
        )


def test_a_gpu_gets_triton() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    for wanted, name in (("auto", "triton"), ("triton", "triton"), ("reference", "reference")):
        assert choose_quantized(wanted, torch.device("cuda")).arithmetic.name == name


@pytest.mark.parametrize("name", ENCODING_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_backends_agree(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(50, 200, generator=generator).to(dtype)
    codes = [encoding(name, choose_quantized(wanted, CPU).arithmetic) for wanted in ("auto", "reference")]
    parts = [code.encode(weight) for code in codes]
    out = [torch.empty(50, 200, dtype=dtype) for _ in codes]
    for code, tensor in zip(codes, out, strict=True):
        code.decode(parts[1], tensor)
    assert torch.equal(*out)
    for part in parts[0]:
        assert torch.equal(parts[0][part].view(torch.uint8), parts[1][part].view(torch.uint8)), part


class _CudaDivision(TorchDispatchMode):
    """Divides by a Python number as torch's CUDA kernels do: multiplies by the reciprocal, rounded to fp32."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.div.Tensor, torch.ops.aten.div_.Tensor) and isinstance(args[1], Number):
            reciprocal = torch.ones(()).div(torch.tensor(float(args[1])))
            return (args[0].mul_ if func is torch.ops.aten.div_.Tensor else args[0].mul)(reciprocal)
        return func(*args, **(kwargs or {}))


def _same_bits(ours: Tensor, theirs: Tensor) -> bool:
    return torch.equal(ours.flatten().view(torch.uint8), theirs.flatten().view(torch.uint8))


@pytest.mark.parametrize("name", ENCODING_NAMES)
def test_codes_and_scales_do_not_depend_on_how_a_device_divides(name: str) -> None:
    weight = torch.randn(300, 192, generator=torch.Generator().manual_seed(0))
    code = encoding(name, choose_quantized("reference", CPU).arithmetic)
    expected = code.encode(weight)
    with _CudaDivision():
        found = code.encode(weight)
    assert all(_same_bits(found[part], expected[part]) for part in expected)


@pytest.mark.parametrize("quantize", ["quantize_rows", "quantize_matrix"])
def test_operands_do_not_depend_on_how_a_device_divides(quantize: str) -> None:
    """Several matrices show it: about half of the numbers have the same bits either way, and a matrix has one scale."""
    generator, function = torch.Generator().manual_seed(1), getattr(reference_quantize, quantize)
    for _ in range(16):
        x = torch.randn(30, 20, generator=generator)
        expected = function(x)
        with _CudaDivision():
            found = function(x)
        assert all(map(_same_bits, found, expected))
