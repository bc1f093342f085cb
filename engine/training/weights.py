"""What the parameters of a run start with: a checkpoint, a PEFT adapter, or numbers drawn anew."""

from __future__ import annotations

from engine.checkpoint.loading import load_parameters
from engine.checkpoint.peft_read import AdapterSource
from engine.checkpoint.source import ModelFolder
from engine.config.run import RunConfig
from engine.layers.module import ShardEntry, shard_entries
from engine.layers.plan import TrainingPlan
from engine.layers.sharded_storage import SpreadWeights
from engine.models.describe import meta_model
from engine.models.initialise import initialise_adapters, initialise_weights
from engine.optim.flat import FlatParameters
from engine.telemetry.log import Log
from engine.telemetry.progress import Progress
from engine.training.source import ModelSource


def fill_parameters(
    config: RunConfig,
    source: ModelSource,
    plan: TrainingPlan,
    entries: list[ShardEntry],
    flat: FlatParameters,
    weights: SpreadWeights,
    log: Log,
) -> None:
    """Weights from the checkpoint (or drawn), adapters fresh or from PEFT. Trained tensors are filled in their fp32
    masters, so that nothing is rounded to the compute dtype on the way."""
    masters = flat.master_shards()
    frozen = [part for entry in entries if entry.sink is None for part in weights.parts(entry)]
    base = frozen + [shard for shard in masters if not shard.name.endswith((".lora_A", ".lora_B"))]
    adapters = [shard for shard in masters if shard.name.endswith((".lora_A", ".lora_B"))]
    if source.weights is None:
        std = float(source.model.hf_config.get("initializer_range", 0.02))
        initialise_weights(base, config.train.seed, std, norm=1.0 - source.model.decoder.norm_offset)
    else:
        total = sum(shard.tensor.nbytes for shard in base)
        with Progress(log, "reading weights", total, "bytes") as progress:
            load_parameters(base, source.weights, progress=progress.advance)
    if config.lora.rank > 0:
        if config.lora.init_from is None:
            initialise_adapters(adapters, config.train.seed)
        else:
            load_parameters(adapters, _adapter_source(config, source.model, plan))
    flat.publish()


def _adapter_source(config: RunConfig, model: ModelFolder, plan: TrainingPlan) -> AdapterSource:
    """The PEFT adapter of `lora.init_from`, found to be what this run would train."""
    lora = config.lora
    assert lora.init_from is not None
    source = AdapterSource(lora.init_from, names=model.names, decoder=model.decoder, fused_qkv=lora.fused_qkv)
    names = [entry.name for entry in shard_entries(meta_model(model.decoder, plan=plan))]
    modules = {name.rpartition(".")[0] for name in names if name.endswith(".lora_A")}
    source.require_matching(rank=lora.rank, alpha=lora.alpha, rslora=lora.rslora, modules=modules)
    return source
