"""Attention over a group that shares its prompt, against PrefixGrouper (arXiv 2506.05433): outputs and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.kernels.native.loader import native_status
from engine.kernels.records import Documents
from engine.ops.backends import choose_kernels

GROUPS = [[19, 7, 1, 12], [33, 5, 5], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
"""Tokens of a prompt, and those behind it of each member."""


def _sdpa(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    """Causal attention of the last positions to those that are kept [B, keys]; the form that PrefixGrouper calls."""
    queries, keys = q.shape[2], k.shape[2]
    causal = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    seen = causal & kept[:, None, None, :] | torch.eye(queries, keys, dtype=torch.bool)  # padding sees something
    return scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("group", GROUPS)
def test_outputs_and_gradients_are_prefix_groupers(group: list[int], backend: str) -> None:
    library = pytest.importorskip("prefix_grouper")
    if backend == "native" and not native_status().available:
        pytest.skip(native_status().reason)
    draw = torch.Generator().manual_seed(sum(group))
    heads, tokens = (6, 2, 2), sum(group)
    given = [torch.randn(tokens, count, 16, generator=draw) for count in heads]
    weights = torch.randn(tokens, 6, 16, generator=draw)
    q, k, v = (one.clone().requires_grad_() for one in given)
    theirs = library.PrefixGrouper([group]).forward(_sdpa, *(one.transpose(0, 1)[None] for one in (q, k, v)))[0]
    (theirs * weights).sum().backward()
    expected = theirs.detach(), q.grad, k.grad, v.grad

    kernels, _ = choose_kernels(backend, device=torch.device("cpu"), dtype=torch.float32)
    q, k, v = (one.clone().requires_grad_() for one in given)
    documents = Documents.of_rows(tuple(group), row_length=tokens, parents=(-1, *[0] * (len(group) - 1)))
    ours = kernels.attention(q, k, v, documents, scale=16**-0.5)
    (ours * weights).sum().backward()
    names, founds = ("out", "dq", "dk", "dv"), (ours.detach(), q.grad, k.grad, v.grad)
    for name, found, wanted in zip(names, founds, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")
