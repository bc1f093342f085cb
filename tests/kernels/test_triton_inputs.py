"""Inputs rounded in groups: bit for bit those of the specification; and the products of their codes on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from engine.errors import UserError
from engine.kernels import reference_inputs
from engine.kernels.formats import FORMATS, Format
from engine.kernels.reference_formats import block_decode
from engine.kernels.triton import inputs
from engine.ops.quantized_backends import choose_quantized
from engine.ops.scaled_products import plain_multiply, require_scaled_device
from engine.quantization.encoding import encoding
from tests.kernels.comparing import places, random_rows
from tests.support.format_parts import bits

BLOCKS = FORMATS["fp8_block"]
ROUNDED = {
    "fp8_block": BLOCKS,
    "fp8_block, powers of 2": replace(BLOCKS, scale_dtype=torch.uint8),
    "mxfp8": FORMATS["mxfp8"],
    "nvfp4": FORMATS["nvfp4"],
}
rounded = pytest.mark.parametrize("of", ROUNDED.values(), ids=ROUNDED)


@places
@rounded
@pytest.mark.parametrize("shape", [(5, 123), (1, 1), (3, 4096 + 160), (17, 512), (0, 64)])
def test_rounding(place: tuple[str, torch.dtype], of: Format, shape: tuple[int, int]) -> None:
    """Rows of different sizes that lie apart, with groups of zeros."""
    x = random_rows(place, *shape, gap=3)
    x *= 2.0 ** (torch.arange(shape[0], device=x.device) % 17 - 8).to(x.dtype)[:, None]
    x *= 2.0 ** (torch.arange(shape[1], device=x.device) // 16 % 9 - 4).to(x.dtype)
    x[1:2, :200] = 0
    ours, theirs = inputs.round_input(of, x), reference_inputs.round_input(of, x)
    assert ours.keys() == theirs.keys()
    for name, part in theirs.items():
        assert ours[name].shape == part.shape and ours[name].dtype == part.dtype, name
        assert torch.equal(bits(ours[name].contiguous()), bits(part.contiguous())), name


@places
@rounded
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so(place: tuple[str, torch.dtype], of: Format, value: float) -> None:
    x = random_rows(place, 3, 256)
    x[1, 7] = value
    out = torch.empty(3, 256, device=place[0])
    block_decode(reference_inputs.input_format(of), inputs.round_input(of, x), out)
    assert not bool(out[1, :16].isfinite().any()) and bool(out[[0, 2]].isfinite().all())


@pytest.mark.gpu
@rounded
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [384, 336])
@pytest.mark.parametrize("tokens", [256, 37, 1])
def test_products_of_codes(of: Format, dtype: torch.dtype, rows: int, tokens: int) -> None:
    """torch's product of the same codes as plain torch's in fp32; 336 rows leave blocks of 16. NVFP4's is rounded to 16
    bits before it is scaled, and after."""
    device = torch.device("cuda")
    try:
        require_scaled_device(of, device, "weight")
    except UserError as error:
        pytest.skip(str(error))
    columns, operands = 1152, choose_quantized("auto", device).operands
    code = encoding(of).stacked((rows,))
    parts = code.encode(random_rows(("cuda", torch.float32), rows, columns, seed=1) * 0.02)
    assert code.format is not None
    x = operands.round_input(code.format, random_rows(("cuda", dtype), tokens, columns, seed=2))
    found = operands.multiply_groups(code.format, x, parts, dtype)
    expected = plain_multiply(code.format, x, parts, torch.float32)
    step = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 1e-3}[dtype]
    error = (found.float() - expected).abs().max() / expected.abs().max()
    assert found.shape == expected.shape and found.dtype == dtype and float(error) < 2 * step, float(error)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [256, 37])
def test_gradients_of_codes(tokens: int) -> None:
    """dY W of FP8 blocks: the codes and the scales of W transposed."""
    device = torch.device("cuda")
    try:
        require_scaled_device(BLOCKS, device, "weight")
    except UserError as error:
        pytest.skip(str(error))
    operands = choose_quantized("auto", device).operands
    parts = encoding(BLOCKS).encode(random_rows(("cuda", torch.float32), 640, 384, seed=1) * 0.02)
    transposed = {"codes": operands.transpose(parts["codes"]), "scales": parts["scales"].t().contiguous()}
    dy = operands.round_input(BLOCKS, random_rows(("cuda", torch.bfloat16), tokens, 640, seed=2))
    found = operands.multiply_groups(BLOCKS, dy, transposed, torch.bfloat16)
    numbers, decoded = torch.empty(tokens, 640, device=device), torch.empty(640, 384, device=device)
    block_decode(reference_inputs.input_format(BLOCKS), dy, numbers)
    block_decode(BLOCKS, parts, decoded)
    expected = numbers.double() @ decoded.double()
    assert float((found.double() - expected).abs().max() / expected.abs().max()) < 2.0**-7
