"""The forms that the adapters of a mixture of experts have in a folder, and the adapters that each can hold.

| form         | the experts' factors                                    | readers                                  |
|--------------|---------------------------------------------------------|------------------------------------------|
| per_expert   | each expert's apart, by the names of the checkpoint     | PEFT, vLLM                               |
| stacked      | a stack for each parameter, PEFT's `target_parameters`  | PEFT; vLLM for models that are stored so |
| shared_outer | a stack for each linear, shared factors once            | SGLang and vLLM, where an option says so |

PEFT stacks separate adapters, as transformers stacks the experts, and has rules of its own:

* a target such as `gate_proj` means the experts of all layers, and never an MLP beside them;
* gate and up of all experts are one parameter, whose adapter has twice the rank and twice the alpha.

For a model whose experts it keeps separate, vLLM matches stacks with no module, and computes without them: it skips its
check of names where one holds `base_layer`. An adapter that a reader would silently load otherwise than it was trained,
or not at all, is refused.

vLLM finds a linear by its path, so for vLLM alone a folder may hold linears beside the experts, such as those of dense
first layers and of shared experts. It also reads ranks and scales that PEFT does not read of experts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from engine.choices import AdapterForm, AdapterReader
from engine.conversion.expert_stacks import DOWN, GATE_UP, expert_module, routed_layers
from engine.conversion.vllm_adapters import reads_stacks, unread_by_vllm
from engine.layers.mlp import first_linears
from engine.models.decoder_config import DecoderConfig
from engine.models.names import fused_parts, is_shared_factor

_EXPERTS = ".mlp.experts."
_ROUTER = ".mlp.router"
_STACKED_ALONE = ("gpt_oss", "granitemoehybrid", "kimi_linear", "qwen3_5_moe_text", "gemma4_text")
"""Families of which PEFT and servers read no adapters of single experts: their checkpoints have them stacked, or PEFT's
table lacks them and vLLM loads their adapters as stacks (`is_3d_moe_weight`), or has not been tried with them."""
_UNSTACKED_BY_PEFT = ("qwen2_moe", "lfm2_moe", "nemotron_h")
"""Families that PEFT 0.21.2 leaves out of its table of those that it stacks, though their experts are stacked: it finds
no module of an expert, and computes without its adapter."""
_OTHER_ROUTERS = (
    "glm4_moe", "glm4_moe_lite", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "minimax_m2",
    "ernie4_5_moe", "hunyuan_v1_moe",
    *_STACKED_ALONE, *_UNSTACKED_BY_PEFT,
)  # fmt: skip
"""Families whose routers do more than a product, so that PEFT's adapters of them are not known to be ours, or where it
opens none."""


def is_expert(module: str) -> bool:
    """Returns whether an engine module belongs to an expert that a router chooses."""
    return _EXPERTS in module


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedAdapters:
    """The trained parameters of a run, as far as a folder's form depends on them.

    Args:
        adapters: engine module -> rank and scale of its adapter; of each expert, also where they share factors.
        in_full: engine modules that were trained in full.
        shared: names of the factors that all experts of a layer share.
        rslora: scales are alpha / sqrt(rank).
    """

    adapters: Mapping[str, tuple[int, float]]
    in_full: Collection[str]
    shared: Collection[str]
    rslora: bool

    @property
    def experts(self) -> list[str]:
        return [module for module in self.adapters if is_expert(module)]

    @property
    def expert_linears(self) -> set[str]:
        """The names of the experts' linears that have adapters."""
        return {part.rpartition(".")[2] for module in self.experts for part in fused_parts(module)}

    def missing_linear(self, decoder: DecoderConfig) -> str | None:
        """Returns the first of an expert's linears, three or, without a gate, two, that has no adapter in any."""
        linears = (*first_linears(decoder.activation), *DOWN)
        return next((leaf for leaf in linears if leaf not in self.expert_linears), None)

    @property
    def beside_experts(self) -> list[str]:
        """The linears of dense layers and of shared experts, in order."""
        return sorted(one for one in self.adapters if ".mlp." in one and not is_expert(one) and _ROUTER not in one)


