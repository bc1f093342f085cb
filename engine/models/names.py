"""Logical parameter names of the decoder, and their places in a Hugging Face checkpoint.

The engine's names:

    embed_tokens.weight
    layers.{i}.input_norm.weight
    layers.{i}.attention.{q_proj,k_proj,v_proj,o_proj}.{weight,bias}
    layers.{i}.attention.{q_norm,k_norm}.weight
    layers.{i}.post_attention_norm.weight
    layers.{i}.mlp.{gate_proj,up_proj,down_proj}.{weight,bias}
    norm.weight
    lm_head.weight                         absent when embeddings are tied

Adapters add `<module>.lora_A` [rank, in] and `<module>.lora_B` [out, rank]; a fused query-key-value adapter belongs to
module `layers.{i}.attention.qkv_proj`. Layer indices are those of the whole model, on every rank.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

_LAYER = re.compile(r"^layers\.(\d+)\.(.+)$")


class HfLocation(NamedTuple):
    """A logical tensor inside a Hugging Face one: rows [row_offset, +num_rows) of `name`; num_rows None means all."""

    name: str
    row_offset: int = 0
    num_rows: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NameMap:
    """One family's table, read in both directions.

    Args:
        layer_modules: engine module name inside a layer -> Hugging Face module name inside a layer.
        body: prefix of the decoder's body in the checkpoint ("model." usually; "llm.model." or
            "model.language_model." where the language model is nested).
        head: full module name of the output head.
    """

    layer_modules: dict[str, str]
    body: str = "model."
    head: str = "lm_head"

    def module_to_hf(self, module: str) -> str:
        """Hugging Face module name of an engine module such as `layers.3.attention.q_proj`."""
        if module == "lm_head":
            return self.head
        if match := _LAYER.match(module):
            return f"{self.body}layers.{match[1]}.{self.layer_modules[match[2]]}"
        return self.body + module

    def to_hf(self, name: str) -> HfLocation:
        """Where the logical tensor `name` lies."""
        module, _, leaf = name.rpartition(".")
        return HfLocation(f"{self.module_to_hf(module)}.{leaf}")

    def module_from_hf(self, hf_module: str) -> str | None:
        """Engine module of a Hugging Face one, or None when the family has no such module."""
        if hf_module == self.head:
            return "lm_head"
        if not hf_module.startswith(self.body):
            return None
        rest = hf_module[len(self.body) :]
        if match := _LAYER.match(rest):
            for engine_name, hf_name in self.layer_modules.items():
                if hf_name == match[2]:
                    return f"layers.{match[1]}.{engine_name}"
            return None
        return rest if rest in ("embed_tokens", "norm") else None


def nest(names: NameMap, tensor_names: list[str]) -> NameMap:
    """The map with body and head prefixes as the checkpoint `tensor_names` has them."""
    suffix = "embed_tokens.weight"
    bodies = [name[: -len(suffix)] for name in tensor_names if name.endswith(suffix)]
    heads = [name.removesuffix(".weight") for name in tensor_names if name.endswith("lm_head.weight")]
    return NameMap(
        layer_modules=names.layer_modules,
        body=min(bodies, key=len) if bodies else names.body,
        head=min(heads, key=len) if heads else names.head,
    )
