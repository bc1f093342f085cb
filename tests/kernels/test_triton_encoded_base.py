"""Adapters train on an encoded base on a GPU: decoded weights, and FP8 products by the GPU's own instructions.

On a GPU: python -m pytest -m gpu tests/kernels/test_triton_encoded_base.py
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from engine.layers.recompute import MemoryPlan
from engine.ops.kernels import REFERENCE, Kernels, backend
from tests.distributed.cases import Case, make_batch, small_config
from tests.support.memory_models import build_with

TRITON = backend("triton")

# FP8 products take sizes that divide by 16
CONFIG = small_config(hidden=32, intermediate=48, num_heads=4, num_kv_heads=1, head_dim=16)


def gradients(
    base: str, dropout: float, kernels: Kernels, device: torch.device, dtype: torch.dtype, *, merge_aware: bool = False
) -> dict[str, Tensor]:
    """Each adapter's gradient after one micro-batch, fp32 on the CPU."""
    case = Case(config=CONFIG, adapters=r"layers\..*_proj", base=base, dropout=dropout, merge_aware=merge_aware)
    batch = make_batch([(0, (9, 15)), (1, (24,))], row_length=24, seq_length=24, vocab_size=131, seed=0)
    built = build_with(case, MemoryPlan(), kernels=kernels, device=device, dtype=dtype)
    built.stage.load([batch.to(device)], float(batch.loss_weights_BS.sum()))
    built.stage.forward(0)
    built.stage.backward(0)
    return {name: gradient.float().cpu() for name, gradient in built.gradients().items()}


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("base", ["nf4", "int8", "fp8", "fp8_row", "nvfp4", "mxfp4", "mxfp8", "fp8_block", "int4"])
def test_gradients_on_an_encoded_base(base: str, dropout: float) -> None:
    """No further from plain fp32 on a CPU than three times what torch's ops are in bf16 on the same GPU, and a
    rounding: both round every activation to 8 bits of mantissa, at different places, and FP8 operands to 4."""
    _compare(base, dropout)


@pytest.mark.gpu
@pytest.mark.parametrize("base", ["nvfp4", "mxfp4", "fp8_block", "int4", "int8"])
def test_gradients_where_adapters_are_merged_before_rounding(base: str) -> None:
    """As above; both round the weight with its adapters to the same codes, from A and B in bf16."""
    _compare(base, 0.0, merge_aware=True)


def _compare(base: str, dropout: float, *, merge_aware: bool = False) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", torch.cuda.current_device())
    exact = gradients(base, dropout, REFERENCE, cpu, torch.float32, merge_aware=merge_aware)
    torchs = gradients(base, dropout, REFERENCE, gpu, torch.bfloat16, merge_aware=merge_aware)
    ours = gradients(base, dropout, TRITON, gpu, torch.bfloat16, merge_aware=merge_aware)
    assert ours.keys() == exact.keys() and len(exact) == 28
    for name, truth in exact.items():
        error, allowed = (ours[name] - truth).norm(), (torchs[name] - truth).norm()
        assert error <= 3 * allowed + torch.finfo(torch.bfloat16).eps * truth.norm(), (name, error, allowed)
