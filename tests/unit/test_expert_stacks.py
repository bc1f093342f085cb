"""What a mixture of experts makes in memory for its adapters, and that all of them train."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.choices import ExpertFactors
from engine.distributed.mesh import single_process_mesh
from engine.distributed.ranks import RankGrid
from engine.experts.layers.routed_experts import RoutedMLP, RoutedSizes
from engine.experts.ops.routing import RoutingRule
from engine.layers.context import AdapterSettings, LayerContext, TensorLayout, TrainingPlan
from engine.layers.module import shard_entries
from engine.ops.inputs import GivenInput
from tests.distributed.cases import whole_tensor
from tests.distributed.sharded_runs import Layout, Run
from tests.unit.test_ops_routing import _context

TOKENS, HIDDEN, INNER, EXPERTS = 6, 96, 64, 8


class _Largest(TorchDispatchMode):
    """The bytes of the largest tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {one.untyped_storage().data_ptr() for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        for one in tree_leaves(out):
            if isinstance(one, Tensor) and one.untyped_storage().data_ptr() not in known:
                self.num_bytes = max(self.num_bytes, one.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("form", ["per_expert", "shared_outer", "shared"])
def test_peft_3577_2527_2545_no_delta_of_a_stack_is_made(form: ExpertFactors) -> None:
    """Nor of one expert: forward and backward make nothing as large as its smallest matrix."""
    settings = AdapterSettings(rank=3, scale=1.7, dropout=0.1)
    plan = TrainingPlan(adapter=lambda name: settings if ".experts." in name else None, experts=form)
    build = LayerContext(layout=TensorLayout(), plan=plan, device=torch.device("cpu"), dtype=torch.float32)
    rule = RoutingRule(num_experts=EXPERTS, per_token=2, renormalises=True, rounds=True)
    sizes = RoutedSizes(rule=rule, intermediate=INNER)
    mlp = RoutedMLP("layers.0.mlp", sizes, hidden=HIDDEN, layer=0, first_site=2, shared_site=9, build=build)
    entries = list(shard_entries(mlp))
    for entry in entries:
        entry.parameter.data.copy_(whole_tensor(entry.name, entry.spec.global_shape))
        assert entry.sink is None or entry.sink.buffer.numel()  # made before anything is counted
    x = whole_tensor("x", (TOKENS, HIDDEN)).requires_grad_()
    with _Largest() as seen:
        mlp(x, GivenInput(), _context(TOKENS)).backward(whole_tensor("dy", (TOKENS, HIDDEN)))
    assert 0 < seen.num_bytes < 4 * HIDDEN * INNER
    assert sum(entry.sink is not None and bool(entry.sink.buffer.any()) for entry in entries) >= 5


@pytest.mark.parametrize("case", ["four experts, adapters", "four experts, in full"])
def test_unsloth_3405_ms_swift_6173_all_experts_train(case: str) -> None:
    """Every matrix of an expert, or both factors of its adapter, has a gradient."""
    run = Run(Layout(case=case, grid=RankGrid()), single_process_mesh(), "none")
    run.step.gradients(*run.batches(1))
    gradients = {name: tensor for name, tensor, _ in run.flat.gradient_shards() if ".experts." in name}
    assert len(gradients) == 2 * 4 * 3 * (2 if "adapters" in case else 1)
    assert not [name for name, gradient in gradients.items() if not gradient.any()]