def obstacle(
    trained: TrainedAdapters, decoder: DecoderConfig, form: AdapterForm, reader: AdapterReader | None = None
) -> str | None:
    """Returns the reason why a reader would not compute with the adapters as they were trained; None where it does.

    Args:
        decoder: of the base.
        reader: None for those that `form` is made for. For vLLM, the forms that its version 0.33 reads.
    """
    if reader == "vllm" and (reason := unread_by_vllm(trained.adapters, decoder)) is not None:
        return reason
    if not decoder.num_experts:
        return None if form == "per_expert" else f"{decoder.family} models have no experts that a router chooses"
    for module in trained.in_full:
        if ".mlp." in module:
            return f"{module} was trained in full, and PEFT saves no part of a layer with experts"
    routers = [module for module in trained.adapters if _ROUTER in module]
    if routers and decoder.family in _OTHER_ROUTERS:
        return f"{routers[0]} has an adapter, but to PEFT a router of a {decoder.family} model is no linear"
    if (beside := trained.beside_experts) and not (reader == "vllm" and form == "per_expert"):
        return f"{beside[0]} has an adapter, whose name means the experts to PEFT"
    gates = [one for one in (*beside, *routers) if not one.endswith("_proj")]
    if gates and (form == "shared_outer" or reader in ("vllm", "sglang")):
        return f"{gates[0]} has an adapter, and vLLM and SGLang have not been tried with those"
    if not trained.experts:
        return None if form == "per_expert" else "no expert has an adapter"
    if decoder.family in _STACKED_ALONE and form != "stacked":
        first = min(trained.experts)
        return f"{first} has an adapter of its own, and PEFT has one for all experts of a {decoder.family} model"
    if form != "per_expert" and "gate_proj" not in first_linears(decoder.activation):
        return f"the experts of a {decoder.family} model have no gates, and this form is of experts that have"
    if form == "stacked":
        return _of_stacks(trained, decoder, reader)
    if form == "shared_outer":
        return _of_outer(trained, decoder, reader)
    return _of_each(trained, decoder, reader)


def _of_stacks(trained: TrainedAdapters, decoder: DecoderConfig, reader: AdapterReader | None) -> str | None:
    if reader == "sglang":
        return "SGLang has no form in which gate and up of the experts are one parameter"
    if reader == "vllm":
        return _of_stacks_in_vllm(trained, decoder)
    for layer in routed_layers(decoder):
        for parts in ((*GATE_UP, "gate_up_proj"), DOWN):
            scales = {
                scale
                for module in trained.experts
                if module.startswith(f"layers.{layer}.") and module.rpartition(".")[2] in parts
                for scale in (trained.adapters[module][1],)
            }
            if len(scales) > 1:
                return f"the adapters of {parts[0]} in layer {layer} differ in scale, and their stack has one"
    return None


def _of_stacks_in_vllm(trained: TrainedAdapters, decoder: DecoderConfig) -> str | None:
    if not reads_stacks(decoder):
        if decoder.family in _STACKED_ALONE:
            return f"vLLM has not been tried with the stacks of a {decoder.family} model without its tower"
        return f"vLLM knows the experts of {decoder.family} apart, and would load their stacks and compute without them"
    if (missing := trained.missing_linear(decoder)) is not None:
        return f"the experts' {missing} has no adapter, and vLLM reads stacks of all linears together"
    if trained.rslora:
        return "lora.rslora is true, and vLLM takes the rank of each expert for that of gate and up together"
    if len({trained.adapters[module] for module in trained.experts}) > 1:
        return "the experts' adapters differ in rank or alpha, of which vLLM takes one for all"
    return None


def _of_each(trained: TrainedAdapters, decoder: DecoderConfig, reader: AdapterReader | None) -> str | None:
    if reader == "sglang":
        return "SGLang is only known to read experts in the form of shared outer factors"
    if reason := _incomplete(trained, decoder, "vLLM" if reader == "vllm" else "PEFT"):
        return reason
    if reader == "vllm":
        return _of_each_in_vllm(trained, decoder)
    if decoder.family in _UNSTACKED_BY_PEFT:
        return f"PEFT does not stack the experts' adapters of a {decoder.family} model, and would compute without them"
    routers = {module for module in trained.adapters if _ROUTER in module}
    if routers and (without := [i for i in routed_layers(decoder) if f"layers.{i}{_ROUTER}" not in routers]):
        return f"layers.{without[0]}{_ROUTER} has no adapter, and PEFT gives one to all routers or to none"
    if len(set(trained.adapters.values())) > 1:
        return "the adapters differ in rank or alpha, which PEFT does not read of experts"
    leaves = {module.rpartition(".")[2] for module in trained.experts}
    if trained.rslora and leaves & {"gate_proj", "gate_up_proj"}:
        return "lora.rslora is true, whose scale PEFT changes when it joins the experts' gate_proj and up_proj"
    return None


