"""Decoded formats beside the packages whose checkpoints have them: compressed-tensors, torchao, transformers.

All codes and scales that can be stored are among the parts, also those that no quantiser writes. Where a package rounds
to 16 bits on the way the result is compared in those 16 bits.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.kernels.formats import FORMATS, Format
from engine.quantization.encoding import encoding
from tests.support.format_parts import SPELLINGS, drawn_parts, same_numbers

ROWS, COLUMNS = 96, 256


def decoded(of: Format, parts: dict[str, Tensor], dtype: torch.dtype, columns: int = COLUMNS) -> Tensor:
    out = torch.empty(parts["codes"].shape[0], columns, dtype=dtype)
    encoding(of).decode(parts, out)
    return out


def all_codes(of: Format, scales: Tensor) -> dict[str, Tensor]:
    """Every code under every one of [n] scales: a row for each scale."""
    packed = of.name in ("nvfp4", "mxfp4", "int4")
    row = torch.arange(256, dtype=torch.uint8)[: of.group // 2 if packed else None]
    if packed:
        low = torch.arange(of.group, dtype=torch.uint8) % 16
        row = low[::2] | (low[1::2] << 4)
    codes = row.expand(len(scales), -1).contiguous()
    codes = codes if packed else codes.view(torch.float8_e4m3fn)
    blocks = (codes.shape[1] * (2 if packed else 1)) // of.group
    return {
        "codes": codes,
        "scales": scales.view(torch.uint8)[:, None].expand(-1, blocks).contiguous().view(scales.dtype),
    }


def _scheme(compressed: Any, **arguments: Any) -> Any:
    weights = compressed.quantization.QuantizationArgs(**arguments)
    return compressed.quantization.QuantizationScheme(targets=["Linear"], weights=weights)


def _decompressed(compressed: Any, name: str, stored: dict[str, Tensor], **arguments: Any) -> Tensor:
    from compressed_tensors.compressors import BaseCompressor

    return BaseCompressor.get_value_from_registry(name).decompress(stored, _scheme(compressed, **arguments))["weight"]


def _cases(of: Format) -> list[dict[str, Tensor]]:
    every = torch.arange(256, dtype=torch.uint8).view(of.scale_dtype)
    edges = all_codes(of, every)
    if of.name == "nvfp4":
        edges["tensor_scale"] = torch.full((256,), 0.37)
    return [edges, *(drawn_parts(of, ROWS, COLUMNS, seed, extreme=seed > 1) for seed in range(4))]


@pytest.mark.parametrize("case", range(5))
def test_nvfp4_is_decoded_as_by_compressed_tensors(tensors: ModuleType, case: int) -> None:
    of = SPELLINGS["nvfp4 divided"]
    parts = _cases(of)[case]
    columns = parts["codes"].shape[1] * 2
    stored = {
        "weight_packed": parts["codes"],
        "weight_scale": parts["scales"],
        "weight_global_scale": parts["tensor_scale"][:1],
    }
    arguments = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    theirs = _decompressed(tensors, "nvfp4-pack-quantized", stored, **arguments)
    assert same_numbers(decoded(of, parts, torch.bfloat16, columns), theirs)

    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    unpacked = unpack_fp4_from_uint8(parts["codes"], len(parts["codes"]), columns, torch.float32)
    wide = tensors.quantization.lifecycle.forward.dequantize(
        unpacked,
        parts["scales"].float(),
        args=tensors.quantization.QuantizationArgs(**arguments),
        dtype=torch.float32,
        global_scale=parts["tensor_scale"][:1],
    )
    assert same_numbers(decoded(of, parts, torch.float32, columns), wide)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", range(5))
def test_nvfp4_of_modelopt_is_decoded_as_by_torchao(torchao: Any, case: int, dtype: torch.dtype) -> None:
    of = FORMATS["nvfp4"]
    parts = _cases(of)[case]
    theirs = torchao.nvfp4_tensor.NVFP4Tensor(
        parts["codes"], parts["scales"], 16, dtype, per_tensor_scale=parts["tensor_scale"][0]
    )
    assert same_numbers(decoded(of, parts, dtype, parts["codes"].shape[1] * 2), theirs.dequantize(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", range(5))
@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
def test_mx_is_decoded_as_by_torchao(torchao: Any, name: str, case: int, dtype: torch.dtype) -> None:
    of = FORMATS[name]
    parts = _cases(of)[case]
    codes = parts["codes"]
    elements = torch.float4_e2m1fn_x2 if name == "mxfp4" else torch.float8_e4m3fn
    theirs = torchao.mx_tensor.to_dtype(codes, parts["scales"].view(torch.float8_e8m0fnu), elements, 32, dtype)
    assert same_numbers(decoded(of, parts, dtype, theirs.shape[1]), theirs)


@pytest.mark.parametrize("case", range(5))
@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
def test_mx_is_decoded_as_by_compressed_tensors(tensors: ModuleType, name: str, case: int) -> None:
    """Except under the exponent 255, which the specification calls NaN and compressed-tensors takes for 2^128."""
    of = FORMATS[name]
    parts = {part: values[:255] for part, values in _cases(of)[case].items()}
    codes = parts["codes"]
    if name == "mxfp4":
        stored, kind, bits = {"weight_packed": codes}, "mxfp4-pack-quantized", 4
    else:
        stored, kind, bits = {"weight": codes}, "mxfp8-quantized", 8
    stored["weight_scale"] = parts["scales"]
    theirs = _decompressed(
        tensors, kind, stored, num_bits=bits, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8
    )
    assert same_numbers(decoded(of, parts, torch.bfloat16, theirs.shape[1]), theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", range(5))
def test_mxfp4_is_decoded_as_by_transformers(case: int, dtype: torch.dtype) -> None:
    """Except under the exponent 255, as above."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    of = FORMATS["mxfp4"]
    parts = {part: values[:255] for part, values in _cases(of)[case].items()}
    blocks = parts["codes"].view(1, len(parts["codes"]), -1, 16)
    theirs = convert_moe_packed_tensors(blocks, parts["scales"][None], dtype=dtype)[0].t().contiguous()
    assert same_numbers(decoded(of, parts, dtype, theirs.shape[1]), theirs)


