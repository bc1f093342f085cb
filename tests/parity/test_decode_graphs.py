"""Decode passes as graphs against the passes of the loop without them, and against transformers.

On a CPU passes are recorded (engine.layers.recorded_calls), and functions stand in for CUDA graphs, which insist that a
replay repeats the operations of the capture (tests.support.graph_stand_in). With those of a GPU:
tests/unit/test_decode_graphs.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.inference import decode_graphs
from engine.inference.model_part import InferenceStage
from engine.inference.options import Limits, ModelChoice, Sampling
from engine.runtime.launch import Launch
from engine.telemetry.log import Log
from engine.training.generation import open_for_generation
from tests.support.family_models import make_model
from tests.support.family_table import FAMILIES
from tests.support.generation import STORIES, KeptRecordings, engine_answers, random_prompts, stock_greedy
from tests.support.graph_stand_in import Again, FunctionCapture
from tests.support.sweeps import sampled

RECORDED = [
    name
    for name in FAMILIES
    if not any(word in name for word in ("moe", "gemma2", "gpt oss", "deepseek", "mixtral", "nemotron"))
    and name not in ("minimax m2", "qwen3 next", "kimi linear", "glm4 moe lite", "glm moe dsa", "olmoe")
]
"""Families without experts and with attention that reads pages where they are."""


@pytest.fixture(autouse=True)
def _short_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets rows outgrow shapes of a few tokens."""
    monkeypatch.setattr(decode_graphs, "SHORTEST", 16)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("llama fused", None),
        ("qwen3 moe", "the products of experts in this qwen3_moe model are launched one by one"),
        ("gemma2", "they do not read pages where they are"),
    ],
)
def test_what_stands_against_graphs_is_said(name: str, reason: str | None, tmp_path: Path) -> None:
    make_model(name, tmp_path / "hf")
    device = torch.device("cpu")
    opened = open_for_generation(ModelChoice(path=tmp_path / "hf"), Launch(rank=0, world_size=1, device=device), Log(1))
    sizes: dict[str, Any] = {"sampling": Sampling(), "slots": 2, "length": 8, "device": device}
    stages = [
        InferenceStage(opened.decoder, tp=opened.mesh.tp, pp=opened.mesh.pp, capture=capture, **sizes)
        for capture in (None, Again())
    ]
    said = [[note for note in stage.notes if "graphs" in note] for stage in stages]
    assert said[0] == [] and (said[1] == [] if reason is None else reason in said[1][0])


@pytest.mark.parametrize("recorded", [False, True])
def test_greedy_answers_are_those_of_transformers(recorded: bool, stories_dir: Path) -> None:
    """Rows of four lengths in three slots, so that they begin and end at different times, and pages are added."""
    expected = stock_greedy(AutoModelForCausalLM.from_pretrained(stories_dir), STORIES, 64)
    captures: list[FunctionCapture] = []
    limits = Limits(max_new_tokens=64, slots=3)
    found = engine_answers(stories_dir, STORIES, limits, graphs=captures, recorded=recorded)
    assert [list(answer.ids) for answer in found] == expected
    assert sum(one.replays for one in captures[0].captured) > 60


@pytest.mark.parametrize(
    ("name", "sampling"),
    sampled(
        [
            ("llama fused", Sampling(temperature=1.0, seed=3)),
            ("mistral", Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.2, seed=4)),
            ("qwen3.5", Sampling(temperature=1.0, min_p=0.01, seed=5)),
            ("falcon h1", Sampling(temperature=1.0, top_k=20, seed=6)),
        ],
        [("mistral", Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.2, seed=4))],
    ),
)
def test_sampled_answers_are_those_without_graphs(name: str, sampling: Sampling, tmp_path: Path) -> None:
    """Groups that share a prompt's pages and are cut by the slots; rows end on tokens that they sample. Attention in
    full, with a window that rows outgrow, and beside states."""
    make_model(name, tmp_path / "hf")
    prompts = [prompt for prompt in random_prompts(67, (5, 17, 1, 33)) for _ in range(3)]
    limits = Limits(max_new_tokens=40, slots=5, stop_ids=frozenset({3, 40}))
    for multiple in (1, 5, 4):
        captures: list[FunctionCapture] = []
        common: dict[str, Any] = {"sampling": sampling, "group": 3, "multiple": multiple}
        graphed = engine_answers(tmp_path / "hf", prompts, limits, graphs=captures, **common)
        recordings: list[KeptRecordings] = []
        recorded = engine_answers(tmp_path / "hf", prompts, limits, graphs=recordings, recorded=True, **common)
        plain = engine_answers(tmp_path / "hf", prompts, limits, **common)
        assert [answer.ids for answer in graphed] == [answer.ids for answer in plain]
        assert [answer.ids for answer in recorded] == [answer.ids for answer in plain]
        assert sum(one.replays for one in recordings[0].captured) > 40
        lengths = {len(answer.ids) for answer in graphed}
        assert len(lengths) > 3 and max(lengths) > 32, lengths
        assert sum(one.replays for one in captures[0].captured) > 40


@pytest.mark.parametrize(
    ("name", "dtype"),
    sampled(
        [(name, dtype) for name in RECORDED for dtype in ("float32", "bfloat16")],
        [("llama", "bfloat16"), ("bamba", "float32")],
    ),
)
def test_recorded_passes_have_the_bits_of_passes_as_they_are(name: str, dtype: str, tmp_path: Path) -> None:
    _assert_same_bits(name, tmp_path, dtype=dtype)


@pytest.mark.parametrize(
    ("name", "base"),
    sampled([(name, base) for name in ("llama", "qwen3.5") for base in ("nf4", "int8", "fp8_row")], [("llama", "nf4")]),
)
def test_recorded_passes_decode_weights(name: str, base: str, tmp_path: Path) -> None:
    """Not of the encoding "fp8": its one scale for all rows of a pass is that of rows that only fill it up, too."""
    _assert_same_bits(name, tmp_path, base_dtype=base)


def _assert_same_bits(name: str, tmp_path: Path, **choice: str) -> None:
    """Compares tokens and log-probabilities; passes are filled up to as many rows either way."""
    make_model(name, tmp_path / "hf")
    prompts = random_prompts(67, (5, 17, 1, 33))
    limits = Limits(max_new_tokens=20, slots=3, stop_ids=frozenset({3, 40}))
    common: dict[str, Any] = {"sampling": Sampling(temperature=0.9, seed=4), "multiple": 3, **choice}
    recordings: list[KeptRecordings] = []
    recorded = engine_answers(tmp_path / "hf", prompts, limits, graphs=recordings, recorded=True, **common)
    plain = engine_answers(tmp_path / "hf", prompts, limits, logps=True, **common)
    assert [(one.ids, one.logps) for one in recorded] == [(one.ids, one.logps) for one in plain]
    assert sum(one.replays for one in recordings[0].captured) > 10  # of up to 40: rows may stop early
