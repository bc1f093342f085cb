"""What two ranks do of each type: of tensors, of experts, with half of the weights each, and of context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from engine.adopted.config import adopted_config
from engine.adopted.expert_proof import expert_difference
from engine.adopted.forms import small_record
from engine.adopted.proof import (
    Computed,
    Difference,
    Small,
    Trained,
    computed,
    difference,
    proof_batch,
    reference,
    small_of,
)
from engine.data.collate import context_part
from engine.distributed.collectives import all_reduce
from engine.distributed.mesh import build_mesh
from engine.distributed.ranks import RankGrid
from engine.errors import UserError
from engine.layers.context import TensorLayout
from engine.layers.storage import WeightPlacement
from engine.models.expert_ranks import check_expert_ranks
from engine.zigzag import rank_columns
from tests.coverage.checks import PACKED, SINGLE, Result, text_alone, tried
from tests.coverage.made import config_of

_ROW = (11, 13, 16)
"""Documents of a row whose tokens divide over context ranks."""


@text_alone
def two_tensor_ranks(model_type: str) -> Result:
    """Runs a rank of two tensor ranks; collective."""
    mesh = build_mesh(RankGrid(tp=2), device_type="cpu", num_kv_heads=2)

    def compare() -> Difference:
        small = _of_two_ranks(model_type)
        lengths = PACKED if small.config.keeps_documents_apart else SINGLE
        batch = proof_batch(lengths, small.config.vocab_size)
        parts = small.parts(layout=TensorLayout.over(mesh))
        return difference(computed(parts, batch, mesh), reference(small, batch), parts)

    return {"tensor": tried(compare)}


@text_alone
def two_expert_ranks(model_type: str) -> Result:
    """Runs a rank of two expert ranks; collective. Returns None for a type without an expert plan."""
    layout = TensorLayout.over(build_mesh(RankGrid(dp=2, ep=2), device_type="cpu", num_kv_heads=2))
    small = _of_two_ranks(model_type)
    if not small.config.divided_experts:
        return {"expert": None}

    def compare() -> Difference:
        check_expert_ranks(small.config, expert=2, tensor=1, folds=True)
        return expert_difference(small, small.parts(layout=layout), layout)

    return {"expert": tried(compare)}


@text_alone
def two_data_ranks(model_type: str) -> Result:
    """Runs a rank of two that train on different documents and have a part of the weights each; collective."""
    mesh = build_mesh(RankGrid(dp=2), device_type="cpu", num_kv_heads=2)

    def compare() -> Difference:
        small = _of_two_ranks(model_type)
        rows = (PACKED, SINGLE) if small.config.keeps_documents_apart else (SINGLE, PACKED[:1])
        batches = [proof_batch(lengths, small.config.vocab_size, seed=2 + rank) for rank, lengths in enumerate(rows)]
        wanted = [reference(small, batch) for batch in batches]
        spread = WeightPlacement(mesh.dp_cp, expert_axis=mesh.edp)
        assert spread.is_sharded
        found = computed(small.parts(spread=spread), batches[mesh.dp.rank])
        summed = {name: all_reduce(gradient, mesh.dp_cp) for name, gradient in found.gradients.items()}
        expected = {name: one + wanted[1].gradients[name] for name, one in wanted[0].gradients.items()}
        return difference(Computed(found.losses, summed), Computed(wanted[mesh.dp.rank].losses, expected))

    return {"zero": tried(compare)}


@text_alone
def two_context_ranks(model_type: str) -> Result:
    """Runs a rank of two that have half of each row's tokens each, by a ring or, where that is refused, by Ulysses;
    collective."""
    mesh = build_mesh(RankGrid(cp=2), device_type="cpu", num_kv_heads=2)
    small = _of_two_ranks(model_type)
    try:
        small.config.check_context(2, "ring")
    except UserError:
        method: Any = "ulysses"
    else:
        method = "ring"

    def compare() -> Difference:
        small.config.check_context(2, method)
        whole = proof_batch(_ROW, small.config.vocab_size)
        wanted = reference(small, whole)
        layout = TensorLayout.over(mesh, context_method=method)
        found = computed(small.parts(layout=layout), context_part(whole, size=2, rank=mesh.cp.rank))
        columns = torch.cat([torch.arange(*span) for span in rank_columns(sum(_ROW), 2, mesh.cp.rank)])
        summed = {name: all_reduce(gradient, mesh.cp) for name, gradient in found.gradients.items()}
        return difference(Computed(found.losses, summed), Computed(wanted.losses[columns], wanted.gradients))

    found: Result = {"context": tried(compare)}
    return {**found, "context_method": method} if isinstance(found["context"], float) else found


ON_RANKS: dict[str, Callable[[str], Result]] = {
    "tensor": two_tensor_ranks,
    "expert": two_expert_ranks,
    "zero": two_data_ranks,
    "context": two_context_ranks,
}
"""By their key in the JSON, the columns of two ranks."""


def _of_two_ranks(model_type: str) -> Small:
    return small_with_stacks(model_type, ranks=2)


def small_with_stacks(model_type: str, ranks: int) -> Small:
    """Returns a small model whose sizes divide over so many ranks, with adapters on all linears and stacks of
    experts."""
    config = small_record(small_record(config_of(model_type)), ranks)
    attention = adopted_config(config).attention
    plain = small_of(config, ranks=ranks)
    names = {name.removesuffix(".lora_A") for name in plain.factors if name.endswith(".lora_A")}
    for stack in plain.names.stack_shapes():
        experts: Any = plain.model.get_submodule(stack.rpartition(".")[0])
        module = plain.names.module_from_hf(stack)
        if module is not None and not experts.is_transposed:  # on which adapters are refused
            names.add(module)
    trained = Trained.of(f"{name}.lora_A" for name in names) if names else None
    small = small_of(config, trained, ranks=ranks)
    return replace(small, config=replace(small.config, attention=attention))
