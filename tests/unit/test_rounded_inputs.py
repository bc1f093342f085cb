"""Inputs that are rounded in groups beside what the packages make of them, and products of their codes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.kernels.formats import FORMATS, Format
from engine.kernels.native.loader import native_status
from engine.kernels.native.quantize import NATIVE_ARITHMETIC
from engine.kernels.reference_formats import block_decode
from engine.kernels.reference_inputs import input_format, round_input
from engine.ops.encoded_weight import Scratch
from engine.ops.quantized_products import PLAIN_OPERANDS, QuantizedWeight
from engine.ops.scaled_products import plain_multiply
from engine.ops.scaled_weight import ScaledWeight
from engine.quantization.encoding import encoding
from tests.support.format_parts import bits

POWERS = replace(FORMATS["fp8_block"], scale_dtype=torch.uint8)


def _x(rows: int = 40, columns: int = 512) -> Tensor:
    """Groups of sizes from 2^-9 to 2^9, one of zeros, and rows of as different sizes."""
    generator = torch.Generator().manual_seed(1)
    sizes = 2.0 ** torch.randint(-9, 10, (rows, columns // 16, 1), generator=generator)
    x = (torch.randn(rows, columns // 16, 16, generator=generator) * sizes).flatten(1)
    x *= 2.0 ** torch.randint(-6, 7, (rows, 1), generator=generator)
    x[rows // 2, :128] = 0
    return x


@pytest.fixture(scope="module")
def torchao() -> ModuleType:
    pytest.importorskip("torchao", reason="torchao is not installed")
    import torchao.prototype.mx_formats.mx_tensor
    import torchao.prototype.mx_formats.nvfp4_tensor

    return torchao.prototype.mx_formats


def test_fp8_blocks_have_the_groups_of_compressed_tensors() -> None:
    """Its dynamic groups, of numbers in fp32; a group of zeros has another scale there, and the same codes."""
    quantization = pytest.importorskip("compressed_tensors.quantization", reason="compressed-tensors is not installed")
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    arguments: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128}
    scheme = quantization.QuantizationArgs(**arguments, dynamic=True, symmetric=True)
    x = _x()
    scale, zero = compute_dynamic_scales_and_zp(x, scheme, torch.nn.Linear(1, 1))
    codes = quantize(x=x, scale=scale, zero_point=zero, args=scheme, dtype=torch.float8_e4m3fn)
    ours = round_input(FORMATS["fp8_block"], x)
    assert torch.equal(bits(ours["codes"]), bits(codes))
    alike = ours["scales"] == scale
    assert int((~alike).sum()) == 1 and bool((x.unflatten(1, (4, 128))[~alike] == 0).all())


@pytest.mark.parametrize("powers", [False, True])
def test_fp8_blocks_have_the_groups_of_vllm(powers: bool) -> None:
    """Its per_token_group_quant_fp8 (vllm/model_executor/layers/quantization/utils/fp8_utils.py), in numpy:

    s = max(amax, 1e-10) / 448, with use_ue8m0 exp2(ceil(log2(s))); codes of clamp(y / s, -448, 448)
    """
    x = _x()
    groups = x.unflatten(1, (4, 128)).numpy()
    scale = np.maximum(np.abs(groups).max(2), np.float32(1e-10)) / np.float32(448)
    if powers:
        scale = np.exp2(np.ceil(np.log2(scale.astype(np.float64)))).astype(np.float32)
    codes = torch.from_numpy(groups / scale[:, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn).flatten(1)
    ours = round_input(POWERS if powers else FORMATS["fp8_block"], x)
    if powers:
        scale = (np.log2(scale) + 127).astype(np.uint8)
    assert torch.equal(ours["scales"], torch.from_numpy(scale))
    assert torch.equal(bits(ours["codes"]), bits(codes))


def test_mxfp8_has_the_groups_of_torchao_and_vllm(torchao: ModuleType) -> None:
    """torchao's RCEIL; of vLLM the formula of _mxfp8_e4m3_quantize_torch, ceil(log2(amax / 448)) + 127."""
    x = _x()
    scales, codes = torchao.mx_tensor.to_mx(x, torch.float8_e4m3fn, 32, torchao.mx_tensor.ScaleCalculationMode.RCEIL)
    ours = round_input(FORMATS["mxfp8"], x)
    assert torch.equal(ours["scales"], scales.view(torch.uint8)) and torch.equal(bits(ours["codes"]), bits(codes))
    largest = x.unflatten(1, (16, 32)).abs().amax(2).clamp(min=torch.finfo(torch.float32).tiny).double()
    exponents = (torch.ceil(torch.log2(largest.float().div(448).double())) + 127).clamp(0, 254)
    assert torch.equal(ours["scales"], exponents.to(torch.uint8))


def test_nvfp4_has_the_groups_of_torchao(torchao: ModuleType) -> None:
    """Each row with the row's own scale as torchao's scale of a tensor: a power of 2 in which all block scales fit."""
    x = _x()
    ours = round_input(FORMATS["nvfp4"], x)
    for row, of_row in enumerate(ours["tensor_scale"]):
        scales, codes = torchao.nvfp4_tensor.nvfp4_quantize(x[row : row + 1], 16, of_row)
        assert torch.equal(bits(scales).flatten(), bits(ours["scales"][row])), row
        assert torch.equal(codes.flatten(), ours["codes"][row]), row
    least = x.abs().amax(1) / 2688
    assert bool((ours["tensor_scale"] >= least).all()) and bool((ours["tensor_scale"] < 2 * least).all())
    assert bool((ours["tensor_scale"].frexp().mantissa == 0.5).all())


