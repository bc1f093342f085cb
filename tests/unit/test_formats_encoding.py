"""Encoded formats beside what the packages make of the same weights, and shards beside the whole matrix.

compressed-tensors is asked with weights in fp32, because it computes scales and quotients in the weight's dtype and the
engine in fp32.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.errors import UserError
from engine.kernels.formats import FORMATS, Format, part_shapes
from engine.quantization.encoded_parts import WholeMatrix
from engine.quantization.encoding import encoding
from tests.support.format_parts import SPELLINGS, bits, same_parts

ROWS, COLUMNS = 96, 256


def _weight(seed: int, rows: int = ROWS, columns: int = COLUMNS) -> Tensor:
    """Rows of very different sizes, a block of zeros, signed zeros, and numbers that lie between two codes."""
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=draw)
    weight *= 2.0 ** torch.randint(-6, 3, (rows, 1), generator=draw)
    weight[1, :128] = 0
    weight[2, :64] = -0.0
    halves = torch.tensor([0.25, -0.25, 0.75, 1.25, -1.75, 2.5, 3.5, 5.0, 6.0, -0.1, 0.2500001, 0.7499999, 0.0, 1e-30])
    weight[3, : len(halves)] = halves
    weight[4] = weight[4].bfloat16().float()
    return weight


def _qparams(compressed: Any, blocks: Tensor, arguments: dict[str, Any], g: Tensor | None = None) -> tuple[Any, Tensor]:
    """Returns compressed-tensors' scheme and scales of numbers [..., C]."""
    args = compressed.quantization.QuantizationArgs(**arguments)
    scheme = compressed.quantization.QuantizationScheme(targets=["Linear"], weights=args)
    calculate = compressed.quantization.utils.helpers.calculate_qparams
    return scheme, calculate(blocks.amin(-1), blocks.amax(-1), args, global_scale=g)[0]


def _compressed(name: str, weight: Tensor, scales: Tensor, scheme: Any, **more: Tensor) -> dict[str, Tensor]:
    from compressed_tensors.compressors import BaseCompressor

    stored = {"weight": weight.clone(), "weight_scale": scales, **more}
    return BaseCompressor.get_value_from_registry(name).compress(stored, scheme)


@pytest.mark.parametrize("seed", range(3))
def test_nvfp4_is_that_of_compressed_tensors(tensors: ModuleType, seed: int) -> None:
    weight = _weight(seed)
    ours = encoding(SPELLINGS["nvfp4 divided"]).encode(weight)
    g = tensors.quantization.utils.helpers.generate_gparam(weight.amin(), weight.amax())
    assert torch.equal(ours["tensor_scale"], g.expand(ROWS))
    arguments = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    arguments["scale_dtype"] = torch.float8_e4m3fn
    scheme, scales = _qparams(tensors, weight.unflatten(1, (-1, 16)), arguments, g)
    theirs = _compressed("nvfp4-pack-quantized", weight, scales, scheme, weight_global_scale=g)
    assert torch.equal(ours["scales"].float(), theirs["weight_scale"].float())
    assert torch.equal(ours["codes"], theirs["weight_packed"])


def test_nvfp4_of_zeros_has_the_scales_of_compressed_tensors(tensors: ModuleType) -> None:
    ours = encoding(SPELLINGS["nvfp4 divided"]).encode(torch.zeros(2, 32))
    assert float(tensors.quantization.utils.helpers.generate_gparam(torch.zeros(()), torch.zeros(()))) == 1.0
    assert ours["tensor_scale"].tolist() == [1.0, 1.0] and (ours["scales"].float() == 0.125).all()