def _of_each_in_vllm(trained: TrainedAdapters, decoder: DecoderConfig) -> str | None:
    if (missing := trained.missing_linear(decoder)) is not None:
        return f"the experts' {missing} has no adapter, and vLLM reads adapters of experts' linears together"
    ranks: dict[tuple[str, str], int] = {}
    for module in trained.experts:
        layer, leaf = module.partition(_EXPERTS)[0], module.rpartition(".")[2]
        if ranks.setdefault((layer, leaf), trained.adapters[module][0]) != trained.adapters[module][0]:
            return f"the adapters of {layer}'s {leaf} differ in rank from expert to expert, which vLLM does not read"
    return None


def _of_outer(trained: TrainedAdapters, decoder: DecoderConfig, reader: AdapterReader | None) -> str | None:
    if reader == "peft":
        return "PEFT has no form in which experts share factors"
    if not any(is_shared_factor(name) for name in trained.shared):
        return "the experts share no factors (lora.experts per_expert)"
    if reason := _incomplete(trained, decoder, "a server"):
        return reason
    if (missing := trained.missing_linear(decoder)) is not None:
        return f"the experts' {missing} has no adapter, and vLLM reads this form with all linears"
    if len(set(trained.adapters.values())) > 1:
        return "the adapters differ in rank or alpha, of which this form has one"
    return None


def _incomplete(trained: TrainedAdapters, decoder: DecoderConfig, reader: str) -> str | None:
    """Returns the reason where a linear of some expert has no adapter and that of another has."""
    leaves = {module.rpartition(".")[2] for module in trained.experts}
    gated = "gate_proj" in first_linears(decoder.activation)
    if gated and "gate_up_proj" not in leaves and ("gate_proj" in leaves) != ("up_proj" in leaves):
        return f"of the experts' gate_proj and up_proj, which are one parameter to {reader}, one alone has adapters"
    count = decoder.num_experts
    every = {expert_module(i, e, leaf) for i in routed_layers(decoder) for e in range(count) for leaf in leaves}
    if missing := sorted(every - set(trained.experts)):
        return f"{missing[0]} has no adapter, and {reader} gives one to all experts or to none"
    return None


def fitting_form(trained: TrainedAdapters, decoder: DecoderConfig, reader: AdapterReader | None) -> AdapterForm | None:
    """Returns the first form that a reader computes with as it was trained; None where there is none."""
    forms: tuple[AdapterForm, ...] = ("per_expert", "stacked", "shared_outer")
    return next((form for form in forms if obstacle(trained, decoder, form, reader) is None), None)


def advice(trained: TrainedAdapters, decoder: DecoderConfig, reader: AdapterReader | None) -> str:
    """Returns the remedy where a form has an obstacle: the first form that has none, else the merge."""
    fitting = None if not decoder.num_experts else fitting_form(trained, decoder, reader)
    if fitting == "per_expert":
        return "export with --adapter-form per_expert"
    way = "--format hf --merge" if fitting is None else f"--adapter-form {fitting}"
    alone = reader is None and obstacle(trained, decoder, "per_expert", "vllm") is None
    return f"export with {way}{', or for vLLM alone with --reader vllm' if alone else ''}"


def readers_line(form: AdapterForm, decoder: DecoderConfig, *, alone: bool) -> str:
    """Returns the line that names the readers of a folder of this form.

    Args:
        alone: PEFT would read it otherwise than vLLM.
    """
    if alone:
        return "every adapter is named by the path of its linear, which vLLM reads; PEFT would not read it as trained"
    if form == "shared_outer":
        return (
            "the experts' factors are in the form of shared outer factors: SGLang reads them with "
            "--experts-shared-outer-loras, vLLM with --enable-moe-shared-loras, and PEFT not at all"
        )
    if form == "per_expert":
        return "each expert's factors are apart: PEFT and vLLM read them so"
    servers = " alone: vLLM would load them and compute without them"
    if reads_stacks(decoder):
        servers = ", and by vLLM from 0.33 on, with a --max-lora-rank of twice their rank"
    elif decoder.family in _STACKED_ALONE or not decoder.num_experts:
        servers = "; vLLM has not been tried with them"
    return f"the experts' factors are stacked (target_parameters): read by PEFT{servers}"
