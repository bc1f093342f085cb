"""Plans the role of each module of this model, from the configuration's names and patterns."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from engine.choices import VISION
from engine.config.lora import LoraOptions
from engine.config.matching import ALL_LINEARS, BLOCK_LINEARS, matches_target, matches_trainable, require_matched
from engine.config.run import RunConfig
from engine.errors import UserError
from engine.layers.context import AdapterSettings, TrainingPlan
from engine.layers.mlp import first_linears
from engine.models.decoder_config import DecoderConfig
from engine.models.describe import module_names, vision_linears
from engine.models.names import (
    EXPERT_GATE_UP,
    FUSED,
    GATE_UP,
    KEY_VALUE,
    QKV,
    VISION_GATE_UP,
    VISION_QKV,
    NameMap,
    fused_parts,
)
from engine.seams import resolve


def _carries_adapter(module: str, decoder: DecoderConfig) -> bool:
    if module.startswith(VISION):
        return module in vision_linears(decoder)
    leaf = module.rpartition(".")[2]
    further = tuple(f".{name}" for variant in decoder.variants for name in variant.further_linears())
    return leaf.endswith("_proj") or leaf in ("lm_head", "embed_tokens", "router") or f".{module}".endswith(further)


def trains_apart(config: RunConfig, decoder: DecoderConfig, names: NameMap) -> bool:
    """Returns whether a run trains a copy of one side of a tied matrix, or of each: the model then has its own head.

    Args:
        decoder, names: of the model on the disk.
    """
    if not decoder.tied_embeddings or config.lora.rank == 0 or config.lora.ensure_weight_tying:
        return False
    return any(matches_trainable(end, config.trainable, names.aliases(end)) for end in ("embed_tokens", "lm_head"))


def decoder_in_training(config: RunConfig, decoder: DecoderConfig, names: NameMap) -> DecoderConfig:
    """Returns the model as a run trains it, see `trains_apart`; for callers that have no folder of it."""
    if (head := config.objective.kind.head) is not None:
        found: DecoderConfig = resolve(head).decoder(decoder)
        return found
    return replace(decoder, tied_embeddings=decoder.tied_embeddings and not trains_apart(config, decoder, names))


def training_plan(config: RunConfig, decoder: DecoderConfig, names: NameMap) -> TrainingPlan:
    """Plans which modules of the model train in full, and which carry an adapter.

    Raises:
        UserError: a pattern matches nothing, a module is asked to do both, or an adapter to start from cannot be read.
    """
    config = replace(config, lora=_meant_targets(config.lora, decoder))
    modules = {name: names.aliases(name) for name in module_names(decoder)}
    trained = {name for name, aliases in modules.items() if matches_trainable(name, config.trainable, aliases)}
    require_matched("trainable", config.trainable, modules, matches_trainable)
    trained.update(decoder.always_trained)
    settings: dict[str, AdapterSettings] = {}
    if config.lora.rank > 0:
        candidates = {name: aliases for name, aliases in modules.items() if _carries_adapter(name, decoder)}
        fusable = _fusable(config.lora, decoder, names)
        for fused in fusable:
            for part in fused_parts(fused):
                candidates[part] = [*candidates[part], fused]  # a pattern may name the fused module
        require_matched("lora.targets", config.lora.targets, candidates, matches_target)
        _require_patterns(config.lora, candidates, decoder)
        settings = {
            name: _settings(config.lora, name, aliases)
            for name, aliases in candidates.items()
            if config.lora.targets_module(name, aliases)
        }
        for fused in fusable:
            _fuse(settings, fused, asked=config.lora.fused != "auto")
    if (config.lora.dora or config.lora.bias) and "embed_tokens" in settings:
        option = "dora" if config.lora.dora else "bias"
        raise UserError(
            f"lora.{option} is true and lora.targets has embed_tokens, but that is for linears: remove it from "
            "lora.targets, or add it to lora.exclude."
        )
    if both := sorted(part for module in settings for part in fused_parts(module) if part in trained):
        raise UserError(
            f"{both[0]} is in lora.targets and in trainable, but a module is either trained in full or carries an "
            "adapter: remove it from one of them (lora.rank 0 trains without adapters)."
        )
    if config.lora.rank > 0 and config.lora.ensure_weight_tying:
        _check_tying(decoder, trained, settings)
    if config.lora.experts != "per_expert" and not any(".experts." in module for module in settings):
        raise UserError(
            f"lora.experts is {config.lora.experts}, but no expert that a router chooses is to have an adapter: add "
            "their linears to lora.targets, or set lora.experts to per_expert."
        )
    return TrainingPlan(
        trains=trained.__contains__,
        adapter=settings.get,
        fused={name for name in settings if fused_parts(name) != [name]}.__contains__,
        experts=config.lora.experts,
        merge_aware=config.lora.merge_aware,
        seed=config.train.seed,
    )


def block_linears(decoder: DecoderConfig) -> tuple[str, ...]:
    """Returns the names of the linears of attention and MLP, which carry adapters where no target is named."""
    absent = set(first_linears("silu")) - set(first_linears(decoder.activation))  # of an MLP without a gate
    names = tuple(name for name in BLOCK_LINEARS if name not in absent)
    for variant in decoder.variants:
        names = variant.linears(names)
    return names


def _meant_targets(lora: LoraOptions, decoder: DecoderConfig) -> LoraOptions:
    """Returns the options with the model's own linears in place of those of a plain layer, where these are the targets
    by default or by all-linear."""
    by_default = lora.targets == BLOCK_LINEARS
    if by_default and not decoder.all_linears:
        lora = replace(lora, targets=block_linears(decoder))
    if decoder.usual_linears and (by_default or lora.targets == (ALL_LINEARS,)):
        return replace(lora, targets=(*lora.targets, *decoder.usual_linears))
    if not decoder.all_linears:
        return lora
    given = (ALL_LINEARS,) if by_default else lora.targets
    spelled = [name for target in given for name in (decoder.all_linears if target == ALL_LINEARS else (target,))]
    return replace(lora, targets=tuple(spelled))


def _check_tying(decoder: DecoderConfig, trained: Collection[str], adapted: Collection[str]) -> None:
    """Raises UserError where lora.ensure_weight_tying has no effect, or would apply to adapters."""
    ends = ("embed_tokens", "lm_head")
    if not decoder.tied_embeddings:
        raise UserError(
            "lora.ensure_weight_tying is true, but this model has a head of its own (tie_word_embeddings is false): "
            "set lora.ensure_weight_tying to false."
        )
    if both := [end for end in ends if end in adapted]:
        raise UserError(
            f"lora.ensure_weight_tying is true and lora.targets has {both[0]}, but adapters that embedding and head "
            "share are not supported: name it in trainable, or set lora.ensure_weight_tying to false."
        )
    if not any(end in trained for end in ends):
        raise UserError(
            "lora.ensure_weight_tying is true, but neither embed_tokens nor lm_head is in trainable, so that both stay "
            "frozen: name one of them there, or set lora.ensure_weight_tying to false."
        )


def fusing_lines(plan: TrainingPlan, decoder: DecoderConfig, names: NameMap) -> list[str]:
    """Returns the log lines where the checkpoint stores modules as one matrix, or where several share one adapter."""
    lines: list[str] = []
    for kind, parts in FUSED.items() if not decoder.all_linears else ():
        if kind == EXPERT_GATE_UP:
            continue  # PEFT has one adapter or two there, as its user asks
        layers = [f"layers.{index}" for index in range(decoder.num_layers)]
        whole = any(plan.adapter(f"{layer}.{kind}") for layer in layers)
        apart = any(plan.adapter(f"{layer}.{part}") for layer in layers for part in parts)
        short, leaves = kind.rpartition(".")[2], ", ".join(part.rpartition(".")[2] for part in parts)
        if whole and kind in names.fused:
            lines.append(
                f"{short}: one adapter for the whole matrix, as in PEFT (lora.fused none: one each for {leaves})"
            )
        elif whole:
            lines.append(f"note: {leaves} share one adapter, where PEFT trains one each (lora.fused none)")
        if apart and kind in names.fused:
            lines.append(
                f"note: one adapter each for parts of {short}, where PEFT trains one for the whole matrix (lora.fused "
                f"auto, with all of {leaves} in lora.targets and of one rank and alpha)"
            )
    return list(dict.fromkeys(lines))  # experts have parts of one name


def bare_mixers_line(plan: TrainingPlan, decoder: DecoderConfig) -> str | None:
    """Returns the log line of layers that carry a state and have no adapter on what makes it, while attention of other
    layers has; None where there are none."""
    adapted = {name for name in module_names(decoder) if plan.adapter(name) is not None}
    if not any(".attention." in name for name in adapted):
        return None
    bare = []
    for index in range(decoder.num_layers):
        linears = {name for variant in decoder.variants_at(index) for name in variant.mixer_linears()}
        own = {name.rpartition(".")[2] for name in adapted if name.startswith(f"layers.{index}.")}
        if linears and not linears & own:
            bare.append(index)
    if not bare:
        return None
    return (
        f"note: the mixers of {len(bare)} of {decoder.num_layers} layers have no adapter, since lora.targets names "
        f"none of {', '.join(decoder.mixer_linears)} (all-linear means these too)"
    )


def _fusable(lora: LoraOptions, decoder: DecoderConfig, names: NameMap) -> list[str]:
    """Returns the modules, such as `layers.3.attention.qkv_proj`, that one adapter is to stand for."""
    if lora.fused == "auto" and lora.init_from is not None:
        found: list[str] = resolve("engine.conversion.peft_read:fused_modules")(lora.init_from, names, decoder)
        return found
    qkv, gate_up = (QKV, VISION_QKV), (GATE_UP, VISION_GATE_UP)
    every = (*qkv, *gate_up, KEY_VALUE)
    asked = {"auto": names.fused, "none": (), "qkv": qkv, "gate_up": gate_up, "all": every}[lora.fused]
    kinds = [kind for kind in asked if all(part in names.layer_modules for part in FUSED[kind])]
    fused = [f"layers.{index}.{kind}" for index in range(decoder.num_layers) for kind in kinds]
    return [place for module in fused for place in _places(module, decoder)]


def _places(fused: str, decoder: DecoderConfig) -> list[str]:
    """Returns the modules that the layer has in place of a plain layer's."""
    layer, _, inside = fused.removeprefix("layers.").partition(".")
    places: tuple[str, ...] = (inside,)
    for variant in decoder.variants_at(int(layer)):
        places = tuple(found for place in places for found in variant.fused_places(place))
    return [f"layers.{layer}.{module}" for module in places]