@pytest.mark.parametrize("of", [*(FORMATS[name] for name in ("fp8_block", "mxfp8", "nvfp4")), POWERS])
def test_ranks_round_what_they_have_of_a_row_alike(of: Format) -> None:
    """NVFP4's scale of a row is another one, and what a code means is not."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(16, 512, generator=generator) * 2.0 ** torch.randint(-3, 3, (1, 512), generator=generator)
    whole, halves = torch.empty(16, 512), torch.empty(16, 512)
    block_decode(input_format(of), round_input(of, x), whole)
    for half in (slice(256), slice(256, 512)):
        block_decode(input_format(of), round_input(of, x[:, half]), halves[:, half])
    assert torch.equal(whole, halves)
    assert 0 < float((whole - x).norm() / x.norm()) < (0.15 if of.name == "nvfp4" else 0.05)


@pytest.mark.parametrize("of", [*(FORMATS[name] for name in ("fp8_block", "mxfp8", "nvfp4")), POWERS])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so(of: Format, value: float) -> None:
    x, out = _x(3), torch.empty(3, 512)
    x[1, 5] = value
    block_decode(input_format(of), round_input(of, x), out)
    assert not bool(out[1, :16].isfinite().any()) and bool(out[[0, 2]].isfinite().all())


def _weight(name: str, rows: int, arithmetic: Any = None) -> tuple[ScaledWeight, Tensor]:
    """A matrix of two sections, and its numbers in fp64."""
    matrix = torch.randn(rows, 512, generator=torch.Generator().manual_seed(3)) * 0.02
    code = encoding(name).stacked((256, rows))
    operands = PLAIN_OPERANDS
    if arithmetic is not None:
        operands = replace(operands, multiply_groups=partial(plain_multiply, decode=arithmetic.block_decode))
    parts = code.encode(matrix)
    stored = QuantizedWeight(encoding=code, parts=parts, in_features=512, sections=(256, rows - 256), operands=operands)
    scratch = Scratch()
    scratch.announce((rows, 512), torch.float32)
    numbers = torch.empty(rows, 512, dtype=torch.float64)
    code.decode(parts, numbers)
    return ScaledWeight(weight=stored, dtype=torch.float32, scratch=scratch), numbers


def _rounded(of: Format, x: Tensor) -> Tensor:
    out = torch.empty(x.shape, dtype=torch.float64)
    block_decode(input_format(of), round_input(of, x), out)
    return out


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("rows", [1408, 1300])
@pytest.mark.parametrize("name", ["fp8_block", "mxfp8", "nvfp4"])
def test_products_are_those_of_the_rounded_numbers(name: str, rows: int, native: bool) -> None:
    """The input's gradient rounds where the blocks of the weight are whole, and is of decoded numbers otherwise."""
    if native and not native_status().available:
        pytest.skip("the compiled kernels are not built")
    weight, numbers = _weight(name, rows, NATIVE_ARITHMETIC if native else None)
    of = weight.weight.encoding.format
    assert of is not None
    generator = torch.Generator().manual_seed(4)
    x, dy = torch.randn(33, 512, generator=generator), torch.randn(33, rows, generator=generator)
    expected = _rounded(of, x) @ numbers.t()
    torch.testing.assert_close(weight.product(x, None).double(), expected, rtol=1e-5, atol=1e-5)
    rounds = name == "fp8_block" and rows == 1408
    expected = (_rounded(of, dy) if rounds else dy.double()) @ numbers
    torch.testing.assert_close(weight.input_gradient(dy, None, 512).double(), expected, rtol=1e-5, atol=1e-5)
    moved = (expected - dy.double() @ numbers).norm() / expected.norm()
    assert (moved > 0.01) == rounds


@pytest.mark.parametrize("name", ["fp8_block", "mxfp8", "nvfp4"])
def test_cuts_of_a_weight_have_the_products_of_the_whole(name: str) -> None:
    """As tensor ranks have them: rows side by side, or columns whose products are added up."""
    whole, _ = _weight(name, 1024)
    generator = torch.Generator().manual_seed(5)
    x, dy = torch.randn(33, 512, generator=generator), torch.randn(33, 1024, generator=generator)
    y, dx = whole.product(x, None), whole.input_gradient(dy, None, 512)

    def part(rows: slice, columns: slice) -> ScaledWeight:
        of = replace(whole.weight, parts={}, sections=(rows.stop - rows.start,))
        parts = whole.weight.encoding.cut(whole.weight.parts, rows, columns)
        return replace(whole, weight=replace(of, parts=parts, in_features=columns.stop - columns.start))

    low, high = (part(rows, slice(0, 512)) for rows in (slice(0, 256), slice(256, 1024)))
    beside = torch.cat((low.product(x, None), high.product(x, None)), 1)
    added = low.input_gradient(dy[:, :256], None, 512) + high.input_gradient(dy[:, 256:], None, 512)
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
    close(beside, y)
    close(added, dx)
    left, right = (part(slice(0, 1024), columns) for columns in (slice(0, 256), slice(256, 512)))
    close(left.product(x[:, :256], None) + right.product(x[:, 256:], None), y)
    close(torch.cat([one.input_gradient(dy, None, 256) for one in (left, right)], 1), dx)
