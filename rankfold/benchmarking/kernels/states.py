"""Cases of layers with states: the convolution, the gated delta rule and the gated norm of Qwen3.5's layers.

Documents of `--length` tokens are packed. Heads have 128 features, as many value heads as `--hidden` has room for and
half as many key heads: with 4096, the layers of Qwen3.5-9B.

Legend: T tokens, C channels, G key heads, N value heads, K, V features of a key and a value.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from engine.hybrids import reference
from engine.hybrids.kernels import hybrid_kernels
from engine.hybrids.pieces import Pieces
from engine.ops.kernels import Kernels
from rankfold.benchmarking.case import Case, Contestant, Results, calling
from rankfold.benchmarking.ceilings import Demand
from rankfold.benchmarking.kernels.setting import Setting
from rankfold.benchmarking.oracles import EPS

_DIM, _WIDTH = 128, 4


def _heads(setting: Setting) -> tuple[int, int]:
    """Returns G and N."""
    key_heads = max(1, setting.options.hidden // (2 * _DIM))
    return key_heads, 2 * key_heads


def _pieces(setting: Setting) -> Pieces:
    tokens, length = setting.options.tokens, setting.options.length
    lengths = [length] * (tokens // length) + [tokens % length] * (tokens % length > 0)
    return Pieces.of_lengths(lengths, setting.device)


def _convolution(setting: Setting, *, backward: bool) -> Case:
    key_heads, heads = _heads(setting)
    tokens, channels, draws = setting.options.tokens, (2 * key_heads + heads) * _DIM, setting.draws("convolution")
    x, dy = (draws.normal(tokens, channels) for _ in range(2))
    weight, pieces = draws.normal(channels, _WIDTH, scale=0.5), _pieces(setting)
    wide = (weight.double(), None, pieces, None)

    def engine(kernels: Kernels) -> Contestant:
        ops = hybrid_kernels(kernels)
        if not backward:
            return calling(partial(ops.conv_forward, activation="silu"), x, weight, None, pieces, None)

        def run() -> Tensor:
            none = {"weight_gradient": None, "bias_gradient": None}
            return ops.conv_backward(dy, x, weight, None, pieces, None, activation="silu", **none)[0]

        return calling(run)

    def answer() -> Results:
        if not backward:
            return (reference.conv_forward(x.double(), *wide, activation="silu"),)
        none = {"weight_gradient": None, "bias_gradient": None}
        return (reference.conv_backward(dy.double(), x.double(), *wide, activation="silu", **none)[0],)

    return Case(
        size=f"{tokens}x{channels}, {_WIDTH} taps",
        demand=Demand(moved=setting.moved("short_conv", tokens, channels)["backward" if backward else "forward"]),
        contestants=setting.contestants(engine),
        answer=answer,
    )


def _gated_norm(setting: Setting, *, backward: bool) -> Case:
    (_, heads), tokens, draws = _heads(setting), setting.options.tokens, setting.draws("gated norm")
    x, z, dy = (draws.normal(tokens, heads, _DIM) for _ in range(3))
    weight = draws.normal(_DIM, mean=1.0, scale=0.1)

    def engine(kernels: Kernels) -> Contestant:
        ops = hybrid_kernels(kernels)
        if backward:
            return calling(ops.gated_norm_backward, dy, x, z, weight, EPS, None)
        return calling(ops.gated_norm_forward, x, z, weight, EPS)

    def answer() -> Results:
        wide = (x.double(), z.double(), weight.double(), EPS)
        return (
            reference.gated_norm_backward(dy.double(), *wide, None)
            if backward
            else (reference.gated_norm_forward(*wide),)
        )

    return Case(
        size=f"{tokens}x{heads}x{_DIM}",
        demand=Demand(moved=setting.moved("gated_norm", tokens, heads, _DIM)["backward" if backward else "forward"]),
        contestants=setting.contestants(engine),
        answer=answer,
    )


def _delta_rule(setting: Setting, *, backward: bool) -> Case:
    (key_heads, heads), tokens, draws = _heads(setting), setting.options.tokens, setting.draws("delta rule")
    q, k = (draws.normal(tokens, key_heads, _DIM) for _ in range(2))
    v, d_out = (draws.normal(tokens, heads, _DIM) for _ in range(2))
    decay = -draws.normal(tokens, heads, dtype=torch.float32).exp()
    beta = draws.normal(tokens, heads, dtype=torch.float32).sigmoid()
    given, pieces, scale = (q, k, v, decay, beta), _pieces(setting), _DIM**-0.5

    def engine(kernels: Kernels) -> Contestant:
        ops = hybrid_kernels(kernels)

        def forward() -> Tensor:
            return ops.delta_forward(*given, pieces, None, scale=scale, keep=False)[0]

        if not backward:
            return calling(forward)
        kept = ops.delta_forward(*given, pieces, None, scale=scale, keep=True)[2]

        def run() -> Results:
            return ops.delta_backward(d_out, None, *given, pieces, None, scale=scale, kept=kept)[:5]

        return calling(run)

    def library() -> Contestant:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        leaves = [one.detach().requires_grad_() for one in given]

        def run() -> Tensor:
            expanded = [one.repeat_interleave(heads // key_heads, dim=1) for one in leaves[:2]]
            out: Tensor = chunk_gated_delta_rule(
                *(one[None] for one in (*expanded, *leaves[2:])), scale=scale, use_qk_l2norm_in_kernel=True,
                cu_seqlens=pieces.offsets.long(),
            )[0]  # fmt: skip
            return out[0]

        if not backward:
            return calling(run)
        out = run()
        return calling(lambda: torch.autograd.grad(out, leaves, d_out, retain_graph=True))

    def answer() -> Results:
        wide = [one.double() for one in given]
        out, _, kept = reference.delta_forward(*wide, pieces, None, scale=scale, keep=True)
        if not backward:
            return (out,)
        return reference.delta_backward(d_out.double(), None, *wide, pieces, None, scale=scale, kept=kept)[:5]

    sizes = (tokens, key_heads, heads, _DIM, _DIM)
    return Case(
        size=f"{tokens} tokens, {key_heads} and {heads} heads of {_DIM}",
        demand=Demand(moved=setting.moved("delta", *sizes)["backward" if backward else "forward"]),
        contestants=setting.contestants(engine, fla=library),
        answer=answer,
    )


CASES = {
    "Short convolution forward": partial(_convolution, backward=False),
    "Short convolution backward": partial(_convolution, backward=True),
    "Gated norm forward": partial(_gated_norm, backward=False),
    "Gated norm backward": partial(_gated_norm, backward=True),
    "Gated delta rule forward": partial(_delta_rule, backward=False),
    "Gated delta rule backward": partial(_delta_rule, backward=True),
}