@pytest.mark.parametrize("seed", range(3))
def test_nvfp4_of_modelopt_has_the_scales_of_torchao(torchao: Any, seed: int) -> None:
    """Where theirs are normal numbers of e4m3; ModelOpt's may be subnormal. torchao's codes are of number * (1 / scale)
    where ModelOpt divides: the scale of the matrix is 1 / 2688 here, so that fewer of them are rounded apart."""
    weight = _weight(seed)
    weight[0, 0] = weight.abs().max() * 1.25
    ours = encoding("nvfp4").encode(weight)
    g = torchao.nvfp4_tensor.per_tensor_amax_to_scale(weight.abs().amax())
    assert torch.equal(ours["tensor_scale"], g.expand(ROWS))
    scales, codes = torchao.nvfp4_tensor.nvfp4_quantize(weight, 16, g)
    theirs = scales.view(ours["scales"].shape).float()
    near = ours["scales"].float() / theirs
    normal = theirs > 2**-6
    # (m / 6) / g and m / (6 g) may be rounded apart, next to a number between two of e4m3
    assert (near[normal] == 1).float().mean() > 0.99 and ((near[normal] - 1).abs() <= 0.125).all()
    pairs = normal.repeat_interleave(8, 1) & (near == 1).repeat_interleave(8, 1)
    assert (ours["codes"] == codes.view(ours["codes"].shape))[pairs].float().mean() > 0.999


def test_nvfp4_of_modelopt_by_hand() -> None:
    """g = 6 / 2688 = 1 / 448, m / (6 g) is 448 for the largest block and 448 / 6 for m = 1, which e4m3 rounds to 72;
    1 / (72 / 448) is 6.2, so 6; 0.4 is 2.49, so 2. Zeros get the scale 1, and 0.00001 the smallest, 2^-9."""
    weight = torch.zeros(1, 64)
    weight[0, 50] = 1e-5
    weight[0, 0], weight[0, 16], weight[0, 17] = -6.0, 1.0, 0.4
    parts = encoding("nvfp4").encode(weight)
    assert parts["tensor_scale"].tolist() == [torch.tensor(6 / 2688).item()]
    assert parts["scales"].float().tolist() == [[448.0, 72.0, 1.0, 2.0**-9]]
    assert parts["codes"][0].tolist() == [15, *[0] * 7, 7 | (4 << 4), *[0] * 16, 4, *[0] * 6]


@pytest.mark.parametrize("name, bits_of", [("mxfp4", 4), ("mxfp8", 8)])
@pytest.mark.parametrize("seed", range(3))
def test_mx_is_that_of_compressed_tensors(tensors: ModuleType, name: str, bits_of: int, seed: int) -> None:
    weight = _weight(seed)
    weight[5, :32] = torch.linspace(0, 7, 32)
    weight[6, :32] = torch.linspace(-6.999, 6.5, 32)
    weight[7, :32] = torch.linspace(-447.9, 448, 32)
    ours = encoding(name).encode(weight)
    arguments = {"num_bits": bits_of, "type": "float", "strategy": "group", "group_size": 32}
    arguments["scale_dtype"] = torch.uint8
    scheme, scales = _qparams(tensors, weight.unflatten(1, (-1, 32)), arguments)
    theirs = _compressed("mxfp4-pack-quantized" if name == "mxfp4" else "mxfp8-quantized", weight, scales, scheme)
    assert torch.equal(ours["scales"], theirs["weight_scale"])
    codes = theirs["weight_packed" if name == "mxfp4" else "weight"]
    assert torch.equal(bits(ours["codes"]), bits(codes))


@pytest.mark.parametrize("seed", range(3))
def test_mxfp4_is_that_of_torchao_rounding_scales_evenly(torchao: Any, seed: int) -> None:
    weight = _weight(seed)
    ours = encoding("mxfp4").encode(weight)
    even = torchao.mx_tensor.ScaleCalculationMode.EVEN
    scales, codes = torchao.mx_tensor.to_mx(weight, torch.float4_e2m1fn_x2, 32, even)
    assert torch.equal(ours["scales"], scales.view(torch.uint8))
    # torchao keeps the sign of -0, which compressed-tensors and ModelOpt do not
    assert (
        torch.equal(ours["codes"][3:], codes[3:])
        and (codes[2, :32] == 0x88).all()
        and (ours["codes"][2, :32] == 0).all()
    )


