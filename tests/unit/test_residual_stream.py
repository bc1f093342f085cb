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
from engine.models.decoder_config import Multipliers
from engine.ops.backends import NATIVE
from engine.ops.kernels import REFERENCE, Kernels
from tests.distributed.cases import Case, small_config
from tests.distributed.gradient_table import EVERY_LINEAR
from tests.distributed.sharded_runs import ROUTED
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
NORMS = {"adapters on the last layer": 1, "norms on outputs alone": 0}
"""Of a micro-batch, norms whose backward adds the residual; two for each of two layers where nothing is said."""


def _run(
    case: Case, kernels: Kernels, level: Level, dtype: torch.dtype
) -> tuple[int, tuple[Tensor, dict[str, Tensor]]]:
    """Returns how many norms added a residual in two micro-batches, and the loss and the gradients."""
    count = 0

    def norm_backward(*given: Any) -> Tensor:
        nonlocal count
        count += len(given) > 6 and given[6] is not None
        return kernels.norm_backward(*given)

    counted = replace(kernels, norm_backward=norm_backward)
    built = build_with(case, MemoryPlan(recompute=level), kernels=counted, dtype=dtype)
    found = two_alive(built, packed_batches(case.config.vocab_size))
    return count, found


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
    """In bfloat16 the norm's gradient is rounded before the sum, as autograd's operand is."""
    if name == "experts" and level == "none":
        pytest.skip("of a mixture this is selective")
    case = CASES[name]
    count, found = _run(case, kernels, level, dtype)
    assert count == 2 * NORMS.get(name, 2 * case.config.num_layers)
    monkeypatch.setattr(Branch, "reads_once", False)
    summed, expected = _run(case, kernels, level, dtype)
    assert summed == 0
    same_bits(found, expected)


def test_nothing_is_handed_on_without_gradients() -> None:
    case = CASES["adapters"]
    built = build_with(case, MemoryPlan(), kernels=REFERENCE)
    batch = packed_batches(case.config.vocab_size)[0]
    with torch.no_grad():
        context = built.model.context(batch, built.stage.step, training=False)
        x = built.model.embed(batch)
        assert built.model.run_layers(x, context).grad_fn is None
