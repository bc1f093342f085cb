"""Rules for keys about experts that a router chooses, which several trainers have."""

from __future__ import annotations

import re

from rankfold.migrating.conversion import Conversion, names, sets
from rankfold.migrating.given import Given

COEFFICIENT = "train.router_aux_loss_coef"
_PARAMETER = re.compile(
    r"(?:(?:.*\.)?(?:layers\.)?(\d+)\.)?(?:(?:mlp|feed_forward)\.)?experts\.(gate_up_proj|down_proj)"
)
"""PEFT's name of all experts' matrices of a kind, in all layers or in one."""
_LEAVES = {"gate_up_proj": "(gate|up)_proj", "down_proj": "down_proj"}


@sets("lora.targets", "lora.fused")
def target_parameters(conversion: Conversion, given: Given) -> None:
    """Converts PEFT's parameters of experts, which have one A for gate and up, to targets beside the others."""
    found = names(given) if given.value not in (None, "None") else []
    matches = [_PARAMETER.fullmatch(name) for name in found]
    if not found:
        conversion.drop(given, "none")
        return
    if None in matches:
        unknown = next(name for name, match in zip(found, matches, strict=True) if match is None)
        conversion.unsupported(given, f"{unknown} is no parameter of experts; adapters are on linears")
        return
    layers = [(f"layers\\.{match[1]}\\.mlp\\." if match[1] else "", match[2]) for match in matches if match]
    targets = [rf"{layer}experts\.\d+\.{_LEAVES[leaf]}" for layer, leaf in layers]
    fused = any(leaf == "gate_up_proj" for _, leaf in layers)
    said = ", with lora.fused: gate_up" if fused else ""
    conversion.add_fact(given, "expert targets", targets, f"lora.targets: {', '.join(targets)} too{said}")
    conversion.facts["expert targets fused"] = fused


def add_expert_targets(conversion: Conversion) -> None:
    """Adds the targets of experts to those of linears, once these are known."""
    if not (targets := conversion.facts.get("expert targets")):
        return
    found = conversion.options.get("lora.targets", [])
    if "all-linear" not in found:
        conversion.options["lora.targets"] = [*found, *targets]
    if conversion.facts["expert targets fused"]:
        conversion.set_default(
            "derived", "target_parameters", "lora.fused", "gate_up", "one A for gate and up, as in PEFT"
        )


def set_coefficient(conversion: Conversion) -> None:
    """Sets the coefficient of the routers' auxiliary loss, which a config.json asks for by two keys together."""
    facts = conversion.facts
    if facts.get("router_logits") and "router_coefficient" in facts:
        conversion.set_default("derived", "router_aux_loss_coef", COEFFICIENT, facts["router_coefficient"])
    elif facts.get("router_logits"):
        conversion.to_fill.append(f"{COEFFICIENT}: router_aux_loss_coef in the model's config.json")
