"""Quantisation kernels: decoding and operands bit for bit those of the specification, e4m3 those of torch's cast."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from engine.kernels import reference_quantize
from engine.kernels.triton import quantize, rmsnorm, swiglu
from engine.quantization.encoding import encoding
from tests.kernels.comparing import places, random_rows

SHAPES = [(5, 123), (1, 1), (40, 200), (0, 64), (3, 64 * 260), (2, 17000)]


def _equal(ours: Tensor, theirs: Tensor, name: str) -> None:
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, (name, ours.shape, theirs.shape)
    # as bytes: e4m3 has no comparison, and scales may be NaN
    assert torch.equal(ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8)), name


def _scaled_rows(place: tuple[str, torch.dtype], rows: int, columns: int, gap: int = 0) -> Tensor:
    """Rows of sizes from 2^-8 to 2^8, one of zeros."""
    x = random_rows(place, rows, columns, gap=gap)
    x *= 2.0 ** (torch.arange(rows, device=x.device) % 17 - 8).to(x.dtype)[:, None]
    x[rows // 2 : rows // 2 + 1] = 0
    return x


@places
@pytest.mark.parametrize("name", ["nf4", "int8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_decode(place: tuple[str, torch.dtype], name: str, shape: tuple[int, int]) -> None:
    _compare_decoding(place, name, shape)


@places
def test_decode_e4m3(place: tuple[str, torch.dtype]) -> None:
    """Interpreted in fp32 it is torch that decodes; see `quantize.row_decode`."""
    for shape in SHAPES:
        _compare_decoding(place, "fp8_row", shape)


def _compare_decoding(place: tuple[str, torch.dtype], name: str, shape: tuple[int, int]) -> None:
    device, dtype = place
    parts = encoding(name).encode(_scaled_rows(place, *shape).float())
    out = torch.full((shape[0], shape[1] + 8), torch.nan, dtype=dtype, device=device)
    expected = torch.empty(shape, dtype=dtype, device=device)
    if name == "nf4":
        values = (parts["codes"], parts["scales"], parts["groups"], parts["phase"])
        quantize.nf4_decode(*values, out[:, : shape[1]])
        reference_quantize.nf4_decode(*values, expected)
    else:
        quantize.row_decode(parts["codes"], parts["scales"], out[:, : shape[1]])
        reference_quantize.row_decode(parts["codes"], parts["scales"], expected)
    _equal(out[:, : shape[1]], expected, name)
    assert bool(out[:, shape[1] :].isnan().all())


@places
def test_decode_of_a_cut(place: tuple[str, torch.dtype]) -> None:
    """Parts that are slices, and rows that begin anywhere in their group of scales."""
    code = encoding("nf4")
    parts = code.cut(code.encode(_scaled_rows(place, 90, 64 * 7).float()), slice(11, 80), slice(64, 384))
    out, expected = (torch.empty(69, 320, dtype=place[1], device=place[0]) for _ in range(2))
    values = (parts["codes"], parts["scales"], parts["groups"], parts["phase"])
    quantize.nf4_decode(*values, out)
    reference_quantize.nf4_decode(*values, expected)
    assert len(set(parts["phase"].tolist())) > 1
    _equal(out, expected, "cut")


@places
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_operands(place: tuple[str, torch.dtype], shape: tuple[int, int], scaled: bool) -> None:
    x = _scaled_rows(place, *shape, gap=3)
    scale = random_rows((place[0], torch.float32), 1, shape[1], seed=3)[0].abs() if scaled else None
    for name in ("quantize_rows", "quantize_matrix"):
        ours, our_scale = getattr(quantize, name)(x, scale)
        theirs, their_scale = getattr(reference_quantize, name)(x, scale)
        _equal(our_scale, their_scale, f"{name} scale")
        _equal(ours, theirs, f"{name} codes")


@places
def test_e4m3_is_torchs_cast(place: tuple[str, torch.dtype]) -> None:
    """Every code, the middle between each and the next, and the fp32 numbers beside the middles."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[:-1] + codes[1:]) / 2
    up, down = torch.nextafter(middles, torch.tensor(1e3)), torch.nextafter(middles, torch.tensor(0.0))
    x = torch.cat((codes, middles, up, down, torch.tensor([448.0])))
    x = torch.cat((x, -x))[None].to(place[0])
    ours, scale = quantize.quantize_rows(x)
    assert float(scale) == 1.0
    _equal(ours, x.to(torch.float8_e4m3fn), "codes")


