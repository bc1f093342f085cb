"""From the configuration's names and patterns to what each module of this model does."""

from __future__ import annotations

from engine.config.matching import matches_target, matches_trainable, require_matched
from engine.config.run import RunConfig
from engine.errors import UserError
from engine.layers.plan import AdapterSettings, TrainingPlan
from engine.models.config import DecoderConfig
from engine.models.describe import module_names
from engine.models.names import NameMap


def _carries_adapter(module: str) -> bool:
    leaf = module.rpartition(".")[2]
    return leaf.endswith("_proj") or leaf in ("lm_head", "embed_tokens")


def training_plan(config: RunConfig, decoder: DecoderConfig, names: NameMap) -> TrainingPlan:
    """Which modules of the model train in full, which carry an adapter.

    Raises:
        UserError: a pattern that matches nothing, or a module that is asked to do both.
    """
    modules = {name: [names.module_to_hf(name)] for name in module_names(decoder)}
    trained = {name for name, aliases in modules.items() if matches_trainable(name, config.trainable, aliases)}
    require_matched("trainable", config.trainable, modules, matches_trainable)
    adapted: set[str] = set()
    if config.lora.rank > 0:
        candidates = {name: list(aliases) for name, aliases in modules.items() if _carries_adapter(name)}
        if config.lora.fused_qkv:
            for index in range(decoder.num_layers):
                candidates[f"layers.{index}.attention.qkv_proj"] = []
        require_matched("lora.targets", config.lora.targets, candidates, matches_target)
        adapted = {name for name, aliases in candidates.items() if matches_target(name, config.lora.targets, aliases)}
        if config.lora.fused_qkv:
            adapted = _fuse(adapted)
    if both := sorted(trained & adapted):
        raise UserError(
            f"{both[0]} is in lora.targets and in trainable, but a module is either trained in full or carries an "
            "adapter: remove it from one of them (lora.rank 0 trains without adapters)."
        )
    settings = AdapterSettings(rank=config.lora.rank, scale=config.lora.scale, dropout=config.lora.dropout)
    return TrainingPlan(
        trains=trained.__contains__,
        adapter=lambda module: settings if module in adapted else None,
        fused_qkv=config.lora.fused_qkv,
        seed=config.train.seed,
    )


def _fuse(adapted: set[str]) -> set[str]:
    """q, k and v targets become their layer's one fused adapter."""
    fused = set()
    for name in adapted:
        parent, _, leaf = name.rpartition(".")
        fused.add(f"{parent}.qkv_proj" if leaf in ("q_proj", "k_proj", "v_proj") else name)
    return fused
