"""Attention with sinks on every path that computes it, against a softmax over the scores and one more column."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from engine.distributed.mesh import Axis
from engine.errors import UserError
from engine.kernels.native.loader import native_status
from engine.kernels.records import Documents
from engine.layers.attention import AttentionKind, attention_of
from engine.layers.context import TensorLayout
from engine.layers.module import ShardEntry
from engine.ops.attention import masked as masked_module
from engine.ops.attention import mergeable
from engine.ops.attention.blocks import CPU_BLOCKS, NATIVE_BLOCKS, REFERENCE_BLOCKS
from engine.ops.attention.mergeable import ByDocument
from engine.ops.attention.packed import attention_by_document
from engine.ops.attention.sinks import Sinks, with_sinks
from engine.ops.attention.varlen import VarlenAttention
from engine.ops.gradients import GradientSink
from engine.ops.kernels import REFERENCE
from tests.unit.test_ops_bidirectional import PATHS, PLAIN_BLOCKS

PACKED = (9, 1, 23, 7)
SINKS = torch.tensor([0.3, -1.0, 2.0, 5.0], dtype=torch.float64)


def _documents(lengths: tuple[int, ...]) -> Documents:
    offsets = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    return Documents(lengths=lengths, offsets=offsets, max_length=max(lengths))


def _expected(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, lengths: tuple[int, ...], window: int | None) -> Tensor:
    """As transformers' eager attention of gpt-oss, with all documents behind one mask."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    distance = torch.arange(len(document))[:, None] - torch.arange(len(document))
    seen = (document[:, None] == document) & (distance >= 0) & (distance < (window or 1000))
    k, v = (x.repeat_interleave(2, dim=1).transpose(0, 1) for x in (k, v))
    scores = (q.transpose(0, 1) @ k.transpose(1, 2) * 0.4).masked_fill(~seen, -torch.inf)
    column = sinks.view(-1, 1, 1).expand(-1, scores.shape[1], 1)
    return (torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1] @ v).transpose(0, 1)


def _check(
    attention_with: Callable[[Tensor, GradientSink], Callable[..., Tensor]],
    lengths: tuple[int, ...],
    window: int | None,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(sum(lengths), heads, 8, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for heads in (4, 2, 2)
    )
    gradient = GradientSink(SINKS.shape, torch.device("cpu"))
    found = attention_with(SINKS.to(dtype), gradient)(q, k, v, _documents(lengths), scale=0.4)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v, SINKS.to(dtype))]
    expected = _expected(*exact, lengths, window)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)
    dy = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours = torch.autograd.grad(found, (q, k, v), dy.to(dtype))
    *theirs, of_sinks = torch.autograd.grad(expected, exact, dy)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), other, rtol=0, atol=4 * tolerance)
    # which the sink adds up in fp32
    torch.testing.assert_close(gradient.buffer.double(), of_sinks, rtol=0, atol=max(20 * tolerance, 2e-6))


@pytest.mark.parametrize("lengths", [PACKED, (40,)], ids=["packed", "one"])
@pytest.mark.parametrize("window", [None, 3, 8, 30])
@pytest.mark.parametrize("path", PATHS)
def test_equals_a_softmax_with_one_more_column(
    path: str, window: int | None, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the sinks in the sums outputs move by 2."""
    if path == "native" and not native_status().available:
        pytest.skip(native_status().reason)
    monkeypatch.setattr(masked_module, "BLOCK", 4)  # so that documents have several
    dtype = torch.float32 if path == "native" else torch.float64
    kernels = replace(REFERENCE, attention=attention_by_document)

    def attention_with(sinks: Tensor, gradient: GradientSink) -> Callable[..., Tensor]:
        layout = TensorLayout(attention_blocks=PATHS[path], kernels=kernels)
        entry = ShardEntry("sinks", nn.Parameter(sinks), None, gradient)  # type: ignore[arg-type]
        return attention_of(AttentionKind(window=window, sinks=True), layout, entry)

    _check(attention_with, lengths, window, dtype, 2e-6 if path == "native" else 1e-12)


@pytest.mark.parametrize("blocks", [CPU_BLOCKS, REFERENCE_BLOCKS], ids=["torch_cpu", "reference"])
def test_sixteen_bits(blocks: mergeable.AttentionBlocks) -> None:
    def attention_with(sinks: Tensor, gradient: GradientSink) -> Callable[..., Tensor]:
        return with_sinks(
            attention_by_document, blocks, window=None, sinks=Sinks(scores_H=sinks, gradient=gradient), cp=Axis("cp")
        )

    _check(attention_with, PACKED, None, torch.bfloat16, 0.03)


def test_one_call_for_all_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flash kernel's call, by a stand-in that reads boundaries from the device tensors alone."""
    by_document = ByDocument(PLAIN_BLOCKS)

    def documents_of(offsets: Tensor) -> Documents:
        return Documents(lengths=tuple(offsets.diff().tolist()), offsets=None, max_length=0)

    def forward(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int, scale: float) -> tuple[Tensor, Tensor]:
        return by_document.forward(q, k, v, documents_of(offsets), scale=scale)

    def backward(dout: Tensor, saved: tuple[Tensor, ...], offsets: Tensor, longest: int, scale: float) -> object:
        return by_document.backward(dout, *saved, documents_of(offsets), scale=scale)

    monkeypatch.setattr(mergeable, "flash_varlen_forward", forward)
    monkeypatch.setattr(mergeable, "flash_varlen_backward", backward)

    def attention_with(sinks: Tensor, gradient: GradientSink) -> Callable[..., Tensor]:
        return with_sinks(
            VarlenAttention(),
            REFERENCE_BLOCKS,
            window=30,
            sinks=Sinks(scores_H=sinks, gradient=gradient),
            cp=Axis("cp"),
        )

    _check(attention_with, PACKED, None, torch.float64, 1e-12)


def test_lengths_that_only_the_device_knows_are_refused_where_they_are_read() -> None:
    q, k, v = (torch.zeros(40, heads, 8) for heads in (4, 2, 2))
    documents = replace(_documents(PACKED), lengths=())
    for window, plain in ((None, attention_by_document), (8, VarlenAttention())):
        attention = with_sinks(
            plain, NATIVE_BLOCKS, window=window, sinks=Sinks(scores_H=SINKS.float(), gradient=None), cp=Axis("cp")
        )
        with pytest.raises(UserError, match=f"attention with sinks and window {window} reads them on the host"):
            attention(q, k, v, documents, scale=0.4)
