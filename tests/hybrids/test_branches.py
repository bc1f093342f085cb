"""Documents that continue others: states and the convolution's taps of each document behind those that it continues."""

from __future__ import annotations

import pytest
import torch

from tests.hybrids.trees import CPU, KINDS, TREES, assert_small, conv_errors, rule_errors
from tests.kernels.native_support import needs_native

BACKENDS = [
    pytest.param("reference", torch.float64, id="reference"),
    pytest.param("native", torch.float32, marks=needs_native, id="native"),
]


@pytest.mark.parametrize(("name", "dtype"), BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tree", TREES)
def test_states(tree: str, kind: str, name: str, dtype: torch.dtype) -> None:
    assert_small(rule_errors(kind, TREES[tree], name, CPU, dtype), 1e-12 if name == "reference" else 1e-6)


@pytest.mark.parametrize(("name", "dtype"), BACKENDS)
@pytest.mark.parametrize(("taps", "activation"), [(4, "silu"), (3, None), (1, None)])
@pytest.mark.parametrize("tree", TREES)
def test_taps(tree: str, taps: int, activation: str | None, name: str, dtype: torch.dtype) -> None:
    """Gradients of weights are in fp32 always."""
    assert_small(conv_errors(taps, activation, TREES[tree], name, CPU, dtype), 1e-6)
