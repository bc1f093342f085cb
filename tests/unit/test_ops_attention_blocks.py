"""Each backend of the attention blocks against attention in fp64 by torch, whole and in pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.errors import UserError
from engine.kernels.native.loader import native_status
from engine.ops.attention.blocks import (
    CPU_BLOCKS,
    CUDA_BLOCKS,
    NATIVE_BLOCKS,
    REFERENCE_BLOCKS,
    AttentionBlocks,
    choose_attention_blocks,
    merge_,
)
from engine.spans import Block, Span

SCALE = 0.3
HEADS = [(4, 4), (6, 2), (3, 1)]
BLOCKS = [
    pytest.param(REFERENCE_BLOCKS, id="reference"),
    pytest.param(CPU_BLOCKS, id="torch_cpu"),
    pytest.param(
        NATIVE_BLOCKS,
        id="native",
        marks=pytest.mark.skipif(not native_status().available, reason="no compiled kernels"),
    ),
]
COMMON = BLOCKS[:2]
"""Those that take any dtype."""


def _draw(tokens: int, keys: int, heads: tuple[int, int], head_dim: int = 8, dtype: torch.dtype = torch.float32) -> Any:
    """q, k, v, dout."""
    generator = torch.Generator().manual_seed(tokens + keys)
    shapes = ((tokens, heads[0]), (keys, heads[1]), (keys, heads[1]), (tokens, heads[0]))
    return tuple(torch.randn(*shape, head_dim, generator=generator).to(dtype) for shape in shapes)


def _exact(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """out, lse, dq, dk, dv in fp64, where `mask` [T, N] says who sees whom."""
    inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    heads_first = [x.transpose(0, 1)[None] for x in inputs]
    out = scaled_dot_product_attention(*heads_first, attn_mask=mask, scale=SCALE, enable_gqa=True)[0].transpose(0, 1)
    keys = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("qhd,mhd->hqm", q.double(), keys) * SCALE
    lse = scores.masked_fill(~mask, -torch.inf).logsumexp(-1).t()
    return (out.detach(), lse, *torch.autograd.grad(out, inputs, dout.double()))


def _whole_row(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, block: Block, blocks: AttentionBlocks) -> Any:
    """out, lse, dq, dk, dv of one block that holds all keys of its queries."""
    out, lse = blocks.forward(q, k, v, (block,), scale=SCALE)
    return (out, lse, *blocks.backward(dout, q, k, v, out.to(q.dtype), lse, (block,), scale=SCALE))


def _close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float) -> None:
    for name, mine, theirs in zip(("out", "lse", "dq", "dk", "dv"), found, expected, strict=True):
        torch.testing.assert_close(
            mine.double(), theirs, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("tokens", "keys"), [(5, 9), (1, 1), (37, 13), (1, 40), (13, 13)])
@pytest.mark.parametrize("blocks", BLOCKS)
def test_all_see_all(blocks: AttentionBlocks, tokens: int, keys: int, heads: tuple[int, int]):
    q, k, v, dout = _draw(tokens, keys, heads)
    found = _whole_row(q, k, v, dout, Block(Span(0, tokens), Span(0, keys), False), blocks)
    _close(found, _exact(q, k, v, dout, torch.ones(tokens, keys, dtype=torch.bool)), 1e-5)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("tokens", [1, 13, 37, 150])
@pytest.mark.parametrize("blocks", BLOCKS)
def test_causal(blocks: AttentionBlocks, tokens: int, heads: tuple[int, int]):
    q, k, v, dout = _draw(tokens, tokens, heads)
    found = _whole_row(q, k, v, dout, Block(Span(0, tokens), Span(0, tokens), True), blocks)
    _close(found, _exact(q, k, v, dout, torch.ones(tokens, tokens, dtype=torch.bool).tril()), 1e-5)


PIECES = (
    # a document of 11 on queries 2 to 12; its keys in three calls, the first causal, the last two of earlier tokens
    (Block(Span(2, 13), Span(1, 12), True), Block(Span(0, 2), Span(13, 20), False)),
    (Block(Span(2, 13), Span(0, 5), False),),
    (Block(Span(7, 13), Span(3, 10), False), Block(Span(0, 1), Span(0, 3), False)),
)
PIECE_KEYS = (20, 6, 10)


def _pieces_mask() -> Tensor:
    """[13, 36]: who sees whom over the three calls' keys, laid side by side."""
    mask, first = torch.zeros(13, sum(PIECE_KEYS), dtype=torch.bool), 0
    for call, keys in zip(PIECES, PIECE_KEYS, strict=True):
        for query, key, causal in call:
            seen = torch.ones(query.length, key.length, dtype=torch.bool)
            mask[slice(*query), first + key.start : first + key.stop] = seen.tril() if causal else seen
        first += keys
    return mask


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("blocks", BLOCKS)
def test_pieces_merge_and_their_gradients_add_up(blocks: AttentionBlocks, heads: tuple[int, int]):
    q, k, v, dout = _draw(13, sum(PIECE_KEYS), heads)
    expected = _exact(q, k, v, dout, _pieces_mask())
    calls = list(zip(PIECES, k.split(PIECE_KEYS), v.split(PIECE_KEYS), strict=True))
    out, lse = blocks.forward(q, calls[0][1], calls[0][2], PIECES[0], scale=SCALE)
    for call, key, value in calls[1:]:
        other, other_lse = blocks.forward(q, key, value, call, scale=SCALE)
        for start, stop in (block.query for block in call):
            merge_(out[start:stop], lse[start:stop], other[start:stop], other_lse[start:stop])
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    first = 0
    for (call, key, value), keys in zip(calls, PIECE_KEYS, strict=True):
        one = blocks.backward(dout, q, key, value, out, lse, call, scale=SCALE)
        for query, place, _ in call:
            dq[slice(*query)] += one[0][slice(*query)]
            dk[first + place.start : first + place.stop] = one[1][slice(*place)]
            dv[first + place.start : first + place.stop] = one[2][slice(*place)]
        first += keys
    _close((out, lse, dq, dk, dv), expected, 1e-5)


