"""Rows that compute common beginnings once, split over context ranks, against one process, which is held to
transformers in `tests/parity/test_shared_prefixes.py`.

Losses of every token, and the gradient that reaches its embedding.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine.batch import Batch
from engine.branches import depths
from engine.checkpoint.model_weights import open_source
from engine.data.collate import build_batch, context_part
from engine.data.dataset import dataset_of
from engine.data.prefixes import with_shared_prefixes
from engine.distributed.mesh import build_mesh
from engine.distributed.ranks import RankGrid
from engine.layers.context import TensorLayout
from engine.ops.attention.blocks import NATIVE_BLOCKS, REFERENCE_BLOCKS
from tests.distributed.cases import relative_error
from tests.distributed.test_families import _embedding_gradient, _methods
from tests.parity.test_shared_prefixes import alike
from tests.support.family_models import make_model
from tests.support.spawning import spawn

pytestmark = pytest.mark.distributed

NAMES = ("llama", "gemma2", "qwen3 moe", "gpt oss", "deepseek v3")
_ROW = 96
Seen = dict[tuple[str, str], tuple[Tensor, Tensor, Tensor]]


def _batch() -> Batch:
    shared = with_shared_prefixes(dataset_of(alike(5, count=14), seq_length=_ROW, packing=True))
    return build_batch(shared, range(len(shared)), range(len(shared)), length=_ROW)


def _run(folder: str) -> Seen:
    mesh = build_mesh(RankGrid(cp=dist.get_world_size()), device_type="cpu", num_kv_heads=2)
    batch = context_part(_batch(), size=mesh.cp.size, rank=mesh.cp.rank)
    seen = {}
    for name in NAMES:
        source = open_source(Path(folder) / name.replace(" ", "-"))
        for method in _methods(source):
            for blocks in (REFERENCE_BLOCKS, NATIVE_BLOCKS) if method == "ring" else (REFERENCE_BLOCKS,):
                layout = TensorLayout(cp=mesh.cp, context_method=method, attention_blocks=blocks)
                seen[name, f"{method} {blocks.name}"] = _embedding_gradient(source, layout, batch)
    return seen


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="beginnings-")
    for name in NAMES:
        make_model(name, Path(folder.name) / name.replace(" ", "-"))
    return folder


@functools.cache
def _ranks(world: int) -> list[Seen]:
    return spawn(_run, world=world, args=(_folder().name,), timeout=110)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_beginnings_over_context_ranks(name: str, world: int) -> None:
    source = open_source(Path(_folder().name) / name.replace(" ", "-"))
    assert source.model.decoder.branch_obstacle() is None
    batch = _batch()
    assert max(depths(batch.document_parents)) == 2
    place, expected_losses, expected = _embedding_gradient(source, TensorLayout(), batch)
    order = {int(index): row for row, index in enumerate(place)}
    ranks = _ranks(world)
    ways = [way for one, way in ranks[0] if one == name]
    assert len(ways) == (3 if "ring" in _methods(source) else 1)
    for way in ways:
        for own, losses, gradient in (rank[name, way] for rank in ranks):
            rows = torch.tensor([order[int(index)] for index in own])
            torch.testing.assert_close(losses, expected_losses[rows], rtol=0, atol=2e-5)
            assert relative_error(gradient, expected[rows]) < 2e-5, way
