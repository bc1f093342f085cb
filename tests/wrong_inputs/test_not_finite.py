"""Weights with NaN or infinite values, and runs that skip every step: a sentence, and a status that says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.wrong_inputs.workplace import Workplace, check_refused, run_here

NAME, DOWN = "layers.1.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight"
MODEL, BASE, ADAPTER, OUT = "{folder}/model", "{folder}/base", "{folder}/adapter", "{folder}/out"
COMMANDS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "train": ("pretrain_lora", (), NAME),
    "generate": ("generate", ("--model", MODEL, "--prompt", "ab", "--max-new-tokens", "1"), NAME),
    "import": ("convert", ("import", "--source", MODEL, "--out", OUT, "--tensor", "2"), NAME),
    "export": ("convert", ("export", "--source", MODEL, "--out", OUT, "--format", "hf"), DOWN),
    "merge": ("convert", ("merge", "--base", MODEL, "--adapter", ADAPTER, "--out", OUT), DOWN),
}


def _run(place: Workplace, capsys: pytest.CaptureFixture[str], tool: str, arguments: tuple[str, ...]) -> Any:
    first = place.arguments() if tool == "pretrain_lora" else []
    return run_here(tool, [*first, *(one.format(folder=place.folder) for one in arguments)], capsys)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_weight_that_is_not_finite_is_named(
    command: str, dtype: torch.dtype, value: float, place: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    """One value among all, the last of its matrix."""

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})
        tensors[DOWN][-1, -1] = value

    place.change_tensors(spoil)
    tool, arguments, name = COMMANDS[command]
    seen = _run(place, capsys, tool, arguments)
    check_refused(seen, "values that are not finite", at_once=False)
    assert name in seen.sentence
    assert not (place.folder / "out").exists()


def test_a_weight_beyond_the_dtype_is_named(place: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    place.change_tensors(lambda tensors: tensors[DOWN].mul_(1e7))
    place.set(model__dtype="float16")
    check_refused(_run(place, capsys, "pretrain_lora", ()), "or in float16, in which", at_once=False)


def test_a_run_whose_steps_were_all_skipped_fails(place: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    """So does its repetition, which finds nothing left to do."""
    path = Path(str(place.options["checkpoint.dir"]))
    place.set(train__steps=2, checkpoint__every=1)
    place.change_tensors(lambda tensors: tensors["lm_head.weight"].mul_(1e38))  # finite, and its logits are not
    for _ in range(2):
        check_refused(
            _run(place, capsys, "pretrain_lora", ()), f"the run in {path} skipped every step of 2", at_once=False
        )
    assert sorted(one.name for one in (path / "checkpoints").glob("step_*"))
    place.set(train__steps=1, checkpoint__dir=path.with_name("other"))
    check_refused(_run(place, capsys, "pretrain_lora", ()), "skipped every step of 1", at_once=False)
