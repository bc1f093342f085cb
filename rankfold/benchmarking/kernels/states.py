"""Cases of layers with states: the convolution, the gated norm and the rules of Qwen3.5, Kimi Linear and Mamba2.

Documents of `--length` tokens are packed. Heads have 128 features, as many value heads as `--hidden` has room for and
half as many key heads: with 4096, the layers of Qwen3.5-9B. Kimi Linear has as many key heads as value heads; Mamba2
here has heads of 64 features, twice as many, in eight groups with states of 128. A step is a token of each of 64 rows.

Legend: T tokens, C channels, G key heads, N value heads, K, V features of a key and a value.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from engine.hybrids import reference, state_space_reference
from engine.hybrids.kernels import HybridKernels, hybrid_kernels
from engine.hybrids.pieces import Pieces
from engine.ops.kernels import REFERENCE, Kernels
from rankfold.benchmarking.case import Case, Contestant, Results, calling
from rankfold.benchmarking.ceilings import Demand
from rankfold.benchmarking.kernels.setting import Setting
from rankfold.benchmarking.oracles import EPS

_DIM, _WIDTH = 128, 4
_ROWS = 64
"""Of a step of generation."""


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


def _gated_norm(setting: Setting, *, backward: bool, gate: str = "gated") -> Case:
    (_, heads), tokens, draws = _heads(setting), setting.options.tokens, setting.draws("gated norm")
    names = f"{gate}_norm_forward", f"{gate}_norm_backward"
    x, z, dy = (draws.normal(tokens, heads, _DIM) for _ in range(3))
    weight = draws.normal(_DIM, mean=1.0, scale=0.1)

    def engine(kernels: Kernels) -> Contestant:
        ops = hybrid_kernels(kernels)
        if backward:
            return calling(getattr(ops, names[1]), dy, x, z, weight, EPS, None)
        return calling(getattr(ops, names[0]), x, z, weight, EPS)

    def answer() -> Results:
        wide = (x.double(), z.double(), weight.double(), EPS)
        if backward:
            gradients: Results = getattr(reference, names[1])(dy.double(), *wide, None)
            return gradients
        return (getattr(reference, names[0])(*wide),)

    return Case(
        size=f"{tokens}x{heads}x{_DIM}",
        demand=Demand(moved=setting.moved("gated_norm", tokens, heads, _DIM)["backward" if backward else "forward"]),
        contestants=setting.contestants(engine),
        answer=answer,
    )


def _delta_rule(setting: Setting, *, backward: bool, by_channel: bool = False) -> Case:
    (key_heads, heads), tokens, draws = _heads(setting), setting.options.tokens, setting.draws("delta rule")
    key_heads = heads if by_channel else key_heads
    q, k = (draws.normal(tokens, key_heads, _DIM) for _ in range(2))
    v, d_out = (draws.normal(tokens, heads, _DIM) for _ in range(2))
    decay = -draws.normal(tokens, heads, *([_DIM] if by_channel else []), dtype=torch.float32).exp()
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
        if by_channel:
            from fla.ops.kda import chunk_kda as compute
        else:
            from fla.ops.gated_delta_rule import chunk_gated_delta_rule as compute

        leaves = [one.detach().requires_grad_() for one in given]

        def run() -> Tensor:
            expanded = [one.repeat_interleave(heads // key_heads, dim=1) for one in leaves[:2]]
            out: Tensor = compute(
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

    if by_channel:
        moved = setting.moved("delta_channels", tokens, heads, _DIM, _DIM)
    else:
        moved = setting.moved("delta", tokens, key_heads, heads, _DIM, _DIM)
    return Case(
        size=f"{tokens} tokens, {key_heads} and {heads} heads of {_DIM}",
        demand=Demand(moved=moved["backward" if backward else "forward"]),
        contestants=setting.contestants(engine, fla=library),
        answer=answer,
    )


def _state_space(setting: Setting, *, backward: bool) -> Case:
    (_, heads), tokens, draws = _heads(setting), setting.options.tokens, setting.draws("state space")
    heads, groups, features, size = 2 * heads, min(8, 2 * heads), _DIM // 2, _DIM
    x, dy = (draws.normal(tokens, heads, features) for _ in range(2))
    b, c = (draws.normal(tokens, groups, size) for _ in range(2))
    dt = draws.normal(tokens, heads, dtype=torch.float32).sigmoid()
    a, d = -draws.normal(heads, dtype=torch.float32).exp(), draws.normal(heads, dtype=torch.float32)
    given, pieces = (x, dt, a, b, c, d), _pieces(setting)

    def engine(kernels: Kernels) -> Contestant:
        ops = hybrid_kernels(kernels)
        if not backward:
            return calling(lambda: ops.ssd_forward(*given, pieces, None, keep=False)[0])
        kept = ops.ssd_forward(*given, pieces, None, keep=True)[2]
        return calling(lambda: ops.ssd_backward(dy, None, *given, pieces, None, kept=kept)[:6])

    def answer() -> Results:
        wide = [one.double() for one in given]
        if not backward:
            return (state_space_reference.ssd_forward(*wide, pieces, None, keep=False)[0],)
        return state_space_reference.ssd_backward(dy.double(), None, *wide, pieces, None, kept=())[:6]

    moved = setting.moved("state_space", tokens, heads, groups, features, size)
    return Case(
        size=f"{tokens} tokens, {heads} heads of {features}, states of {size}",
        demand=Demand(moved=moved["backward" if backward else "forward"]),
        contestants=setting.contestants(engine),
        answer=answer,
    )


def _step(setting: Setting, *, rule: str) -> Case:
    """A token of each row; contestants begin with states of their own, and the first call alone is compared."""
    (key_heads, heads), draws = _heads(setting), setting.draws(f"{rule} step")
    key_heads = heads if rule == "channels" else key_heads
    channels = (2 * key_heads + heads) * _DIM
    x = draws.normal(_ROWS, channels)
    weight, tails = draws.normal(channels, _WIDTH, scale=0.5), draws.normal(_ROWS, _WIDTH - 1, channels)
    widths = [key_heads * _DIM, key_heads * _DIM, heads * _DIM]
    parts = [part.unflatten(1, (-1, _DIM)) for part in x.split(widths, dim=1)]
    decay = -draws.normal(_ROWS, heads, *([_DIM] if rule == "channels" else []), dtype=torch.float32).exp()
    beta = draws.normal(_ROWS, heads, dtype=torch.float32).sigmoid()
    states = draws.normal(_ROWS, heads, _DIM, _DIM, dtype=torch.float32)

    def run(ops: HybridKernels, cast: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
        own = cast(tails if rule == "convolution" else states).clone()
        if rule == "convolution":
            return partial(ops.conv_step, cast(x), cast(weight), None, own, activation="silu")
        given = [cast(one) for one in (*parts, decay, beta)]
        return partial(ops.delta_step, *given, own, scale=_DIM**-0.5)

    moved = setting.moved("state_steps", _ROWS, heads, _DIM, _DIM, channels, _WIDTH)
    return Case(
        size=f"{_ROWS} rows, {heads} heads of {_DIM}, {channels} channels",
        demand=Demand(moved=moved["convolution" if rule == "convolution" else "recurrence"]),
        contestants=setting.contestants(lambda kernels: calling(run(hybrid_kernels(kernels), lambda one: one))),
        answer=lambda: (run(hybrid_kernels(REFERENCE), Tensor.double)(),),
    )


CASES = {
    "Short convolution forward": partial(_convolution, backward=False),
    "Short convolution backward": partial(_convolution, backward=True),
    "Gated norm forward": partial(_gated_norm, backward=False),
    "Gated norm backward": partial(_gated_norm, backward=True),
    "Gated delta rule forward": partial(_delta_rule, backward=False),
    "Gated delta rule backward": partial(_delta_rule, backward=True),
    "Norm with a sigmoid forward": partial(_gated_norm, backward=False, gate="sigmoid"),
    "Norm with a sigmoid backward": partial(_gated_norm, backward=True, gate="sigmoid"),
    "Delta rule by channel forward": partial(_delta_rule, backward=False, by_channel=True),
    "Delta rule by channel backward": partial(_delta_rule, backward=True, by_channel=True),
    "State space forward": partial(_state_space, backward=False),
    "State space backward": partial(_state_space, backward=True),
    "Convolution step": partial(_step, rule="convolution"),
    "Delta rule step": partial(_step, rule="heads"),
    "Delta rule by channel step": partial(_step, rule="channels"),
}
