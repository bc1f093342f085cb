"""A tensor too many, in each kind of folder and for each command that reads one: refused by its name.

Nothing else would tell that a folder holds another model than the one that is computed with.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.leftover import BUFFERS
from engine.checkpoint.manifest import read_manifest, write_manifest
from tests.wrong_inputs.workplace import Workplace, check_refused, run_here

MODEL, BASE, ADAPTER, RUN, OUT = "{folder}/model", "{folder}/base", "{folder}/adapter", "{folder}/run", "{folder}/out"
LAYER = "model.layers.0.self_attn"
Command = tuple[str, tuple[str, ...]]


def _generate(*arguments: str) -> Command:
    return "generate", (*arguments, "--prompt", "ab", "--max-new-tokens", "1")


def _convert(*arguments: str) -> Command:
    return "convert", (*arguments, "--out", OUT, *(() if arguments[0] in ("import", "reshard") else ("--no-proof",)))


def _reading(model: str) -> dict[str, Command]:
    """The commands that read a model."""
    return {
        "train": ("pretrain_lora", ("--model.path", model)),
        "generate": _generate("--model", model),
        "convert": _convert(*(("import",) if model == MODEL else ("reshard", "--tensor", "1")), "--source", model),
        "export": _convert("export", "--source", model, "--format", "hf"),
        "merge": _convert("merge", "--base", model, "--adapter", ADAPTER),
    }


COMMANDS: dict[str, dict[str, Command]] = {
    "model": _reading(MODEL),
    "base": _reading(BASE),
    "adapter": {
        "train": ("pretrain_lora", ("--lora.init_from", ADAPTER)),
        "generate": _generate("--model", MODEL, "--adapter", ADAPTER),
        "merge": _convert("merge", "--base", MODEL, "--adapter", ADAPTER),
    },
    "run": {
        "resume": ("pretrain_lora", ("--checkpoint.dir", RUN, "--train.steps", "2")),
        "generate": _generate("--adapter", RUN),
        "export peft": _convert("export", "--source", RUN, "--format", "peft"),
        "export hf": _convert("export", "--source", RUN, "--format", "hf", "--merge"),
    },
}


def _run(command: Command, place: Workplace, capsys: pytest.CaptureFixture[str]) -> Any:
    tool, arguments = command
    first = place.arguments() if tool == "pretrain_lora" else []
    return run_here(tool, [*first, *(one.format(folder=place.folder) for one in arguments)], capsys)


def _in_file(name: str, file: Callable[[Workplace], Path]) -> Callable[[Workplace], None]:
    return lambda place: place.change_tensors(lambda tensors: tensors.update({name: torch.ones(16)}), file(place))


def _in_model(name: str) -> Callable[[Workplace], None]:
    return _in_file(name, lambda place: place.weights)


def _in_adapter(name: str) -> Callable[[Workplace], None]:
    return _in_file(name, lambda place: place.adapter / "adapter_model.safetensors")


def _out_of_index(place: Workplace) -> None:
    """In a shard's file, and not in the index."""
    tensors, shard = load_file(place.weights), "model-00001-of-00001.safetensors"
    save_file({**tensors, "stray": torch.ones(2)}, place.model / shard, {"format": "pt"})
    index = {"weight_map": dict.fromkeys(tensors, shard)}
    (place.model / "model.safetensors.index.json").write_text(json.dumps(index))
    place.weights.unlink()


def _in_checkpoint(folder: Path, name: str) -> None:
    """As a tensor of its own in a file of a checkpoint, in a manifest that says so."""
    manifest = read_manifest(folder)
    file = next(iter(manifest.files))
    save_file({**load_file(folder / file), name: torch.ones(16)}, folder / file)
    like = next(iter(manifest.tensors.values()))
    piece = replace(like.pieces[0], box=type(like.pieces[0].box)(), file=file, key=name)
    record = replace(like, shape=(16,), dtype="F32", pieces=(piece,))
    sizes = {**manifest.files, file: (folder / file).stat().st_size}
    write_manifest(folder, replace(manifest, tensors={**manifest.tensors, name: record}, files=sizes))


def _in_base(name: str) -> Callable[[Workplace], None]:
    return lambda place: _in_checkpoint(place.folder / "base", name)


def _in_run(name: str) -> Callable[[Workplace], None]:
    return lambda place: _in_checkpoint(place.folder / "run" / "checkpoints" / "step_00000001", name)