@pytest.mark.parametrize("rows, columns", [(256, 384), (200, 300)])
def test_blocks_of_fp8_are_those_of_compressed_tensors(tensors: ModuleType, rows: int, columns: int) -> None:
    weight = _weight(1, rows, columns)
    weight[:128, 128:256] = 0
    ours = encoding("fp8_block").encode(weight)
    padded = torch.nn.functional.pad(weight, (0, -columns % 128, 0, -rows % 128))
    blocks = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).transpose(1, 2).flatten(2)
    arguments = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
    scheme, scales = _qparams(tensors, blocks, arguments)
    theirs = _compressed("float-quantized", weight, scales, scheme)
    assert torch.equal(ours["scales"], theirs["weight_scale"])
    assert torch.equal(bits(ours["codes"]), bits(theirs["weight"]))


def test_blocks_of_fp8_under_exponents_by_hand() -> None:
    """449 / 448 needs 2, 448 / 448 needs 1, 3.6 / 448 = 0.00804 needs 2^-6 = 0.0156."""
    weight = torch.zeros(128, 384)
    weight[5, 3], weight[127, 255], weight[0, 256] = 449.0, -448.0, 3.6
    parts = encoding(SPELLINGS["fp8_block exponents"]).encode(weight)
    assert parts["scales"].tolist() == [[128, 127, 121]]
    assert parts["codes"].float()[[5, 127, 0], [3, 255, 256]].tolist() == [224.0, -448.0, 224.0]


@pytest.mark.parametrize("name", ["fp8_channel", "int4", "int4 rows"])
@pytest.mark.parametrize("seed", range(3))
def test_channels_and_groups_are_those_of_compressed_tensors(tensors: ModuleType, name: str, seed: int) -> None:
    of = replace(SPELLINGS[name], scale_dtype=torch.float32)
    weight = _weight(seed)
    weight[8] = 0
    ours = encoding(of).encode(weight)
    group = of.group or COLUMNS
    arguments: dict[str, Any] = (
        {"num_bits": 4, "type": "int"} if of.name == "int4" else {"num_bits": 8, "type": "float"}
    )
    arguments |= {"strategy": "group", "group_size": group} if of.group else {"strategy": "channel"}
    scheme, scales = _qparams(tensors, weight.unflatten(1, (-1, group)), arguments)
    theirs = _compressed("pack-quantized" if of.name == "int4" else "float-quantized", weight, scales, scheme)
    assert torch.equal(ours["scales"].view(scales.shape), scales)
    codes = theirs["weight_packed"].view(torch.uint8) if of.name == "int4" else theirs["weight"]
    assert torch.equal(bits(ours["codes"]), bits(codes))


def test_scales_of_int4_are_those_of_compressed_tensors_in_bf16(tensors: ModuleType) -> None:
    weight = _weight(2).bfloat16()
    ours = encoding("int4").encode(weight)
    arguments = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
    theirs = _qparams(tensors, weight.unflatten(1, (-1, 128)), arguments)[1]
    assert torch.equal(ours["scales"], theirs)


def _encodable() -> list[str]:
    return [name for name, of in SPELLINGS.items() if not of.has_zero_points]


@pytest.mark.parametrize("name", _encodable())
def test_a_shard_is_encoded_as_the_whole_matrix_is_cut(name: str) -> None:
    code = encoding(SPELLINGS[name]) if name != "int8" else encoding(replace(FORMATS["int8"]))
    weight = _weight(4, 384, 512)
    whole = code.encode(weight)
    maxima = code.absmax(weight)
    for rows, columns in (
        (slice(0, 128), slice(0, 512)),
        (slice(128, 384), slice(256, 512)),
        (slice(256, 320), slice(0, 256)),
    ):
        shard = weight[rows, columns]
        ours = code.encode(shard, WholeMatrix(absmax=maxima, first_row=rows.start, first_column=columns.start))
        if rows.stop == 320 and name.startswith("fp8_block") and code.format.granule == 128:
            assert torch.equal(bits(ours["codes"]), bits(whole["codes"][rows, columns]))
            continue
        assert same_parts(ours, code.cut(whole, rows, columns)), (rows, columns)
    joined = code.join([code.absmax(weight[:, :256]), code.absmax(weight[:, 256:])], 1)
    assert torch.equal(joined, maxima)
    stacked = code.join([code.absmax(weight[:100]), code.absmax(weight[100:])], 0)
    assert torch.equal(stacked, maxima)


