"""Few rows times matrices in the vendors' formats, which are decoded in registers: the numbers of the specification's
decoding, and sums as exact as torch's; of experts, the rows of each times its own matrix."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from engine.kernels import reference_formats
from engine.kernels.formats import FORMATS, Format, part_shapes
from engine.kernels.triton import coded_rows
from tests.kernels.comparing import assert_as_exact_as_torch, assert_rounded_once, long_places, places, random_rows
from tests.kernels.test_triton_formats import VARIANTS, weight_parts

ALL = {
    **VARIANTS,
    "fp8_block of a row, short": Format(name="fp8_block", group=2),
    "int4 by row of 16 bits": replace(FORMATS["int4"], group=0, scale_dtype=torch.float16),
}
variants = pytest.mark.parametrize("name", ALL)
Place = tuple[str, torch.dtype]


def _parts(name: str, shape: tuple[int, int], place: Place) -> dict[str, Tensor]:
    return {part: values.to(place[0]) for part, values in weight_parts(ALL[name], shape).items()}


def _decoded(of: Format, parts: dict[str, Tensor], shape: tuple[int, int], place: Place) -> Tensor:
    out = torch.empty(shape, dtype=place[1], device=place[0])
    reference_formats.block_decode(of, parts, out)
    return out


def _out(place: Place, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Rows further apart than they are long, and the same with what lies between them."""
    wide = torch.full((rows, columns + 8), torch.nan, dtype=place[1], device=place[0])
    return wide[:, :columns], wide


def _compare(ours: Tensor, x: Tensor, weight: Tensor, what: str) -> None:
    exact = x.double() @ weight.double().t()
    assert_as_exact_as_torch(ours, x @ weight.t(), exact, what)
    if ours.dtype != torch.float32:
        assert_rounded_once(ours, exact, what)


@places
@variants
def test_numbers_are_those_of_decoding(place: Place, name: str) -> None:
    """Rows with a single 1 pick columns of the weight, whose codes have all places in a word; it has every code that is
    a number."""
    of, shape = ALL[name], (9, 168)
    parts = _parts(name, shape, place)
    size, dtype = part_shapes(of, *shape)["codes"]
    codes = torch.randint(256, size, generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    parts["codes"] = (codes & 0xFE if dtype == torch.float8_e4m3fn else codes).view(dtype).to(place[0])
    x = torch.eye(shape[1], dtype=place[1], device=place[0])[::33]
    out, wide = _out(place, len(x), shape[0])
    coded_rows.few_rows_product(of, parts, x, out)
    assert torch.equal(out, _decoded(of, parts, shape, place)[:, ::33].t()), name
    assert bool(wide[:, shape[0] :].isnan().all())


@long_places
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "fp8_block stacked", "int4 with zeros", "int8"])
def test_product(place: Place, name: str) -> None:
    """More than a step of all warps; a row's bits are the same beside others, in tiles of them."""
    shape = (9, 1168)
    parts = _parts(name, shape, place)
    weight = _decoded(ALL[name], parts, shape, place)
    x = random_rows(place, 17 if name == "nvfp4" else 6, shape[1], gap=5)
    out, wide = _out(place, len(x), shape[0])
    coded_rows.few_rows_product(ALL[name], parts, x, out)
    _compare(out, x, weight, name)
    assert bool(wide[:, shape[0] :].isnan().all())
    alone, _ = _out(place, 1, shape[0])
    coded_rows.few_rows_product(ALL[name], parts, x[-1:], alone)
    assert torch.equal(alone, out[-1:])


@places
@pytest.mark.parametrize("shape", [(5, 123), (0, 64), (3, 0)])
def test_odd_sizes(place: Place, shape: tuple[int, int]) -> None:
    """Rows that are no words, and nothing at all."""
    for name in ("nvfp4", "fp8_block"):
        parts = _parts(name, shape, place)
        x = random_rows(place, 3, shape[1], gap=5)
        out, _ = _out(place, 3, shape[0])
        coded_rows.few_rows_product(ALL[name], parts, x, out)
        _compare(out, x, _decoded(ALL[name], parts, shape, place), name)


@long_places
def test_codes_without_a_number(place: Place) -> None:
    """NaN among the codes, and among the scales, is in the sums of its row alone."""
    shape = (16, 128)
    for name, part in (("fp8_block", "codes"), ("mxfp8", "codes"), ("mxfp4", "scales"), ("nvfp4", "scales")):
        parts = _parts(name, shape, place)
        integers = parts[part].view(torch.uint8)
        for row, column in ((3, 0), (9, integers.shape[1] - 1)):
            integers[row, column] = 0xFF
        x = random_rows(place, 2, shape[1])
        out, _ = _out(place, 2, shape[0])
        coded_rows.few_rows_product(ALL[name], parts, x, out)
        expected = x @ _decoded(ALL[name], parts, shape, place).t()
        assert torch.equal(out.isnan(), expected.isnan()), name
        assert out.isnan().any(0).nonzero().flatten().tolist() == [3, 9], name


