"""Wrong uses of conversions and planning, and a few real processes as a user starts them: one sentence, at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.commands import REPOSITORY
from tests.wrong_inputs.workplace import Workplace, check_refused, run_here

MODEL, ADAPTER, OUT, TRAIN = "{model}", "{adapter}", "{out}", "{train}"
MEMORY = ("memory", "--model", MODEL, "--seq-length", 64)

HF = ("export", "--source", MODEL, "--out", OUT, "--format", "hf")
CONVERT: list[tuple[tuple[Any, ...], str]] = [
    (("import", "--source", "nowhere", "--out", OUT), "nowhere is not a folder"),
    (("import", "--source", ADAPTER, "--out", OUT), "has no config.json"),
    (("import", "--source", MODEL, "--out", OUT, "--tensor", 0), "--tensor is 0, but at least 1"),
    (("import", "--source", MODEL, "--out", OUT, "--tensor", 3), "4 attention heads, which do not divide"),
    (("import", "--source", MODEL, "--out", OUT, "--threads", 0), "--threads is 0: expected at least 1"),
    (("import", "--source", MODEL, "--out", MODEL), "overlaps with"),
    (("import", "--source", MODEL, "--out", MODEL + "/sub"), "overlaps with"),
    (("import", "--source", MODEL, "--out", TRAIN), "train.jsonl is a file"),
    (("import", "--source", MODEL, "--out", TRAIN + "/x"), "cannot be written (File exists): give another --out"),
    (("import", "--source", MODEL, "--out", ADAPTER), "exists and is not empty"),
    (("import", "--source", MODEL, "--out", "{folder}", "--overwrite"), "overlaps with"),
    (("reshard", "--source", MODEL, "--out", OUT, "--tensor", 2), "is not a partitioned base"),
    (("export", "--source", MODEL, "--out", OUT, "--format", "peft"), "is a base model without adapters"),
    (("export", "--source", MODEL, "--out", OUT, "--format", "hf", "--merge"), "--merge, --base and --step are for"),
    (("export", "--source", MODEL, "--out", OUT, "--format", "hf", "--max-shard-gb", 0), "gives 0 bytes"),
    (("export", "--source", MODEL, "--out", OUT, "--format", "hf", "--max-shard-gb", "nan"), "--max-shard-gb is nan"),
    ((*HF, "--calibrate", 4), "--calibrate is for an export in few bits: give --dtype too"),
    ((*HF, "--quant-method", "fp8"), "--quant-method is for an export in few bits: give --dtype too"),
    ((*HF, "--dtype", "int8", "--calibrate", 0), "--calibrate is 0, but at least 1 row"),
    ((*HF, "--dtype", "int8", "--calibrate", 4), "--calibrate reads the data of a run, and"),
    ((*HF, "--dtype", "int8", "--evaluate", TRAIN), "--evaluate reads the data of a run, and"),
    ((*HF, "--dtype", "stored", "--calibrate", 4), "--dtype stored keeps those of the base"),
    ((*HF, "--dtype", "int8", "--quant-method", "fp8"), "--quant-method fp8 is DeepSeek's way to store fp8_block"),
    ((*HF, "--dtype", "stored"), "--dtype stored keeps the base's format, and"),
    ((*HF, "--dtype", "stored", "--quant-method", "fp8"), "--quant-method is for new formats, and --dtype stored"),
    ((*HF, "--dtype", "nvfp5"), "--dtype is 'nvfp5'"),
    (("export", "--source", MODEL, "--out", OUT, "--format", "peft", "--dtype", "int4"), "--dtype int4 is for a whole"),
    (("merge", "--base", MODEL, "--adapter", "nowhere", "--out", OUT), "nowhere has no adapter_config.json"),
    (("merge", "--base", ADAPTER, "--adapter", ADAPTER, "--out", OUT), "has no config.json"),
    (("inspect", "nowhere"), "nowhere is not a folder"),
    (("inspect", TRAIN), "train.jsonl is not a folder"),
    (("import", "--source", MODEL, "--out", ""), "--out is empty, but a path is expected"),
    (("import", "--source", "", "--out", OUT), "--source is empty, but a path is expected"),
    (("inspect", MODEL, ""), "'' belongs to no option of"),
    (("import", "--source", MODEL, "--out", OUT, "--threads", 2**63), "--threads is a number of 19 digits, too large"),
    (
        ("export", "--source", MODEL, "--out", OUT, "--format", "peft", "--base-name", "\udcff"),
        "--base-name has bytes that are not UTF-8",
    ),
    (("merge", "--base", "x" * 100_000, "--adapter", ADAPTER, "--out", OUT), "xxx... cannot be used"),
]
PLAN: list[tuple[tuple[Any, ...], str]] = [
    (("memory", "--model", "nowhere", "--gpus", 1, "--gpu-memory", 8, "--seq-length", 64), "--model is nowhere"),
    ((*MEMORY, "--gpus", 0, "--gpu-memory", 8), "--gpus is 0: give at least 1"),
    ((*MEMORY, "--gpus", 1, "--gpu-memory", "nan"), "--gpu-memory is nan"),
    ((*MEMORY, "--gpus", 1, "--gpu-memory", -1), "--gpu-memory is -1"),
    (("schedule", "--pipeline", 0, "--microbatches", 4), "--pipeline is 0"),
    (("schedule", "--pipeline", 2, "--microbatches", 0), "0 micro-batches cannot make a schedule"),
    (("schedule", "--pipeline", 2, "--microbatches", 10**7), "passes in a step, more than 1000000"),
    (("certify", "--config", "nowhere.yaml"), "nowhere.yaml cannot be read"),
    (("schedule", "--pipeline", 2, "--microbatches", 4, "--forward", "nan"), "--forward is nan, but a finite number"),
    (("schedule", "--pipeline", 2, "--microbatches", 4, "--p2p", "1e400"), "--p2p is inf, but a finite number"),
    (("schedule", "--pipeline", 2, "--microbatches", 4, "--layers", 2**40), "give at most 1000"),
    (("schedule", "--pipeline", 1000, "--microbatches", 4), "--pipeline is 1000: give at most 256 ranks"),
    (("memory", "--config", "{folder}/run.yaml", "--gpus", 1), "model.path is nowhere/at/all, which is neither"),
    (
        ("memory", "--config", "{folder}/run.yaml", "--gpus", 1, "--model", "gone"),
        "--model is gone, which is neither",
    ),
    ((*MEMORY, "--gpus", 1, "--host-memory", "nan"), "--host-memory is nan"),
    ((*MEMORY, "--gpus", 1, "--host-memory", 0), "--host-memory is 0: give a memory above 0 GiB"),
    ((*MEMORY, "--gpus", 1, "--beside", -1), "--beside is -1: give 0 or more"),
    ((*MEMORY, "--gpus", 1, "--trainable", "[" * 100_000), "trainable contains a pattern of 100,000 characters"),
]
OTHERS: list[tuple[str, tuple[Any, ...], str]] = [
    ("preprocess", (TRAIN, "--tokenizer", MODEL, "--out", OUT, "--show", -1), "--show is -1"),
    ("generate", ("--model", ADAPTER, "--prompt", "a"), "{adapter} is a PEFT adapter: give it as --adapter, and its"),
    ("generate", ("--model", "{folder}/run", "--prompt", "a"), "run is the folder of a run: give it as --adapter"),
    ("convert", ("config", "{folder}/unsloth.py"), "belongs to Unsloth"),
    ("convert", ("config", "--flags", "trl sft --model_name_or_path m"), "--out is not given: name the YAML file"),
    ("report", ("{folder}/run", "--out", "/"), "/ cannot be written"),
    ("report", ("{folder}/run", "--out", "."), ". cannot be written"),
]


def _filled(arguments: tuple[Any, ...], place: Workplace) -> list[str]:
    names = {"folder": place.folder, "model": place.model, "adapter": place.adapter, "train": place.train}
    return [str(one).format(**names, out=place.folder / "out") for one in arguments]


@pytest.mark.parametrize(
    ("tool", "arguments", "words"),
    [*(("convert", *case) for case in CONVERT), *(("plan", *case) for case in PLAN), *OTHERS],
    ids=lambda value: str(value)[:60],
)
def test_conversions_and_planning(
    tool: str, arguments: tuple[Any, ...], words: str, place: Workplace, capsys: pytest.CaptureFixture[str]
):
    (place.folder / "run.yaml").write_text("model: {path: nowhere/at/all}\ndata: {train: a.jsonl}\n")
    (place.folder / "unsloth.py").write_text(
        "from unsloth import FastLanguageModel\nfrom trl import SFTConfig\nSFTConfig()\n"
    )
    if tool == "generate":
        (place.folder / "run" / "checkpoints" / "step_00000001").mkdir(parents=True)
        (place.folder / "run" / "checkpoints" / "step_00000001" / "manifest.json").write_text("{}")
    if tool == "report":
        (place.folder / "run").mkdir()
        (place.folder / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    check_refused(
        run_here(tool, _filled(arguments, place), capsys),
        _filled((words,), place)[0],
        at_once=tool not in ("report", "generate"),
    )
    assert not (place.folder / "out").exists()


FACTORS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "narrower": (lambda factor: factor[:, :8].clone(), "with shape [2, 8], but [2, 16] is expected"),
    "codes": (lambda factor: factor.to(torch.int8), "as int8, but numbers with a point are expected"),
    "float8": (lambda factor: factor.to(torch.float8_e5m2), "as float8_e5m2, but numbers with a point are expected"),
    "not finite": (lambda factor: factor * float("nan"), "is not finite after training, so nothing was exported"),
}


@pytest.mark.parametrize("case", FACTORS)
def test_merging_what_does_not_fit(case: str, place: Workplace, capsys: pytest.CaptureFixture[str]):
    change, words = FACTORS[case]

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: change(factor) for name, factor in tensors.items() if "lora_A" in name})

    place.change_tensors(spoil, place.adapter / "adapter_model.safetensors")
    arguments = [
        "merge",
        "--base",
        place.model,
        "--adapter",
        place.adapter,
        "--out",
        place.folder / "out",
        "--no-proof",
    ]
    check_refused(run_here("convert", arguments, capsys), words)


REAL: list[tuple[str, tuple[Any, ...], str]] = [
    ("pretrain_lora", ("--model.path", MODEL, "--lora.ranks", 2), "error: --lora.ranks is not an option"),
    ("pretrain_lora", ("--model.path", ADAPTER, "--data.train", TRAIN), "has no config.json"),
    ("convert", ("merge", "--base", MODEL, "--adapter", MODEL, "--out", OUT), "has no adapter_config.json"),
    ("plan", (*MEMORY, "--gpus", 0, "--gpu-memory", 8), "error: --gpus is 0"),
]


@pytest.mark.parametrize(("tool", "arguments", "words"), REAL, ids=lambda value: str(value)[:40])
def test_real_commands(tool: str, arguments: tuple[Any, ...], words: str, place: Workplace, tmp_path: Path):
    """Imports included; the limit leaves room for a busy machine."""
    command = [sys.executable, str(REPOSITORY / "tools" / f"{tool}.py"), *_filled(arguments, place)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and not ended.stdout
    assert ended.stderr.count("\n") == 1 and words in ended.stderr, ended.stderr
