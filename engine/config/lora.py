"""The low-rank adapters: where they sit and what they look like (arXiv 2106.09685)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from engine.config.checks import require, require_at_least, require_positive

BLOCK_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Every linear of a decoder block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraOptions:
    """LoRA: low-rank adapters beside frozen linears, y = x W^T + scale * (dropout(x) A^T) B^T.

    Args:
        rank: Rank of the adapters; 0 means no adapters (then say in trainable what is trained).
        alpha: Numerator of the scale: alpha / rank, or alpha / sqrt(rank) with lora.rslora.
        dropout: Probability that an input feature of an adapter is dropped during training, 0 to below 1.
        targets: Modules that get an adapter, as names (q_proj) or regular expressions that match the whole name
            (.*self_attn\\.(q|v)_proj), in the engine's or the checkpoint's spelling. lm_head and embed_tokens can be
            targets too.
        rslora: Scale by alpha / sqrt(rank) instead of alpha / rank (arXiv 2312.03732).
        fused_qkv: One adapter for query, key and value together instead of one each.
        init_from: Folder of a PEFT adapter to start from; null starts from fresh ones.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: tuple[str, ...] = BLOCK_LINEARS
    rslora: bool = False
    fused_qkv: bool = False
    init_from: str | None = None

    def __post_init__(self) -> None:
        require_at_least("lora.rank", self.rank, 0, "use for example 16, or 0 for no adapters")
        require_positive("lora.alpha", self.alpha, "use for example twice lora.rank")
        require(
            0 <= self.dropout < 1,
            f"lora.dropout is {self.dropout}, but a probability from 0 to below 1 is expected: use for example 0.05.",
        )
        require(
            not isinstance(self.targets, str),
            f"lora.targets is the text {self.targets!r}, but a list is expected: write [{self.targets}].",
        )
        for target in self.targets:
            _check_target(target)

    @property
    def scale(self) -> float:
        """Factor on the adapter's output; 0 without adapters."""
        if self.rank == 0:
            return 0.0
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


def _check_target(target: str) -> None:
    require(bool(target), "lora.targets contains an empty name, but module names are expected: remove it.")
    try:
        re.compile(target)
    except re.error as error:
        require(
            False,
            f"lora.targets contains {target!r}, which is not a valid regular expression ({error}): "
            "write a module name such as q_proj, or mend the expression.",
        )
