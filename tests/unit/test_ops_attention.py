"""Attention over documents against one call of torch's a document; rotary frequencies against transformers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.ops.attention.dense_gradient import dense
from engine.ops.attention.packed import causal_attention
from engine.ops.rope import inverse_frequencies
from rankfold.benchmarking.oracles import attention_by_document

DOCUMENTS = [(7,), (5, 5, 5), (1, 9, 1, 1, 3), (4, 6, 6, 2), (1,)]
HEADS = [(4, 4), (6, 2), (3, 1)]


def _inputs(lengths: tuple[int, ...], heads: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(sum(lengths), num, 6, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for num in (heads[0], heads[1], heads[1])
    )
    return q, k, v


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("lengths", DOCUMENTS)
def test_documents_are_apart(lengths: tuple[int, ...], heads: tuple[int, int]):
    q, k, v = _inputs(lengths, heads, torch.float64)
    ours = causal_attention(q, k, v, lengths, scale=0.3)
    theirs = attention_by_document(q, k, v, lengths, 0.3)
    torch.testing.assert_close(ours, theirs)
    dy = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = (torch.autograd.grad(out, (q, k, v), dy) for out in (ours, theirs))
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other)


def test_a_gradient_made_dense_has_the_layout_of_a_dense_output():
    wide = torch.randn(6, 5 * 4 + 3)
    rows = wide[:, :20]
    assert dense(rows).is_contiguous() and torch.equal(dense(rows), rows)
    heads = rows.view(2, 3, 5, 4).transpose(1, 2)
    assert dense(heads).transpose(1, 2).is_contiguous() and torch.equal(dense(heads), heads)
    whole = torch.randn(6, 20)
    assert dense(whole).data_ptr() == whole.data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("lengths", [(9, 15, 24), (512, 512)])
def test_gradients_whatever_the_distance_of_the_rows_of_the_outputs_gradient(head_dim: int, lengths: tuple[int, ...]):
    """Three of the same sizes in turn, which one plan of a library's kernel may serve."""
    heads, kv_heads, scale = 4, 1, head_dim**-0.5
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths), num, head_dim) for num in (heads, kv_heads, kv_heads)]
    drawn = [torch.randn(shape, generator=generator).bfloat16().cuda() for shape in shapes]
    dy = torch.randn(shapes[0], generator=generator).bfloat16().cuda()
    wide = torch.nn.functional.pad(dy.flatten(1), (0, 16))[:, : heads * head_dim].view_as(dy)
    exact = [x.double().requires_grad_() for x in drawn]
    truths = torch.autograd.grad(causal_attention(*exact, lengths, scale=scale), exact, dy.double())
    for gradient in (dy, wide, dy):
        given = [x.clone().requires_grad_() for x in drawn]
        found = torch.autograd.grad(causal_attention(*given, lengths, scale=scale), given, gradient)
        for one, truth in zip(found, truths, strict=True):
            assert (one.double() - truth).norm() <= 0.02 * truth.norm()


def test_a_document_does_not_read_its_neighbours():
    lengths = (4, 6, 5)
    q, k, v = _inputs(lengths, (4, 2), torch.float32)
    before = causal_attention(q, k, v, lengths, scale=0.4)
    with torch.no_grad():
        for x in (k, v):
            x[:4] += 3
            x[10:] -= 5
    after = causal_attention(q, k, v, lengths, scale=0.4)
    assert torch.equal(before[4:10], after[4:10])
    assert not torch.equal(before[:4], after[:4])


def test_bf16_error_is_torchs_own():
    lengths = (16, 9, 40)
    q, k, v = _inputs(lengths, (4, 2), torch.bfloat16)
    exact = attention_by_document(q.double(), k.double(), v.double(), lengths, 0.4)
    ours = (causal_attention(q, k, v, lengths, scale=0.4).double() - exact).norm()
    theirs = (attention_by_document(q, k, v, lengths, 0.4).double() - exact).norm()
    assert ours <= 2 * theirs


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("original_length", [16, 512, 8192])
@pytest.mark.parametrize(("head_dim", "theta"), [(6, 10000.0), (128, 500000.0)])
def test_llama3_frequencies_equal_transformers(head_dim: int, theta: float, original_length: int):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    values = {**LLAMA3, "rope_type": "llama3", "rope_theta": theta, "original_max_position_embeddings": original_length}
    config = LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, rope_parameters=values)
    expected, factor = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    assert factor == 1.0
    ours = inverse_frequencies(head_dim, theta, kind="llama3", original_length=original_length, **LLAMA3)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
    assert not torch.allclose(ours, inverse_frequencies(head_dim, theta), rtol=1e-2), "nothing was scaled"


def test_linear_frequencies_divide():
    torch.testing.assert_close(
        inverse_frequencies(10, 500.0, kind="linear", factor=4.0) * 4, inverse_frequencies(10, 500.0)
    )
