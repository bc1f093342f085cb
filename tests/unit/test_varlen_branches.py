"""Attention over documents that continue others by calls for all documents and for each level of them.

torch's flash ops are stood in for on a CPU, so that what the engine gives them is computed, in fp64; that torch takes
the calls is seen with tensors that have shapes alone.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.batch import Batch
from engine.branches import levels
from engine.distributed.mesh import Axis
from engine.document_levels import CALLS_IN_PLACE, device_levels
from engine.kernels.records import Documents
from engine.ops.attention.bidirectional import with_spans
from engine.ops.attention.blocks import REFERENCE_BLOCKS
from engine.ops.attention.mergeable import ByDocument, merged_attention
from engine.ops.attention.sinks import Sinks, with_sinks
from engine.ops.attention.varlen import VarlenAttention
from engine.ops.gradients import GradientSink
from engine.vision.batch_parts import BidirectionalSpans
from tests.support.document_trees import random_tree, seen_tokens
from tests.support.flash_ops_stand_in import flash_ops

GROUP = (9, 5, 1, 7, 6), (-1, 0, 0, 0, 0)
GROUPS = (9, 5, 1, 7, 6, 4, 3, 2, 8), (-1, 0, 0, 0, -1, -1, 5, 6, 5)
PAIRS = (9, 5, 1, 7, 6, 4, 3, 2, 8, 2, 3, 5, 4), (-1, 0, -1, 2, -1, -1, 5, 6, 5, -1, 9, -1, 11)
"""Five documents that others continue, one of which is continued twice over."""
LONG = (150, 140, 2, 129), (-1, 0, 0, 0)
TREES = [GROUP, GROUPS, PAIRS, LONG, ((3, 2), (-1, -1)), *(random_tree(seed) for seed in range(6))]
HEADS = [(4, 4), (6, 2)]
Tree = tuple[tuple[int, ...], tuple[int, ...]]


def _documents(tree: Tree, device: str = "cpu") -> Documents:
    lengths, parents = tree
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    found = device_levels(lengths, parents, torch.device(device))
    return Documents(lengths=lengths, offsets=offsets, max_length=max(lengths), parents=parents, levels=found)


def _inputs(tree: Tree, heads: tuple[int, int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(sum(tree[0]), num, 8, generator=generator, dtype=torch.float64).requires_grad_()
        for num in (heads[0], heads[1], heads[1])
    ]


def _results(out: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    dy = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return out.detach(), *torch.autograd.grad(out, inputs, dy)


def _dense(tree: Tree, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    q, k, v = (x.transpose(0, 1)[None] for x in inputs)
    out = scaled_dot_product_attention(q, k, v, attn_mask=seen_tokens(*tree), scale=0.3, enable_gqa=True)
    return _results(out[0].transpose(0, 1), inputs)


def _compare(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for name, one, other in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        torch.testing.assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("tree", TREES, ids=str)
def test_calls_of_levels_equal_one_mask(tree: Tree, heads: tuple[int, int]) -> None:
    inputs = _inputs(tree, heads)
    with flash_ops() as calls:
        found = _results(VarlenAttention()(*inputs, _documents(tree), scale=0.3), inputs)
    _compare(found, _dense(tree, inputs))
    count = sum(len(level) if len(level) <= CALLS_IN_PLACE else 1 for level in levels(*tree))
    assert [(name, causal) for name, *_, causal in calls] == [
        *(("forward", number == 0) for number in range(count + 1)),
        *(("backward", number == 0) for number in range(count + 1)),
    ]


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_blocks_of_levels_equal_one_mask(tree: Tree) -> None:
    inputs = _inputs(tree, (6, 2))
    out = merged_attention(*inputs, _documents(tree), scale=0.3, attention=ByDocument(REFERENCE_BLOCKS))
    _compare(_results(out, inputs), _dense(tree, inputs))


def _calls_of(tree: Tree) -> list[tuple[object, ...]]:
    inputs = _inputs(tree, (4, 2))
    with flash_ops() as calls:
        _results(VarlenAttention()(*inputs, _documents(tree), scale=0.3), inputs)
    return calls


def test_a_few_blocks_of_a_level_are_a_call_each() -> None:
    """A document of 9 tokens continued by 13, and one of 4 by 13, of which 3 are continued by 2."""
    shapes = [(45, 45, 128, 128, True), (13, 9, 128, 128, False), (13, 4, 128, 128, False), (2, 3, 128, 128, False)]
    assert _calls_of(GROUPS) == [(name, *shape) for name in ("forward", "backward") for shape in shapes]
    assert [(one.queries, one.keys) for one in _documents(GROUPS).levels] == [
        ((9, 22), (0, 9)), ((32, 45), (28, 32)), ((35, 37), (32, 35))
    ]  # fmt: skip


def test_more_blocks_of_a_level_are_one_call_of_their_tokens_alone() -> None:
    keys, queries = (9, 1, 4, 2, 5), (5, 7, 13, 3, 4)
    shapes = [(59, 59, 128, 128, True), (sum(queries), sum(keys), 128, 128, False), (2, 3, 128, 128, False)]
    assert _calls_of(PAIRS) == [(name, *shape) for name in ("forward", "backward") for shape in shapes]
    first, second = _documents(PAIRS).levels
    assert (first.longest_query, first.longest_key) == (13, 9)
    assert first.query_offsets.tolist() == [0, *accumulate(queries)]
    assert first.key_offsets.tolist() == [0, *accumulate(keys)]
    assert isinstance(first.keys, Tensor) and first.keys.tolist() == [
        *range(9), 14, *range(28, 32), *range(45, 47), *range(50, 55)
    ]  # fmt: skip
    assert (second.queries, second.keys) == ((35, 37), (32, 35))


@pytest.mark.parametrize("tree", [GROUP, PAIRS], ids=str)
def test_sinks_are_taken_in_once(tree: Tree) -> None:
    """As one more key of each head, without a value."""
    inputs = _inputs(tree, (4, 2))
    scores = torch.tensor([0.3, -1.0, 2.0, 5.0], dtype=torch.float64)
    gradient = GradientSink((4,), torch.device("cpu"))
    attention = with_sinks(
        VarlenAttention(), REFERENCE_BLOCKS, window=30, sinks=Sinks(scores_H=scores, gradient=gradient), cp=Axis("cp")
    )
    with flash_ops():
        found = _results(attention(*inputs, _documents(tree), scale=0.3), inputs)
    sinks = scores.clone().requires_grad_()
    q, k, v = (x.repeat_interleave(4 // x.shape[1], 1).transpose(0, 1) for x in inputs)
    masked = (q @ k.transpose(1, 2) * 0.3).masked_fill(~seen_tokens(*tree), -torch.inf)
    column = sinks.view(-1, 1, 1).expand(-1, masked.shape[1], 1)
    out = (torch.cat([masked, column], dim=-1).softmax(-1)[..., :-1] @ v).transpose(0, 1)
    *expected, of_sinks = _results(out, [*inputs, sinks])
    _compare(found, tuple(expected))
    torch.testing.assert_close(gradient.buffer.double(), of_sinks, rtol=1e-6, atol=1e-6)  # added up in fp32


def test_a_window_hides_nothing_of_the_longest_path_alone() -> None:
    """9 tokens are continued by up to 7: a window of 15 hides the first from the last."""
    sinks = Sinks(scores_H=torch.zeros(4, dtype=torch.float64), gradient=None)
    for window, in_one_call in ((16, True), (15, False)):
        attention = with_sinks(VarlenAttention(), REFERENCE_BLOCKS, window=window, sinks=sinks, cp=Axis("cp"))
        with flash_ops() as calls:
            attention(*_inputs(GROUP, (4, 2)), _documents(GROUP), scale=0.3)
        assert bool(calls) == in_one_call


@pytest.mark.parametrize("tree", [GROUP, PAIRS], ids=str)
def test_torch_takes_the_calls(tree: Tree) -> None:
    """With tensors that have a shape, but no content, through torch's own ops."""
    q, k, v = (
        torch.empty(sum(tree[0]), num, 16, dtype=torch.bfloat16, device="meta", requires_grad=True) for num in (6, 2, 2)
    )
    out = VarlenAttention()(q, k, v, _documents(tree, "meta"), scale=0.25)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    gradients = torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, x.dtype) for x in (q, k, v)]


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_sixteen_bits_err_as_torch_does(tree: Tree) -> None:
    """Error of at most twice that of one call with a mask in the same dtype."""
    half = [x.detach().bfloat16().requires_grad_() for x in _inputs(tree, (4, 2))]
    exact = _dense(tree, [x.detach().double().requires_grad_() for x in half])
    q, k, v = (x.transpose(0, 1)[None] for x in half)
    theirs = scaled_dot_product_attention(q, k, v, attn_mask=seen_tokens(*tree), scale=0.3, enable_gqa=True)
    dy = torch.randn(exact[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).bfloat16()
    with flash_ops():
        ours = VarlenAttention()(*half, _documents(tree), scale=0.3)
        mine = (ours, *torch.autograd.grad(ours, half, dy))
    others = theirs[0].transpose(0, 1)
    others = (others, *torch.autograd.grad(others, half, dy))
    for name, one, other, right in zip(("out", "dq", "dk", "dv"), mine, others, exact, strict=True):
        assert (one.double() - right).norm() <= 2 * (other.double() - right).norm(), name


def test_levels_that_are_not_on_the_device_are_a_defect() -> None:
    documents = replace(_documents(GROUP), levels=())
    with pytest.raises(AssertionError, match="need their levels on the device"):
        VarlenAttention()(*_inputs(GROUP, (4, 4)), documents, scale=0.3)


def test_spans_of_images_are_refused() -> None:
    documents = replace(_documents(GROUP), seen_whole=BidirectionalSpans.of(((2, 5),)))
    with pytest.raises(AssertionError, match="images do not continue others"):
        with_spans(VarlenAttention(), REFERENCE_BLOCKS)(*_inputs(GROUP, (4, 4)), documents, scale=0.3)


def test_a_batch_on_the_host_sends_nothing() -> None:
    lengths, parents = GROUP
    whole = torch.arange(sum(lengths))[None]
    batch = Batch(
        tokens_BS=whole, labels_BS=whole, positions_BS=whole, token_index_BS=whole, loss_weights_BS=whole.float(),
        document_offsets=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        document_lengths=lengths, document_parents=parents,
    )  # fmt: skip
    assert batch.documents.levels == () and batch.documents.parents == parents


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("tree", [GROUP, GROUPS, PAIRS], ids=str)
def test_torchs_kernel_on_a_gpu(tree: Tree, size: int) -> None:
    """Error against fp64 of at most twice that of torch's attention with one mask in the same dtype."""
    lengths, device = tuple(37 * length for length in tree[0]), torch.device("cuda")
    longer = lengths, tree[1]
    generator = torch.Generator().manual_seed(0)
    half = [
        torch.randn(sum(lengths), heads, size, generator=generator).to(device, torch.bfloat16).requires_grad_()
        for heads in (4, 2, 2)
    ]
    exact = _dense(longer, [x.detach().cpu().double().requires_grad_() for x in half])
    dy = torch.randn(exact[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(half[0])
    q, k, v = (x.transpose(0, 1)[None] for x in half)
    mask = seen_tokens(*longer).to(device)
    theirs = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True)[0].transpose(0, 1)
    ours = VarlenAttention()(*half, _documents(longer, "cuda"), scale=0.3)
    for name, one, other, right in zip(
        ("out", "dq", "dk", "dv"),
        (ours, *torch.autograd.grad(ours, half, dy)),
        (theirs, *torch.autograd.grad(theirs, half, dy)),
        exact,
        strict=True,
    ):
        error, allowed = ((x.cpu().double() - right).norm() for x in (one, other))
        assert error <= 2 * allowed, name
