"""The residual stream around a branch: handed on by the op that reads it, or summed by autograd with the same bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.kernels.native.loader import native_status
from engine.layers.branch import Branch
from engine.layers.recompute import Level, MemoryPlan
from engine.models.layer_records import Multipliers
from engine.ops.backends import NATIVE
from engine.ops.kernels import REFERENCE, Kernels
from tests.distributed.cases import Case, small_config
from tests.distributed.gradient_table import EVERY_LINEAR
from tests.distributed.run_cases import ROUTED
from tests.support.memory_models import build_with, packed_batches, same_bits, two_alive

PLAIN = small_config()
CASES = {
    "adapters": Case(config=PLAIN, adapters=EVERY_LINEAR),
    "adapters on the last layer": Case(config=PLAIN, adapters=r"layers\.1\..*_proj"),
    "all parameters": Case(config=PLAIN, trained=".*"),
    "norms on outputs too": Case(
        config=replace(PLAIN, norms="both", norm_offset=1.0), adapters=EVERY_LINEAR, trained=".*norm"
    ),
    "branches with a factor": Case(
        config=replace(PLAIN, multipliers=Multipliers(branch=0.25)), adapters=EVERY_LINEAR, trained=".*norm"
    ),
    "norms on outputs alone": Case(config=replace(PLAIN, norms="outputs"), adapters=EVERY_LINEAR),
    "experts": Case(config=ROUTED, adapters=EVERY_LINEAR, trained=".*norm"),
}
RESIDUALS = {"adapters on the last layer": 1, "norms on outputs alone": 0}
"""Norms whose backward adds the residual, in a micro-batch; two for each of two layers where nothing is said."""
SUMS = {"branches with a factor": 0, "norms on outputs alone": 0, "experts": 0}
"""Norms whose forward adds attention's output to the stream; one for each layer where nothing is said."""


def _run(
    case: Case, kernels: Kernels, level: Level, dtype: torch.dtype
) -> tuple[tuple[int, int], tuple[Tensor, dict[str, Tensor]]]:
    """Returns how many norms added an output and how many a residual in two micro-batches, and the loss and the
    gradients."""
    sums = residuals = 0

    def norm_forward(*given: Any) -> Tensor:
        nonlocal sums
        sums += len(given) > 4 and given[4] is not None
        return kernels.norm_forward(*given)

    def norm_backward(*given: Any) -> Tensor:
        nonlocal residuals
        residuals += len(given) > 6 and given[6] is not None
        return kernels.norm_backward(*given)

    counted = replace(kernels, norm_forward=norm_forward, norm_backward=norm_backward)
    built = build_with(case, MemoryPlan(recompute=level), kernels=counted, dtype=dtype)
    found = two_alive(built, packed_batches(case.config.vocab_size))
    return (sums, residuals), found


needs_native = pytest.mark.skipif(not native_status().available, reason=native_status().reason)


@pytest.mark.parametrize("level", ["selective", "none", "full"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [(REFERENCE, torch.bfloat16), pytest.param(NATIVE, torch.float32, marks=needs_native)],
    ids=["reference", "native"],
)
def test_bits_are_those_of_autograds_sum(
    monkeypatch: pytest.MonkeyPatch, kernels: Kernels, dtype: torch.dtype, name: str, level: Level
) -> None:
    """In bfloat16 a norm's gradient is rounded before the sum, as autograd's operand is, and a sum before its norm."""
    if name == "experts" and level == "none":
        pytest.skip("of a mixture this is selective")
    case = CASES[name]
    counts, found = _run(case, kernels, level, dtype)
    residuals = RESIDUALS.get(name, 2 * case.config.num_layers)
    sums = SUMS.get(name, case.config.num_layers)
    again = min(sums, -(-residuals // 2)) if level == "full" else 0  # in layers that have a backward
    assert counts == (2 * (sums + again), 2 * residuals)
    monkeypatch.setattr(Branch, "reads_once", False)
    summed, expected = _run(case, kernels, level, dtype)
    assert summed == (0, 0)
    same_bits(found, expected)


def test_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["adapters"]
    built = build_with(case, MemoryPlan(), kernels=REFERENCE)
    batch = packed_batches(case.config.vocab_size)[0]

    @torch.no_grad()
    def last_stream() -> Tensor:
        context = built.model.context(batch, built.stage.step, training=False)
        return built.model.run_layers(built.model.embed(batch), context)

    found = last_stream()
    monkeypatch.setattr(Branch, "reads_once", False)
    assert torch.equal(found, last_stream())