@pytest.mark.parametrize("blocks", BLOCKS)
def test_strided_heads_and_tokens(blocks: AttentionBlocks):
    """q, k, v as slices of one fused product, dout with heads before tokens, lse as a slice."""
    fused, dout = torch.randn(2, 9, 8, 6), torch.randn(4, 9, 6).transpose(0, 1)
    q, k, v = fused[1].split([4, 2, 2], dim=1)
    block = Block(Span(0, 9), Span(0, 9), True)
    _close(
        _whole_row(q, k, v, dout, block, blocks), _exact(q, k, v, dout, torch.ones(9, 9, dtype=torch.bool).tril()), 1e-5
    )


def test_merging_does_not_overflow():
    """Log sums far apart: the larger one wins, and nothing becomes infinite or not a number."""
    out, other = torch.full((3, 1, 2), 1.0), torch.full((3, 1, 2), 5.0)
    lse, other_lse = torch.tensor([[400.0], [-400.0], [0.0]]), torch.tensor([[-400.0], [400.0], [0.0]])
    merge_(out, lse, other, other_lse)
    torch.testing.assert_close(out[:, 0, 0], torch.tensor([1.0, 5.0, 3.0]))
    torch.testing.assert_close(lse[:, 0], torch.tensor([400.0, 400.0, 0.6931472]))


