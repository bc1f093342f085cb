"""Adapters that PEFT reads and vLLM does not, or computes without: facts of the sources of its version 0.33.0.

They are facts of another program, with the place that shows each; nothing here decides how an adapter is written.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.models.decoder_config import DecoderConfig

WITHOUT_ADAPTERS = {
    "bamba": "vLLM has no bamba models since version 0.23",  # model_executor/models/registry.py
    "kimi_linear": "vLLM 0.33 serves no adapters of kimi_linear models",  # models/kimi_k3: no SupportsLoRA
}
"""Families of which vLLM serves no adapters -> the reason."""
IGNORED_ROUTERS = ("nemotron_h",)
"""Families whose routers it leaves out (lora/model_manager.py, `_create_lora_modules`)."""


def unread_by_vllm(modules: Iterable[str], decoder: DecoderConfig) -> str | None:
    """Returns the reason why vLLM would not compute with all of these adapters, whatever their form; None otherwise.

    Args:
        modules: engine modules with adapters.
        decoder: of the base.
    """
    if (reason := WITHOUT_ADAPTERS.get(decoder.family)) is not None:
        return reason
    for module in sorted(modules):
        if module.endswith(".kv_b_proj"):
            return f"{module} has an adapter, and vLLM generates with that matrix multiplied into others, without it"
        if decoder.family in IGNORED_ROUTERS and module.endswith(".mlp.router"):
            return f"{module} has an adapter, and vLLM leaves out those of routers of {decoder.family} models"
        # its matrix of queries, keys and values has the keys' weight twice, but not their adapter (models/gemma4.py)
        if module.endswith(".attention.k_proj") and _are_values(module, decoder):
            return f"{module} has an adapter, and its outputs are values too, which vLLM computes without it"
    return None


def reads_stacks(decoder: DecoderConfig) -> bool:
    """Returns whether vLLM knows the experts stacked, so that it finds PEFT's stacks (`is_3d_moe_weight`): of
    Qwen3.5-MoE as it is released, with its tower (models/qwen3_5.py)."""
    return decoder.family == "qwen3_5_moe_text" and bool(decoder.fronts)


def _are_values(module: str, decoder: DecoderConfig) -> bool:
    """Returns whether the keys of a module such as `layers.5.attention.k_proj` are the values of its layer as well."""
    return any(variant.values_are_keys for variant in decoder.variants_at(int(module.split(".")[1])))