@pytest.mark.parametrize("name", _encodable())
def test_few_rows_at_a_time_give_the_same(name: str) -> None:
    """As the engine encodes a large matrix: with granules of 32 rows a run may begin inside a block."""
    code = encoding(SPELLINGS[name])
    weight = _weight(6, 200, 192)
    maxima, whole = code.absmax(weight), code.encode(weight)
    step = 96 if SPELLINGS[name].granule < 128 else 128
    runs = [
        code.encode(weight[first : first + step], WholeMatrix(absmax=maxima, first_row=first))
        for first in range(0, 200, step)
    ]
    assert same_parts(
        {part: torch.cat([run[part].view(torch.uint8) for run in runs]).view(whole[part].dtype) for part in whole},
        whole,
    )


@pytest.mark.parametrize("name", list(SPELLINGS))
@pytest.mark.parametrize("rows, columns", [(0, 64), (3, 0), (1, 1), (130, 33)])
def test_parts_have_their_shapes(name: str, rows: int, columns: int) -> None:
    of = SPELLINGS[name]
    if of.has_zero_points:
        return
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    before = weight.clone()
    parts = encoding(of).encode(weight) if name != "int8" else encoding(replace(of)).encode(weight)
    assert {part: (tuple(values.shape), values.dtype) for part, values in parts.items()} == part_shapes(
        of, rows, columns
    )
    assert torch.equal(weight, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", _encodable())
def test_the_dtype_and_strides_of_a_weight_do_not_matter(name: str, dtype: torch.dtype) -> None:
    code = encoding(SPELLINGS[name])
    weight = (_weight(7) / 16).to(dtype)
    assert same_parts(code.encode(weight.t().contiguous().t()), code.encode(weight.float()))


@pytest.mark.parametrize("name", _encodable())
def test_errors_are_within_half_a_step(name: str) -> None:
    """The error is a number's to its decoded one, the step the format's under a scale that absmax makes."""
    of: Format = SPELLINGS[name]
    weight = _weight(8)
    out = torch.empty_like(weight)
    code = encoding(of)
    code.decode(code.encode(weight), out)
    group = of.group or COLUMNS
    blocks = weight.unflatten(1, (-1, group)).abs().amax(-1, keepdim=True).expand(-1, -1, group).flatten(1)
    if of.rows > 1:
        blocks = blocks.amax(0, keepdim=True).expand_as(blocks)
    relative = {"nvfp4": 1 / 5, "mxfp4": 1 / 4, "int4": 0.55 / 7.5, "int8": 0.55 / 127}.get(of.name, 1 / 16)
    assert ((out - weight).abs() <= blocks * relative + 1e-12).all()


def test_what_is_not_finite_is_refused() -> None:
    for name in _encodable():
        weight = _weight(0)
        weight[7, 3] = float("nan")
        with pytest.raises(UserError, match="not finite in row 7"):
            encoding(SPELLINGS[name]).encode(weight)


def test_a_cut_inside_a_block_is_refused() -> None:
    code = encoding("nvfp4")
    parts = code.encode(_weight(0))
    with pytest.raises(UserError, match="16 columns .* a cut at column 8"):
        code.cut(parts, slice(0, 96), slice(8, 256))
    with pytest.raises(UserError, match="a cut at column 24"):
        code.cut(parts, slice(0, 96), slice(0, 24))
    blocks = encoding("fp8_block")
    parts = blocks.encode(_weight(0, 256, 256))
    with pytest.raises(UserError, match="128 rows under one scale, and a cut at row 64"):
        blocks.cut(parts, slice(64, 256), slice(0, 256))
    with pytest.raises(UserError, match="a cut at row 64"):
        blocks.cut(parts, slice(0, 64), slice(0, 256))
    cut = blocks.stacked([64]).cut(
        encoding(replace(FORMATS["fp8_block"], granule=64)).encode(_weight(0, 256, 256)), slice(64, 128), slice(0, 128)
    )
    assert cut["scales"].shape == (1, 1)
    rows = encoding(SPELLINGS["int4 rows"])
    with pytest.raises(UserError, match="2 columns .* a cut at column 3"):
        rows.cut(rows.encode(_weight(0)), slice(0, 96), slice(3, 256))
