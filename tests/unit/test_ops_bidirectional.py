"""Documents in which images see themselves, on every path that computes attention, against masks of transformers.

Leaving out the second call, its last token or the order of its tokens moves outputs by 0.1 and more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.distributed.mesh import Axis
from engine.errors import UserError
from engine.kernels.native.loader import native_status
from engine.kernels.records import Documents
from engine.layers.attention import AttentionKind, attention_of
from engine.layers.context import TensorLayout
from engine.ops.attention import masked as masked_module
from engine.ops.attention.bidirectional import BidirectionalAttention, spans_sentence, with_spans
from engine.ops.attention.blocks import (
    CPU_BLOCKS,
    NATIVE_BLOCKS,
    REFERENCE_BLOCKS,
    _reference_backward,
    _reference_forward,
    one_by_one,
)
from engine.ops.attention.masked import MaskedAttention
from engine.ops.attention.mergeable import InOneCall
from engine.ops.attention.packed import attention_by_document
from engine.ops.attention.varlen import VarlenAttention
from engine.ops.kernels import REFERENCE
from engine.vision.batch_parts import BidirectionalSpans
from tests.support.bidirectional_reference import masked, stock_mask

LENGTHS = (9, 1, 23, 7)
SPANS = ((1, 5), (5, 7), (10, 11), (12, 22), (24, 33), (34, 40))
"""At a document's start, beside each other, of one token, in the middle, at a document's end, and up to its end."""
WINDOWS = (None, 3, 8, 30)
PLAIN_BLOCKS = one_by_one("torch", _reference_forward, _reference_backward)
PATHS = {
    "masked": REFERENCE_BLOCKS,
    "blocks of torch": PLAIN_BLOCKS,
    "torch_cpu": CPU_BLOCKS,
    "native": NATIVE_BLOCKS,
}


def documents(spans: tuple[tuple[int, int], ...] = SPANS) -> Documents:
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0, dtype=torch.int32)
    return Documents(lengths=LENGTHS, offsets=offsets, max_length=max(LENGTHS), seen_whole=BidirectionalSpans.of(spans))


def inputs(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(sum(LENGTHS), heads, 8, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for heads in (4, 2, 2)
    ]


def attention_on(path: str, window: int | None) -> Callable[..., Tensor]:
    layout = TensorLayout(attention_blocks=PATHS[path], kernels=replace(REFERENCE, attention=attention_by_document))
    return attention_of(AttentionKind(window=window, bidirectional=True), layout)


def check(attention: Callable[..., Tensor], window: int | None, dtype: torch.dtype, tolerance: float) -> None:
    q, k, v = inputs(dtype)
    found = attention(q, k, v, documents(), scale=0.4)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = masked(*exact, stock_mask(LENGTHS, SPANS, window), 0.4)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)
    dy = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours = torch.autograd.grad(found, (q, k, v), dy.to(dtype).expand_as(found))
    for mine, other in zip(ours, torch.autograd.grad(expected, exact, dy), strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), other, rtol=0, atol=4 * tolerance)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("path", PATHS)
def test_equals_transformers_masks(path: str, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if path == "native" and not native_status().available:
        pytest.skip(native_status().reason)
    # so that spans cross blocks of queries
    monkeypatch.setattr(masked_module, "BLOCK", 4)
    dtype = torch.float32 if path == "native" else torch.float64
    check(attention_on(path, window), window, dtype, 2e-6 if path == "native" else 1e-12)


def test_sixteen_bits() -> None:
    check(attention_on("torch_cpu", None), None, torch.bfloat16, 0.03)


def test_one_call_for_all_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flash kernel's call, by a stand-in that reads boundaries from the device tensors alone."""

    def spans_of(offsets: Tensor) -> Documents:
        return Documents(lengths=tuple(offsets.diff().tolist()), offsets=None, max_length=0)

    from engine.ops.attention import mergeable
    from engine.ops.attention.mergeable import ByDocument

    by_document, calls = ByDocument(PLAIN_BLOCKS), []

    def forward(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int, scale: float) -> tuple[Tensor, Tensor]:
        calls.append((tuple(offsets.tolist()), longest))
        out, lse = by_document.forward(q, k, v, spans_of(offsets), scale=scale)
        return out, lse.t().contiguous().t()  # as the kernel lays it out

    def backward(dout: Tensor, saved: tuple[Tensor, ...], offsets: Tensor, longest: int, scale: float) -> object:
        return by_document.backward(dout, *saved, spans_of(offsets), scale=scale)

    monkeypatch.setattr(mergeable, "flash_varlen_forward", forward)
    monkeypatch.setattr(mergeable, "flash_varlen_backward", backward)
    attention = with_spans(VarlenAttention(), REFERENCE_BLOCKS)
    assert isinstance(attention, BidirectionalAttention) and isinstance(attention.attention, InOneCall)
    check(attention, None, torch.float64, 1e-12)
    assert calls == [((0, 9, 10, 33, 40), 128), ((0, 3, 4, 13, 21, 26), 128)]


