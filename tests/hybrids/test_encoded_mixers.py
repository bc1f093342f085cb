"""Encoded linears of mixers, whose rows on a rank are several runs of the whole's, in an order of their own.

Scales of a whole matrix, of its rows, or of groups of scales in the order of its rows, are those of the checkpoint's
matrix, whichever rows a rank has. Else int8 takes the scales of other rows, and the base of a merged model is not the
one that was trained.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from engine.distributed.mesh import Mesh, build_mesh, single_process_mesh
from engine.distributed.ranks import RankGrid
from engine.distributed.sharding import shard_of
from engine.hybrids.families.kimi import kimi_linear
from engine.hybrids.families.lfm2 import lfm2
from engine.hybrids.families.mamba import bamba, granite_hybrid
from engine.hybrids.families.nemotron import nemotron_h
from engine.hybrids.families.olmo import olmo_hybrid
from engine.hybrids.families.qwen import qwen3_5, qwen3_next
from engine.layers.encoded_storage import encoded_entries
from engine.models.decoder_config import DecoderConfig
from engine.quantization.encoding import encoding
from tests.distributed.cases import Case, whole_tensor
from tests.distributed.sharded_runs import Layout, Run
from tests.support.shared_scales import encoded_whole
from tests.support.spawning import spawn
from tests.support.sweeps import sampled

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(200)]

_SIZES: dict[str, Any] = {
    "vocab_size": 67, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 0.1, "hidden_act": "silu", "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_DELTA = {
    **_SIZES, "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}  # fmt: skip
_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 256}
_MAMBA = {
    **_SIZES, "head_dim": None, "mamba_n_heads": 16, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1,
}  # fmt: skip
_NEMOTRON = {
    **_SIZES, "layers_block_type": ["linear_attention", "full_attention"], "mamba_num_heads": 8, "mamba_head_dim": 32,
    "n_groups": 2, "ssm_state_size": 16, "layer_norm_epsilon": 0.1,
}  # fmt: skip
_KIMI = {
    **_SIZES, "num_key_value_heads": 8, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 32, "linear_head_dim": 32, "linear_num_heads": 8, "moe_intermediate_size": 256, "num_experts": 2,
    "num_experts_per_token": 1,
}  # fmt: skip
MODELS: dict[str, DecoderConfig] = {
    "qwen3.5": qwen3_5({**_DELTA, "model_type": "qwen3_5_text"}),
    "qwen3 next": qwen3_next(
        {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 256, "model_type": "qwen3_next"}
    ),
    "olmo hybrid": olmo_hybrid({**_DELTA, "head_dim": None, "linear_num_key_heads": 8, "model_type": "olmo_hybrid"}),
    "kimi linear": kimi_linear({**_KIMI, "model_type": "kimi_linear"}),
    "granite hybrid": granite_hybrid(
        {**_MAMBA, "num_local_experts": 0, "shared_intermediate_size": 256, "model_type": "granitemoehybrid"}
    ),
    "bamba": bamba({**_MAMBA, "mamba_n_groups": 2, "attn_layer_indices": [1], "model_type": "bamba"}),
    "nemotron h": nemotron_h({**_NEMOTRON, "model_type": "nemotron_h"}),
    "lfm2": lfm2({**_SIZES, "head_dim": None, "layer_types": ["conv", "full_attention"], "model_type": "lfm2"}),
}
"""Linears that two ranks cut at multiples of 128."""

BASES = ("nf4", "int8", "fp8", "fp8_row", "nvfp4", "fp8_block")
"""The last shares scales over rows."""
QUICK = [
    (model, base)
    for model in ("qwen3 next", "kimi linear", "bamba", "lfm2")
    for base in ("int8", "fp8_row", "fp8_block")
]


def _mesh(world: int) -> Mesh:
    return single_process_mesh() if world == 1 else build_mesh(RankGrid(tp=world), device_type="cpu", num_kv_heads=2)


def _wrong(model: str, base: str, mesh: Mesh) -> tuple[list[str], int]:
    """The encoded weights of this rank that are not its part of the encoded whole, and how many have several runs."""
    codec = encoding(base)
    case = Case(config=MODELS[model], trained=r".*norm", adapters="")
    run = Run(Layout(case=case, grid=mesh.grid, layers=(2,), base=base), mesh, "none")
    wrong, several = [], 0
    entries = list(encoded_entries(run.stages.models()[0]))
    shapes = {entry.name: entry.spec.global_shape for entry in entries}
    for entry in entries:
        module = entry.name.split(".")[:-2]  # or the expert
        together = [one.name for one in entries if one.memory is entry.memory and one.name.split(".")[:-2] == module]
        rows, columns = entry.spec.global_shape
        whole = torch.empty(rows, columns)
        codec.decode(encoded_whole(codec, entry.name, shapes, whole_tensor, together), whole)
        several += len(entry.spec.runs(0)) > 1
        if not torch.equal(entry.decoded(torch.float32), shard_of(whole, entry.spec)):
            wrong.append(entry.name)
    return wrong, several


def _all(world: int, quick: bool) -> dict[tuple[str, str], tuple[list[str], int]]:
    mesh = _mesh(world)
    cases = [(model, base) for model in MODELS for base in BASES if ((model, base) in QUICK) == quick]
    return {(model, base): _wrong(model, base, mesh) for model, base in cases}


@functools.cache
def _ranks(world: int, quick: bool) -> list[dict[tuple[str, str], tuple[list[str], int]]]:
    return [_all(1, quick)] if world == 1 else spawn(_all, world=world, args=(world, quick), timeout=150)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("model", "base"), sampled([(model, base) for model in MODELS for base in BASES], QUICK))
def test_a_ranks_rows_are_those_of_the_encoded_whole(model: str, base: str, world: int) -> None:
    for rank in _ranks(world, (model, base) in QUICK):
        wrong, several = rank[model, base]
        assert not wrong
        assert several > 0 or model not in ("qwen3 next", "granite hybrid", "bamba") or world == 1
