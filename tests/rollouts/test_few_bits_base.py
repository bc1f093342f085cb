"""Policy gradients on a base in few bits: samples are those on the decoded base, and losses and figures too, but for
the order in which products of few rows are summed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from engine.api import export
from tests.support.few_bits import draw_in_few_bits
from tests.support.rollout_runs import rollout_settings, run_here, stepped
from tests.support.spawning import spawn
from tests.support.sweeps import sampled
from tests.support.teachers import distilled_settings

LAYOUTS: dict[str, dict[str, object]] = {
    "one": {},
    "tp2": {"parallel.tensor": 2},
    "dp2, parameters": {"parallel.shard": "parameters"},
}


@pytest.mark.distributed
@pytest.mark.parametrize("layout", sampled(LAYOUTS, ["one"]))
def test_samples_and_losses_are_those_on_the_decoded_base(layout: str, tmp_path: Path) -> None:
    given = {**rollout_settings(tmp_path, model__init="checkpoint"), **LAYOUTS[layout]}
    model = tmp_path / "model"
    draw_in_few_bits(model, "fp8_channel" if layout == "tp2" else "nvfp4")  # two ranks would cut blocks of 16
    for file in model.glob("tokenizer*"):
        shutil.copy(file, model / "few" / "decoded")
    outcomes = []
    for place, base in ((model, "stored"), (model / "few" / "decoded", "null")):
        settings = {**given, "model.path": place, "model.base_dtype": base}
        one = layout == "one"
        outcomes.append([stepped(settings, 2)] if one else spawn(stepped, world=2, args=(settings, 2), timeout=200))
    for ours, decoded in zip(*outcomes, strict=True):
        for step, expected in zip(ours, decoded, strict=True):
            assert step.pop("completions") == expected.pop("completions")
            assert step == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert len({step["loss"] for step in outcomes[0][0]}) == 2


MERGED: dict[str, dict[str, object]] = {
    "host memory": {"memory.offload_weights": "true"},
    "pp2": {"parallel.pipeline": 2},
    "dp2, parameters": {"parallel.shard": "parameters"},
}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("layout", list(MERGED))
def test_codes_that_are_merged_once_change_no_layouts_samples(layout: str, tmp_path: Path) -> None:
    """Against merges in each pass, before and after an update."""
    given = rollout_settings(tmp_path, model__init="checkpoint", lora__merge_aware="true", model__base_dtype="stored")
    draw_in_few_bits(tmp_path / "model", "nvfp4")
    outcomes = []
    for once in ("true", "false"):
        settings = {**given, **MERGED[layout], "rollout.merge_once": once}
        one = layout == "host memory"
        outcomes.append([stepped(settings, 2)] if one else spawn(stepped, world=2, args=(settings, 2), timeout=200))
    for ours, theirs in zip(*outcomes, strict=True):
        for step, expected in zip(ours, theirs, strict=True):
            assert step.pop("completions") == expected.pop("completions")
            assert step == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert len({step["loss"] for step in outcomes[0][0]}) == 2


def test_teachers_have_the_formats_that_they_are_stored_in(tmp_path: Path) -> None:
    """Beside a merge-aware model, one in other few bits teaches as its numbers in a checkpoint in 32 bits do."""
    settings = distilled_settings(tmp_path, ("other",))
    draw_in_few_bits(tmp_path / "model", "nvfp4")
    draw_in_few_bits(tmp_path / "other", "fp8_channel")
    teachers = [tmp_path / "other", tmp_path / "other" / "few" / "decoded"]
    stored = {**settings, "model.base_dtype": "stored", "lora.merge_aware": "true"}
    few, decoded = (stepped({**stored, "distillation.teachers": f"[{one}]"}, 1)[0] for one in teachers)
    assert few["completions"] == decoded["completions"] and few["loss"] == decoded["loss"] > 0


@pytest.mark.slow
def test_a_merge_aware_run_teaches_as_its_merged_model_does(tmp_path: Path) -> None:
    """The teacher's adapters are in its codes, as in those that its export has, beside a model that merges too."""
    settings = distilled_settings(tmp_path, ("other",), model__init="checkpoint", model__base_dtype="stored")
    settings |= {"lora.merge_aware": "true", "lora.alpha": 64, "model.dtype": "bfloat16", "train.steps": 1}
    for name in ("model", "other"):
        draw_in_few_bits(tmp_path / name, "nvfp4")
    run_here({**settings, "optim.lr": 0.1})
    export(tmp_path / "run", tmp_path / "merged", format="hf")
    settings["checkpoint.dir"] = tmp_path / "another"
    found = []
    for name in ("run", "merged"):
        step = stepped({**settings, "distillation.teachers": f"[{tmp_path / name}]"}, 1)[0]
        found.append((step["completions"], step["loss"], step[f"teachers/{name}/kl"]))
    assert found[0] == found[1] and found[0][2] > 0.01
