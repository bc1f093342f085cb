"""Codes that ModelOpt 0.47.0 made of one small matrix, recorded: NVFP4QTensor and MXFP8QTensor of nvidia-modelopt."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.kernels.formats import FORMATS
from engine.quantization.encoding import encoding

RECORDED = {
    "nvfp4": (
        "efcd2964f7de9b5276efbd3065f7de1a0b64ef4ad7613da7d6d6c6964f7dc46f"
        "65df612e97075eeb47c8edde8c74bff5de608f974feb6766f69ee6e3c45f92bb",
        "777e6f76676c5e67",
    ),
    "mxfp8": (
        "f4f1ede7d85e696e72f4f1ece5d0616a787afbf8f3eb006b73787bfaf8f2e958e3486770f4eedc6973ec5a71ed6274e178f275f476f179e2"
        "fb70f27b6eeffa776d72f2ea5a70ef5e74d87348f26be2f2796fd0edf2f4f4f2edd06f79faea73faf0ea006df2c873d8f368e4f173706e6f"
        "79fcf6dc76f86bf971f1fc7466e2ebeb",
        "77767574",
    ),
}
"""Format -> bytes of codes and of scales, by rows."""
TENSOR_SCALE = float.fromhex("0x1.0c30c4p-11")
SUM, SUM_OF_SIZES = -2.393973369151354, 33.458335909992456
"""Of the fp32 numbers that its NVFP4 is decoded to, added in fp64."""


def matrix() -> Tensor:
    """Numbers of 7 bits and powers of two, exact in any float, fp32 [4, 32]."""
    row, column = torch.arange(4)[:, None], torch.arange(32)[None]
    return ((row * 37 + column * 11 + row * column * column) % 97 - 48) / 64 * 2.0 ** (column // 16 - row)


@pytest.mark.parametrize("name", list(RECORDED))
def test_codes_are_modelopts(name: str) -> None:
    parts = encoding(FORMATS[name]).encode(matrix())
    for part, recorded in zip(("codes", "scales"), RECORDED[name], strict=True):
        assert bytes(parts[part].contiguous().view(torch.uint8).flatten().tolist()).hex() == recorded, part
    if name == "nvfp4":
        assert parts["tensor_scale"].tolist() == [TENSOR_SCALE] * 4
        out = torch.empty(4, 32)
        encoding(FORMATS[name]).decode(parts, out)
        assert (out.double().sum().item(), out.double().abs().sum().item()) == (SUM, SUM_OF_SIZES)
