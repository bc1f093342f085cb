"""Launches of layers beside linears and norms: attention over pages, states, and experts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from engine.hybrids import triton_ops
from engine.hybrids.pieces import Pieces
from engine.kernels.records import GroupedUpdate
from engine.kernels.triton import grouped, grouped_factors
from engine.kernels.triton.rows import weigh_rows
from tests.kernels.launch_sizes import (
    EPS,
    PAGE,
    TRITON,
    Case,
    Experts,
    Heads,
    States,
)


def decode_cases(
    heads: Heads, dtype: torch.dtype = torch.bfloat16, lengths: tuple[int, ...] = (2048,)
) -> Iterator[Case]:
    """Yields a token of 64 rows, the longest of which may have so many keys: in several splits, or one."""

    def launch(length: int) -> None:
        rows, pool = 64, torch.empty(64 * PAGE, heads.kv_heads, heads.head_dim, dtype=dtype)
        assert TRITON.paged_attention is not None
        TRITON.paged_attention.attend(
            torch.empty(rows, heads.heads, heads.head_dim, dtype=dtype),
            pool,
            torch.empty_like(pool),
            torch.zeros(rows, -(-length // PAGE), dtype=torch.int32),
            torch.ones(rows, dtype=torch.int64),
            page=PAGE,
            scale=heads.head_dim**-0.5,
            softcap=heads.softcap,
            sinks_H=torch.empty(heads.heads, dtype=dtype) if heads.sinks else None,
        )

    for length in lengths:
        yield Case(f"{heads.name} decode {length}", partial(launch, length))


def state_cases(sizes: States, dtype: torch.dtype = torch.bfloat16) -> Iterator[Case]:
    """Yields the ops of a layer with states, in two documents; of the delta rule also between context ranks."""
    tokens, heads = sizes.tokens, (sizes.heads, sizes.value_dim)
    key_width = sizes.key_heads * sizes.key_dim
    channels = 2 * key_width + sizes.heads * sizes.value_dim
    empty = partial(torch.empty, dtype=dtype)

    def pieces(**links: tuple[int, ...]) -> Pieces:
        return Pieces.of_lengths([tokens // 2, tokens - tokens // 2], torch.device("cpu"), **links)

    def by_head(x: Tensor) -> list[Tensor]:
        parts = x.split([key_width, key_width, heads[0] * heads[1]], dim=1)
        return [
            one.unflatten(1, (-1, width)) for one, width in zip(parts, (*2 * [sizes.key_dim], heads[1]), strict=True)
        ]

    def convolution() -> None:
        x, weight = empty(tokens, channels), empty(channels, sizes.width)
        received, trained = empty(1, sizes.width - 1, channels), torch.empty(channels, sizes.width)
        for tail, bias, gradient in ((None, None, None), (None, empty(channels), trained), (received, None, None)):
            links = pieces() if tail is None else pieces(received=(1,))
            triton_ops.conv_forward(x, weight, bias, links, tail, activation="silu")
            triton_ops.conv_backward(
                x, x, weight, bias, links, tail, activation="silu", weight_gradient=gradient,
                bias_gradient=None if bias is None else torch.empty(channels),
            )  # fmt: skip

    def gated_norm() -> None:
        x, weight = empty(tokens, *heads), empty(sizes.value_dim)
        z = empty(tokens, heads[0] * heads[1] + 64)[:, : heads[0] * heads[1]].unflatten(1, heads)
        triton_ops.gated_norm_forward(x, z, weight, EPS)
        triton_ops.sigmoid_norm_forward(x, z, weight, EPS)
        for gradient in (None, torch.empty(sizes.value_dim)):
            triton_ops.gated_norm_backward(x, x, z, weight, EPS, gradient)
            triton_ops.sigmoid_norm_backward(x, x, z, weight, EPS, gradient)

    def delta_rule(*decays: int) -> None:
        q, k, v = by_head(empty(tokens, channels))
        decay, beta = torch.empty(tokens, heads[0], *decays), torch.empty(tokens, heads[0])
        state = torch.empty(1, heads[0], sizes.key_dim, sizes.value_dim)
        for ends, initial, final in ((pieces(), None, None), (pieces(received=(1,), sent=(0,)), state, state)):
            given = (q, k, v, decay, beta, ends, initial)
            out, _, kept = triton_ops.delta_forward(*given, scale=0.1, keep=True)
            triton_ops.delta_backward(out, final, *given, scale=0.1, kept=kept)

    def steps() -> None:
        rows = min(64, tokens)
        x, tails = empty(rows, channels), empty(rows, sizes.width - 1, channels)
        triton_ops.conv_step(x, empty(channels, sizes.width), None, tails, activation="silu")
        q, k, v = by_head(x)
        states, beta = torch.empty(rows, heads[0], sizes.key_dim, heads[1]), torch.empty(rows, heads[0])
        for decay in (beta, torch.empty(rows, heads[0], sizes.key_dim)):
            triton_ops.delta_step(q, k, v, decay, beta, states, scale=0.1)

    for launch in (convolution, gated_norm, delta_rule, steps):
        yield Case(f"{sizes.name} {launch.__name__}", launch)
    yield Case(f"{sizes.name} delta_rule by channel", partial(delta_rule, sizes.key_dim))


def state_space_case(
    name: str, tokens: int, heads: int, groups: int, features: int, size: int, dtype: torch.dtype = torch.bfloat16
) -> Case:
    """Returns a state space of two documents; the second may continue from a state."""

    def launch() -> None:
        x, b, c = (
            torch.empty(tokens, n, width, dtype=dtype) for n, width in ((heads, features), *2 * [(groups, size)])
        )
        one, dt, state = torch.empty(heads), torch.empty(tokens, heads), torch.empty(1, heads, features, size)
        lengths = [tokens // 2, tokens - tokens // 2]
        for d, initial, links in ((one, None, {}), (None, state, {"received": (1,), "sent": (0,)})):
            pieces = Pieces.of_lengths(lengths, torch.device("cpu"), **links)
            given = (x, dt, one, b, c, d, pieces, initial)
            y, final, kept = triton_ops.ssd_forward(*given, keep=True)
            triton_ops.ssd_backward(y, final, *given, kept=kept)
        rows = min(64, tokens)
        given = (x[:rows], dt[:rows], one, b[:rows], c[:rows], one, torch.empty(rows, heads, features, size))
        triton_ops.ssd_step(*given)

    return Case(f"{name} state_space", launch)


def expert_cases(
    sizes: Experts, rank: int, *, dropped: bool = False, dtype: torch.dtype = torch.bfloat16
) -> Iterator[Case]:
    """Yields the products of experts' linears: gate and up of gathered tokens, and down."""
    num_rows, ends = sizes.tokens * sizes.per_token, torch.empty(sizes.experts, dtype=torch.int32)
    empty = partial(torch.empty, dtype=dtype)
    index = torch.empty(num_rows, dtype=torch.int64)

    def linear(inputs: int, outputs: int, ranks: int, gathers: bool) -> None:
        x = empty(sizes.tokens if gathers else num_rows, inputs)
        dy = empty(num_rows if gathers else sizes.tokens, outputs)
        both, a = empty(sizes.experts, outputs, inputs + ranks), empty(sizes.experts, ranks, inputs)
        w, b = both[..., :inputs], both[..., inputs:]
        mask = torch.empty(num_rows, inputs // 8, dtype=torch.uint8) if dropped else None
        scale = 1.25 if dropped else 1.0
        of_x, of_dy = (index, None) if gathers else (None, index)
        h = grouped_factors.grouped_project(x, a.mT, ends, index_N=of_x, mask=mask, scale=scale)
        update = GroupedUpdate(h_NR=h, factors_ERM=b.mT)
        grouped.grouped_rows(x, w.mT, ends, update=update, index_N=of_x)
        dh = grouped_factors.grouped_project(dy, b, ends, index_N=of_dy)
        update = GroupedUpdate(h_NR=dh, factors_ERM=a, mask=mask, scale=scale)
        grouped.grouped_rows(dy, w, ends, update=update, index_N=of_dy)
        if not gathers:
            weigh_rows(x, empty(num_rows, inputs), empty(num_rows))
        grouped_factors.grouped_outer(h, dy, ends, index_N=of_dy, ranks_first=False)
        grouped_factors.grouped_outer(dh, x, ends, index_N=of_x, mask=mask, scale=scale, ranks_first=True)

    hidden, intermediate = sizes.hidden, sizes.intermediate
    name = f"{sizes.name} %s r={rank}{' dropped' if dropped else ''}"
    yield Case(name % "gate_up", partial(linear, hidden, 2 * intermediate, -(-2 * rank // 8) * 8, True))
    yield Case(name % "down", partial(linear, intermediate, hidden, -(-rank // 8) * 8, False))
