"""The parameters of a model on a rank, described without making any."""

from __future__ import annotations

from functools import lru_cache
from math import prod

import torch

from engine.distributed.mesh import shape_mesh
from engine.distributed.ranks import RankGrid
from engine.distributed.sharding import ShardSpec
from engine.layers.context import TensorLayout, TrainingPlan
from engine.layers.module import shard_entries
from engine.models.decoder import Decoder, Part, build_decoder
from engine.models.decoder_config import DecoderConfig
from engine.models.layer_kinds import layer_kinds
from engine.models.names import buffer_value
from engine.ops.encoded_weight import BaseEncoding


def meta_model(
    config: DecoderConfig,
    *,
    tensor_rank: int = 0,
    tensor_size: int = 1,
    shards_experts: bool = True,
    plan: TrainingPlan | None = None,
    base: BaseEncoding | None = None,
    part: Part | None = None,
) -> Decoder:
    """Returns the model of one tensor-parallel rank, or a part of it, on the meta device: shapes, names and specs, no
    memory. Of experts it has all."""
    mesh = shape_mesh(RankGrid(tp=tensor_size, shards_experts=shards_experts), tensor_rank, config.num_kv_heads)
    layout = TensorLayout.over(mesh, base=base)
    return build_decoder(
        config,
        layout=layout,
        plan=plan or TrainingPlan(),
        device=torch.device("meta"),
        dtype=torch.float32,
        part=part,
    )


def trained_shapes(config: DecoderConfig, plan: TrainingPlan) -> dict[str, tuple[int, ...]]:
    """Returns the global shape of each trained parameter by its logical name; layers that are alike are built once."""
    found = _trained(meta_model(config, plan=plan, part=Part(first=0, last=0)))
    kinds = layer_kinds(config, plan)
    layers = {
        kind: _trained(meta_model(config, plan=plan, part=Part(first=kind, last=kind + 1, embedding=False, head=False)))
        for kind in set(kinds)
    }
    for index, kind in enumerate(kinds):
        prefix = f"layers.{kind}."
        found.update({f"layers.{index}.{name.removeprefix(prefix)}": shape for name, shape in layers[kind].items()})
    return found


def _trained(model: Decoder) -> dict[str, tuple[int, ...]]:
    return {entry.name: entry.spec.global_shape for entry in shard_entries(model) if entry.sink is not None}


def parameter_specs(config: DecoderConfig, *, tensor_rank: int, tensor_size: int) -> dict[str, ShardSpec]:
    """Returns the shard of every base parameter on one tensor-parallel rank, by logical name, in forward order.

    Raises:
        UserError: the model's sizes do not fit `tensor_size`.
    """
    return dict(_specs(config, tensor_rank, tensor_size))


@lru_cache(maxsize=8)
def _specs(config: DecoderConfig, tensor_rank: int, tensor_size: int) -> dict[str, ShardSpec]:
    """A start asks for the same description several times: of its weights, its modules and its size."""
    model = meta_model(config, tensor_rank=tensor_rank, tensor_size=tensor_size)
    return {entry.name: entry.spec for entry in shard_entries(model)}


def module_names(config: DecoderConfig) -> list[str]:
    """Returns the engine names of the modules that can carry an adapter or be trained, the head included even when
    tied."""
    specs = parameter_specs(config, tensor_rank=0, tensor_size=1)
    names = [name.rsplit(".", 1)[0] for name in specs if buffer_value(name) is None]
    if config.tied_embeddings:
        names.append("lm_head")
    return list(dict.fromkeys(names))


@lru_cache(maxsize=4)
def vision_linears(config: DecoderConfig) -> frozenset[str]:
    """Returns the engine names of a vision model's linears, which may have adapters; none without a vision model."""
    return frozenset(config.vision_linears())


@lru_cache(maxsize=4)
def num_parameters(config: DecoderConfig) -> int:
    """Counts the parameters of the whole model; a tied matrix counts once, and a buffer does not."""
    total = 0
    for name, spec in parameter_specs(config, tensor_rank=0, tensor_size=1).items():
        if buffer_value(name) is not None:
            continue
        size = 1
        for length in spec.global_shape:
            size *= length
        total += size
    return total


def active_parameters(config: DecoderConfig) -> int:
    """Counts the parameters that a token meets: of a mixture of experts, those of the experts that a token has."""
    experts = sum(
        prod(spec.global_shape)
        for name, spec in parameter_specs(config, tensor_rank=0, tensor_size=1).items()
        if ".experts." in name
    )
    idle = config.num_experts - config.experts_per_token
    return num_parameters(config) - (experts * idle // config.num_experts if config.num_experts else 0)
