"""PEFT's adapters with drawn numbers, and losses of documents that stand alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from engine.batch import IGNORE_LABEL, Batch


def drawn_adapters(model: Any, lora: Any) -> Any:
    """Returns a model of transformers with PEFT's adapters, whose A and B are drawn."""
    from peft import get_peft_model

    adapted = get_peft_model(model, lora).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return adapted


def losses_alone(model: Any, batch: Batch) -> Tensor:
    """Returns the token losses [T] of each document alone, by a model of transformers."""
    found, first = [], 0
    for length in batch.document_lengths:
        piece = slice(first, first + length)
        logits = model(input_ids=batch.tokens_BS[:, piece], use_cache=False).logits[0]
        found.append(cross_entropy(logits, batch.labels_BS[0, piece], reduction="none", ignore_index=IGNORE_LABEL))
        first += length
    return torch.cat(found)
