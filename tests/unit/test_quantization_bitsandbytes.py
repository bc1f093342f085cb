"""NF4 beside bitsandbytes: the same codes, scales and weights, bit for bit.

What bitsandbytes makes of a matrix that can be written down by hand is recorded here; where the package is installed,
it is asked again, with more matrices. Its CPU library finds 8-bit codes by a table that is right but for numbers
almost between two codes, so they are compared with those of its backend in plain torch, which searches as its GPU
kernels do.
"""

from __future__ import annotations

import hashlib
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.kernels.reference_quantize import dynamic_map, nf4_values, scale_codes
from engine.quantization.encoding import encoding

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def functional() -> ModuleType:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    import bitsandbytes.functional

    return bitsandbytes.functional


def by_hand(rows: int, columns: int) -> Tensor:
    """Numbers on a grid of 2^-15 below 1, scrambled by a multiplicative hash; sums of a few hundred are exact."""
    index = torch.arange(rows * columns, dtype=torch.int64)
    hashed = ((index * 2654435761) % 2**32) >> 16
    sizes = 2 ** (torch.arange(rows, dtype=torch.int64) % 3)
    return ((hashed - 2**15).view(rows, columns) // sizes[:, None]).float() / 2**15


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def _decode(parts: dict[str, Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
    out = torch.empty(shape, dtype=dtype)
    encoding("nf4").decode(parts, out)
    return out


RECORDED = {
    "codes": "e0771d60bedf425d",
    "scales": "332a2e861e1c2de5",
    "float32": "54d9c63eddd06b7f",
    "bfloat16": "619c7efb703a19c1",
}
"""What bitsandbytes 0.50.2 makes of by_hand(24, 1280): sha256 of the bytes, the first 16 digits."""


def _theirs(functional: ModuleType, weight: Tensor) -> tuple[Tensor, Any]:
    """Codes and nested state, with the 8-bit codes by the backend that searches."""
    codes, state = functional.quantize_4bit(weight, quant_type="nf4", blocksize=64, compress_statistics=True)
    absmax = functional.quantize_4bit(weight, quant_type="nf4", blocksize=64)[1].absmax
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)
    search = torch.ops.bitsandbytes.quantize_blockwise.default.redispatch
    state.absmax, largest = search(key, absmax - state.offset, state.state2.code, 256)
    assert torch.equal(largest, state.state2.absmax)
    return codes, state


def test_bits_are_those_recorded() -> None:
    weight = by_hand(24, 1280)
    parts = encoding("nf4").encode(weight)
    found = {
        "codes": _digest(parts["codes"]),
        "scales": _digest(parts["scales"]),
        "float32": _digest(_decode(parts, weight.shape, torch.float32)),
        "bfloat16": _digest(_decode(parts, weight.shape, torch.bfloat16)),
    }
    assert found == RECORDED


def test_the_record_is_what_bitsandbytes_makes(functional: ModuleType) -> None:
    weight = by_hand(24, 1280)
    codes, state = _theirs(functional, weight)
    found = {"codes": _digest(codes), "scales": _digest(state.absmax)}
    for dtype in (torch.float32, torch.bfloat16):
        state.dtype = dtype
        found[str(dtype)[6:]] = _digest(functional.dequantize_4bit(codes, state))
    assert found == RECORDED


def test_tables_are_the_same(functional: ModuleType) -> None:
    assert torch.equal(nf4_values(CPU), functional.get_4bit_type("nf4", device="cpu"))
    assert torch.equal(dynamic_map(CPU), functional.create_dynamic_map())


def _parts(codes: Tensor, scales: Tensor, largest: Tensor, offset: Tensor, shape: tuple[int, int]) -> dict[str, Tensor]:
    """What the engine stores of a matrix from what bitsandbytes keeps of it: 64 weights have a scale, and 256 scales,
    counted through all rows, have one number in `largest`."""
    rows, blocks = shape[0], shape[1] // 64
    first = torch.arange(rows) * blocks
    groups = first[:, None] // 256 + torch.arange(encoding("nf4").parts(*shape)["groups"][0][1] - 1)
    return {
        "codes": codes.view(rows, -1),
        "scales": scales.view(rows, blocks),
        "groups": torch.cat((offset.expand(rows, 1), largest[groups.clamp(max=len(largest) - 1)]), 1),
        "phase": (first % 256).to(torch.uint8),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 64), (5, 192), (64, 1024), (300, 320)])
def test_codes_scales_and_weights(functional: ModuleType, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """All that is kept and what it decodes to, given their mean: theirs depends on the order of an fp32 sum."""
    torch.manual_seed(0)
    weight = (torch.randn(shape) * torch.rand(shape[0], 1)).to(dtype)
    codes, state = _theirs(functional, weight)
    ours = encoding("nf4").encode(weight)
    assert torch.equal(ours["codes"].view(-1), codes.view(-1))
    absmax = encoding("nf4").absmax(weight)
    assert torch.equal(absmax.view(-1), functional.quantize_4bit(weight, quant_type="nf4", blocksize=64)[1].absmax)
    # an fp32 sum of n numbers, all of one sign: fewer than log2(n) + 8 roundings deep as torch adds them
    assert abs(float(ours["groups"][0, 0]) - float(state.offset)) <= 16 * 2**-24 * float(state.offset)
    scales, largest = scale_codes(absmax.view(-1), state.offset)
    assert torch.equal(scales, state.absmax) and torch.equal(largest, state.state2.absmax)
    parts = _parts(ours["codes"], scales, largest, state.offset, shape)
    for out_dtype in (torch.float32, torch.bfloat16, torch.float16):
        state.dtype = out_dtype
        assert torch.equal(_decode(parts, weight.shape, out_dtype), functional.dequantize_4bit(codes, state))


def test_a_stored_state_decodes_to_its_bits(functional: ModuleType) -> None:
    """As its CPU library made it, mean, table and all."""
    torch.manual_seed(1)
    weight = torch.randn(96, 832).to(torch.bfloat16)
    codes, state = functional.quantize_4bit(weight, quant_type="nf4", blocksize=64, compress_statistics=True)
    parts = _parts(codes, state.absmax, state.state2.absmax, state.offset, (96, 832))
    assert torch.equal(_decode(parts, weight.shape, torch.bfloat16), functional.dequantize_4bit(codes, state))
    cut = encoding("nf4").cut(parts, slice(10, 50), slice(128, 640))
    exact = functional.dequantize_4bit(codes, state)[10:50, 128:640]
    assert torch.equal(_decode(cut, exact.shape, torch.bfloat16), exact)


def test_error_is_theirs(functional: ModuleType) -> None:
    """Whole way, its CPU library against ours: one scale in a hundred may be a neighbour."""
    torch.manual_seed(2)
    weight = torch.randn(256, 2048) * 0.02
    codes, state = functional.quantize_4bit(weight, quant_type="nf4", blocksize=64, compress_statistics=True)
    theirs = functional.dequantize_4bit(codes, state)
    parts = encoding("nf4").encode(weight)
    ours = _decode(parts, weight.shape, torch.float32)
    assert int((parts["scales"].view(-1) != state.absmax).sum()) <= parts["scales"].numel() // 100
    assert float((ours - theirs).norm()) <= 1e-3 * float(theirs.norm())
    errors = [float((decoded - weight).norm() / weight.norm()) for decoded in (ours, theirs)]
    assert abs(errors[0] / errors[1] - 1) <= 1e-4, errors
