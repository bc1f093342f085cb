"""What the parameters of a run start with: a checkpoint, a PEFT adapter, or numbers drawn anew."""

from __future__ import annotations

from engine.checkpoint.loading import load_parameters
from engine.checkpoint.merge import fully_trained
from engine.checkpoint.peft_read import AdapterSource
from engine.checkpoint.source import ModelFolder
from engine.config.run import RunConfig
from engine.errors import UserError
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
            initialise_adapters(adapters, config.train.seed, gaussian=config.lora.init == "gaussian")
        else:
            start = _adapter_source(config, source.model, plan)
            if source.weights is not None:
                start.require_base(source.weights)
            load_parameters(adapters + [shard for shard in base if shard.name in start], start)
    flat.publish()


def _adapter_source(config: RunConfig, model: ModelFolder, plan: TrainingPlan) -> AdapterSource:
    """The PEFT adapter of `lora.init_from`, found to be what this run would train."""
    lora = config.lora
    assert lora.init_from is not None
    source = AdapterSource(
        lora.init_from, names=model.names, decoder=model.decoder, fused_qkv=lora.fused_qkv, with_saved_modules=True
    )
    names = [entry.name for entry in shard_entries(meta_model(model.decoder, plan=plan))]
    modules = [name.rpartition(".")[0] for name in names if name.endswith(".lora_A")]
    settings = {module: found for module in modules if (found := plan.adapter(module)) is not None}
    source.require_matching({module: (found.rank, found.scale) for module, found in settings.items()})
    for name in fully_trained(source.tensor_names()):
        if not plan.trains(name.rpartition(".")[0]):
            raise UserError(
                f"the adapter in {lora.init_from} has {name} trained in full (modules_to_save), which this run does "
                f"not train: add {name.rpartition('.')[0]} to trainable."
            )
    return source