TOO_MANY: dict[str, list[tuple[Callable[[Workplace], None], str]]] = {
    "model": [
        (_in_model("stray"), "has stray, which a llama model"),
        (_in_model(f"{LAYER}.q_proj.bias"), f"has {LAYER}.q_proj.bias, which a llama model"),
        (_in_model("model.layers.2.input_layernorm.weight"), "has model.layers.2.input_layernorm.weight, which"),
        (_out_of_index, "has stray, which model.safetensors.index.json does not place there"),
    ],
    "base": [
        (_in_base("stray"), "has stray, which a llama model"),
        (_in_base("layers.0.attention.q_proj.bias"), "has layers.0.attention.q_proj.bias, which a llama model"),
    ],
    "adapter": [
        (_in_adapter("stray"), "has stray, which is neither"),
        (_in_adapter("lm_head.weight"), "has lm_head.weight, which is neither"),  # PEFT's keys say base_model.model
        (_in_adapter("base_model.model.score.weight"), "has base_model.model.score.weight, which is neither"),
        (_in_adapter(f"base_model.model.{LAYER}.q_proj.bias"), "has layers.0.attention.q_proj.bias, which"),
        (_in_adapter("base_model.model.model.norm.bias"), "has norm.bias, which"),
        (
            _in_adapter("base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"),
            "token_adapter.trainable_tokens_delta, which is neither",
        ),
    ],
    "run": [
        (_in_run("stray"), "has stray, which no run reads"),
        (_in_run("optim.exp_avg/stray.weight"), "has optim.exp_avg/stray.weight, which no run reads"),
        (_in_run("master/norm.bias"), "norm.bias, which"),
    ],
}
CASES = {
    f"{kind}, {command}: {words}": (kind, command, add, words)
    for kind, cases in TOO_MANY.items()
    for command in COMMANDS[kind]
    for add, words in cases
}


def _prepare(kind: str, place: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    """Makes the partitioned base, or the run, from the model."""
    if kind == "base":
        command = ("convert", ("import", "--source", MODEL, "--out", BASE, "--tensor", "2"))
        assert _run(command, place, capsys).status == 0
    if kind == "run":
        place.set(lora__init_from=place.adapter)  # drawn, so that an export would have something to export
        assert _run(("pretrain_lora", ("--checkpoint.dir", RUN)), place, capsys).status == 0


@pytest.mark.parametrize("case", CASES)
def test_a_tensor_too_many_is_refused_by_name(case: str, place: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    kind, command, add, words = CASES[case]
    _prepare(kind, place, capsys)
    add(place)
    check_refused(_run(COMMANDS[kind][command], place, capsys), words)
    assert not (place.folder / "out").exists()


@pytest.mark.parametrize("kind", COMMANDS)
def test_what_is_harmless_is_read(kind: str, place: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a tensor too many, and with buffers that every reader computes again, each command works."""
    for name in BUFFERS:
        _in_model(f"{LAYER}{name}")(place)
    _prepare(kind, place, capsys)
    for command in COMMANDS[kind].values():
        seen = _run(command, place, capsys)
        assert seen.status == 0, seen.printed
        shutil.rmtree(place.folder / "out", ignore_errors=True)


def test_what_lies_beside_a_nested_model_is_named(place: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    """It is carried along by conversions, so that nothing of a model with another front is lost."""

    def nest(tensors: dict[str, torch.Tensor]) -> None:
        front = "base_model.model." if any("lora" in name for name in tensors) else ""
        for name in list(tensors):
            tensors[f"{front}llm.{name.removeprefix(front)}"] = tensors.pop(name)

    place.change_tensors(nest)
    place.change_tensors(nest, place.adapter / "adapter_model.safetensors")
    _in_model("tower.weight")(place)
    for command in COMMANDS["model"].values():
        seen = _run(command, place, capsys)
        assert seen.status == 0 and (command[0] == "convert" or "tower.weight" in seen.printed), seen.printed
        for file in (place.folder / "out").glob("*.safetensors"):
            assert any(name.endswith("tower.weight") for name in load_file(file))
        shutil.rmtree(place.folder / "out", ignore_errors=True)


def test_one_tensor_under_two_names_is_refused(place: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("lora_A.weight", "lora_embedding_A"):
        _in_adapter(f"base_model.model.model.embed_tokens.{name}")(place)
    words = "are the same tensor of the model: remove one"
    for command in COMMANDS["adapter"].values():
        check_refused(_run(command, place, capsys), words)


@pytest.mark.parametrize("value", [{"embed_tokens": [1, 2]}, [1, 2]])
def test_token_indices_are_refused(value: Any, place: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    place.change_config(place.adapter / "adapter_config.json", trainable_token_indices=value)
    for command in COMMANDS["adapter"].values():
        check_refused(_run(command, place, capsys), "has trainable_token_indices")
