"""The attention that each layer of a decoder has, as its config says."""

from __future__ import annotations

from engine.experts.layers.latent_attention import LatentAttention
from engine.layers.attention import Attention, AttentionKind
from engine.layers.context import LayerContext
from engine.models.decoder_config import DecoderConfig


def _attention_kind(config: DecoderConfig, index: int) -> AttentionKind:
    layer = config.layer_kind(index)
    return AttentionKind(
        window=layer.window,
        softcap=config.attention_softcap,
        scale=config.attention_scale,
        rotary_dim=config.rotary_dim,
        rope=int(layer.second_rope),
        num_ropes=len(config.ropes),
        qk_norm_over=config.qk_norm_over,
        norm_offset=config.norm_offset,
        bidirectional=config.bidirectional_images,
        sinks=config.attention_sinks,
    )


def build_attention(
    index: int, config: DecoderConfig, build: LayerContext, *, first_site: int, inner_site: int
) -> Attention | LatentAttention:
    """Returns the attention of a layer.

    Args:
        index: of the layer in the whole model.
        first_site: dropout site of its input; the output projection's is the next one.
        inner_site: that of what latent attention makes queries from; keys' and values' is the next one.
    """
    name = f"layers.{index}.attention"
    if config.latent is not None:
        return LatentAttention(
            name,
            config.latent,
            hidden=config.hidden,
            num_heads=config.num_heads,
            head_dim=config.head_dim,
            bias=config.qkv_bias,
            first_site=first_site,
            inner_site=inner_site,
            kind=_attention_kind(config, index),
            build=build,
        )
    return Attention(
        name,
        hidden=config.hidden,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        qkv_bias=config.qkv_bias,
        out_bias=config.out_bias,
        qk_norm=config.qk_norm,
        norm_eps=config.norm_eps,
        first_site=first_site,
        kind=_attention_kind(config, index),
        vision_qkv_bias=config.vision_qkv_bias if config.token_experts else None,
        build=build,
    )
