"""Products of codes with codes: a frozen weight in the groups of its format, and an input rounded in groups too, as
servers compute them.

    forward          y = Q(x) W^T                    Q rounds in groups of I, see `engine.kernels.reference_inputs`
    input gradient  dX = Q(dY) W                     FP8 blocks of 128 rows: Q rounds in groups of O, the blocks of W
                                                     are transposed with its codes
                    dX = dY W                        all others: W is decoded, as for products of numbers

A GPU multiplies the codes by torch's `scaled_mm`, with sums in fp32. It reads scales in layouts of its own, which are
made for the call, as W^T is: a Hopper GPU those of FP8 blocks group by group (128 x 128, their columns padded to 4), or
those of each row where a cut left smaller blocks; a Blackwell GPU scales of 8 bits in tiles of 128 rows and 4 groups,
blocks with powers of 2 spread to groups of 32 among them. NVFP4's scales of rows and of the matrix multiply a result
in 16 bits. Elsewhere what the codes mean is multiplied in fp32, which has the products exactly.

Adapters are not folded beside W, because the product would round H and B.

Legend: T tokens, I input features, O output features of this rank; M, N, K rows, columns and summed dimension of a
product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from engine.errors import UserError
from engine.kernels import reference_formats
from engine.kernels.formats import Format
from engine.kernels.reference_inputs import input_format

Parts = Mapping[str, Tensor]
Decode = Callable[[Format, Parts, Tensor], None]

_WIDE_ROWS = 1024
"""Rows of a weight that `plain_multiply` decodes at a time."""
_TOKENS = 16
"""A GPU's products get a multiple of so many rows of an input."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledFormat:
    """The demands of a format's products of codes on a GPU.

    Args:
        columns: of the dimensions along groups, which are multiples of it; others are of 16.
        majors: of the compute capability.
        cuda: the oldest version that torch may be built for.
        has_gradient: whether dX is a product of codes too.
    """

    columns: int
    majors: range
    cuda: tuple[int, int]
    has_gradient: bool = False


SCALED_FORMATS = {
    "fp8_block": ScaledFormat(columns=128, majors=range(9, 10), cuda=(12, 9), has_gradient=True),
    "mxfp8": ScaledFormat(columns=32, majors=range(10, 100), cuda=(12, 8)),
    "nvfp4": ScaledFormat(columns=32, majors=range(10, 100), cuda=(12, 8)),
}


def is_scaled(of: Format | None) -> bool:
    """Returns whether a format has products of codes."""
    return of is not None and of.name in SCALED_FORMATS and (of.name != "fp8_block" or of.group == 128 == of.rows)


def has_gradient(of: Format) -> bool:
    """Returns whether dX is a product of codes: where no block of 128 rows is divided, by a cut or in a stack."""
    return SCALED_FORMATS[of.name].has_gradient and of.granule == of.rows


def require_some_scaled(base_dtype: str | None, found: Sequence[object]) -> None:
    """Refuses a model whose products are all of decoded numbers.

    Args:
        base_dtype: as model.base_dtype.
        found: its linears, or their formats, that have products of codes.

    Raises:
        UserError: there are none.
    """
    if not found:
        raise UserError(
            f"model.base_products is codes and model.base_dtype is {base_dtype}, but no frozen linear is in fp8_block, "
            "mxfp8 or nvfp4: set model.base_products to decoded."
        )


def require_scaled_device(of: Format, device: torch.device, what: str) -> None:
    """Refuses a GPU that has no products of codes for a weight.

    Args:
        what: the weight's name.

    Raises:
        UserError: the GPU or torch's CUDA has none in this format.
    """
    if device.type != "cuda":
        return
    demands = SCALED_FORMATS[of.name]
    major, minor = torch.cuda.get_device_capability(device)
    require_scaled_major(of, major, what, f"this one has {major}.{minor}")
    version = torch.version.cuda
    if version is not None and tuple(map(int, version.split(".")[:2])) < demands.cuda:
        raise UserError(
            f"model.base_products is codes and {what} is in {of.name}, whose products need torch for CUDA "
            f"{'.'.join(map(str, demands.cuda))} or newer, but this one is for {version}: set model.base_products to "
            "decoded."
        )


def require_scaled_major(of: Format, major: int, what: str, found: str) -> None:
    """Refuses a compute capability of GPUs that have no products of codes for a weight.

    Args:
        major: the capability's first number.
        what: the weight's name.
        found: the GPU and its capability, in words.

    Raises:
        UserError: they have none in this format.
    """
    powers = of.name == "fp8_block" and of.scale_dtype == torch.uint8
    majors = range(9, 100) if powers else SCALED_FORMATS[of.name].majors
    if major not in majors:
        raise UserError(
            f"model.base_products is codes and {what} is in {of.name}, whose products need a GPU of compute capability "
            f"{majors[0]}{'.x' if len(majors) == 1 else '.0 or newer'}, but {found}: set model.base_products to "
            "decoded."
        )


def require_scaled_sizes(of: Format, rows: int, columns: int, device: torch.device, what: str) -> None:
    """Refuses a weight whose codes a GPU does not multiply.

    Args:
        rows, columns: O and I of this rank.
        what: the weight's name.

    Raises:
        UserError: a size does not divide.
    """
    multiple = SCALED_FORMATS[of.name].columns
    if device.type == "cuda" and (columns % multiple or rows % 16):
        raise UserError(
            f"model.base_products is codes and {what} is {rows} x {columns} in {of.name} on each rank, but its "
            f"products on a GPU need a multiple of 16 rows and of {multiple} columns: use a smaller parallel.tensor, "
            "or set model.base_products to decoded."
        )


