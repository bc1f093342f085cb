"""Which backend encodes and decodes: what was asked for, where it can run; and that all give the same bits."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.native.loader import native_status
from engine.ops.quantized_backends import choose_quantized
from engine.ops.quantized_products import REFERENCE_OPERANDS
from engine.quantization.encoding import ENCODING_NAMES, encoding

CPU = torch.device("cpu")


def test_what_is_asked_for_is_taken() -> None:
    assert choose_quantized("reference", CPU).arithmetic.name == "reference"
    assert choose_quantized("auto", torch.device("meta")).arithmetic.name == "reference"
    expected = "native" if native_status().available else "reference"
    for wanted in ("auto", "native", "apex"):
        backend = choose_quantized(wanted, CPU)
        assert backend.arithmetic.name == expected and backend.operands is REFERENCE_OPERANDS


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
