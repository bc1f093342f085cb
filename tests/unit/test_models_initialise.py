"""Initial values: every layout holds slices of one whole tensor; bounds and scales are PEFT's and the config's."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from engine.distributed.mesh import shape_mesh
from engine.distributed.ranks import RankGrid
from engine.distributed.sharding import NamedShard, Piece, ShardSpec
from engine.layers.context import TensorLayout
from engine.layers.module import ShardEntry, shard_entries
from engine.models import initialise
from engine.models.decoder import Decoder
from tests.distributed.cases import Case, cut, small_config
from tests.distributed.gradient_table import CASES

NAMES = ["adapters local", "fused local", "everything", "tied head adapter", "one kv head"]


def _entries(case: Case, world: int = 1, rank: int = 0) -> list[ShardEntry]:
    mesh = shape_mesh(RankGrid(tp=world), rank, case.config.num_kv_heads)
    layout = TensorLayout(tp=mesh.tp, kv_replica=mesh.kv_replica)
    model = Decoder(case.config, layout=layout, plan=case.plan(), device=torch.device("cpu"), dtype=torch.float32)
    return list(shard_entries(model))


def _drawn(entries: list[ShardEntry], seed: int = 3) -> dict[str, Tensor]:
    shards = [entry.shard for entry in entries]
    initialise.initialise_weights(shards, seed, 0.02, fresh=initialise.fresh_values(entries))
    initialise.initialise_adapters([shard for shard in shards if ".lora_" in shard.name], seed)
    return {shard.name: shard.tensor for shard in shards}


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("name", NAMES)
def test_slices_of_every_layout_are_the_whole_tensors(name: str, world: int):
    if CASES[name].fused and world > 2:
        pytest.skip("a fused adapter needs a key/value head for each rank")
    whole = _drawn(_entries(CASES[name]))
    for rank in range(world):
        entries = _entries(CASES[name], world, rank)
        drawn = _drawn(entries)
        assert drawn.keys() == whole.keys()
        for entry in entries:
            assert torch.equal(drawn[entry.name], cut(whole[entry.name], entry.spec)), entry.name


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch):
    whole = _drawn(_entries(CASES["adapters local"]))
    monkeypatch.setattr(initialise, "_CHUNK", 100)
    chunked = _drawn(_entries(CASES["adapters local"], 2, 1))
    for entry in _entries(CASES["adapters local"], 2, 1):
        assert torch.equal(chunked[entry.name], cut(whole[entry.name], entry.spec)), entry.name


def _wide() -> dict[str, Tensor]:
    config = small_config(hidden=256, intermediate=512, num_layers=1, head_dim=32)
    return _drawn(_entries(Case(config=config, adapters=CASES["adapters local"].adapters)))


def test_adapters_start_as_in_peft():
    from peft import LoraConfig, get_peft_model
    from torch import nn

    drawn = _wide()
    torch.manual_seed(0)
    peer = get_peft_model(
        nn.Sequential(nn.Linear(512, 256), nn.Embedding(9, 256)), LoraConfig(r=64, target_modules=["0", "1"])
    )
    theirs = {name: value.detach() for name, value in peer.named_parameters() if "lora_" in name}
    down = drawn["layers.0.mlp.down_proj.lora_A"]
    bound = 1 / math.sqrt(512)
    for values in (down, theirs["base_model.model.0.lora_A.default.weight"]):
        assert values.abs().max() <= bound
        # the largest of n uniform draws misses the bound by a factor of about 1 / n
        assert values.abs().max() > bound * (1 - 20 / values.numel())
        # the standard error of a variance's root is below 0.9 / sqrt(2 n) for a uniform draw
        assert values.std() == pytest.approx(bound / math.sqrt(3), rel=5 * 0.9 / math.sqrt(2 * values.numel()))
        assert abs(values.mean()) < 5 * bound / math.sqrt(3 * values.numel())
    for values in (drawn["layers.0.mlp.down_proj.lora_B"], theirs["base_model.model.0.lora_B.default.weight"]):
        assert values.abs().sum() == 0
    for values in (drawn["embed_tokens.lora_A"], theirs["base_model.model.1.lora_embedding_A.default"]):
        assert values.abs().sum() == 0
    for values in (drawn["embed_tokens.lora_B"], theirs["base_model.model.1.lora_embedding_B.default"]):
        assert values.std() == pytest.approx(1.0, rel=5 / math.sqrt(2 * values.numel()))


def test_fresh_weights():
    drawn = _wide()
    matrix = drawn["layers.0.mlp.gate_proj.weight"]
    count = matrix.numel()
    assert matrix.std() == pytest.approx(0.02, rel=5 / math.sqrt(2 * count))
    assert abs(matrix.mean()) < 5 * 0.02 / math.sqrt(count)
    standard = (matrix / 0.02).double()
    # the fourth moment of a normal draw is 3, with variance 96 / n
    assert standard.pow(4).mean() == pytest.approx(3.0, abs=5 * math.sqrt(96 / count))
    assert standard.abs().max() > 4
    assert drawn["layers.0.input_norm.weight"].unique().tolist() == [1.0]
    everything = _drawn(_entries(CASES["everything"]))
    assert everything["layers.0.attention.q_proj.bias"].abs().sum() == 0


def test_tensors_and_seeds_differ():
    first, second = _drawn(_entries(CASES["adapters local"])), _drawn(_entries(CASES["adapters local"]), seed=4)
    q, k = (first[f"layers.0.attention.{name}_proj.lora_A"] for name in "qk")
    assert not torch.equal(q, k)
    assert not torch.equal(q, second["layers.0.attention.q_proj.lora_A"])
    assert not torch.equal(q, first["layers.1.attention.q_proj.lora_A"])


def test_padding_stays_zero():
    entries = _entries(CASES["adapters local"], 4, 3)
    drawn = _drawn(entries)
    specs = {entry.name: entry.spec for entry in entries}
    spec = specs["lm_head.weight"]
    held = sum(piece.length for piece in spec.pieces)
    assert spec.is_padded and held == 131 - 3 * 33
    assert drawn["lm_head.weight"][held:].abs().sum() == 0 and drawn["lm_head.weight"][:held].abs().sum() > 0


def test_one_number_does_not_depend_on_the_width_asked_for():
    spec = _entries(CASES["adapters local"])[0].spec
    one = NamedShard("x", torch.zeros(spec.local_shape), spec)
    initialise.fill_uniform(one, 1.0, 7)
    again = NamedShard("x", torch.zeros(spec.local_shape), spec)
    initialise.fill_uniform(again, 2.0, 7)
    torch.testing.assert_close(again.tensor, 2 * one.tensor)


def test_kernels_of_convolutions_are_cut_like_matrices():
    """[6, 3, 2, 2], whole, by rows, and by boxes of further dimensions, as sharded weights are cut."""
    shape = (6, 3, 2, 2)

    def filled(local: tuple[int, ...], dim: int | None, *pieces: Piece) -> Tensor:
        shard = NamedShard(
            "vision.patch.weight",
            torch.zeros(local),
            ShardSpec(global_shape=shape, local_shape=local, dim=dim, pieces=pieces),
        )
        initialise.fill_normal(shard, 0.5, 7)
        return shard.tensor

    whole = filled(shape, None)
    assert 0.3 < whole.std() < 0.7
    assert torch.equal(filled((2, 3, 2, 2), 0, Piece(3, 0, 2)), whole[3:5])
    assert torch.equal(filled((6, 1, 2, 2), 1, Piece(2, 0, 1)), whole[:, 2:3])
    matrix = NamedShard("vision.patch.weight", torch.zeros(6, 12), ShardSpec(global_shape=(6, 12), local_shape=(6, 12)))
    initialise.fill_normal(matrix, 0.5, 7)
    assert torch.equal(whole.flatten(1), matrix.tensor)