def _require_patterns(lora: LoraOptions, candidates: Mapping[str, Sequence[str]], decoder: DecoderConfig) -> None:
    """Raises UserError where an option for some of the adapters matches no module."""
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


def _settings(lora: LoraOptions, module: str, aliases: Sequence[str]) -> AdapterSettings:
    """Returns the settings of the adapter on `module`."""
    rank, scale = lora.rank_of(module, aliases), lora.scale_of(module, aliases)
    return AdapterSettings(rank=rank, scale=scale, dropout=lora.dropout, dora=lora.dora, bias=lora.bias)


def _fuse(settings: dict[str, AdapterSettings], fused: str, *, asked: bool) -> None:
    """Puts one adapter in the place of those of the parts of `fused`.

    Args:
        settings: engine module -> its adapter; changed in place.
        asked: the user wants it, so that parts that differ are refused and not left as they are.
    """
    parts = fused_parts(fused)
    missing = [part for part in parts if part not in settings]
    found = {settings[part] for part in parts if part in settings}
    if not missing and len(found) == 1:
        settings[fused] = found.pop()
        for part in parts:
            del settings[part]
    elif asked and missing and found:
        raise UserError(
            f"lora.fused gives {', '.join(parts)} one adapter, but {missing[0]} is not to have one: add it to "
            "lora.targets, remove it from lora.exclude, or set lora.fused to none."
        )
    elif asked and found:
        raise UserError(
            f"lora.rank_pattern and lora.alpha_pattern tell {', '.join(parts)} apart, but lora.fused gives them one "
            "adapter: give them one rank and alpha, or set lora.fused to none."
        )
