"""The engine's attention behind transformers' attention interface."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.functional import pad

from engine.errors import UserError
from engine.layers.attention import AttentionKind, attend, attention_of
from engine.layers.context import TensorLayout
from engine.ops.attention.sinks import SinkAttention, Sinks, with_sinks
from engine.ops.attention.token_context import TokenContext
from engine.ops.attention.ulysses import check_context_heads

IMPLEMENTATION = "rankfold"
"""The name under which transformers' modules find this attention."""
_RUN, _NAME = "_engine_run", "_engine_name"


class Seen(NamedTuple):
    """Keys and values that a module's attention was given.

    Args:
        kind: of the attention.
        num_kv_heads, width: heads on this rank, and features of each.
        sinks_H: scores of the sinks of its heads; None for none.
    """

    kind: AttentionKind
    num_kv_heads: int
    width: int
    sinks_H: Tensor | None


@dataclass(slots=True)
class Run:
    """The micro-batch that a body's modules are in, for their linears and their attention to read.

    Args:
        layout: of tensors over ranks.
        context: of the micro-batch's tokens; None between two.
        seen: what each attention was given in this pass, by name, where text is generated; a module that attends twice
            has two names.
    """

    layout: TensorLayout
    context: TokenContext | None = None
    ops: dict[AttentionKind, Any] = field(default_factory=dict)
    seen: dict[str, Seen] | None = None

    @contextmanager
    def within(self, context: TokenContext) -> Iterator[None]:
        """Has modules read this micro-batch, and afterwards what they read before."""
        before, self.context = self.context, context
        try:
            yield
        finally:
            self.context = before

    @property
    def now(self) -> TokenContext:
        """The coordinates of the micro-batch's tokens."""
        assert self.context is not None, "a module of the body runs outside of it"
        return self.context


def attach(prefix: str, module: nn.Module, run: Run) -> None:
    """Lets every module inside read `run`, and its own name behind `prefix`."""
    for name, child in module.named_modules():
        object.__setattr__(child, _RUN, run)
        object.__setattr__(child, _NAME, f"{prefix}{name}")


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Computes causal attention within documents.

    Args:
        query, key, value: [B, heads, S, D].

    Returns:
        [B, S, heads, D], and no weights.
    """
    run: Run = getattr(module, _RUN)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    refused = (
        ("a mask of its own", attention_mask is not None),
        ("attention to what comes later", not causal),
        ("sinks that are no parameter", not isinstance(s_aux, nn.Parameter | None)),
        ("sinks beside a soft cap", s_aux is not None and softcap is not None),
        ("a bias on scores", others.get("position_bias") is not None),
    )
    if reasons := [reason for reason, holds in refused if holds]:
        raise UserError(f"the attention of this model has {reasons[0]}, which packed rows of adopted models lack.")
    kind = AttentionKind(window=sliding_window, softcap=softcap)
    if kind not in run.ops:
        run.ops[kind] = attention_of(kind, run.layout)
        if run.layout.cp.size > 1 and run.layout.context_method == "ulysses":
            check_context_heads(query.shape[1], key.shape[1], run.layout.cp.size)
    rows, _, length, width = query.shape
    values = value.shape[-1]
    widest = max(width, values)  # columns of zeros change no score, and no column of the output but their own
    q, k, v = (_flat(pad(x, (0, widest - x.shape[-1]))) for x in (query, key, value))
    scale = width**-0.5 if scaling is None else scaling
    name: str = getattr(module, _NAME)
    if run.seen is not None:
        while name in run.seen:
            name += "'"
        run.seen[name] = Seen(kind, k.shape[1], widest, s_aux)
    op = run.ops[kind] if s_aux is None else _with_sinks(kind, run.layout, s_aux)
    out = attend(name, op, run.layout, scale, q, k, v, run.now)
    return out.view(rows, length, -1, widest)[..., :values], None


def _with_sinks(kind: AttentionKind, layout: TensorLayout, scores_H: nn.Parameter) -> SinkAttention:
    """Returns the attention with a module's own sinks, whose gradient autograd leaves on the parameter."""
    sinks = Sinks(scores_H=scores_H, gradient=None)
    return with_sinks(layout.kernels.attention, layout.attention_blocks, window=kind.window, sinks=sinks, cp=layout.cp)


def _flat(x_BHSD: Tensor) -> Tensor:
    """Returns [B S, heads, D]."""
    return x_BHSD.transpose(1, 2).flatten(0, 1).contiguous()


def register() -> None:
    """Makes this attention known to transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, _attention)
