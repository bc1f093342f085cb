"""Weights in the vendors' formats: decoded, and merged with adapters, bit for bit as the specification has them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from engine.kernels import reference_formats
from engine.kernels.formats import FORMATS, Format, part_shapes
from engine.kernels.triton import formats, merged_formats
from engine.quantization.block_formats import BlockEncoding
from tests.kernels.comparing import long_places, places, random_rows
from tests.support.sweeps import portion, sampled

VARIANTS = {
    **FORMATS,
    "nvfp4 divided": replace(FORMATS["nvfp4"], divides=True),
    "fp8_block of exponents": replace(FORMATS["fp8_block"], scale_dtype=torch.uint8),
    "fp8_block bf16": replace(FORMATS["fp8_block"], scale_dtype=torch.bfloat16),
    "fp8_block stacked": replace(FORMATS["fp8_block"], granule=32),
    "fp8_block of a row": Format(name="fp8_block", group=64),
    "fp8_block of a row, exponents": Format(name="fp8_block", group=64, scale_dtype=torch.uint8),
    "fp8_channel bf16": replace(FORMATS["fp8_channel"], scale_dtype=torch.bfloat16),
    "fp8_channel one": replace(FORMATS["fp8_channel"], keeps_scales=True),
    "int4 with zeros": replace(FORMATS["int4"], group=32, has_zero_points=True, scale_dtype=torch.float16),
    "int4 by row": replace(FORMATS["int4"], group=0),
    "int4 by row with zeros": replace(FORMATS["int4"], group=0, has_zero_points=True),
    "int4 of 96": replace(FORMATS["int4"], group=96, scale_dtype=torch.float32),
}
SHAPES = [(5, 123), (1, 1), (0, 64), (2, 600)]
variants = pytest.mark.parametrize("name", VARIANTS)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _codes(of: Format, shape: tuple[int, int]) -> dict[str, Tensor]:
    """Parts with every code and every scale, and numbers that are none among both."""
    parts, generator = {}, _generator(sum(shape))
    for name, (size, dtype) in part_shapes(of, *shape).items():
        integers = torch.randint(0, 16 if name == "zeros" else 256, size, generator=generator, dtype=torch.uint8)
        random = torch.randn(size, generator=generator)
        parts[name] = integers.view(dtype) if dtype.itemsize == 1 else random.to(dtype)
    return parts


def weight_parts(of: Format, shape: tuple[int, int], device: str = "cpu") -> dict[str, Tensor]:
    """Parts of normal numbers, row by row of another size; of granules every one of a block has the block's scale."""
    generator = torch.Generator(device).manual_seed(sum(shape))
    weight = torch.randn(*shape, generator=generator, device=device)
    weight *= 2.0 ** (torch.arange(shape[0], device=device) % 9 - 6)[:, None]
    whole = replace(of, granule=of.rows, has_zero_points=False)
    parts = BlockEncoding(whole).encode(weight)
    if of.granule < of.rows:
        repeated = parts["scales"].repeat_interleave(of.rows // of.granule, 0)
        parts["scales"] = repeated[: -(-shape[0] // of.granule)].contiguous()
    if of.has_zero_points:
        size, dtype = part_shapes(of, *shape)["zeros"]
        parts["zeros"] = torch.randint(6, 11, size, generator=generator, dtype=dtype, device=device)
    return parts


def _assert_same(ours: Tensor, theirs: Tensor, what: object) -> None:
    """As bytes, but that a NaN may have any."""
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    none = theirs.isnan()
    assert torch.equal(ours.isnan(), none), what
    mine, expected = (x.masked_fill(none, 0).contiguous().view(torch.uint8) for x in (ours, theirs))
    assert torch.equal(mine, expected), (what, (mine != expected).nonzero()[:3], int((mine != expected).sum()))


def _outs(place: tuple[str, torch.dtype], shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Rows further apart than they are long, and where the specification writes."""
    wide = torch.full((shape[0], shape[1] + 8), torch.nan, dtype=place[1], device=place[0])
    return wide, torch.empty(shape, dtype=place[1], device=place[0])


@places
@variants
def test_decode(place: tuple[str, torch.dtype], name: str) -> None:
    of = VARIANTS[name]
    for shape in SHAPES:
        parts = {part: values.to(place[0]) for part, values in _codes(of, shape).items()}
        wide, expected = _outs(place, shape)
        formats.block_decode(of, parts, wide[:, : shape[1]])
        reference_formats.block_decode(of, parts, expected)
        _assert_same(wide[:, : shape[1]], expected, shape)
        assert bool(wide[:, shape[1] :].isnan().all())


def _factors(place: tuple[str, torch.dtype], shape: tuple[int, int], rank: int, size: float) -> tuple[Tensor, Tensor]:
    b_OR = random_rows(place, shape[0], rank, gap=3) * size
    # a folded B lies beside a weight
    return torch.cat((b_OR, b_OR), 1)[:, :rank], random_rows(place, rank, shape[1], gap=5, seed=1)


@long_places
@pytest.mark.parametrize("name", portion(VARIANTS, 2, ["nvfp4"]))
def test_merge(place: tuple[str, torch.dtype], name: str) -> None:
    """With no change, a small one that keeps nearly all scales, and one that keeps hardly any."""
    of = VARIANTS[name]
    for shape in (*SHAPES, (131, 20)):
        parts = {part: values.to(place[0]) for part, values in weight_parts(of, shape).items()}
        base = torch.empty(shape, dtype=place[1], device=place[0])
        reference_formats.block_decode(of, parts, base)
        for size in (0.0, 0.01, 2.0) if shape[0] == 5 else (0.1,):
            factors = _factors(place, shape, 3, size)
            wide, expected = _outs(place, shape)
            merged_formats.merged_decode(of, parts, *factors, 0.7, wide[:, : shape[1]])
            reference_formats.merged_decode(of, parts, *factors, 0.7, expected)
            _assert_same(wide[:, : shape[1]], expected, (shape, size))
            assert bool(wide[:, shape[1] :].isnan().all())
            assert size > 0 or torch.equal(expected, base)


@long_places
@variants
def test_what_is_not_finite_is_in_its_block(place: tuple[str, torch.dtype], name: str) -> None:
    of, shape = VARIANTS[name], (10, 140)
    parts = {part: values.to(place[0]) for part, values in weight_parts(of, shape).items()}
    b_OR, a_RI = _factors(place, shape, 2, 0.01)
    b_OR[3, 1], b_OR[8, 0] = torch.nan, torch.inf
    if of.group:
        a_RI[0, 139] = -torch.inf
    ours, expected = (torch.empty(shape, dtype=place[1], device=place[0]) for _ in range(2))
    merged_formats.merged_decode(of, parts, b_OR, a_RI, 1.0, ours)
    reference_formats.merged_decode(of, parts, b_OR, a_RI, 1.0, expected)
    assert bool(expected.isnan().any()) and (of.rows > 1 or bool(expected.isfinite().any()))
    _assert_same(ours, expected, name)


@long_places
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "int4", "int8", "fp8_block stacked"])
def test_parts_of_a_cut(place: tuple[str, torch.dtype], name: str) -> None:
    """Cuts of rows, and of columns at the beginning of a block: a rank has views, no tensors of its own."""
    of = VARIANTS[name]
    block = of.group or 128
    rows, columns = slice(32, 96), slice(block, 2 * block + 9)
    whole = weight_parts(of, (128, 4 * block))
    parts = {}
    for part, values in whole.items():
        per_row = of.granule if part == "scales" else 1
        kept = values[rows.start // per_row : rows.stop // per_row]
        if kept.dim() == 2:
            wide = columns.start * kept.shape[1] // (4 * block)
            kept = kept[:, wide : wide + part_shapes(of, 64, block + 9)[part][0][1]]
        parts[part] = kept.to(place[0])
    shape = (64, block + 9)
    ours, expected = (torch.empty(shape, dtype=place[1], device=place[0]) for _ in range(2))
    formats.block_decode(of, parts, ours)
    reference_formats.block_decode(of, parts, expected)
    _assert_same(ours, expected, "decoded")
    factors = _factors(place, shape, 2, 0.05)
    merged_formats.merged_decode(of, parts, *factors, 0.5, ours)
    reference_formats.merged_decode(of, parts, *factors, 0.5, expected)
    _assert_same(ours, expected, "merged")


@long_places
def test_scales_at_the_ends(place: tuple[str, torch.dtype]) -> None:
    """Scales of 0, exponents of the smallest and the largest power of 2, and sums that stop at the dtype's ends."""
    for name in ("nvfp4", "mxfp4", "mxfp8", "int4", "fp8_block"):
        of, shape = FORMATS[name], (4, 160)
        parts = {part: values.to(place[0]) for part, values in weight_parts(of, shape).items()}
        scales = parts["scales"].view(torch.uint8) if parts["scales"].dtype.itemsize == 1 else parts["scales"]
        ends = torch.tensor([0, 254, 1, 253], dtype=torch.float32) if name.startswith("mx") else torch.zeros(4)
        scales.view(len(scales), -1)[:, 0] = ends[: len(scales)].to(scales)
        for size in (0.0, 0.01, 1e-43):  # the last of which has scales that are rounded to 0
            factors = _factors(place, shape, 2, size)
            ours, expected = (torch.empty(shape, dtype=place[1], device=place[0]) for _ in range(2))
            merged_formats.merged_decode(of, parts, *factors, 1.0, ours)
            reference_formats.merged_decode(of, parts, *factors, 1.0, expected)
            _assert_same(ours, expected, (name, size))


@long_places
@pytest.mark.parametrize(
    "name", sampled(["nvfp4", "fp8_block stacked", "int8", "int4 with zeros", "int4 of 96"], ["nvfp4", "int4 of 96"])
)
def test_rows_of_several_matrices(place: tuple[str, torch.dtype], name: str) -> None:
    """Three experts' gate and up, each with adapters of its own, in a launch for all gates and one for all ups."""
    of, columns = VARIANTS[name], 160
    sections, height = (slice(0, 32), slice(32, 96)), 96
    experts = [weight_parts(of, (height, columns)) for _ in range(3)]
    parts = {part: torch.cat([one[part] for one in experts]).to(place[0]) for part in experts[0]}
    wide = torch.full((3 * height, columns + 8), torch.nan, dtype=place[1], device=place[0])
    out = wide[:, :columns].view(3, height, columns)
    for seed, rows in enumerate(sections):
        count = rows.stop - rows.start
        b_MOR = random_rows(place, 3, count, 4, gap=2, seed=seed) * 0.05
        a_MRI = random_rows(place, 3, 4, columns, gap=5, seed=seed)
        stacked = {part: values.unflatten(0, (3, -1)) for part, values in parts.items()}
        own = {part: values[:, _part_rows(of, part, rows)] for part, values in stacked.items()}
        merged_formats.merged_stack(of, own, b_MOR, a_MRI, 0.5, out[:, rows])
        assert seed or bool(out[:, 32:].isnan().all())
        for matrix in range(3):
            expected = torch.empty(count, columns, dtype=place[1], device=place[0])
            one = {part: values[matrix] for part, values in own.items()}
            reference_formats.merged_decode(of, one, b_MOR[matrix], a_MRI[matrix], 0.5, expected)
            _assert_same(out[matrix, rows], expected, (matrix, rows))
    assert bool(wide[:, columns:].isnan().all())


def _part_rows(of: Format, part: str, rows: slice) -> slice:
    return slice(rows.start // of.granule, rows.stop // of.granule) if part == "scales" else rows


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 14336), (8 * 5760, 2880)], ids=["matrix", "experts"])
@variants
def test_sizes_of_models(name: str, shape: tuple[int, int]) -> None:
    """The MLP of an 8B model, and 8 experts of gpt-oss-20b."""
    of = VARIANTS[name]
    parts = weight_parts(of, shape, "cuda")
    generator = torch.Generator("cuda").manual_seed(5)
    b_OR, a_RI = (torch.randn(*size, generator=generator, device="cuda") for size in ((shape[0], 16), (16, shape[1])))
    ours, expected = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    formats.block_decode(of, parts, ours)
    reference_formats.block_decode(of, parts, expected)
    assert torch.equal(ours, expected)
    for size in (2**-10, 2**-4):
        factors = ((b_OR * size).bfloat16(), a_RI.bfloat16())
        merged_formats.merged_decode(of, parts, *factors, 0.25, ours)
        reference_formats.merged_decode(of, parts, *factors, 0.25, expected)
        assert torch.equal(ours, expected), size
