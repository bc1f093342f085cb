"""What a decoder-only language model is made of, independent of the family's own vocabulary.

Families translate a Hugging Face `config.json` into this record; the decoder is built from it alone.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """Frequency scaling of rotary embeddings.

    Args:
        kind: "linear" (position interpolation, arXiv 2306.15595) or "llama3" (Llama 3.1's smooth band-wise scaling).
        factor: how much longer the new context is.
        low_freq_factor, high_freq_factor, original_length: the band edges of "llama3"; unused by "linear".
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """Sizes and switches of one decoder.

    Args:
        family: key of the family table that produced this record.
        hidden, intermediate: widths of the residual stream and of the MLP.
        num_layers, num_heads, num_kv_heads, head_dim, vocab_size: counts; head_dim need not be hidden / num_heads.
        norm_eps: epsilon of every RMSNorm.
        rope_theta, rope_scaling: rotary embedding base and optional scaling.
        tied_embeddings: lm_head shares the embedding's matrix.
        qkv_bias, out_bias, mlp_bias: whether q/k/v, o, and the MLP's linears have biases.
        qk_norm: RMSNorm over head_dim on queries and keys before rotation (one weight vector for all heads).
        max_length: longest sequence the model was made for (positions).
    """

    family: str
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    max_length: int = 2048

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
