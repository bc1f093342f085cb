"""Adopted models over context ranks against transformers' model on each document alone, and what is refused there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.adopted.proof import Small, Trained, computed, proof_batch, reference, small_of
from engine.data.collate import context_part
from engine.distributed.collectives import all_reduce
from engine.distributed.mesh import build_mesh
from engine.distributed.ranks import RankGrid
from engine.errors import UserError
from engine.layers.context import TensorLayout
from engine.zigzag import rank_columns
from tests.distributed.cases import relative_error
from tests.support.spawning import spawn

pytestmark = pytest.mark.distributed

METHODS = {
    "glm4": ("ring", "ulysses"),
    "deepseek_v3": ("ring", "ulysses"),
    "olmo3": ("ulysses",),
    "gemma2": ("ulysses",),
    "gpt_oss": ("ring", "ulysses"),
}
"""Models, and the methods by which their attention reaches other ranks: values narrower than keys, windows, soft caps,
and sinks that train among them."""
CHANGES: dict[str, Any] = {"gpt_oss": {"layer_types": ["full_attention"] * 36}}
LENGTHS = (11, 13, 16)


def _small(model_type: str) -> Small:
    from transformers import CONFIG_MAPPING

    trained = Trained(weights=frozenset({"layers.*.module.self_attn.sinks"}))
    return small_of(
        {**CONFIG_MAPPING[model_type](**CHANGES.get(model_type, {})).to_dict(), "model_type": model_type}, trained
    )


def _errors() -> dict[str, float]:
    """Returns the errors of this rank's losses, and of gradients over all ranks, by what was computed."""
    mesh = build_mesh(RankGrid(cp=2), device_type="cpu", num_kv_heads=2)
    found = {}
    for model_type, methods in METHODS.items():
        small = _small(model_type)
        whole = proof_batch(LENGTHS, small.config.vocab_size)
        wanted = reference(small, whole)
        mine = context_part(whole, size=2, rank=mesh.cp.rank)
        columns = torch.cat([torch.arange(*span) for span in rank_columns(sum(LENGTHS), 2, mesh.cp.rank)])
        for method in methods:
            layout: Any = TensorLayout.over(mesh, context_method=method)
            got = computed(small.parts(layout=layout), mine)
            case = f"{model_type} {method}"
            found[f"{case} loss"] = float((got.losses - wanted.losses[columns]).abs().max())
            for name, gradient in got.gradients.items():
                found[f"{case} {name}"] = relative_error(all_reduce(gradient, mesh.cp), wanted.gradients[name])
    return found


def test_context_ranks_compute_what_transformers_does_of_each_document() -> None:
    for errors in spawn(_errors, world=2, timeout=200):
        worst = sorted(errors.items(), key=lambda one: -one[1])[:5]
        assert worst[0][1] < 1e-5, worst
        assert len([name for name in errors if name.endswith(" loss")]) == 8
        assert any(name.endswith(".sinks") for name in errors)


def test_rings_refuse_windows_and_soft_caps_and_every_method_other_mixers() -> None:
    for model_type, said in (("olmo3", "has windows"), ("gemma2", "has a soft cap on scores")):
        with pytest.raises(UserError, match=f"{said}, which ring attention.* set parallel.context_method to ulysses"):
            _small(model_type).config.check_context(2, "ring")
        _small(model_type).config.check_context(2, "ulysses")
    with pytest.raises(UserError, match="layers.0 of a small gptj model has an attention of its own"):
        _small("gptj").config.check_context(2, "ring")
    own = replace(_small("qwen3_next").config, attention="own")
    for method in ("ring", "ulysses"):
        with pytest.raises(UserError, match="set parallel.context to 1"):
            own.check_context(2, method)
