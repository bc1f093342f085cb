"""Fills the parameters of a run at its start: from a checkpoint, a PEFT adapter, or the random generator."""

from __future__ import annotations

import torch

from engine.checkpoint.loading import load_copies, load_parameters
from engine.checkpoint.weight_source import SHARED, TIED_HEAD
from engine.config.run import RunConfig
from engine.distributed.mesh import Mesh
from engine.distributed.sharding import NamedShard, Piece, ShardSpec
from engine.layers.context import LORA_LEAVES
from engine.layers.module import ShardEntry
from engine.layers.storage import WeightPlacement
from engine.models.decoder_config import DecoderConfig
from engine.models.initialise import (
    fresh_values,
    initialise_adapters,
    initialise_magnitudes,
    initialise_weights,
)
from engine.models.names import fused_parts, fused_rows
from engine.optim.flat import FlatParameters
from engine.telemetry.log import Log
from engine.telemetry.progress import Progress
from engine.training.start_model import ModelPlan, ModelSource, start_adapter


def fill_parameters(
    config: RunConfig,
    source: ModelSource,
    plan: ModelPlan,
    entries: list[ShardEntry],
    flat: FlatParameters,
    weights: WeightPlacement,
    mesh: Mesh,
    log: Log,
) -> None:
    """Fills weights from the checkpoint (or draws them), and adapters fresh or from PEFT. Trained tensors are
    filled in their fp32 masters, so that nothing is rounded to the compute dtype on the way. Collective.

    Args:
        mesh: of ranks that hold the same unsharded parts, one reads each.
    """
    masters = flat.master_shards()
    base = [shard for shard in masters if shard.name.rpartition(".")[2] not in LORA_LEAVES]
    copied: list[NamedShard] = []
    for part in (part for entry in entries if entry.sink is None for part in weights.parts(entry)):
        is_copy = not weights.is_sharded and part.tensor.device == flat.gradient.device
        (copied if is_copy else base).append(part)
    adapters = [shard for shard in masters if shard.name.rpartition(".")[2] in LORA_LEAVES]
    if source.weights is None:
        drawn = [_as_drawn(shard, source) for shard in copied + base]
        norm, fresh = 1.0 - source.model.decoder.norm_offset, fresh_values(entries)
        initialise_weights(drawn, config.train.seed, _drawn_std(source), norm=norm, fresh=fresh)
    else:
        total = sum(shard.tensor.nbytes for shard in copied + base)
        with Progress(log, "reading weights", total, "bytes") as progress:
            for data in ("dp_cp", "edp"):
                alike = [shard for shard in copied if shard.spec.data == data]
                load_copies(alike, source.weights, mesh.axis(data), progress=progress.advance)
            load_parameters(base, source.weights, progress=progress.advance)
    if config.lora.rank > 0:
        start = start_adapter(config, source, plan)
        if start is None:
            initialise_adapters(adapters, config.train.seed, gaussian=config.lora.init == "gaussian")
            lengths = [shard for shard in adapters if shard.name.endswith(".lora_magnitude")]
            if lengths:
                dtype = next(entry.parameter.dtype for entry in entries if entry.name == lengths[0].name)
                _initialise_magnitudes(lengths, config, source, dtype)
        else:
            load_parameters(adapters + [shard for shard in base if shard.name in start], start)
    flat.publish()


def _initialise_magnitudes(
    shards: list[NamedShard], config: RunConfig, source: ModelSource, dtype: torch.dtype
) -> None:
    """DoRA's lengths, from the weights as the checkpoint has them, or drawn once more."""
    shapes, decoder = source.model.expected_shapes(), source.model.decoder

    def fill(shard: NamedShard) -> None:
        if source.weights is None:
            initialise_weights([_as_drawn(shard, source)], config.train.seed, _drawn_std(source))
        else:
            source.weights.read(shard.name if shard.name in source.weights else SHARED, shard.spec, out=shard.tensor)

    def width(module: str) -> int:
        return shapes.get(f"{module}.weight", shapes[SHARED])[1]

    initialise_magnitudes([part for shard in shards for part in _by_part(shard, decoder)], width, fill, dtype)


def _drawn_std(source: ModelSource) -> float:
    return float(source.model.hf_config.get("initializer_range", 0.02))


def _as_drawn(shard: NamedShard, source: ModelSource) -> NamedShard:
    """Returns the shard under the name that seeds its random values: a head that is the embedding, or a copy of it,
    has the embedding's."""
    is_shared = source.head_is_copy or source.model.decoder.tied_embeddings
    return shard._replace(name=SHARED) if is_shared and shard.name == TIED_HEAD else shard


def _by_part(shard: NamedShard, decoder: DecoderConfig) -> list[NamedShard]:
    """Returns the magnitudes of one adapter over several modules, split by module: views of the same memory."""
    module, _, leaf = shard.name.rpartition(".")
    if fused_parts(module) == [module]:
        return [shard]
    found = []
    for run in shard.spec.runs(0):
        shift = run.local_offset - run.global_offset
        for part, rows in fused_rows(decoder, module).items():
            first, last = max(rows.start, run.global_offset), min(rows.stop, run.global_offset + run.length)
            if first < last:
                pieces = (Piece(first - rows.start, 0, last - first),)
                size = (rows.stop - rows.start,)
                spec = ShardSpec(global_shape=size, local_shape=(last - first,), dim=0, pieces=pieces)
                found.append(NamedShard(f"{part}.{leaf}", shard.tensor[first + shift : last + shift], spec))
    return found