@long_places
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "int4", "int8", "fp8_block stacked"])
def test_parts_of_a_cut(place: Place, name: str) -> None:
    """Cuts of rows, and of columns at the beginning of a block: a rank has views, no tensors of its own."""
    of = ALL[name]
    block = of.group or 128
    whole = weight_parts(of, (128, 4 * block))
    parts = {}
    for part, values in whole.items():
        per_row = of.granule if part == "scales" else 1
        kept = values[32 // per_row : 96 // per_row]
        if kept.dim() == 2 and kept.shape[1] > 1:
            kept = kept[:, kept.shape[1] // 4 : 3 * kept.shape[1] // 4]
        parts[part] = kept if place[0] == "cpu" else kept.to(place[0])
    weight = _decoded(of, parts, (64, 2 * block), place)
    x = random_rows(place, 5, 2 * block, gap=16)
    out, _ = _out(place, 5, 64)
    coded_rows.few_rows_product(of, parts, x, out)
    _compare(out, x, weight, name)


@long_places
@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("nvfp4", (0, 3, 0, 17, 1)),
        ("mxfp4", (0, 0, 2)),
        ("fp8_block stacked", (2, 5, 0)),
        ("int8", (1,)),
        ("int4 with zeros", (0, 2, 0)),
    ],
)
def test_rows_of_experts(place: Place, name: str, counts: tuple[int, ...]) -> None:
    """Experts without rows, with one, and with more than a tile; with adapters of ten ranks beside them or none, rows
    by their numbers or in order."""
    of, height, columns = ALL[name], 32 if name == "fp8_block stacked" else 12, 136
    parts = _parts(name, (len(counts) * height, columns), place)
    weights = _decoded(of, parts, (len(counts) * height, columns), place).unflatten(0, (len(counts), height))
    ends = torch.tensor(counts, device=place[0]).cumsum(0).to(torch.int32)
    num_rows = sum(counts)
    index = torch.arange(num_rows, device=place[0]) * 7 % 11
    rows_of_x = random_rows(place, 11, columns, gap=8)
    h = random_rows(place, num_rows, 10, gap=6, seed=1)
    b = random_rows(place, len(counts), height, 10, gap=6, seed=2)
    experts_N = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    for given, numbers, factors in ((rows_of_x, index, (h, b)), (rows_of_x[index], None, None)):
        y = coded_rows.expert_rows_product(of, parts, given, ends, index_N=numbers, factors=factors)
        assert y is not None
        for expert in set(experts_N.tolist()):
            own = (experts_N == expert).to(place[0])
            left, right = rows_of_x[index][own], weights[expert]
            if factors is not None:
                left, right = torch.cat((left, h[own]), 1), torch.cat((right, b[expert]), 1)
            _compare(y[own], left, right, f"expert {expert}, {'with' if factors else 'without'} adapters")


@places
def test_rows_that_are_no_words(place: Place) -> None:
    """Experts' codes that are not multiplied as they are."""
    of = FORMATS["nvfp4"]
    ends = torch.tensor([1, 2], dtype=torch.int32, device=place[0])
    x = random_rows(place, 2, 20)
    assert coded_rows.expert_rows_product(of, _parts("nvfp4", (8, 20), place), x, ends) is None


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 14336), (1024, 4096), (28672, 4096)])
@variants
def test_sizes_of_models(name: str, shape: tuple[int, int]) -> None:
    """Linears of an 8B model, bfloat16, and from a graph as outside of one."""
    of, place = ALL[name], ("cuda", torch.bfloat16)
    parts = weight_parts(of, shape, "cuda")
    weight = _decoded(of, parts, shape, place)
    for count in (1, 4, 16, 64):
        x = random_rows(place, count, shape[1])
        out, again = torch.empty(count, shape[0], dtype=torch.bfloat16, device="cuda"), None
        coded_rows.few_rows_product(of, parts, x, out)
        _compare(out, x, weight, f"{count} rows")
        graph, again = torch.cuda.CUDAGraph(), torch.empty_like(out)
        with torch.cuda.graph(graph):
            coded_rows.few_rows_product(of, parts, x, again)
        graph.replay()
        assert torch.equal(out, again)


@pytest.mark.gpu
def test_experts_of_a_model() -> None:
    """gpt-oss's sizes: 32 experts, four tokens with four experts each."""
    of, place, rows, columns = FORMATS["mxfp4"], ("cuda", torch.bfloat16), 5760, 2880
    parts = weight_parts(of, (32 * rows, columns), "cuda")
    weights = _decoded(of, parts, (32 * rows, columns), place).unflatten(0, (32, rows))
    chosen = torch.tensor([0, 3, 3, 3, 4, 4, 9, 9, 9, 9, 17, 20, 20, 31, 31, 31], device="cuda")
    ends = torch.searchsorted(chosen, torch.arange(32, device="cuda"), right=True, out_int32=True)
    x = random_rows(place, 16, columns)
    y = coded_rows.expert_rows_product(of, parts, x, ends)
    assert y is not None
    for expert in chosen.unique().tolist():
        _compare(y[chosen == expert], x[chosen == expert], weights[expert], f"expert {expert}")
