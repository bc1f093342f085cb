"""Products with quantised weights against torch's product of the decoded ones, and against hand-scaled operands."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.distributed.mesh import Axis
from engine.errors import UserError
from engine.ops.encoded_weight import EncodedWeight, Scratch
from engine.ops.kernels import REFERENCE
from engine.ops.operands import LinearOperands
from engine.ops.products import SEPARATE
from engine.ops.quantized_products import QuantizedWeight, input_gradient, product, require_product_sizes
from engine.quantization.encoding import ENCODING_NAMES, encoding

SECTIONS = (48, 16, 32)
TOKENS, COLUMNS = 33, 192


def _weight(name: str, columns: int = COLUMNS) -> tuple[QuantizedWeight, Tensor]:
    """Three matrices of different sizes of numbers in one storage, and what they decode to."""
    generator = torch.Generator().manual_seed(1)
    code, stacked = encoding(name), {}
    for index, rows in enumerate(SECTIONS):
        matrix = torch.randn(rows, columns, generator=generator) * 0.02 * 4.0**index
        for part, tensor in code.encode(matrix).items():
            stacked.setdefault(part, []).append(tensor)
    parts = {part: torch.cat(tensors) for part, tensors in stacked.items()}
    weight = QuantizedWeight(encoding=code, parts=parts, in_features=columns, sections=SECTIONS)
    return weight, weight.decode(torch.empty(sum(SECTIONS), columns))


def _random(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes = 2.0 ** torch.randint(-8, 8, (rows, 1), generator=generator)
    return torch.randn(rows, columns, generator=generator) * sizes


def _rounded(x: Tensor, by_row: bool) -> Tensor:
    """To e4m3 and back, by torch's own cast, with the largest number at 448; fp64."""
    largest = x.abs().amax(1, keepdim=True) if by_row else x.abs().max()
    return (x * torch.div(torch.tensor(448.0), largest)).to(torch.float8_e4m3fn).double() * (largest.double() / 448)


@pytest.mark.parametrize("name", ["nf4", "int8"])
def test_decoded_products_are_torchs(name: str) -> None:
    weight, decoded = _weight(name)
    x, dy = _random(TOKENS, COLUMNS, 2), _random(TOKENS, sum(SECTIONS), 3)
    assert torch.equal(product(x, weight), x @ decoded.t())
    assert torch.equal(input_gradient(dy, weight), dy @ decoded)


def test_decoded_products_are_the_backends() -> None:
    """Both directions, from a linear's operands on: another product than the backend's was half as fast on AMD's."""
    weight, decoded = _weight("nf4")
    x, dy = _random(TOKENS, COLUMNS, 0), _random(TOKENS, sum(SECTIONS), 1)

    def twice(left: Tensor, right: Tensor) -> Tensor:
        return 2 * (left @ right)

    encoded = EncodedWeight(weight=weight, dtype=torch.float32, scratch=Scratch())
    encoded.scratch.announce((sum(SECTIONS), COLUMNS), torch.float32)
    operands = LinearOperands(
        extended_OE=torch.empty(sum(SECTIONS), COLUMNS, device="meta"),
        in_features=COLUMNS,
        bias_O=None,
        low_rank=None,
        forward_way=SEPARATE,
        backward_way=SEPARATE,
        sinks=(),
        axis=Axis("tp"),
        sequence_parallel=False,
        joint=False,
        kernels=replace(REFERENCE, product=twice),
        name="linear",
        encoded=encoded,
    )
    assert torch.equal(operands.base_product(x, folded=False), 2 * (x @ decoded.t()))
    assert torch.equal(operands.base_gradient(dy, folded=False), 2 * (dy @ decoded))


@pytest.mark.parametrize("name", ["nf4", "int8"])
def test_adapters_folded_beside_a_decoded_weight(name: str) -> None:
    weight, decoded = _weight(name)
    b, h = _random(sum(SECTIONS), 8, 4), _random(TOKENS, 8, 5)
    x, dy = _random(TOKENS, COLUMNS, 2), _random(TOKENS, sum(SECTIONS), 3)
    scratch = torch.full((sum(SECTIONS), COLUMNS + 8), torch.nan)
    scratch[:, COLUMNS:] = b
    extended = torch.cat((decoded, b), 1)
    assert torch.equal(product(torch.cat((x, h), 1), weight, scratch), torch.cat((x, h), 1) @ extended.t())
    assert torch.equal(input_gradient(dy, weight, scratch), dy @ extended)


