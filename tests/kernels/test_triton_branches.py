"""Documents that continue others by the Triton kernels; see tests.hybrids.test_branches."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from tests.hybrids.trees import KINDS, TREES, assert_small, conv_errors, rule_errors
from tests.kernels.comparing import interpreted_only

places = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=interpreted_only, id="cpu-float32"),
        pytest.param("cuda", marks=pytest.mark.gpu, id="cuda-float32"),
    ],
)
trees = pytest.mark.parametrize(
    "tree",
    [
        "pairs",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("short", "groups", "random 0")),
    ],
)


@places
@pytest.mark.parametrize("kind", KINDS)
@trees
def test_states(device: str, kind: str, tree: str) -> None:
    assert_small(rule_errors(kind, TREES[tree], "triton", torch.device(device), torch.float32), 1e-6)


@places
@pytest.mark.parametrize(("taps", "activation"), [(4, "silu"), (3, None)])
@trees
def test_taps(device: str, taps: int, activation: str | None, tree: str) -> None:
    assert_small(conv_errors(taps, activation, TREES[tree], "triton", torch.device(device), torch.float32), 1e-6)
