"""Shapes of decode passes, and such passes as graphs of a GPU.

On a GPU: python -m pytest -m gpu tests/unit/test_decode_graphs.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.inference import decode_graphs
from engine.inference.decode_graphs import pass_widths
from engine.inference.options import Limits, Sampling
from tests.support.family_models import make_model
from tests.support.generation import GpuCapture, engine_answers, random_prompts


def test_widths_are_powers_of_two_and_all_slots() -> None:
    assert pass_widths(1, 1) == [1]
    assert pass_widths(6, 1) == [1, 2, 4, 6]
    assert pass_widths(64, 1) == [1, 2, 4, 8, 16, 32, 64]
    assert pass_widths(6, 4) == [4, 8]
    assert pass_widths(24, 24) == [24]


@pytest.mark.gpu
@pytest.mark.parametrize("multiple", [1, 6])
@pytest.mark.parametrize("name", ["llama fused", "mistral", "gemma2", "qwen3.5", "falcon h1"])
def test_a_gpus_graphs_give_the_tokens_of_single_launches(
    name: str, multiple: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups that share a prompt's pages and are cut by the slots; rows end on tokens that they sample, and outgrow
    windows and shapes. Passes are filled up alike, so that the same kernels compute the same bits."""
    monkeypatch.setattr(decode_graphs, "SHORTEST", 16)
    make_model(name, tmp_path / "hf")
    prompts = [prompt for prompt in random_prompts(67, (5, 17, 1, 33)) for _ in range(3)]
    limits = Limits(max_new_tokens=60, slots=6, stop_ids=frozenset({3, 40}))
    common: dict[str, Any] = {
        "sampling": Sampling(temperature=1.0, top_p=0.95, repetition_penalty=1.1, seed=3), "group": 3,
        "multiple": multiple, "device": "cuda", "dtype": "bfloat16",
    }  # fmt: skip
    captures: list[GpuCapture] = []
    graphed = engine_answers(tmp_path / "hf", prompts, limits, graphs=captures, **common)
    plain = engine_answers(tmp_path / "hf", prompts, limits, **common)
    assert len(captures[0].captured) > 2
    if multiple > 1:
        assert [answer.ids for answer in graphed] == [answer.ids for answer in plain]
    else:  # of other widths, and so of products that may round otherwise
        assert sum(one.ids == other.ids for one, other in zip(graphed, plain, strict=True)) > len(prompts) / 2
