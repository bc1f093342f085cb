"""Proves exports in few bits by their readers: stock transformers decodes the folder, by compressed-tensors where that
wrote such names first, and its logits are compared with those of the weights as the engine decodes them.

That leaves what rounding did to the model, which is told and not judged.
"""

from __future__ import annotations

from pathlib import Path

import torch

from engine.checkpoint.model_weights import open_source
from engine.checkpoint.weight_source import WeightSource
from engine.conversion.live_logits import live_logits, proof_tokens
from engine.conversion.low_precision.linears import LowPrecision
from engine.conversion.proof import (
    NEEDS_IMAGES,
    SAME,
    agreement,
    largest_difference,
    live_of,
    obstacle_to,
    stock_logits,
    widest,
)
from engine.conversion.stock_readers import obstacle_to_decoding
from engine.errors import UserError

_TO_16_BITS = frozenset(("nvfp4", "mxfp4", "int4"))
"""Formats that compressed-tensors decodes to the dtype of its scales or to bfloat16, whatever the model's is."""
_ROUNDED = 3e-2
"""As `SAME`, of a model in float32 or in another dtype than its scales: one of the two readers rounds each weight, by
2^-9 of it at most."""


def prove_low(folder: Path, source: WeightSource, low: LowPrecision) -> str:
    """Compares a folder in few bits with the engine's decoding of it.

    Args:
        folder: the export.
        source: its origin.
        low: how its linears are stored.

    Returns:
        One sentence: the comparison, or why there is none, and how far rounding moved the logits.

    Raises:
        UserError: tensors are missing or unexpected to transformers, or logits differ.
    """
    if source.model.decoder.needs_images:
        return NEEDS_IMAGES
    written = open_source(folder, source.model.implementation)
    decoder = written.model.decoder
    tokens = proof_tokens(decoder.vocab_size)
    decoded = live_logits(decoder, written, tokens)
    if low.is_trained:
        rounding = "codes are those that training computed with"
    else:
        moved = largest_difference(decoded, live_of(source).logits(tokens))
        rounding = f"rounding to {low.name} moves logits by {moved:.1e} of the largest"
    unreadable = obstacle_to_decoding(folder, has_experts=bool(source.model.decoder.num_experts))
    obstacle = unreadable or obstacle_to(folder, written.model)
    if obstacle is not None:
        return f"logits not compared with a stock reader's: {obstacle}; {rounding}"
    found = stock_logits(folder, decoder, widest(written), tokens)
    difference, limit = largest_difference(found, decoded), _limit(written)
    if not difference <= limit:
        raise UserError(
            f"transformers reads logits from the export that differ from those of its decoded weights by "
            f"{difference:.1e} of the largest (expected at most {limit:.0e}), so nothing was exported: report this "
            "with the model's config.json."
        )
    return f"{agreement(decoder, tokens, 'transformers, decoding', difference)}; {rounding}"


def _limit(written: WeightSource) -> float:
    """Returns how far logits of the reader may be from those of the weights as the engine decodes them."""
    dtype, kinds = widest(written), {written.format(name) for name in written.tensor_names()}
    is_rounded = any(
        (dtype == torch.float32 and kind.name in _TO_16_BITS) or (kind.name == "int4" and kind.scale_dtype != dtype)
        for kind in kinds
        if kind is not None
    )
    return _ROUNDED if is_rounded else SAME
