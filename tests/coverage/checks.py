"""What is run of each type: a small model of its make against transformers, and with PEFT's adapters."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers.pytorch_utils import Conv1D

from engine.adopted.config import adopted_config
from engine.adopted.forms import small_model, small_record
from engine.adopted.images.arguments import forward_arguments
from engine.adopted.images.inputs import ImageInputs
from engine.adopted.proof import (
    Computed,
    Difference,
    Small,
    attention_proof,
    computed,
    difference,
    reference,
    small_of,
)
from engine.adopted.structure import FAULTS, first_line, quiet
from engine.batch import IGNORE_LABEL, Batch
from engine.errors import UserError
from tests.coverage.made import config_of

Result = dict[str, Any]
PACKED, SINGLE = (11, 13), (16,)


text_alone = patch("engine.adopted.structure.sees_images", lambda hf_config: False)
"""Has a type of both of transformers' mappings built as its causal language model."""


@text_alone
def one_process(model_type: str) -> Result:
    """Runs what one process shows; returns what was found, or under "refused" or "failed" a sentence."""
    try:
        config = small_record(config_of(model_type))
        decoder = adopted_config(config)
    except UserError as error:
        return {"refused": str(error)}
    except FAULTS as error:  # transformers' own config class
        return {"failed": f"{type(error).__name__}: {first_line(error)}"}
    small = small_of(config)
    small = replace(small, config=replace(small.config, attention=decoder.attention))
    found, batch, wanted = in_one_piece(config, small)
    count = small.config.num_layers
    found["stages"] = tried(lambda: difference(computed(small.parts((count // 2, count - count // 2)), batch), wanted))
    return found


def in_one_piece(config: dict[str, Any], small: Small) -> tuple[Result, Batch, Computed]:
    """Returns how far the model is from autograd through transformers' and from PEFT, with the batch and what autograd
    computes of it.

    Args:
        small: of `config`.
    """
    apart = small.config.keeps_documents_apart
    found: Result = {"packed": apart}
    packed = attention_proof(small.config.hf_config).packed
    if packed is not None:
        found["packed_reason"] = packed if isinstance(packed, str) else packed.sentence()
    lengths = PACKED if apart else SINGLE
    for seed in (0, len(lengths)):  # other tokens decide where rounding took another slope at the kink of an activation
        batch = small.batch(lengths, seed)
        whole, wanted = computed(small.parts(), batch), reference(small, batch)
        if difference(whole, wanted).is_rounding:
            break
    found["autograd"] = difference(whole, wanted).worst
    try:
        found["peft"] = difference(whole, by_peft(config, small, batch)).worst
    except FAULTS as error:
        found["peft_reason"] = f"{type(error).__name__}: {first_line(error)}"
    return found, batch, wanted


def tried(compare: Any) -> float | str:
    """Returns how far apart a comparison finds two computations, or a phrase on what was raised."""
    try:
        found: Difference = compare()
    except FAULTS as error:
        return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"
    return found.worst


def by_peft(config: dict[str, Any], small: Small, batch: Batch) -> Computed:
    """Returns the losses of transformers' model with PEFT's adapters, and the gradients of their factors.

    Args:
        small: of `config`, with adapters on linears alone.
        batch: of documents, each with images where it has any.
    """
    from peft import LoraConfig, inject_adapter_in_model

    model = small_model(config)
    modules = [name.removesuffix(".lora_A") for name in small.factors if name.endswith(".lora_A")]
    places = {name: small.names.module_to_hf(name) for name in modules}
    target = "|".join(re.escape(place) for place in places.values())
    turned = any(isinstance(model.get_submodule(place), Conv1D) for place in places.values())
    settings = LoraConfig(r=2, lora_alpha=1, target_modules=f"^({target})$", fan_in_fan_out=turned)
    inject_adapter_in_model(settings, model)
    leaves: dict[str, Tensor] = {}
    for name, place in places.items():
        module = model.get_submodule(place)
        for leaf, factors in (("lora_A", module.lora_A), ("lora_B", module.lora_B)):
            weight = factors["default"].weight
            weight.data.copy_(small.factors[f"{name}.{leaf}"])
            leaves[f"{name}.{leaf}"] = weight
    losses, first, lengths = [], 0, batch.document_lengths
    images = batch.part(ImageInputs)
    of_documents = [None] * len(lengths) if images is None else images.split(len(lengths))
    with quiet():
        for length, own in zip(lengths, of_documents, strict=True):
            piece = slice(first, first + length)
            tokens = batch.tokens_BS[:, piece]
            given = {} if own is None else forward_arguments(model, tokens, own)
            logits = model(input_ids=tokens, use_cache=False, **given).logits.float()[0]
            labels = batch.labels_BS[0, piece]
            losses.append(cross_entropy(logits, labels, reduction="none", ignore_index=IGNORE_LABEL))
            first += length
    whole = torch.cat(losses)
    whole.sum().backward()
    gradients = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in leaves.items()}
    return Computed(whole.detach(), gradients)