MultiplyGroups = Callable[[Format, Parts, Parts, torch.dtype], Tensor]
"""Computes a b^T, [M, N]: the format of b [N, K], the parts of a [M, K] in the format that inputs have beside it
(`input_format`), the parts of b, and the result's dtype."""


def plain_multiply(
    of: Format,
    a: Parts,
    b: Parts,
    dtype: torch.dtype,
    decode: Decode = reference_formats.block_decode,
    multiply: Callable[[Tensor, Tensor], Tensor] = torch.mm,
) -> Tensor:
    """Computes `MultiplyGroups` in fp32, of what the parts mean, rounded once; on any device.

    Args:
        decode: a backend's `block_decode`.
        multiply: the product in fp32.
    """
    codes_a, codes_b = a["codes"], b["codes"]
    columns = codes_a.shape[1] * of.codes_per_byte
    wide = torch.empty(codes_a.shape[0], columns, dtype=torch.float32, device=codes_a.device)
    decode(input_format(of), a, wide)
    out = torch.empty(codes_a.shape[0], codes_b.shape[0], dtype=dtype, device=codes_a.device)
    for first in range(0, codes_b.shape[0], _WIDE_ROWS):
        rows = slice(first, min(first + _WIDE_ROWS, codes_b.shape[0]))
        block = wide.new_empty(rows.stop - first, columns)
        decode(of, reference_formats.rows_of(of, b, rows), block)
        out[:, rows] = multiply(wide, block.t())
    return out


def gpu_multiply(of: Format, a: Parts, b: Parts, dtype: torch.dtype) -> Tensor:
    """Computes `MultiplyGroups` on a GPU's matrix units."""
    num_tokens = a["codes"].shape[0]
    if num_tokens == 0:
        return torch.empty(0, b["codes"].shape[0], dtype=dtype, device=b["codes"].device)
    if num_tokens % _TOKENS:
        a = {name: _with_rows(part, num_tokens + -num_tokens % _TOKENS) for name, part in a.items()}
    # before it is scaled, NVFP4's result does not fit into fp16
    out_dtype = torch.float32 if dtype == torch.float16 else dtype
    in_blocks = of.name == "fp8_block" and (_major(b["codes"].device) < 10 or b["scales"].dtype != torch.uint8)
    y = (_blocks_product if in_blocks else _tiles_product)(of, a, b, out_dtype)
    return y[:num_tokens].to(dtype)


@cache
def _major(device: torch.device) -> int:
    """Returns the first number of a GPU's compute capability; of shapes alone, as the planner has them, a Hopper's."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9


def _with_rows(part: Tensor, rows: int) -> Tensor:
    whole = torch.zeros((rows, *part.shape[1:]), dtype=part.dtype, device=part.device)
    whole[: part.shape[0]] = part
    return whole


def _numbers(scales: Tensor) -> Tensor:
    return reference_formats.powers(scales) if scales.dtype == torch.uint8 else scales.float()


def _column_major(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def _blocks_product(of: Format, a: Parts, b: Parts, dtype: torch.dtype) -> Tensor:
    scale_a, scale_b = _column_major(_numbers(a["scales"])), _numbers(b["scales"])
    if of.granule == of.rows:
        recipe = ScalingType.BlockWise128x128
        # cuBLAS reads from 4 to 4 columns, whatever their number is
        scale_b = torch.nn.functional.pad(scale_b, (0, -scale_b.shape[1] % 4)).contiguous().t()
    else:
        recipe = ScalingType.BlockWise1x128
        scale_b = _column_major(scale_b.repeat_interleave(of.granule, 0))
    return scaled_mm(
        a["codes"], b["codes"].t(), scale_a, ScalingType.BlockWise1x128, scale_b, recipe, output_dtype=dtype
    )


def _tiles_product(of: Format, a: Parts, b: Parts, dtype: torch.dtype) -> Tensor:
    scales_a, scales_b = a["scales"], b["scales"]
    if of.name == "fp8_block":
        scales_a, scales_b = (scales.repeat_interleave(of.group // 32, 1) for scales in (scales_a, scales_b))
        scales_b = scales_b.repeat_interleave(of.granule, 0)
    nvfp4 = of.name == "nvfp4"
    code = torch.float4_e2m1fn_x2 if nvfp4 else torch.float8_e4m3fn
    scale = torch.float8_e4m3fn if nvfp4 else torch.float8_e8m0fnu
    recipe = ScalingType.BlockWise1x16 if nvfp4 else ScalingType.BlockWise1x32
    y = scaled_mm(
        a["codes"].view(code),
        b["codes"].view(code).t(),
        tiled_scales(scales_a).view(scale),
        recipe,
        tiled_scales(scales_b).view(scale),
        recipe,
        swizzle_a=SwizzleType.SWIZZLE_32_4_4,
        swizzle_b=SwizzleType.SWIZZLE_32_4_4,
        output_dtype=dtype,
    )
    if nvfp4:
        of_matrix = b["tensor_scale"].reciprocal() if of.divides else b["tensor_scale"]
        y.mul_(a["tensor_scale"][:, None]).mul_(of_matrix)  # the first are powers of 2
    return y


def tiled_scales(scales_RG: Tensor) -> Tensor:
    """Returns scales of 8 bits in the order of a Blackwell GPU, uint8 in one dimension: tiles of 128 rows and 4 groups,
    in which rows that are 32 apart lie together; 0 beyond the matrix."""
    rows, groups = scales_RG.shape
    padded = torch.nn.functional.pad(scales_RG.view(torch.uint8), (0, -groups % 4, 0, -rows % 128))
    return padded.unflatten(1, (-1, 4)).unflatten(0, (-1, 4, 32)).transpose(1, 3).flatten()