@pytest.mark.parametrize("name", ["fp8_block", "fp8_block bf16", "fp8_block exponents"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_fp8_are_decoded_as_by_transformers(name: str, dtype: torch.dtype) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    of = SPELLINGS[name]
    for seed in range(4):
        parts = drawn_parts(of, 256, 384, seed, extreme=seed > 1)
        parts["codes"].view(torch.uint8).view(-1)[:256] = torch.arange(256, dtype=torch.uint8)
        theirs = Fp8Dequantize(None)._dequantize_one(parts["codes"], parts["scales"], output_dtype=dtype)
        assert same_numbers(decoded(of, parts, dtype, 384), theirs)


@pytest.mark.parametrize("rows, columns", [(256, 384), (200, 300), (7, 5)])
@pytest.mark.parametrize("name", ["fp8_block", "fp8_block bf16"])
def test_blocks_of_fp8_are_decoded_as_by_compressed_tensors(
    tensors: ModuleType, name: str, rows: int, columns: int
) -> None:
    """Blocks at the ends may be short: there transformers cuts the matrix into equal blocks, as no checkpoint does."""
    of = SPELLINGS[name]
    parts = drawn_parts(of, rows, columns, 3)
    stored = {"weight": parts["codes"], "weight_scale": parts["scales"]}
    theirs = _decompressed(
        tensors, "float-quantized", stored, num_bits=8, type="float", strategy="block", block_structure=[128, 128]
    )
    assert same_numbers(decoded(of, parts, theirs.dtype, columns), theirs)


@pytest.mark.parametrize("name", ["fp8_channel", "fp8_channel bf16", "int8", "int8 bf16"])
def test_channels_are_decoded_as_by_compressed_tensors(tensors: ModuleType, name: str) -> None:
    of = SPELLINGS[name]
    floats = of.name == "fp8_channel"
    parts = drawn_parts(of, ROWS, COLUMNS, 5)
    parts["codes"].view(torch.uint8).view(-1)[:256] = torch.arange(256, dtype=torch.uint8)
    stored = {"weight": parts["codes"], "weight_scale": parts["scales"][:, None]}
    kind, numbers = ("float-quantized", "float") if floats else ("int-quantized", "int")
    theirs = _decompressed(tensors, kind, stored, num_bits=8, type=numbers, strategy="channel")
    assert same_numbers(decoded(of, parts, theirs.dtype), theirs)


@pytest.mark.parametrize("scale", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("group, zeros", [(128, False), (32, True), (0, False), (0, True)])
def test_int4_is_decoded_as_by_compressed_tensors(
    tensors: ModuleType, group: int, zeros: bool, scale: torch.dtype
) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    of = replace(FORMATS["int4"], group=group, has_zero_points=zeros, scale_dtype=scale)
    parts = drawn_parts(of, ROWS, COLUMNS, 7)
    stored = {
        "weight_packed": parts["codes"].view(torch.int32),
        "weight_scale": parts["scales"],
        "weight_shape": torch.tensor([ROWS, COLUMNS]),
    }
    if zeros:
        stored["weight_zero_point"] = pack_to_int32((parts["zeros"].to(torch.int8) - 8), 4, packed_dim=0)
    theirs = _decompressed(
        tensors,
        "pack-quantized",
        stored,
        num_bits=4,
        type="int",
        symmetric=not zeros,
        **({"strategy": "group", "group_size": group} if group else {"strategy": "channel"}),
    )
    assert same_numbers(decoded(of, parts, theirs.dtype), theirs)


@pytest.mark.parametrize("name", list(SPELLINGS))
def test_numbers_are_decoded_one_by_one(name: str) -> None:
    """Each number by its own code and scale, in Python's arithmetic; the last blocks and bytes are short."""
    of, rows, columns = SPELLINGS[name], 130, 77
    parts = drawn_parts(of, rows, columns, 11)
    ours = decoded(of, parts, torch.float32, columns)
    e2m1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    scales = parts["scales"].view(len(parts["scales"]), -1)
    for row, column in ((0, 0), (1, 75), (31, 76), (32, 17), (127, 64), (128, 32), (129, 76), (129, 75)):
        if parts["codes"].dtype == torch.uint8:
            byte = int(parts["codes"][row, column // 2])
            code = byte >> 4 if column % 2 else byte & 15
        else:
            code = float(parts["codes"][row, column].float())
        if of.name in ("nvfp4", "mxfp4"):
            code = e2m1[code & 7] * (-1 if code & 8 else 1)
        block = column // of.group if of.group else 0
        if of.name == "int4":
            code -= int(parts["zeros"][row, block]) if of.has_zero_points else 8
        scale = scales[row // of.granule, block]
        scale = 2.0 ** (int(scale) - 127) if of.scale_dtype == torch.uint8 else float(scale.float())
        if of.name == "nvfp4":
            of_matrix = float(parts["tensor_scale"][row])
            both = scale / of_matrix if of.divides else scale * of_matrix
            scale = float(torch.tensor(both, dtype=torch.float32))
        assert float(ours[row, column]) == float(torch.tensor(code * scale, dtype=torch.float32)), (row, column)


def test_the_largest_exponent_is_no_number() -> None:
    for name in ("mxfp4", "mxfp8", "fp8_block exponents"):
        of = SPELLINGS[name]
        parts = drawn_parts(of, 8, 64, 1)
        parts["scales"][:] = 255
        assert decoded(of, parts, torch.bfloat16, 64).isnan().all()


@pytest.mark.parametrize("name", list(SPELLINGS))
def test_the_output_may_be_a_part_of_wider_rows(name: str) -> None:
    of = SPELLINGS[name]
    parts = drawn_parts(of, 64, 96, 2)
    wide = torch.full((64, 200), -1.0, dtype=torch.bfloat16)
    encoding(of).decode(parts, wide[:, 8:104])
    assert same_numbers(wide[:, 8:104].contiguous(), decoded(of, parts, torch.bfloat16, 96))
    assert (wide[:, :8] == -1).all() and (wide[:, 104:] == -1).all()
