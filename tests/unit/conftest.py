"""Packages that tests of formats in few bits compare with."""

from __future__ import annotations

from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def tensors() -> ModuleType:
    """compressed-tensors, with the part that quantises."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    import compressed_tensors.quantization

    return compressed_tensors


@pytest.fixture(scope="module")
def torchao() -> ModuleType:
    """The part of torchao that has the MX formats and NVFP4."""
    pytest.importorskip("torchao", reason="torchao is not installed")
    import torchao.prototype.mx_formats.mx_tensor
    import torchao.prototype.mx_formats.nvfp4_tensor

    return torchao.prototype.mx_formats