@pytest.mark.parametrize(
    "capability, expected", [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)]
)
def test_gpus_before_8_9_put_codes_together(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: bool
) -> None:
    """Triton refuses to compile casts to e4m3 for them."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    gpu = torch.device("cuda", 60 + sum(capability))  # not there: answers are remembered
    assert quantize.casts(cast(Tensor, SimpleNamespace(device=gpu))) is expected


@places
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_in_the_scale(place: tuple[str, torch.dtype], value: float) -> None:
    x = _scaled_rows(place, 5, 100)
    x[3, 77] = value
    assert torch.isfinite(quantize.quantize_rows(x)[1]).flatten().tolist() == [True, True, True, False, True]
    assert not bool(torch.isfinite(quantize.quantize_matrix(x)[1]))


@places
@pytest.mark.parametrize("shape", [(5, 123), (1, 1), (64, 64), (130, 70), (0, 3)])
def test_transpose(place: tuple[str, torch.dtype], shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (shape[0], shape[1] + 5), generator=generator, dtype=torch.uint8).to(place[0])
    given = codes[:, : shape[1]].view(torch.float8_e4m3fn)
    ours = quantize.transpose_codes(given)
    assert ours.is_contiguous()
    _equal(ours, codes[:, : shape[1]].t().view(torch.float8_e4m3fn), "transposed")


@places
@pytest.mark.parametrize("shape", [(5, 123), (1, 1), (70, 64), (3, 600), (0, 7), (2, 5000)])
def test_codes_of_a_norm_are_those_of_its_output(place: tuple[str, torch.dtype], shape: tuple[int, int]) -> None:
    """The epilogue gives what quantising y afterwards gives, and y is what it is without."""
    x, weight = _scaled_rows(place, *shape, gap=3), random_rows(place, 1, shape[1], seed=5)[0] + 1
    expected, expected_rstd = rmsnorm.rmsnorm_forward(x, weight, 1e-5)
    y = torch.full((shape[0], shape[1] + 2), 7.0, dtype=place[1], device=place[0])
    rstd, codes, scale = rmsnorm.rmsnorm_forward_codes(x, weight, 1e-5, y[:, : shape[1]])
    _equal(y[:, : shape[1]], expected, "y")
    _equal(rstd, expected_rstd, "rstd")
    assert bool((y[:, shape[1] :] == 7).all())
    their_codes, their_scale = reference_quantize.quantize_rows(expected)
    _equal(scale, their_scale, "scale")
    _equal(codes, their_codes, "codes")


@places
@pytest.mark.parametrize("width", [2048, 2880, 4096, 8192])
def test_codes_change_no_bit_of_a_norm(place: tuple[str, torch.dtype], width: int) -> None:
    """At models' widths, where threads take vectors: how long these are decides in which order a row is summed."""
    x, weight = random_rows(place, 16, width, seed=4), random_rows(place, 1, width, seed=5)[0] + 1
    expected, expected_rstd = rmsnorm.rmsnorm_forward(x, weight, 1e-5)
    y = torch.empty_like(x)
    rstd, codes, scale = rmsnorm.rmsnorm_forward_codes(x, weight, 1e-5, y)
    _equal(rstd, expected_rstd, "rstd")
    _equal(y, expected, "y")
    their_codes, their_scale = quantize.quantize_rows(expected)
    _equal(scale, their_scale, "scale")
    _equal(codes, their_codes, "codes")


@places
@pytest.mark.parametrize("shape", [(5, 123), (1, 1), (70, 64), (3, 600), (0, 7), (2, 17000)])
def test_codes_of_swiglu_are_those_of_its_output(place: tuple[str, torch.dtype], shape: tuple[int, int]) -> None:
    gate_up = _scaled_rows(place, shape[0], 2 * shape[1], gap=5)
    gate_up /= 8  # whose products float16 holds
    expected = swiglu.swiglu_forward(gate_up)
    y = torch.full((shape[0], shape[1] + 2), 7.0, dtype=place[1], device=place[0])
    codes, scale = swiglu.swiglu_forward_codes(gate_up, y[:, : shape[1]])
    _equal(y[:, : shape[1]], expected, "y")
    assert bool((y[:, shape[1] :] == 7).all())
    their_codes, their_scale = reference_quantize.quantize_rows(expected)
    _equal(scale, their_scale, "scale")
    _equal(codes, their_codes, "codes")


@places
def test_a_row_of_the_epilogue_that_is_not_finite(place: tuple[str, torch.dtype]) -> None:
    gate_up = _scaled_rows(place, 5, 200)
    gate_up[3, 177] = float("nan")
    out = torch.empty(5, 100, dtype=place[1], device=place[0])
    assert torch.isfinite(swiglu.swiglu_forward_codes(gate_up, out)[1]).flatten().tolist() == [True] * 3 + [False, True]
