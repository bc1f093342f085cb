"""Spellings whose codes are stored as the formats have them: floats of 4 and 8 bits, and integers of 8.

    compressed-tensors   weight_packed or weight, weight_scale, weight_global_scale
    ModelOpt             weight, weight_scale, weight_scale_2
    DeepSeek's           weight, weight_scale_inv
    gpt-oss              _blocks and _scales, of all experts

https://docs.vllm.ai/projects/llm-compressor/en/latest/guides/compression_schemes/, arXiv 2412.19437.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from engine.errors import UserError
from engine.kernels.formats import Format
from engine.quantization.shipped.spelling import EXPONENTS, NUMBERS, Layout, Spelling

_NAMES = {
    "nvfp4": "NVFP4",
    "mxfp4": "MXFP4",
    "mxfp8": "MXFP8",
    "fp8_block": "FP8 in blocks",
    "fp8_channel": "FP8",
    "int8": "INT8",
}


@dataclass(frozen=True, kw_only=True)
class Floats(Spelling):
    """Codes and scales as a format has them.

    Args:
        kind: the format, as far as a config says it.
        codes, scales, tensor_scale: endings of names; no `tensor_scale` where there is none.
        one_scale: a matrix has one scale.
        last: bytes of codes in a last dimension of their own, in tensors of all experts; 1 without.
        scale_shape: [] where one scale has no dimension, [1] where it has one.
        scale_dims: dimensions of several scales: 1 or 2 of one for each row; 2, or 4 with two of size 1, of blocks.
        stored_scales: dtype of the scales; None until the tensors are known.
    """

    kind: Format
    codes: str = ".weight"
    scales: str = ".weight_scale"
    tensor_scale: str = ""
    one_scale: bool = False
    last: int = 1
    scale_shape: tuple[int, ...] = (1,)
    scale_dims: int = 2
    stored_scales: torch.dtype | None = None

    @property
    def name(self) -> str:
        return _NAMES[self.kind.name]

    @property
    def weight(self) -> str:
        return ".weight" if self.last == 1 else ""

    @property
    def format(self) -> Format:
        return replace(self.kind, keeps_scales=True) if self.one_scale else self.kind

    @property
    def _per_code(self) -> int:
        """Columns in one index of the codes."""
        return self.kind.codes_per_byte * self.last

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        code = {"nvfp4": torch.uint8, "mxfp4": torch.uint8, "int8": torch.int8}.get(self.kind.name, torch.float8_e4m3fn)
        if self.kind.name == "nvfp4":
            dtypes: tuple[torch.dtype, ...] = (torch.float8_e4m3fn,)
        elif self.kind.name in ("mxfp4", "mxfp8"):
            dtypes = EXPONENTS
        else:
            dtypes = NUMBERS if self.kind.is_rowwise else (*NUMBERS, *EXPONENTS)
        rows = 0 if self.one_scale else self.kind.rows
        found = [
            Layout(ending=self.codes, dtypes=(code,), columns=self._per_code, last=self.last),
            Layout(ending=self.scales, dtypes=dtypes, rows=rows, columns=self.kind.group),
        ]
        if self.tensor_scale:
            found.append(Layout(ending=self.tensor_scale, dtypes=(torch.float32,), rows=0, columns=0))
        return tuple(found)

    def shape(self, stored: Mapping[str, tuple[int, ...]], read: Mapping[str, Tensor]) -> tuple[int, int]:
        rows, columns, *_ = (*stored[self.codes], 0, 0)
        return rows, columns * self._per_code

    def known(self, dtypes: Mapping[str, torch.dtype], shapes: Mapping[str, tuple[int, ...]]) -> Self:
        stored, shape = dtypes[self.scales], shapes[self.tensor_scale or self.scales]
        one = all(size == 1 for size in shape)
        return replace(
            self,
            kind=replace(self.kind, scale_dtype=torch.uint8 if stored in EXPONENTS else stored),
            stored_scales=stored,
            one_scale=one and self.kind.is_rowwise,
            scale_shape=shape if one else self.scale_shape,
            scale_dims=len(shapes[self.scales]),
        )

    def load(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> dict[str, Tensor]:
        scales = tensors[self.scales]
        if self.kind.is_rowwise:
            scales = scales.flatten().expand(rows)
        elif scales.dtype == torch.float8_e8m0fnu:
            scales = scales.view(torch.uint8)
        found = {"codes": tensors[self.codes], "scales": scales}
        if self.tensor_scale:
            found["tensor_scale"] = tensors[self.tensor_scale].flatten().expand(rows)
        return found

    def store(self, parts: Mapping[str, Tensor], columns: int) -> dict[str, Tensor]:
        codes, scales = parts["codes"], parts["scales"]
        if self.last > 1:
            codes = codes.reshape(codes.shape[0], -1, self.last)
        if self.one_scale:
            scales = self._one_of(scales)
        elif self.kind.is_rowwise:
            scales = scales if self.scale_dims == 1 else scales[:, None]
        elif self.scale_dims == 4:  # of ModelOpt's blocks
            scales = scales[:, None, :, None]
        if self.stored_scales is not None and scales.dtype != self.stored_scales:
            same_bits = self.stored_scales == torch.float8_e8m0fnu
            scales = scales.view(self.stored_scales) if same_bits else scales.to(self.stored_scales)
        found = {self.codes: codes.contiguous(), self.scales: scales.contiguous()}
        if self.tensor_scale:
            found[self.tensor_scale] = self._one_of(parts["tensor_scale"]).contiguous()
        return found

    def _one_of(self, scales: Tensor) -> Tensor:
        """Returns the scale that all rows have, as it is stored."""
        if scales.device.type != "meta" and not bool((scales == scales[:1]).all()):
            raise UserError(
                f"several linears lie in the rows of one matrix, each with a scale of its own, and {self.name} has one "
                "for a matrix: store it in another format."
            )
        return scales[:1].reshape(self.scale_shape)
