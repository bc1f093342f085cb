"""Backends that compute wrong gradients do not pass as ones that round.

The same check decides about the Triton kernels on a GPU (`tests/kernels/test_triton_training.py`). Here it
is seen to fail in every dtype, for backends that are wrong in one place and otherwise the reference itself.
"""

from __future__ import annotations

import pytest
import torch

from engine.kernels.native.loader import native_status
from engine.ops.backends import NATIVE
from engine.ops.kernels import REFERENCE
from tests.support.broken_backends import BROKEN
from tests.support.following import WRONG_GRADIENT, assert_follows_the_reference, tiny_training

CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
FOLDS = pytest.mark.parametrize("fold", [True, False], ids=["folded", "unfolded"])
DROPOUTS = pytest.mark.parametrize("dropout", [0.0, 0.1])


@DTYPES
@FOLDS
@pytest.mark.parametrize(
    ("broken", "dropout"),
    [(broken, dropout) for broken in BROKEN for dropout in (0.0, 0.1) if dropout > 0 or broken != "no mask in dA"],
)
def test_a_broken_backend_does_not_follow(dtype: torch.dtype, fold: bool, broken: str, dropout: float) -> None:
    training, kernels = tiny_training(dropout, fold=fold), BROKEN[broken](REFERENCE)
    with pytest.raises(AssertionError, match=WRONG_GRADIENT):
        assert_follows_the_reference(training, kernels, CPU, dtype, steps=0)


@pytest.mark.skipif(not native_status().available, reason=native_status().reason)
@FOLDS
@DROPOUTS
def test_the_native_backend_follows_in_bfloat16(fold: bool, dropout: float) -> None:
    assert_follows_the_reference(tiny_training(dropout, fold=fold), NATIVE, CPU, torch.bfloat16)
