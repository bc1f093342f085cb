"""Vendors' formats decoded by the compiled kernels, with and without an adapter, bit for bit as by the specification.

The specification itself is compared with the vendors' libraries and with arithmetic by hand in tests/unit.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.kernels import reference_formats
from engine.kernels.formats import FORMATS, Format
from engine.kernels.native.quantize import NATIVE_ARITHMETIC
from engine.quantization.encoding import encoding
from tests.kernels.native_support import ON_EVERY_INSTRUCTION_SET, assert_same_on_any_threads, widened
from tests.support.format_parts import SPELLINGS, bits, drawn_parts, same_numbers, same_parts

pytestmark = ON_EVERY_INSTRUCTION_SET

KINDS = {
    **SPELLINGS,
    "fp8_block exponents cut": replace(FORMATS["fp8_block"], scale_dtype=torch.uint8, granule=64),
    "int4 half zeros": replace(FORMATS["int4"], group=20, has_zero_points=True, scale_dtype=torch.float16),
    "int8 of a matrix": replace(FORMATS["int8"], keeps_scales=True, scale_dtype=torch.bfloat16),
    "int4 single": replace(FORMATS["int4"], group=7, scale_dtype=torch.float32),
}
"""Groups of no whole vectors, and ones that begin inside a byte, among them."""
SHAPES = ((5, 123), (1, 64), (3, 1), (0, 64), (4, 0), (260, 300), (7, 1600))
DTYPES = (torch.float32, torch.bfloat16)
of_every_kind = pytest.mark.parametrize("name", list(KINDS))


def _factors(rows: int, columns: int, rank: int, size: float, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    draw = torch.Generator().manual_seed(rank)
    return [
        (torch.randn(rows, rank, generator=draw) * size).to(dtype),
        torch.randn(rank, columns, generator=draw).to(dtype),
    ]


def _nan(of: Format, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parts with a NaN among the codes and one among the scales, as far as they have any."""
    parts = {name: part.clone() for name, part in parts.items()}
    if parts["codes"].dtype == torch.float8_e4m3fn and parts["codes"].numel():
        parts["codes"].view(torch.uint8).view(-1)[::41] = 127
        parts["codes"].view(torch.uint8).view(-1)[-1] = 255
    if parts["scales"].numel():
        parts["scales"].view(torch.uint8).view(-1)[-parts["scales"].itemsize :] = 255
    return parts


@of_every_kind
def test_decoding(name: str) -> None:
    """Every dtype of the result; rows with and without gaps; subnormal scales and NaN."""
    of = KINDS[name]
    for seed, shape in enumerate(SHAPES):
        plain = drawn_parts(of, *shape, seed)
        for parts in (plain, drawn_parts(of, *shape, seed, extreme=True), _nan(of, plain)):
            for dtype in (*DTYPES, torch.float16):
                expected, out = torch.zeros(shape, dtype=dtype), widened(torch.zeros(shape, dtype=dtype))
                reference_formats.block_decode(of, parts, expected)
                NATIVE_ARITHMETIC.block_decode(of, parts, out)
                assert same_numbers(out.clone(), expected), (shape, dtype)
                beside = torch.as_strided(out, (shape[0], 5), out.stride(), out.storage_offset() + shape[1])
                assert bool(beside.isnan().all()), "wrote beyond the row"


def test_every_code_of_e4m3() -> None:
    """Against torch's own cast."""
    of = FORMATS["fp8_channel"]
    codes = torch.arange(256, dtype=torch.uint8).view(1, -1).view(torch.float8_e4m3fn)
    out = torch.empty(1, 256)
    NATIVE_ARITHMETIC.block_decode(of, {"codes": codes, "scales": torch.ones(1)}, out)
    assert same_numbers(out, codes.float())


@of_every_kind
def test_decoding_with_an_adapter(name: str) -> None:
    """Adapters that change nothing, codes, and scales; no rank, one, and one that no vector divides."""
    of = KINDS[name]
    for seed, shape in enumerate(SHAPES):
        plain = drawn_parts(of, *shape, seed)
        cases = ((plain, 3, 0.0), (plain, 0, 1.0), (plain, 5, 1e-2), (plain, 1, 1.0), (_nan(of, plain), 2, 0.1))
        extreme = drawn_parts(of, *shape, seed, extreme=True)
        for number, (parts, rank, size) in enumerate((*cases, (extreme, 16, 1e-4), (extreme, 2, 1e4))):
            b, a = _factors(*shape, rank, size, DTYPES[number % 2])
            for dtype in DTYPES:
                expected, out = torch.zeros(shape, dtype=dtype), widened(torch.zeros(shape, dtype=dtype))
                reference_formats.merged_decode(of, parts, b, a, 1.7, expected)
                NATIVE_ARITHMETIC.merged_decode(of, parts, widened(b), widened(a), 1.7, out)
                assert same_numbers(out.clone(), expected), (shape, dtype, rank, size)


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4 divided", "mxfp4", "mxfp8", "fp8_block", "int4"])
def test_an_adapter_on_an_encoded_weight(name: str) -> None:
    """Numbers as trainings have them: blocks mostly keep their scales, and some do not."""
    of = KINDS[name]
    weight = torch.randn(130, 640, generator=torch.Generator().manual_seed(0)) * 0.02
    parts = encoding(of).encode(weight)
    b, a = _factors(130, 640, 8, 4e-3, torch.bfloat16)
    merged = reference_formats.merge(of, parts, b, a, 0.5)
    kept = merged["scales"].view(torch.uint8) == parts["scales"].view(torch.uint8)
    assert 0 < int(kept.sum()) < kept.numel() or of.rows > 1
    expected, out = torch.empty(130, 640), torch.empty(130, 640)
    reference_formats.block_decode(of, merged, expected)
    NATIVE_ARITHMETIC.merged_decode(of, parts, b, a, 0.5, out)
    assert same_numbers(out, expected)
    assert not same_numbers(out, weight)


