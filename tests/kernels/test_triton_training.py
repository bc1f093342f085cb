"""Trainings with the Triton backend follow those with the reference.

On a GPU: python -m pytest -m gpu tests/kernels/test_triton_training.py
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from engine.layers.recompute import MemoryPlan
from engine.models.decoder_config import DecoderConfig
from engine.ops.kernels import REFERENCE
from engine.ops.triton_backend import TRITON
from tests.distributed.cases import Case, make_batch
from tests.kernels.comparing import places
from tests.memory_models import build_with
from tests.small_training import SmallTraining

CONFIG = DecoderConfig(
    family="llama", hidden=24, intermediate=36, num_layers=2, num_heads=3, num_kv_heads=1, head_dim=6, vocab_size=41,
    norm_eps=1e-5, rope_theta=1e4,
)  # fmt: skip
PATHS = pytest.mark.parametrize(
    "path",
    [
        pytest.param({}, id="folded"),
        pytest.param({"fold": False}, id="unfolded"),
        pytest.param({"trained": ("norm", "lm_head")}, id="norms and head train"),
        pytest.param(
            {"config": replace(CONFIG, qk_norm=True), "trained": ("k_norm",)}, id="queries and keys normalised"
        ),
    ],
)


def _training(dropout: float, path: dict) -> SmallTraining:
    return SmallTraining(**{"config": CONFIG, "documents": ((9, 4), (13,)), "dropout": dropout, **path})


@places
@PATHS
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_training_follows_the_reference(place, dropout: float, path: dict) -> None:
    training, device = _training(dropout, path), torch.device(place[0])
    if place[1] != torch.float32:
        _assert_as_close_as_the_reference(training, device, place[1])
        return
    losses, gradients = training.run(TRITON, steps=4, device=device)
    expected_losses, expected = training.run(REFERENCE, steps=4, device=device)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).norm() <= 1e-5 * expected[name].norm(), name
    assert ((losses - expected_losses).abs() <= 1e-5 * expected_losses).all(), (losses, expected_losses)


def _assert_as_close_as_the_reference(training: SmallTraining, device: torch.device, dtype: torch.dtype) -> None:
    """In 16 bits both stray from the training in fp32, and each its own way: no further than twice the reference does,
    with one rounding of the loss on top where the reference is right by luck."""
    exact, _ = training.run(REFERENCE, steps=4, device=device)
    ours, _ = training.run(TRITON, steps=4, device=device, dtype=dtype)
    torchs, _ = training.run(REFERENCE, steps=4, device=device, dtype=dtype)
    error, allowed = (ours - exact).abs().max(), (torchs - exact).abs().max()
    assert error <= 2 * allowed + torch.finfo(dtype).eps * exact.abs().max(), (ours, torchs, exact)


@places
def test_inputs_quantised_where_they_are_made(place) -> None:
    """An FP8 base by row: the same bits as where norms and SwiGLU are quantised in passes of their own."""
    if place[0] == "cuda":
        pytest.skip("FP8 products on a GPU want sizes that divide by 16")
    case = Case(config=CONFIG, adapters=r"layers\..*_proj", base="fp8_row", dropout=0.1)
    batch = make_batch([(0, (9, 4)), (1, (13,))], row_length=13, seq_length=13, vocab_size=41, seed=0)
    found = []
    for kernels in (TRITON, replace(TRITON, row_codes=None)):
        built = build_with(case, MemoryPlan(), kernels=kernels)
        built.stage.load([batch], float(batch.loss_weights_BS.sum()))
        built.stage.forward(0)
        built.stage.backward(0)
        found.append(built.gradients())
    assert found[0].keys() == found[1].keys() and found[0]
    assert all(torch.equal(gradient, found[1][name]) for name, gradient in found[0].items())
