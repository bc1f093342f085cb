"""The page of models: made of the JSON beside it, whose results are those of a run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.adopted.structure import image_types, known_types
from tests.coverage import image_page
from tests.coverage.apart import run_apart
from tests.coverage.checks import one_process
from tests.coverage.export_checks import exported
from tests.coverage.page import EXACT, JSON, PAGE, counts, page, sentences, trains
from tests.coverage.rank_checks import ON_RANKS

SAMPLE = ["bert", "gpt2", "llama", "qwen3_5_text"]
"""A stem with a biased head, transposed linears, the plain case, and layers that mix documents."""
_FOUND: dict[str, Any] = json.loads(JSON.read_text())


def test_the_page_is_made_of_the_results():
    assert PAGE.read_text() == page(_FOUND)
    assert len(PAGE.read_text().splitlines()) < 270


def test_every_result_is_of_a_type_that_transformers_has():
    assert _FOUND.keys() <= known_types().keys()


def test_what_is_not_right_has_a_sentence():
    silent = [name for name, one in _FOUND.items() if not trains(one) and not (one.get("refused") or one.get("failed"))]
    assert not silent


def test_the_counts_are_said():
    assert all(f"- {sentence}" in PAGE.read_text() for sentence in sentences(_FOUND))
    of = counts(_FOUND)
    assert f"{of['train']} of its [{of['types']} text types](docs/models.md)" in _readme()


def test_the_page_of_models_with_images_is_made_of_the_results():
    found: dict[str, Any] = json.loads(image_page.JSON.read_text())
    text = image_page.PAGE.read_text()
    assert text == image_page.page(found)
    assert found.keys() == image_types().keys()
    silent = [name for name, one in found.items() if not image_page.trains(one) and not image_page.reason(one)]
    assert not silent
    of = image_page.counts(found)
    assert f"{of['train']} of its [{of['types']} image types](docs/models_images.md)" in _readme()


def _readme() -> str:
    return " ".join((PAGE.parents[1] / "README.md").read_text().split())


@pytest.mark.slow
@pytest.mark.parametrize("model_type", SAMPLE)
def test_results_are_those_of_a_run(model_type: str):
    found, kept = run_apart(one_process, model_type), _FOUND[model_type]
    assert found["packed"] == kept["packed"]
    assert found["peft"] < EXACT and kept["peft"] < EXACT


@pytest.mark.parametrize("model_type", ["bert", "nanochat"])
def test_exports_are_those_of_a_run(model_type: str):
    """A head whose bias is stored under another name, and layers that need more of others than the stream."""
    found = exported(model_type)
    assert found.keys() == {"export"} and found["export"] < EXACT, found


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["apertus", "bamba", "bart", "ctrl", "gpt_oss", "gpt2"])
def test_further_exports_are_those_of_a_run(model_type: str):
    found = exported(model_type)
    assert found.keys() == {"export"} and found["export"] < EXACT, found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "column"), [("bert", "zero"), ("openai-gpt", "zero"), ("llama", "context"), ("electra", "context")]
)
def test_ranks_compute_what_the_page_says(model_type: str, column: str):
    assert run_apart(ON_RANKS[column], model_type, ranks=2)[column] < EXACT
