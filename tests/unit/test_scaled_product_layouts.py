"""Calls of torch's products of codes on a GPU, without one: its own checks of sizes and layouts, and the numbers that a
product gets which reads scales as cuBLAS documents them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from engine.errors import UserError
from engine.kernels.formats import FORMATS, Format
from engine.kernels.reference_formats import empty_parts
from engine.kernels.reference_inputs import input_format, round_input
from engine.ops import scaled_products
from engine.ops.scaled_products import gpu_multiply, plain_multiply, tiled_scales
from engine.quantization.encoding import encoding

BLOCKS, META = FORMATS["fp8_block"], torch.device("meta")
CASES = {
    "fp8_block, Hopper": (BLOCKS, 9, 384),
    "fp8_block, cut, Hopper": (replace(BLOCKS, granule=16), 9, 336),
    "fp8_block, powers of 2, Hopper": (replace(BLOCKS, scale_dtype=torch.uint8), 9, 384),
    "fp8_block, powers of 2, Blackwell": (replace(BLOCKS, scale_dtype=torch.uint8, granule=32), 10, 352),
    "mxfp8, Blackwell": (FORMATS["mxfp8"], 10, 336),
    "nvfp4, Blackwell": (FORMATS["nvfp4"], 10, 336),
    "nvfp4, divided, Blackwell": (replace(FORMATS["nvfp4"], divides=True), 12, 336),
}
cases = pytest.mark.parametrize(("of", "major", "rows"), CASES.values(), ids=CASES)
columns_of = pytest.mark.parametrize("columns", [128, 640, 1152])


def _gpu(monkeypatch: pytest.MonkeyPatch, major: int) -> None:
    monkeypatch.setattr(scaled_products, "_major", lambda device: major)


@cases
@columns_of
@pytest.mark.parametrize("tokens", [64, 37, 1])
def test_torch_takes_the_operands(
    of: Format, major: int, rows: int, columns: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's function of shapes, which takes tensors without memory for a GPU's, checks operands' strides, and shapes,
    strides, dtypes and order of scales."""
    _gpu(monkeypatch, major)
    a, b = empty_parts(input_format(of), tokens, columns, META), empty_parts(of, rows, columns, META)
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        y = gpu_multiply(of, a, b, dtype)
        assert y.shape == (tokens, rows) and y.dtype == dtype


