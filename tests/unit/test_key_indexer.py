"""The indexer of sparse attention; whole models are compared with transformers in test_models_families.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.distributed.mesh import Axis
from engine.errors import UserError
from engine.experts.layers.key_indexer import IndexSizes, KeyIndexer, sparse_attention
from engine.kernels.records import Documents
from engine.layers.context import AdapterSettings, LayerContext, TensorLayout, TrainingPlan
from tests.support.family_models import batch_of, engine_model, make_model, stock_losses

BUILD = LayerContext(layout=TensorLayout(), plan=TrainingPlan(), device=torch.device("cpu"), dtype=torch.float32)
SIZES = IndexSizes(heads=16, dim=10, kept=5, interleaved=False)


def _indexer(build: LayerContext = BUILD) -> KeyIndexer:
    indexer = KeyIndexer("layers.0.attention.indexer", SIZES, hidden=12, narrow=8, rotated=4, build=build)
    torch.manual_seed(0)
    for parameter in indexer.parameters():
        torch.nn.init.normal_(parameter)
    return indexer


def test_each_query_sees_so_many_keys_of_its_document():
    lengths = (3, 9, 300)
    total = sum(lengths)
    angles = torch.rand(total, 2)
    documents = Documents.of_rows(lengths, row_length=total)
    short, middle, long = _indexer().seen(
        torch.randn(total, 12), torch.randn(total, 8), angles.cos(), angles.sin(), documents
    )
    assert short is None
    for mask, length in ((middle, 9), (long, 300)):
        assert mask.sum(dim=1).tolist() == [min(index + 1, SIZES.kept) for index in range(length)]
        assert not mask.triu(1).any()


def test_what_it_cannot_do_is_refused():
    plan = TrainingPlan(adapter=lambda name: AdapterSettings(rank=2, scale=1.0, dropout=0.0))
    with pytest.raises(UserError, match="indexer.wq_b is to have an adapter, .* would never learn"):
        _indexer(replace(BUILD, plan=plan))
    with pytest.raises(UserError, match="parallel.context is 2, but the indexer"):
        _indexer(replace(BUILD, layout=TensorLayout(cp=Axis("cp", size=2))))
    with pytest.raises(UserError, match="up to 6 tokens are to be generated, .* at most 5 keys, the index_topk"):
        _indexer().check_generated(6)
    _indexer().check_generated(5)


def test_the_mask_is_part_of_the_model(tmp_path: Path):
    """With as many keys as a row has tokens, logits are others."""
    model = make_model("deepseek v32", tmp_path / "few")
    make_model("deepseek v32", tmp_path / "all", index_topk=64)
    batch = batch_of()
    losses = [engine_model(tmp_path / name).model(batch, torch.tensor(0)).detach() for name in ("few", "all")]
    with torch.no_grad():
        torch.testing.assert_close(losses[0], stock_losses(model, batch)[1], rtol=0, atol=1e-4)
    assert (losses[0] - losses[1]).abs().max() > 0.05


def _unused(*_: object, **__: object) -> torch.Tensor:
    raise AssertionError("every document has a mask")


def test_no_scores_are_kept_for_backward():
    """Torch's fused kernels take a batch alone: what is kept is queries, keys, values, output and the mask, of which no
    tensor has a number for each head and pair of tokens."""
    heads, length, width = 3, 40, 8
    documents = Documents.of_rows((length,), row_length=length)
    mask = torch.ones(length, length, dtype=torch.bool).tril() & (torch.arange(length) % 3 == 0)
    mask |= torch.eye(length, dtype=torch.bool)
    q, k, v = (torch.randn(length, heads, width, requires_grad=True) for _ in range(3))
    sizes = list[int]()
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: sizes.append(kept.numel()) or kept, lambda kept: kept):
        found = sparse_attention(q, k, v, documents, [mask], _unused, scale=0.3)
    assert max(sizes) == length * length  # the mask
    scores = torch.einsum("qhd,khd->hqk", q, k) * 0.3
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    torch.testing.assert_close(found, torch.einsum("hqk,khd->qhd", weights, v))
