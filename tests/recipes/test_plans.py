"""The stored plans: what they say is what the planner says now, their run files are run files, and all of them fit."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from engine.config.load import from_yaml
from engine.config.rules import check_config, check_world
from rankfold.planning import memory, memory_config
from rankfold.recipes import catalog, memory_page, update
from rankfold.recipes.catalog import PLANS_FILE, Recipe
from rankfold.recipes.planning import planned
from rankfold.recipes.run_file import text_of
from tests.support.sweeps import sampled

RECIPES = {one.name: one for one in catalog.recipes()}
STORED = [name for name in RECIPES if name in catalog.plans()]
_QUICK = [
    "llama-3.1-8b-sft-1xh100", "qwen3-8b-sft-1xrtx4090", "qwen3-8b-dpo-8xh100", "qwen3-0.6b-grpo-1xh100",
    "minicpm-v-4.6-sft-1xl40s", "phi-4-sft-2xl40s",
]  # fmt: skip


@pytest.mark.parametrize("name", sampled([*RECIPES], _QUICK))
def test_a_plan_is_what_the_planner_says(name: str) -> None:
    assert planned(RECIPES[name]) == catalog.plans().get(name)


_ONE_EACH = list({RECIPES[name].model.name: name for name in STORED}.values())
"""The last recipe of each model."""


@pytest.mark.parametrize("name", sampled(STORED, _ONE_EACH))
def test_a_run_file_is_one(name: str) -> None:
    recipe, plan = RECIPES[name], catalog.plans()[name]
    config = from_yaml(text_of(recipe, plan))
    check_config(config)
    check_world(config, recipe.count)
    assert (config.model.path, config.model.base_dtype) == (recipe.model.path, plan.base_dtype)
    for section, options in (("parallel", plan.parallel), ("memory", plan.memory)):
        assert {option: getattr(getattr(config, section), option) for option in options} == options
    assert 0 < plan.gib <= recipe.gpu.memory * (1 - memory.RESERVE / 100) + 0.05
    assert 0 < plan.tokens[0] <= plan.tokens[1] <= plan.tokens[2]
    assert plan.step_seconds[0] >= plan.step_seconds[1] >= plan.step_seconds[2] > 0


@pytest.mark.parametrize(
    "name", sampled(STORED, ["qwen3-8b-sft-2xrtx4090", "llama-3.1-8b-dpo-1xl40s", "smollm3-3b-grpo-1xh200"])
)
def test_rankfold_plan_predicts_the_run_file_so(name: str, tmp_path: Path) -> None:
    """By the command that a recipe prints, which reads the file and searches nothing."""
    recipe, plan = RECIPES[name], catalog.plans()[name]
    (tmp_path / "run.yaml").write_text(text_of(recipe, plan), encoding="utf-8")
    (tmp_path / "config.json").write_text(json.dumps(recipe.model.config), encoding="utf-8")
    parser = argparse.ArgumentParser()
    memory.add_arguments(parser)
    words = ["--config", str(tmp_path / "run.yaml"), "--gpus", str(recipe.count), "--machine", recipe.gpu.machine]
    words += ["--model", str(tmp_path / "config.json"), "--gpu-memory", f"{recipe.gpu.memory:g}"]
    report = memory_config.report(parser.parse_args(words))
    last = next(line for line in report.splitlines() if " GiB at most: fits " in line)
    assert float(last.partition(" ")[0]) == pytest.approx(plan.gib, abs=0.06)


def test_every_stored_plan_has_a_recipe() -> None:
    assert set(catalog.plans()) <= set(RECIPES)
    for model in catalog.models().values():
        assert any(RECIPES[name].model is model for name in STORED), f"{model.name} fits nowhere"


def test_the_files_are_as_they_are_written() -> None:
    assert PLANS_FILE.read_text(encoding="utf-8") == update.plans_text(catalog.plans())
    assert update.PAGE.read_text(encoding="utf-8") == memory_page.text(catalog.plans())
    first_day = update.FIRST_DAY.read_text(encoding="utf-8")
    assert first_day == memory_page.first_day(first_day, catalog.plans())
    known = catalog.plans()["qwen3-8b-sft-1xh200"]
    assert f"| {known.gib:.1f} | {known.tokens[1]:,} (" in first_day


def test_a_page_has_every_plan() -> None:
    """Counted in the page as it is read: a cell for each plan."""
    text = update.PAGE.read_text(encoding="utf-8")
    cells = [cell.strip() for line in text.splitlines() if line.startswith("| ") for cell in line.split("|")[2:-1]]
    assert sum(cell[:1].isdigit() and "." in cell for cell in cells) == len(catalog.plans())


def test_a_larger_row_takes_more(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(model=catalog.models()["qwen3-0.6b"], gpu=catalog.GPUS["h100"], count=1)
    short, long = planned(recipe, seq_length=2048), planned(recipe, seq_length=8192)
    assert short is not None and long is not None and long.gib > short.gib


def test_what_does_not_fit_has_no_plan() -> None:
    recipe = Recipe(model=catalog.models()["llama-3.1-70b"], gpu=catalog.GPUS["rtx4090"], count=1)
    assert planned(recipe) is None and recipe.name not in catalog.plans()
