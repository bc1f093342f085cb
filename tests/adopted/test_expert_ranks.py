"""Adopted mixtures on two expert ranks, each with a document of its own, against transformers' model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine.adopted import dispatch
from engine.adopted.config import adopted_config
from engine.adopted.expert_proof import expert_difference
from engine.adopted.proof import Small, Trained, proof_batch, small_of
from engine.adopted.run_proof import prove
from engine.distributed.collectives import all_reduce
from engine.distributed.mesh import Axis, Mesh, build_mesh
from engine.distributed.ranks import RankGrid
from engine.errors import UserError
from engine.layers.context import AdapterSettings, TensorLayout, TrainingPlan
from engine.layers.module import shard_entries
from engine.models.decoder import Decoder, build_decoder
from engine.models.run_proof import AskedOfModel
from tests.distributed.cases import cut, relative_error
from tests.support.spawning import spawn

pytestmark = pytest.mark.distributed

INSIDE = "layers.*.module."
LINEARS = {"glm4_moe_lite": "self_attn.q_b_proj", "qwen3_moe": "self_attn.q_proj"}
STACKS = [f"{INSIDE}mlp.experts.{leaf}" for leaf in ("gate_up_proj", "down_proj")]
CPU = torch.device("cpu")


def _written(model_type: str) -> dict[str, Any]:
    from transformers import CONFIG_MAPPING

    return {**CONFIG_MAPPING[model_type]().to_dict(), "model_type": model_type}


def _found(small: Small, layout: TensorLayout) -> float:
    parts = small.parts(layout=layout)
    divided = [entry for entry in shard_entries(parts[0]) if entry.spec.data == "edp"]
    assert all(entry.spec.local_shape != entry.spec.global_shape for entry in divided)
    assert any(entry.sink is not None for entry in divided)
    return expert_difference(small, parts, layout).worst


def _differences(mesh: Mesh) -> dict[str, float]:
    layout, found = TensorLayout.over(mesh), {}
    weights = frozenset(f"{stack}.weight" for stack in STACKS)
    for model_type, linear in LINEARS.items():
        adapters = frozenset((*STACKS, INSIDE + linear))
        small = small_of(_written(model_type), Trained(adapters=adapters, weights=weights))
        found[model_type] = _found(small, layout)
    for name, weight in small.model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            weight.data.zero_()  # all tokens choose the same experts, and one rank gets none
    return found | {"a rank without rows": _found(small, layout)}


def _dropped(layout: TensorLayout, mesh: Mesh | None) -> dict[str, Any]:
    """Returns losses and gradients of adapters with dropout, of this rank's tokens or of all."""
    settings = AdapterSettings(rank=2, scale=0.5, dropout=0.3)
    plan = TrainingPlan(adapter=lambda name: settings if name.endswith(("gate_up_proj", "down_proj")) else None, seed=5)
    config = adopted_config(
        small_of(_written("qwen3_moe")).model.config.to_dict() | {"model_type": "qwen3_moe"}, "engine"
    )
    model: Decoder = build_decoder(config, layout=layout, plan=plan, device=CPU, dtype=torch.float32)
    with torch.no_grad():
        for entry in shard_entries(model):
            whole = torch.randn(
                entry.spec.global_shape, generator=torch.Generator().manual_seed(sum(entry.name.encode()))
            )
            entry.parameter.copy_(cut(0.1 * whole, entry.spec))
    places = range(2) if mesh is None else [mesh.ep.rank]
    losses = []
    for place in places:
        batch = proof_batch((11 + place,), config.vocab_size, seed=place)
        batch.token_index_BS.add_(100 * place)
        context = model.context(batch, torch.tensor(3), training=True)
        losses.append(model.token_losses(model.run_layers(model.embed(batch), context), batch, context).sum())
    sum(losses).backward()  # type: ignore[union-attr]
    return {"loss": torch.stack(losses).detach()} | {
        entry.name: (entry.sink.buffer, entry.spec) for entry in shard_entries(model) if entry.sink is not None
    }


def _dropout_errors(mesh: Mesh) -> dict[str, float]:
    wanted, own = _dropped(TensorLayout(), None), _dropped(TensorLayout.over(mesh), mesh)
    losses = wanted.pop("loss")
    found = {"loss": float((own.pop("loss") - losses[mesh.ep.rank]).abs())}
    for name, (gradient, spec) in own.items():
        whole = gradient if spec.data == "edp" else all_reduce(gradient.clone(), mesh.dp_cp)
        found[name] = relative_error(whole, cut(wanted[name][0], spec))
    return found


def _proofs(mesh: Mesh) -> list[str]:
    """Returns what the proof at the start says of expert ranks as they are, and of broken ones."""
    decoder = adopted_config(_written("mixtral") | {"num_hidden_layers": 2})
    names = [
        f"layers.{index}.module.mlp.experts.{leaf}" for index in range(2) for leaf in ("gate_up_proj", "down_proj")
    ]
    asked = AskedOfModel(
        trained=tuple(f"{name}.{factor}" for name in names for factor in ("lora_A", "lora_B")), layers=(2,)
    )
    world, found = Axis("world", 2, dist.get_rank(), dist.group.WORLD), []
    right = dispatch._Exchanged.backward
    for backward in (right, lambda ctx, dy: (2 * right(ctx, dy)[0], None, None, None)):
        dispatch._Exchanged.backward = staticmethod(backward)  # type: ignore[method-assign, assignment]
        try:
            found.append(prove(decoder, asked, mesh=mesh, world=world, device=CPU).line())
        except UserError as error:
            found.append(str(error))
    return found


Ranks = list[tuple[dict[str, float], dict[str, float], list[str]]]


def _all() -> tuple[dict[str, float], dict[str, float], list[str]]:
    mesh = build_mesh(RankGrid(dp=2, ep=2), device_type="cpu", num_kv_heads=2)
    return _differences(mesh), _dropout_errors(mesh), _proofs(mesh)


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    return spawn(_all, world=2, timeout=200)


def test_two_ranks_compute_what_transformers_does(ranks: Ranks) -> None:
    for found, _, _ in ranks:
        assert len(found) == len(LINEARS) + 1
        assert max(found.values()) < 1e-5, found


def test_dropout_of_a_token_and_its_expert_is_that_of_one_rank(ranks: Ranks) -> None:
    for _, found, _ in ranks:
        assert len(found) > 8 and max(found.values()) < 1e-5, found


def test_the_proof_at_the_start_runs_expert_ranks(ranks: Ranks) -> None:
    first, second = (said for _, _, said in ranks)
    assert first[1] == second[1]
    assert "2 expert ranks" in first[0]
    assert "parallel.expert is 2, but a small mixtral model on 2 expert ranks is not the one of one rank" in first[1]
    assert "differs from transformers' own" in first[1] and first[1].endswith("leave parallel.expert out.")