def test_torch_refuses_other_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the test above means something: scales row by row, and none that are padded."""
    _gpu(monkeypatch, 9)
    a, b = empty_parts(input_format(BLOCKS), 64, 640, META), empty_parts(BLOCKS, 384, 640, META)
    for name, wrong in (
        ("_column_major", lambda x: x),
        ("_numbers", lambda x: torch.empty(x.shape[0], x.shape[1] + 4, device=META)),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(scaled_products, name, wrong)
            with pytest.raises(RuntimeError, match="must have shape"):
                gpu_multiply(BLOCKS, a, b, torch.bfloat16)


def _e2m1(codes: Tensor) -> Tensor:
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    pairs = codes.view(torch.uint8)
    both = torch.stack((pairs & 15, pairs >> 4), 2).flatten(1).long()
    return torch.cat((values, -values))[both]


def _cublas(
    a: Tensor, b: Tensor, scale_a: Tensor, recipe_a: ScalingType, scale_b: Tensor, recipe_b: ScalingType, **more: Any
) -> Tensor:
    """Multiplies as cuBLAS documents scales: of groups of 128 one after the other for all rows, of 128 x 128 blocks
    along K in steps of 4, of 16 and 32 numbers in tiles of 128 rows by 4 groups."""
    assert a.stride(1) == 1 and b.stride(0) == 1 and a.shape[0] % 16 == b.shape[1] % 16 == 0
    assert a.data_ptr() % 16 == b.data_ptr() % 16 == 0

    def wide(codes: Tensor, scale: Tensor, recipe: ScalingType, swizzle: Any) -> Tensor:
        numbers = _e2m1(codes) if codes.dtype == torch.float4_e2m1fn_x2 else codes.double()
        rows, columns = numbers.shape
        if recipe in (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128):
            assert scale.dtype == torch.float32 and swizzle is None
            memory = torch.as_strided(scale, (scale.numel(),), (1,))
            groups = columns // 128
            if recipe == ScalingType.BlockWise1x128:
                each = memory.view(groups, rows).t()
            else:
                each = memory.view(rows // 128, -(-groups // 4) * 4)[:, :groups].repeat_interleave(128, 0)
            return numbers * each.double().repeat_interleave(128, 1)
        assert swizzle == SwizzleType.SWIZZLE_32_4_4 and scale.dim() == 1
        group = 16 if recipe == ScalingType.BlockWise1x16 else 32
        assert scale.dtype == (torch.float8_e4m3fn if group == 16 else torch.float8_e8m0fnu)
        row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns // group), indexing="ij")
        tiles = -(-columns // group // 4)
        place = (row // 128 * tiles + column // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
        return numbers * scale.float()[place].double().repeat_interleave(group, 1)

    left = wide(a, scale_a, recipe_a, more.get("swizzle_a"))
    return (left @ wide(b.t(), scale_b, recipe_b, more.get("swizzle_b")).t()).to(more["output_dtype"])


@contextmanager
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr(scaled_products, "scaled_mm", _cublas)
        yield


@cases
@columns_of
def test_the_product_reads_the_scales_of_each_group(
    of: Format, major: int, rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _gpu(monkeypatch, major)
    generator = torch.Generator().manual_seed(1)
    sizes = 2.0 ** torch.randint(-4, 5, (rows // 16, columns // 16), generator=generator)
    matrix = torch.randn(rows, columns, generator=generator) * sizes.repeat_interleave(16, 0).repeat_interleave(16, 1)
    x = torch.randn(37, columns, generator=generator) * 2.0 ** torch.randint(-4, 5, (37, 1), generator=generator)
    parts, rounded = encoding(of).encode(matrix), round_input(of, x)
    with _stand_in(monkeypatch):
        found = gpu_multiply(of, rounded, parts, torch.float32)
    expected = plain_multiply(of, rounded, parts, torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_tiles_are_those_of_torchao() -> None:
    pytest.importorskip("torchao", reason="torchao is not installed")
    from torchao.prototype.mx_formats.utils import to_blocked

    for shape in ((128, 4), (300, 10), (1, 1), (16, 33)):
        scales = torch.randint(0, 255, shape, dtype=torch.uint8)
        assert torch.equal(tiled_scales(scales), to_blocked(scales).flatten())


@pytest.mark.parametrize(
    ("of", "capability", "cuda", "message"),
    [
        (BLOCKS, (8, 9), "13.0", "need a GPU of compute capability 9.x, but this one has 8.9"),
        (BLOCKS, (10, 0), "13.0", "need a GPU of compute capability 9.x, but this one has 10.0"),
        (BLOCKS, (9, 0), "12.8", "need torch for CUDA 12.9 or newer, but this one is for 12.8"),
        (FORMATS["mxfp8"], (9, 0), "13.0", "need a GPU of compute capability 10.0 or newer, but this one has 9.0"),
        (FORMATS["nvfp4"], (9, 0), "13.0", "need a GPU of compute capability 10.0 or newer, but this one has 9.0"),
        (FORMATS["nvfp4"], (10, 0), "12.6", "need torch for CUDA 12.8 or newer, but this one is for 12.6"),
    ],
)
def test_gpus_without_products_are_refused(
    of: Format, capability: tuple[int, int], cuda: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(UserError) as error:
        scaled_products.require_scaled_device(of, torch.device("cuda"), "layers.0.q_proj")
    assert message in str(error.value) and "layers.0.q_proj is in" in str(error.value)
    scaled_products.require_scaled_device(of, torch.device("cpu"), "layers.0.q_proj")


def test_gpus_with_products_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    powers = replace(BLOCKS, scale_dtype=torch.uint8)
    for of, majors in ((BLOCKS, (9,)), (powers, (9, 10, 12)), (FORMATS["mxfp8"], (10, 12)), (FORMATS["nvfp4"], (10,))):
        for major in majors:
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, major=major: (major, 0))
            scaled_products.require_scaled_device(of, torch.device("cuda"), "layers.0.q_proj")


@pytest.mark.parametrize(("rows", "columns"), [(48, 120), (40, 128)])
def test_sizes_that_a_gpu_does_not_multiply_are_refused(rows: int, columns: int) -> None:
    with pytest.raises(UserError, match=f"is {rows} x {columns} in fp8_block on each rank, but its products on a GPU"):
        scaled_products.require_scaled_sizes(BLOCKS, rows, columns, torch.device("cuda"), "layers.0.q_proj")
    scaled_products.require_scaled_sizes(BLOCKS, rows, columns, torch.device("cpu"), "layers.0.q_proj")
