"""Ring attention: queries stay, keys and values travel, and results are merged by their log sum exp.

In step t rank r works on the keys of rank r - t, which that rank sends straight to it, and only those tokens that r's
queries see. Handing one buffer from neighbour to neighbour would send all of every rank's keys over every link: under a
causal mask half of them are useless to the ranks after their owner, and nearly all for short documents. In backward,
each rank sends its share of the keys' gradients straight to their owner, one transfer less than round the ring.

| step t                 | starts                                | meanwhile       | then                        |
|------------------------|---------------------------------------|-----------------|-----------------------------|
| forward                | keys and values of step t + 1         | blocks of t     | merge                       |
| backward               | keys and values of step t + 1         | blocks of t     | add gradients of t - 1      |
|                        | gradients of t's keys, to their owner | blocks of t + 1 |                             |

Backward sends keys and values again, so that only this rank's own q, k, v, the output and the log sum exp are
kept. Partial gradients are sent in the keys' dtype and are added in fp32 in the order of the steps, so that results are
the same bits in every run wherever the attention blocks' are. Where documents continue others, a step computes several
rounds of blocks on the keys that it has received, which are sent once for all of them. The host knows all sizes from
the plan and waits for nothing on the device. Sinks are taken in once, when the keys of all ranks are
(`engine.ops.attention.sinks`).

Legend: T this rank's tokens, H query heads, K key/value heads, D head size, N tokens that are sent.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.distributed.collectives import Handle, exchange_async
from engine.distributed.mesh import Axis
from engine.ops.attention.blocks import AttentionBlocks, add_round_, merge_round_
from engine.ops.attention.sinks import ALL_HEADS, Sinks
from engine.spans import Block, Span
from engine.zigzag import ContextPlan, RingStep


class _InFlight(NamedTuple):
    """A buffer that is being received, and the one being sent meanwhile, which must live as long."""

    received: Tensor
    sent: Tensor
    handle: Handle

    def wait(self) -> Tensor:
        self.handle.wait()
        return self.received


def _start_keys(k: Tensor, v: Tensor, step: RingStep, axis: Axis) -> _InFlight:
    """Exchanges [2, N, K, D] of the keys and values that `step` needs here and at its query rank."""
    sent = k.new_empty(2, step.num_sent, *k.shape[1:])
    for part, whole in zip(sent, (k, v), strict=True):
        place = 0
        for start, stop in step.sent:
            part[place : place + stop - start] = whole[start:stop]
            place += stop - start
    shape = (2, step.num_received, *k.shape[1:])
    received, handle = exchange_async(sent, axis, to=step.query_rank, source=step.key_rank, received=shape)
    return _InFlight(received, sent, handle)


def _start_gradients(dk: Tensor, dv: Tensor, step: RingStep, axis: Axis, dtype: torch.dtype) -> _InFlight:
    """Sends the gradients of the keys received in `step` to their owner, and receives those of the keys sent in it."""
    sent = dk.new_empty(2, step.num_received, *dk.shape[1:], dtype=dtype)
    if step.num_received:
        sent[0], sent[1] = dk, dv
    shape = (2, step.num_sent, *dk.shape[1:])
    received, handle = exchange_async(sent, axis, to=step.key_rank, source=step.query_rank, received=shape)
    return _InFlight(received, sent, handle)


def _add_rows(total: Tensor, rows: Tensor, spans: tuple[Span, ...]) -> None:
    """Adds rows, which lie one after the other, to `total` at the places of the spans."""
    place = 0
    for start, stop in spans:
        total[start:stop] += rows[place : place + stop - start]
        place += stop - start


def _own_rounds(own: RingStep) -> tuple[tuple[Block, ...], ...]:
    """Returns the rounds of a rank with itself, of which the first has all of its tokens, if it has any."""
    return own.rounds or ((),)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, plan: ContextPlan, axis: Axis, scale: float, blocks: AttentionBlocks
) -> tuple[Tensor, Tensor]:
    """Returns the output [T, H, D] in fp32 or wider, and log sum exp [T, H]."""
    own, *others = plan.steps
    in_flight = _start_keys(k, v, others[0], axis)  # hidden by this rank's own blocks
    first, *levels = _own_rounds(own)
    out, lse = blocks.forward(q, k, v, first, scale=scale)
    out = out.to(torch.promote_types(q.dtype, torch.float32))
    for level in levels:
        merge_round_(out, lse, blocks, (q, k, v), level, scale=scale)
    for step, following in zip(others, [*others[1:], None], strict=True):
        key, value = in_flight.wait()
        if following is not None:
            in_flight = _start_keys(k, v, following, axis)  # hidden by the blocks of this step
        for one in step.rounds:
            merge_round_(out, lse, blocks, (q, key, value), one, scale=scale)
    return out, lse


def _backward(
    dout: Tensor,
    saved: tuple[Tensor, ...],
    plan: ContextPlan,
    axis: Axis,
    scale: float,
    blocks: AttentionBlocks,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dq, dk, dv in the dtypes of q, k, v."""
    q, k, v, out, lse = saved
    wide = torch.promote_types(q.dtype, torch.float32)
    own, *others = plan.steps
    in_flight = _start_keys(k, v, others[0], axis)  # hidden by this rank's own blocks
    first, *levels = _own_rounds(own)
    dq, dk, dv = (x.to(wide) for x in blocks.backward(dout, q, k, v, out, lse, first, scale=scale))
    for level in levels:
        add_round_((dq, dk, dv), blocks, (dout, q, k, v, out, lse), level, scale=scale)
    own_gradients: tuple[_InFlight, RingStep] | None = None
    for step, following in zip(others, [*others[1:], None], strict=True):
        key, value = in_flight.wait()
        if following is not None:
            in_flight = _start_keys(k, v, following, axis)  # hidden by the blocks of this step
        dkey, dvalue = key, value  # never read where there are no blocks
        if len(step.rounds) == 1:  # its keys are all that arrived
            found, dkey, dvalue = blocks.backward(dout, q, key, value, out, lse, step.rounds[0], scale=scale)
            for start, stop in (block.query for block in step.rounds[0]):
                dq[start:stop] += found[start:stop]
        elif step.rounds:
            dkey, dvalue = (torch.zeros_like(x, dtype=wide) for x in (key, value))
            for one in step.rounds:
                add_round_((dq, dkey, dvalue), blocks, (dout, q, key, value, out, lse), one, scale=scale)
        if own_gradients is not None:
            _add_own(dk, dv, *own_gradients)
        # hidden by the blocks of the next step; of the last step by nothing
        own_gradients = _start_gradients(dkey, dvalue, step, axis, k.dtype), step
    assert own_gradients is not None
    _add_own(dk, dv, *own_gradients)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _add_own(dk: Tensor, dv: Tensor, in_flight: _InFlight, step: RingStep) -> None:
    rows_k, rows_v = in_flight.wait()
    _add_rows(dk, rows_k, step.sent)
    _add_rows(dv, rows_v, step.sent)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scores_H: Tensor | None,
        plan: ContextPlan,
        axis: Axis,
        scale: float,
        blocks: AttentionBlocks,
        sinks: Sinks | None,
    ) -> Tensor:
        wide, lse = _forward(q, k, v, plan, axis, scale, blocks)
        if sinks is not None:
            wide, lse = sinks.take_in(wide, lse, ALL_HEADS)
        out = wide.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.axis, ctx.scale, ctx.blocks, ctx.sinks = plan, axis, scale, blocks, sinks
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        # autograd may hand down an expanded gradient
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        saved = ctx.saved_tensors  # once: recomputed tensors are freed with it
        d_sinks = None
        if ctx.sinks is not None:
            d_sinks = ctx.sinks.add_gradient(dout, *saved[3:], ALL_HEADS, needed=ctx.needs_input_grad[3])
        gradients = _backward(dout, saved, ctx.plan, ctx.axis, ctx.scale, ctx.blocks)
        return *gradients, d_sinks, None, None, None, None, None


def ring_attention(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    plan: ContextPlan,
    axis: Axis,
    *,
    scale: float,
    blocks: AttentionBlocks,
    sinks: Sinks | None = None,
) -> Tensor:
    """Computes causal attention within documents of tokens that are split zig-zag over `axis`.

    Args:
        q_THD: [T, H, D]; k_TKD, v_TKD: [T, K, D], this rank's tokens with H a multiple of K; head h reads key/value
            head h // (H / K).
        plan: this rank's plan of the micro-batch.
        axis: the context axis, of two ranks or more; every rank calls this, and its backward, in the same order.
        scale: usually D ** -0.5.
        blocks: computes the attention between ranges of tokens.
        sinks: of the heads; None for none.

    Returns:
        [T, H, D].
    """
    assert (plan.layout.size, plan.rank) == (axis.size, axis.rank), (plan.layout.size, plan.rank, axis)
    assert q_THD.shape[0] == plan.num_tokens, (q_THD.shape, plan.num_tokens)
    scores_H = None if sinks is None else sinks.scores_H
    return _RingAttention.apply(q_THD, k_TKD, v_TKD, scores_H, plan, axis, scale, blocks, sinks)
