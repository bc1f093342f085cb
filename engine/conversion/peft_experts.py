"""The adapters of a mixture of experts that a PEFT folder can hold.

A folder has each expert's factors apart, by the names of the checkpoint. vLLM reads them as they are. PEFT stacks them,
as transformers stacks the experts, and has rules of its own:

* a target such as `gate_proj` means the experts of all layers, and never an MLP beside them;
* gate and up of all experts are one parameter, whose adapter has twice the rank and twice the alpha.

What these rules would change is refused, because PEFT would load it without a word.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from engine.models.decoder_config import DecoderConfig

_EXPERTS = ".mlp.experts."


def is_expert(module: str) -> bool:
    """Returns whether an engine module belongs to an expert that a router chooses."""
    return _EXPERTS in module


def obstacle(
    adapted: Collection[str],
    in_full: Iterable[str],
    decoder: DecoderConfig,
    *,
    alike: bool,
    rslora: bool,
) -> str | None:
    """Returns the reason why PEFT would not compute with the adapters as they were trained; None where it does.

    Args:
        adapted: engine modules that have an adapter.
        in_full: engine modules that were trained in full.
        decoder: of the base.
        alike: all adapters have one rank and one alpha.
        rslora: scales are alpha / sqrt(rank).
    """
    if decoder.routed is None:
        return None
    for module in in_full:
        if ".mlp." in module:
            return f"{module} was trained in full, and PEFT saves no part of a layer with experts"
    experts = set(filter(is_expert, adapted))
    beside = sorted(module for module in adapted if ".mlp." in module and module not in experts)
    if beside:
        return f"{beside[0]} has an adapter, whose name means the experts to PEFT"
    if not experts:
        return None
    leaves = {module.rpartition(".")[2] for module in experts}
    if ("gate_proj" in leaves) != ("up_proj" in leaves):
        return "of the experts' gate_proj and up_proj, which are one parameter to PEFT, one alone has adapters"
    layers = [index for index in range(decoder.num_layers) if decoder.routed_at(index) is not None]
    count = decoder.routed.rule.num_experts
    every = {f"layers.{i}{_EXPERTS}{e}.{leaf}" for i in layers for e in range(count) for leaf in leaves}
    if missing := sorted(every - experts):
        return f"{missing[0]} has no adapter, and PEFT gives one to all experts or to none"
    if not alike:
        return "the adapters differ in rank or alpha, which PEFT does not read of experts"
    if rslora and "gate_proj" in leaves:
        return "lora.rslora is true, whose scale PEFT changes when it joins the experts' gate_proj and up_proj"
    return None
