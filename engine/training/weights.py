"""What the parameters of a run start with: a checkpoint, a PEFT adapter, or numbers drawn anew."""

from __future__ import annotations

from engine.checkpoint.loading import load_parameters
from engine.config.run import RunConfig
from engine.layers.module import ShardEntry
from engine.layers.plan import TrainingPlan
from engine.layers.sharded_storage import SpreadWeights
from engine.models.initialise import initialise_adapters, initialise_weights
from engine.optim.flat import FlatParameters
from engine.telemetry.log import Log
from engine.telemetry.progress import Progress
from engine.training.adapter_source import adapter_source
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
            initialise_adapters(adapters, config.train.seed, gaussian=config.lora.init == "gaussian")
        else:
            start = adapter_source(config, source, plan)
            load_parameters(adapters + [shard for shard in base if shard.name in start], start)
    flat.publish()