def test_torch_takes_the_flash_calls() -> None:
    """With tensors that have a shape, but no content: torch's own ops, forward and backward."""
    meta = torch.device("meta")
    q, k, v = (
        torch.empty(sum(LENGTHS), heads, 16, dtype=torch.bfloat16, device=meta, requires_grad=True)
        for heads in (4, 2, 2)
    )
    spans = BidirectionalSpans.of(SPANS)
    assert spans is not None
    spans = replace(spans, earlier_N=spans.earlier_N.to(meta), offsets=spans.offsets.to(meta))
    offsets = torch.empty(5, dtype=torch.int32, device=meta)
    on_device = Documents(lengths=(), offsets=offsets, max_length=23, seen_whole=spans)
    out = with_spans(VarlenAttention(), REFERENCE_BLOCKS)(q, k, v, on_device, scale=0.3)
    assert out.shape == q.shape and out.dtype == q.dtype
    gradients = torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, x.dtype) for x in (q, k, v)]


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["one call", "by document"])
def test_on_a_gpu(path: str) -> None:
    from engine.ops.attention.blocks import CUDA_BLOCKS

    device = torch.device("cuda")
    q, k, v = (x.detach().to(device).requires_grad_() for x in inputs(torch.bfloat16))
    record = documents()
    assert record.seen_whole is not None and record.offsets is not None
    spans = record.seen_whole
    spans = replace(spans, earlier_N=spans.earlier_N.to(device), offsets=spans.offsets.to(device))
    record = replace(record, offsets=record.offsets.to(device), seen_whole=spans)
    plain = VarlenAttention() if path == "one call" else attention_by_document
    found = with_spans(plain, CUDA_BLOCKS)(q, k, v, record, scale=0.4)
    exact = [x.detach().double().cpu().requires_grad_() for x in (q, k, v)]
    expected = masked(*exact, stock_mask(LENGTHS, SPANS, None), 0.4)
    torch.testing.assert_close(found.double().cpu(), expected, rtol=0, atol=0.03)
    dy = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours = torch.autograd.grad(found, (q, k, v), dy.to(found))
    for mine, other in zip(ours, torch.autograd.grad(expected, exact, dy), strict=True):
        torch.testing.assert_close(mine.double().cpu(), other, rtol=0, atol=0.12)


def test_without_images_the_plain_attention_computes() -> None:
    q, k, v = inputs(torch.float64)
    expected = attention_by_document(q, k, v, documents(()), scale=0.4)
    for path in PATHS:
        if path != "native":
            assert torch.equal(attention_on(path, None)(q, k, v, documents(()), scale=0.4), expected)
    assert BidirectionalSpans.of([(3, 4)]) is None


def test_what_computes_is_said() -> None:
    assert "one more call of the flash kernel" in spans_sentence(VarlenAttention(), REFERENCE_BLOCKS)
    assert spans_sentence(attention_by_document, CPU_BLOCKS).endswith("by torch_cpu")
    assert "plain torch, since no kernel" in spans_sentence(attention_by_document, REFERENCE_BLOCKS)
    assert isinstance(with_spans(attention_by_document, REFERENCE_BLOCKS), MaskedAttention)


def test_ring_attention_is_refused() -> None:
    layout = TensorLayout(cp=Axis("cp", 2), context_method="ring")
    with pytest.raises(UserError, match=r"tokens of images that see .* set parallel.context_method to ulysses"):
        attention_of(AttentionKind(bidirectional=True), layout)