class _Attention(torch.autograd.Function):
    """The reference as a differentiable function, for gradcheck."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, block: Block) -> Tensor:
        out, lse = REFERENCE_BLOCKS.forward(q, k, v, (block,), scale=SCALE)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.block = block
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        return *REFERENCE_BLOCKS.backward(dout, *ctx.saved_tensors, (ctx.block,), scale=SCALE), None


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", HEADS)
def test_reference_gradcheck(heads: tuple[int, int], causal: bool):
    keys = 4 if causal else 5
    q, k, v, _ = (x.requires_grad_() for x in _draw(4, keys, heads, 3, torch.float64))
    block = Block(Span(0, 4), Span(0, keys), causal)
    assert torch.autograd.gradcheck(lambda *inputs: _Attention.apply(*inputs, block), (q, k, v))


@pytest.mark.parametrize("blocks", COMMON)
def test_bf16_error_is_torchs_own(blocks: AttentionBlocks):
    q, k, v, dout = _draw(64, 64, (4, 2), dtype=torch.bfloat16)
    mask = torch.ones(64, 64, dtype=torch.bool).tril()
    exact = _exact(q, k, v, dout, mask)
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    heads_first = [x.transpose(0, 1)[None] for x in inputs]
    out = scaled_dot_product_attention(*heads_first, is_causal=True, scale=SCALE, enable_gqa=True)[0].transpose(0, 1)
    theirs = (out.detach(), *torch.autograd.grad(out, inputs, dout))
    found = _whole_row(q, k, v, dout, Block(Span(0, 64), Span(0, 64), True), blocks)
    for mine, other, truth in zip((found[0], *found[2:]), theirs, (exact[0], *exact[2:]), strict=True):
        assert (mine.double() - truth).norm() <= 2 * (other.double() - truth).norm()


def test_cuda_calls_fit_the_operators_schema():
    """On tensors without data: that torch takes the arguments and gives the shapes. Not what they compute."""
    q, k, v, dout = (x.to("meta") for x in _draw(16, 24, (4, 2), 16, torch.bfloat16))
    blocks = (Block(Span(0, 8), Span(0, 8), True), Block(Span(8, 16), Span(8, 24), False))
    out, lse = CUDA_BLOCKS.forward(q, k, v, blocks, scale=SCALE)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (16, 4), torch.float32)
    gradients = CUDA_BLOCKS.backward(dout, q, k, v, out.to(q.dtype), lse, blocks, scale=SCALE)
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]


@pytest.mark.gpu
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("tokens", "keys", "causal"), [(37, 61, False), (150, 150, True), (1, 300, False)])
def test_cuda_error_is_torchs_own(tokens: int, keys: int, causal: bool, heads: tuple[int, int]):
    """At most twice the error of torch's attention with a mask in bf16."""
    q, k, v, dout = (x.cuda() for x in _draw(tokens, keys, heads, 64, torch.bfloat16))
    mask = torch.ones(tokens, keys, dtype=torch.bool, device="cuda")
    mask = mask.tril() if causal else mask
    exact = _exact(q, k, v, dout, mask)
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    heads_first = [x.transpose(0, 1)[None] for x in inputs]
    out = scaled_dot_product_attention(*heads_first, attn_mask=mask, scale=SCALE, enable_gqa=True)[0].transpose(0, 1)
    theirs = (out.detach(), *torch.autograd.grad(out, inputs, dout))
    found = _whole_row(q, k, v, dout, Block(Span(0, tokens), Span(0, keys), causal), CUDA_BLOCKS)
    for mine, other, truth in zip((found[0], *found[2:]), theirs, (exact[0], *exact[2:]), strict=True):
        assert (mine.double() - truth).norm() <= 2 * (other.double() - truth).norm()
    # scores of products of bf16 numbers summed in fp32
    torch.testing.assert_close(found[1].double(), exact[1], rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", HEADS)
def test_cuda_pieces_add_up(heads: tuple[int, int]):
    """Two halves of the keys, merged, against one call with all of them: the rounding of two results to bf16."""
    q, k, v, dout = (x.cuda() for x in _draw(40, 70, heads, 64, torch.bfloat16))
    whole = _whole_row(q, k, v, dout, Block(Span(0, 40), Span(0, 70), False), CUDA_BLOCKS)
    left, right = Block(Span(0, 40), Span(0, 33), False), Block(Span(0, 40), Span(33, 70), False)
    out, lse = CUDA_BLOCKS.forward(q, k, v, (left,), scale=SCALE)
    merge_(out, lse, *CUDA_BLOCKS.forward(q, k, v, (right,), scale=SCALE))
    parts = [
        CUDA_BLOCKS.backward(dout, q, k, v, whole[0].bfloat16(), lse, (one,), scale=SCALE) for one in (left, right)
    ]
    torch.testing.assert_close(out, whole[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, whole[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole[2], rtol=2e-2, atol=2e-2)
    for which in (1, 2):
        joined = torch.cat([parts[0][which][:33], parts[1][which][33:]])
        torch.testing.assert_close(joined, whole[2 + which], rtol=2e-2, atol=2e-2)


CPU = torch.device("cpu")


def test_the_fastest_that_can_run():
    fastest = "native" if native_status().available else "torch_cpu"
    assert choose_attention_blocks("auto", device=CPU, dtype=torch.float32, head_dim=64).name == fastest
    assert choose_attention_blocks("auto", device=CPU, dtype=torch.bfloat16, head_dim=64).name == "torch_cpu"
    cuda = torch.device("cuda")
    assert choose_attention_blocks("auto", device=cuda, dtype=torch.bfloat16, head_dim=64).name == "torch_cuda"
    assert choose_attention_blocks("auto", device=cuda, dtype=torch.float32, head_dim=64).name == "reference"
    assert choose_attention_blocks("auto", device=cuda, dtype=torch.bfloat16, head_dim=6).name == "reference"


@pytest.mark.parametrize(
    ("name", "device", "dtype", "head_dim", "words"),
    [
        ("fastest", "cpu", torch.float32, 64, "use auto, native, reference, torch_cpu, torch_cuda"),
        ("native", "cpu", torch.bfloat16, 64, "float32 on a CPU, not in torch.bfloat16 on cpu"),
        ("torch_cpu", "cuda", torch.bfloat16, 64, "on a CPU, not on cuda"),
        ("torch_cuda", "cuda", torch.float32, 64, "not in torch.float32"),
        ("torch_cuda", "cuda", torch.bfloat16, 12, "multiple of 8 up to 256, not 12"),
    ],
)
def test_refusals(name: str, device: str, dtype: torch.dtype, head_dim: int, words: str):
    with pytest.raises(UserError, match=words):
        choose_attention_blocks(name, device=torch.device(device), dtype=dtype, head_dim=head_dim)
