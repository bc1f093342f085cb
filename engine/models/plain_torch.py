"""The parts of a model that are computed in plain torch, whichever kernels were chosen: for a run's log."""

from __future__ import annotations

from engine.models.decoder_config import DecoderConfig

_ACTIVATIONS = {"gelu_tanh": "GELU", "relu2": "squared ReLU"}


def plain_torch_parts(config: DecoderConfig) -> str | None:
    """Returns a sentence that names the parts for which no backend has a kernel; None where there are none."""
    windows = sorted({kind.window for kind in config.layer_kinds if kind.window is not None})
    parts = []
    if config.attention_softcap is not None:
        parts.append(f"attention, whose scores have a soft cap of {config.attention_softcap:g}")
    elif windows:
        parts.append(f"attention of documents longer than a window of {' or '.join(map(str, windows))}")
    if config.qk_norm and config.qk_norm_over == "all":
        parts.append("the norm of queries and keys over all heads, where these lie on several ranks")
    has_plain_attention = all(variant.attention_parameters(config) is None for variant in config.variants)
    if has_plain_attention and config.rotary_dim is not None and config.rotary_dim < config.head_dim:
        parts.append("the rotation of queries and keys, which turns a part of each head")
    elif config.interleaved:
        parts.append("the order of the features of queries and keys, whose neighbours are turned together")
    parts += dict.fromkeys(part for variant in config.variants for part in variant.plain_torch())
    if config.activation != "silu":
        parts.append(f"the MLP's {_ACTIVATIONS[config.activation]}")
    if config.logits_softcap is not None:
        parts.append(f"the loss, whose logits have a soft cap of {config.logits_softcap:g}")
    return f"in plain torch, since no backend has kernels for it: {'; '.join(parts)}" if parts else None