@of_every_kind
def test_codes_with_an_adapter_in_place_of_the_bases(name: str) -> None:
    """Every part has the bits that the specification gives, and bytes beside the rows are left alone. No adapter and
    one that changes nothing leave all of them; codes that are no number's nearest, or one of two for it, among them."""
    of = KINDS[name]
    for seed, shape in enumerate(SHAPES):
        plain = drawn_parts(of, *shape, seed)
        extreme = drawn_parts(of, *shape, seed, extreme=True)
        cases = ((plain, 3, 0.0), (plain, 5, 1e-2), (plain, 1, 1.0), (extreme, 16, 1e-4), (extreme, 2, 1e4))
        for number, (parts, rank, size) in enumerate((*cases, (_nan(of, plain), 2, 0.1))):
            b, a = _factors(*shape, rank, size, DTYPES[number % 2])
            expected = reference_formats.merge(of, parts, b, a, 1.7)
            held, apart = {}, {}
            for part, stored in parts.items():  # rows with gaps
                held[part] = torch.full((*stored.shape[:1], *(one + 3 for one in stored.shape[1:])), 7.0).to(
                    stored.dtype
                )
                apart[part] = held[part][:, : stored.shape[1]] if stored.dim() == 2 else held[part]
                apart[part].copy_(stored)
            NATIVE_ARITHMETIC.merge_in_place(of, apart, widened(b), widened(a), 1.7)
            if number == len(cases):  # NaN, whose sign is no backend's to choose
                ours, theirs = torch.empty(shape), torch.empty(shape)
                reference_formats.block_decode(of, apart, ours)
                reference_formats.block_decode(of, expected, theirs)
                assert same_numbers(ours, theirs), shape
            else:
                assert same_parts(apart, expected), (shape, number)
            beside = [held[part][:, -3:].float() for part, stored in parts.items() if stored.dim() == 2]
            assert all(bool((one == 7).all()) for one in beside), "wrote beyond the row"


def test_products_are_rounded_before_they_are_added() -> None:
    """(1 + 2^-12)^2 less its rounded square is 0 where each product is rounded, and 2^-24 in a fused multiply-add."""
    of = FORMATS["fp8_channel"]
    x = 1 + 2.0**-12
    square = float(torch.tensor(x) * torch.tensor(x))
    b, a = torch.tensor([[-square, x]]), torch.tensor([[1.0], [x]]).repeat(1, 64)
    parts = {"codes": torch.zeros(1, 64).to(torch.float8_e4m3fn), "scales": torch.full((1,), 2.0**-24)}
    out = torch.empty(1, 64)
    NATIVE_ARITHMETIC.merged_decode(of, parts, b, a, 1.0, out)
    assert not out.any()


@pytest.mark.parametrize("name", ["nvfp4", "fp8_block", "int4"])
def test_parts_that_are_cut(name: str) -> None:
    """Slices of parts are read as they lie."""
    of, code = KINDS[name], encoding(KINDS[name])
    cut = code.cut(drawn_parts(of, 384, 512, 0), slice(128, 256), slice(128, 384))
    b, a = _factors(128, 256, 3, 0.1)
    expected, out = torch.empty(128, 256), torch.empty(128, 256)
    code.decode(cut, expected)
    encoding(of, NATIVE_ARITHMETIC).decode(cut, out)
    assert same_numbers(out, expected)
    reference_formats.merged_decode(of, cut, b, a, 1.0, expected)
    NATIVE_ARITHMETIC.merged_decode(of, cut, b, a, 1.0, out)
    assert same_numbers(out, expected)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "fp8_block", "fp8_channel", "int4 zeros"])
def test_any_number_of_threads(name: str) -> None:
    of = KINDS[name]
    parts = drawn_parts(of, 400, 200, 0)
    b, a = _factors(400, 200, 4, 0.1)

    def run() -> tuple[Tensor, ...]:
        out, merged = torch.empty(400, 200), torch.empty(400, 200, dtype=torch.bfloat16)
        NATIVE_ARITHMETIC.block_decode(of, parts, out)
        NATIVE_ARITHMETIC.merged_decode(of, parts, b, a, 1.0, merged)
        codes = {name: part.clone() for name, part in parts.items()}
        NATIVE_ARITHMETIC.merge_in_place(of, codes, b, a, 1.0)
        return out, merged, *(bits(part) for part in codes.values())

    assert_same_on_any_threads(run)
