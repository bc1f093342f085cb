"""Tiny Gemma 4 models in many layouts against one process that keeps all: the loss, and every gradient."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from engine.batch import Batch
from engine.distributed.mesh import Mesh, build_mesh, single_process_mesh
from engine.distributed.ranks import RankGrid
from engine.distributed.sharding import NamedShard
from engine.models.families import family_of
from engine.optim.state_sharding import ShardLevel
from tests.distributed.cases import Case, make_batch, relative_error
from tests.distributed.sharded_runs import Layout, Run, assemble
from tests.support.spawning import spawn
from tests.support.sweeps import sampled

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

_DENSE: dict[str, Any] = {
    "model_type": "gemma4_text", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "vocab_size": 67,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True, "num_global_key_value_heads": 1,
}  # fmt: skip
_EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 20}
_SMALL = {
    "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 67,
    "use_double_wide_mlp": True, "attention_k_eq_v": False, "num_key_value_heads": 2,
}  # fmt: skip
HF = {"small": {**_DENSE, **_SMALL}, "dense": _DENSE, "experts": {**_DENSE, **_EXPERTS}}
_ADAPTERS = r"layers\..*(_proj|router)|lm_head|embed_tokens|.*per_layer_(input_gate|(model_)?projection)"
ONE = RankGrid()
ROWS = (((17, 1, 5), (23,)), ((1, 22), (9, 14)))
"""Micro-batches of rows of documents."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A layout of a model; arguments as of `Layout` and `Run`.

    Args:
        frozen_inputs: nothing trains that the inputs of layers are made from.
    """

    model: str
    grid: RankGrid = ONE
    everything: bool = False
    frozen_inputs: bool = False
    layers: tuple[int, ...] = (4,)
    sequence: bool = False
    recompute: Any = "selective"
    level: ShardLevel = "none"
    offload: bool = False
    schedule: str = "1f1b"
    base: str | None = None

    @property
    def layout(self) -> Layout:
        family, text = family_of(HF[self.model], "native")
        adapters, trained = _ADAPTERS, ".*norm"
        if self.frozen_inputs:
            adapters, trained = r"layers\..*_proj", r"layers\..*norm"
        elif self.everything:
            adapters, trained = "", ".*"
        case = Case(config=family.config_from_hf(text), adapters=adapters, trained=trained)
        return Layout(
            case=case, grid=self.grid, layers=self.layers, sequence=self.sequence, dropout=0.1,
            recompute=self.recompute, dtype=torch.float64, schedule=self.schedule, base=self.base,
        )  # fmt: skip


class Seen(NamedTuple):
    """A step on one rank."""

    loss: Tensor
    gradients: list[NamedShard]


def _micro_batches() -> list[Batch]:
    return [
        make_batch(
            [(2 * number + slot, documents) for slot, documents in enumerate(rows)],
            row_length=23,
            seq_length=23,
            vocab_size=67,
            seed=3,
        )
        for number, rows in enumerate(ROWS)
    ]


def step(place: Place) -> Seen:
    """The loss of a step of this layout, and the gradients that this rank has."""
    mesh: Mesh = single_process_mesh()
    if place.grid.world_size > 1:
        mesh = build_mesh(place.grid, device_type="cpu", num_kv_heads=2)
    run = Run(place.layout, mesh, place.level, offload_weights=place.offload, offload_optimizer=place.offload)
    batches = _micro_batches()
    total = sum(float(batch.loss_weights_BS.sum()) for batch in batches)
    loss = run.step.gradients(batches[mesh.dp.rank :: mesh.dp.size], total)
    return Seen(loss, [NamedShard(name, tensor.clone(), spec) for name, tensor, spec in run.flat.gradient_shards()])


TP2, PP2, DP2 = RankGrid(tp=2), RankGrid(pp=2), RankGrid(dp=2)


def _of(model: str) -> dict[str, Place]:
    place = functools.partial(Place, model=model)
    found = {
        "recompute none": place(recompute="none"),
        "recompute attention": place(recompute="attention"),
        "recompute full": place(recompute="full"),
        "offload": place(offload=True),
        "tp2 sequence": place(grid=TP2, sequence=True),
        "tp2, everything": place(grid=TP2, everything=True),
        "tp2 sequence, full, everything": place(grid=TP2, sequence=True, recompute="full", everything=True),
        "pp2": place(grid=PP2, layers=(2, 2)),
        "zero 3": place(grid=DP2, level="parameters"),
        "zero 3, everything": place(grid=DP2, level="parameters", everything=True),
        "tp2 pp2": place(grid=RankGrid(tp=2, pp=2), layers=(2, 2)),
    }
    if model == "small":
        found |= {
            "pp3, everything": place(grid=RankGrid(pp=3), layers=(1, 1, 2), everything=True),
            "pp3": place(grid=RankGrid(pp=3), layers=(2, 1, 1)),
            "pp2, full, frozen inputs": place(grid=PP2, layers=(3, 1), recompute="full", frozen_inputs=True),
            "interleaved, pp2": place(grid=PP2, layers=(1, 1, 1, 1), schedule="interleaved"),
            "zero bubble, pp2": place(grid=PP2, layers=(1, 3), schedule="zb_h1", everything=True),
            "zero bubble in a V, pp2": place(grid=PP2, layers=(1, 1, 1, 1), schedule="zb_v"),
            "zero 3, pp2, full": place(grid=RankGrid(pp=2, dp=2), layers=(2, 2), level="parameters", recompute="full"),
            "int8, tp2 sequence": place(grid=TP2, sequence=True, base="int8"),
            "tp2 sequence, uneven pp2": place(grid=RankGrid(pp=2, tp=2), layers=(1, 3), sequence=True, everything=True),
        }
    if model == "experts":
        found |= {
            "ep2": place(grid=RankGrid(dp=2, ep=2)),
            "ep2, everything": place(grid=RankGrid(dp=2, ep=2), everything=True),
            "ep2 of tp2, sequence": place(grid=RankGrid(tp=2, ep=2, shards_experts=False), sequence=True),
            "ep2 of tp2": place(grid=RankGrid(tp=2, ep=2, shards_experts=False), everything=True),
        }
    return found


PLACES = {f"{model}: {name}": place for model in HF for name, place in _of(model).items()}


@pytest.mark.parametrize("name", sampled(PLACES, ("experts: tp2 sequence, full, everything", "small: pp3, everything")))
def test_layouts_are_one_process(name: str) -> None:
    place = PLACES[name]
    alone = step(
        Place(model=place.model, everything=place.everything, frozen_inputs=place.frozen_inputs, base=place.base)
    )
    world = place.grid.world_size
    ranks = [step(place)] if world == 1 else spawn(step, world=world, args=(place,), timeout=300)
    expected, found = assemble([alone.gradients]), assemble([one.gradients for one in ranks])
    assert found.keys() == expected.keys()
    errors = {key: relative_error(found[key], value) for key, value in expected.items() if value.any()}
    assert all(not found[key].any() for key in expected.keys() - errors.keys())
    worst = max(errors, key=errors.__getitem__)
    print(f"\n{name:40} {errors[worst]:.1e} {worst}")
    # models compute in fp64, but routers and sums of gradients are in fp32
    assert max(abs(one.loss - alone.loss) for one in ranks) < 1e-6 and errors[worst] < 1e-5, worst