@pytest.mark.parametrize("name", ["fp8", "fp8_row"])
@pytest.mark.parametrize("columns", [COLUMNS, 37])
def test_fp8_products_are_those_of_the_rounded_operands(name: str, columns: int) -> None:
    """fp32 sums of exact products: within some roundings of the largest term, nothing more."""
    weight, decoded = _weight(name, columns)
    by_row = name == "fp8_row"
    x, dy = _random(TOKENS, columns, 2), _random(TOKENS, sum(SECTIONS), 3)
    operand = _rounded(x, by_row)
    expected = operand @ decoded.double().t()
    bound = operand.abs() @ decoded.double().abs().t() * columns * 2**-24
    assert bool(((product(x, weight).double() - expected).abs() <= bound).all())
    scales = weight.parts["scales"]
    rounded, codes = _rounded(dy * scales, by_row), weight.parts["codes"].double()
    bound = rounded.abs() @ codes.abs() * sum(SECTIONS) * 2**-24
    assert bool(((input_gradient(dy, weight).double() - rounded @ codes).abs() <= bound).all())


@pytest.mark.parametrize(("name", "allowed"), [("fp8", 0.06), ("fp8_row", 0.04)])
def test_fp8_products_are_near_the_exact_ones(name: str, allowed: float) -> None:
    """e4m3 rounds each number of x by up to 2^-4, evenly spread, which is 2^-4 / sqrt(3) = 0.036 of their norm; one
    scale for all tokens leaves the small ones, 2^16 below the large, with fewer bits."""
    weight, decoded = _weight(name)
    x, dy = torch.randn(TOKENS, COLUMNS), torch.randn(TOKENS, sum(SECTIONS))
    for ours, exact in ((product(x, weight), x @ decoded.t()), (input_gradient(dy, weight), dy @ decoded)):
        assert float((ours - exact).norm() / exact.norm()) < allowed


@pytest.mark.parametrize("name", ENCODING_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_strides_and_no_tokens(name: str, dtype: torch.dtype) -> None:
    weight, _ = _weight(name)
    x = torch.randn(2 * TOKENS, COLUMNS + 8).to(dtype)[::2, :COLUMNS]
    dy = torch.randn(TOKENS, sum(SECTIONS) + 4).to(dtype)[:, : sum(SECTIONS)]
    for function, operand in ((product, x), (input_gradient, dy)):
        result = function(operand, weight)
        assert result.dtype == dtype and torch.isfinite(result).all()
        assert torch.equal(result, function(operand.contiguous(), weight))
        assert function(operand[:0], weight).shape == (0, result.shape[1])
        assert function(operand[:1], weight).shape == (1, result.shape[1])


@pytest.mark.parametrize("name", ["fp8", "fp8_row"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_the_result(name: str, value: float) -> None:
    """The optimizer skips such a step; a cast that saturates would hide it."""
    weight, _ = _weight(name)
    x, dy = torch.randn(4, COLUMNS), torch.randn(4, sum(SECTIONS))
    x[2, 5] = dy[2, 5] = value
    assert not torch.isfinite(product(x, weight)[2]).any()
    assert not torch.isfinite(input_gradient(dy, weight)[2]).any()
    if name == "fp8_row":
        others = [0, 1, 3]
        assert torch.isfinite(product(x, weight)[others]).all()


@pytest.mark.parametrize("name", ["fp8", "fp8_row"])
def test_zero_tokens_give_zeros(name: str) -> None:
    weight, _ = _weight(name)
    assert bool((product(torch.zeros(3, COLUMNS), weight) == 0).all())
    assert bool((input_gradient(torch.zeros(3, sum(SECTIONS)), weight) == 0).all())


def test_sizes_that_a_gpu_cannot_multiply_are_refused() -> None:
    gpu = torch.device("cuda")
    with pytest.raises(UserError, match="layers.0.down is 4096 x 1384 on each rank.*multiples of 16"):
        require_product_sizes("fp8", 4096, 1384, gpu, "layers.0.down")
    require_product_sizes("fp8_row", 4096, 1376, gpu, "layers.0.down")
    require_product_sizes("int8", 4096, 1384, gpu, "layers.0.down")
    require_product_sizes("fp8", 4096, 1384, torch.device("cpu"), "layers.0.down")
