"""The same small models in stock transformers (and PEFT), with the same numbers, as the outside measure.

transformers takes seconds to import, so that happens inside the functions: ranks import this module and need none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engine.batch import IGNORE_LABEL, Batch
from engine.models.decoder_config import DecoderConfig
from engine.models.families import family_of
from engine.models.families.llama import NAMES, config_from_hf
from tests.distributed.cases import RANK, SCALE, Case, whole_parameters

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_SIZES = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
_LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}

STOCK_MODELS: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "llama3 rope": {"rope_parameters": _LLAMA3},
    "linear rope": {"rope_parameters": _LINEAR},
    "one head each": {"num_key_value_heads": 8, "head_dim": 4},
    "query and key norm": {},
}
"""What each model has beside the common sizes."""


def stock_config(name: str) -> PretrainedConfig:
    """The configuration of one of STOCK_MODELS."""
    from transformers import LlamaConfig, Qwen3Config

    family = Qwen3Config if name == "query and key norm" else LlamaConfig
    return family(**{**_SIZES, **STOCK_MODELS[name]})


def decoder_config(name: str) -> DecoderConfig:
    """The engine's record of one of STOCK_MODELS."""
    values = stock_config(name).to_dict()
    if name == "query and key norm":
        return replace(config_from_hf(values), qk_norm=True)
    family, text = family_of(values)
    return family.config_from_hf(text)


def stock_model(name: str, case: Case) -> PreTrainedModel:
    """One of STOCK_MODELS with the case's base weights; every parameter is set."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(stock_config(name))
    state = dict(model.named_parameters())
    filled = set()
    with torch.no_grad():
        for key, value in whole_parameters(case).items():
            if ".lora_" not in key:
                place = NAMES.to_hf(key).name
                state[place].copy_(value)
                filled.add(place)
    assert filled == set(state), set(state) ^ filled
    return model


def stock_parameter(model: nn.Module, name: str) -> Tensor:
    """The parameter of a stock model, wrapped by PEFT or not, that the engine calls `name`."""
    module, _, leaf = name.rpartition(".")
    stock = NAMES.module_to_hf(module)
    if leaf in ("lora_A", "lora_B"):
        place = model.get_submodule(f"base_model.model.{stock}")
        kind = leaf[-1]
        if module == "embed_tokens":
            return getattr(place, f"lora_embedding_{kind}")["default"]
        return getattr(place, leaf)["default"].weight
    return model.get_submodule(stock).get_parameter(leaf)


def with_adapters(model: PreTrainedModel, case: Case, targets: list[str]) -> nn.Module:
    """`model` in stock PEFT with the case's adapters: rank, scale and both factors."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=RANK, lora_alpha=RANK * SCALE, target_modules=targets, lora_dropout=0.0)
    wrapped = get_peft_model(model, settings)
    with torch.no_grad():
        for name, value in whole_parameters(case).items():
            if ".lora_" in name:
                stock_parameter(wrapped, name).copy_(value)
    return wrapped


def documents(batch: Batch) -> list[tuple[Tensor, Tensor]]:
    """(tokens, labels) of each document of a batch, as if it came alone."""
    tokens, labels = batch.tokens_BS.flatten(), batch.labels_BS.flatten()
    return list(zip(tokens.split(batch.document_lengths), labels.split(batch.document_lengths), strict=True))


def stock_token_losses(model: nn.Module, batch: Batch) -> Tensor:
    """[T] losses with every document run alone, from position 0."""
    losses = []
    for tokens, labels in documents(batch):
        logits = model(input_ids=tokens[None], use_cache=False).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORE_LABEL))
    return torch.cat(losses)
