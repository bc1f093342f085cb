"""From the configuration's names and patterns to what each module of this model does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.checkpoint.merge import unfused_modules
from engine.config.lora import LoraOptions
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
        _require_patterns(config.lora, candidates, decoder)
        adapted = {name for name, aliases in candidates.items() if config.lora.targets_module(name, aliases)}
        if config.lora.fused_qkv:
            adapted = _fuse(adapted)
    if (config.lora.dora or config.lora.bias) and "embed_tokens" in adapted:
        option = "dora" if config.lora.dora else "bias"
        raise UserError(
            f"lora.{option} is true and lora.targets has embed_tokens, but that is for linears: remove it from "
            "lora.targets, or add it to lora.exclude."
        )
    if both := sorted(trained & adapted):
        raise UserError(
            f"{both[0]} is in lora.targets and in trainable, but a module is either trained in full or carries an "
            "adapter: remove it from one of them (lora.rank 0 trains without adapters)."
        )
    settings = {module: _settings(config.lora, module, modules) for module in sorted(adapted)}
    return TrainingPlan(
        trains=trained.__contains__,
        adapter=settings.get,
        fused_qkv=config.lora.fused_qkv,
        seed=config.train.seed,
    )


def _require_patterns(lora: LoraOptions, candidates: Mapping[str, Sequence[str]], decoder: DecoderConfig) -> None:
    """Raises UserError where an option about some of the adapters means no module at all."""
    for option, patterns in (
        ("lora.exclude", lora.exclude),
        ("lora.rank_pattern", tuple(lora.rank_pattern or ())),
        ("lora.alpha_pattern", tuple(lora.alpha_pattern or ())),
    ):
        require_matched(option, patterns, candidates, matches_target)
    if beyond := [layer for layer in lora.layers or () if layer >= decoder.num_layers]:
        raise UserError(
            f"lora.layers has {beyond[0]}, but the model has {decoder.num_layers} layers, counted from 0: remove it."
        )


def _settings(lora: LoraOptions, module: str, modules: Mapping[str, Sequence[str]]) -> AdapterSettings:
    """What the adapter on `module` looks like.

    Args:
        modules: each module of the model -> its names in the checkpoint.
    """
    parts = unfused_modules(module)
    found = {(lora.rank_of(part, modules[part]), lora.scale_of(part, modules[part])) for part in parts}
    if len(found) > 1:
        raise UserError(
            f"lora.rank_pattern and lora.alpha_pattern tell {', '.join(parts)} apart, but lora.fused_qkv gives them "
            "one adapter: give them one rank and alpha, or set lora.fused_qkv to false."
        )
    ((rank, scale),) = found
    return AdapterSettings(rank=rank, scale=scale, dropout=lora.dropout, dora=lora.dora, bias=lora.bias)


def _fuse(adapted: set[str]) -> set[str]:
    """q, k and v targets become their layer's one fused adapter."""
    fused = set()
    for name in adapted:
        parent, _, leaf = name.rpartition(".")
        if leaf not in ("q_proj", "k_proj", "v_proj"):
            fused.add(name)
            continue
        whole = f"{parent}.qkv_proj"
        if missing := sorted(set(unfused_modules(whole)) - adapted):
            raise UserError(
                f"lora.fused_qkv gives query, key and value one adapter, but {missing[0]} is not to have one: add it "
                "to lora.targets, remove it from lora.exclude, or set lora.fused_qkv to false."
            )
        fused.add(whole)
    return fused
