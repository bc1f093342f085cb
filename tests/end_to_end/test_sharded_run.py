"""A run whose weights are spread over two ranks: it is resumed on one, and exported as a whole model in 16 bits."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.checkpoint.run.step_folders import checkpoint_folder
from engine.checkpoint.run.training_state import TrainingCheckpoint
from tests.support.commands import losses, options, run_tool
from tests.support.shared_data import write_plays

STEPS, STOP = 6, 3

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, stories_dir: Path) -> Path:
    """The small model with its weights in bfloat16, as transformers writes them."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("base") / "hf"
    shutil.copytree(stories_dir, folder)
    AutoModelForCausalLM.from_pretrained(stories_dir, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def settings(base: Path, tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> dict[str, object]:
    """Everything is trained."""
    text = write_plays(tmp_path_factory.mktemp("text") / "text.txt", data_dir, 6000)
    return {
        "model.path": base, "model.dtype": "bfloat16", "data.train": text, "data.seq_length": 64, "train.steps": STEPS,
        "train.micro_batch_size": 1, "train.global_batch_size": 4, "lora.rank": 0, "trainable": '["*"]',
        "optim.lr": 1e-3, "optim.clip_grad_norm": 0.3, "checkpoint.every": STOP, "checkpoint.keep": 0,
        "parallel.bucket_mb": 0.02,
    }  # fmt: skip


@pytest.fixture(scope="module")
def spread(settings: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spread") / "run"
    result = run_tool(
        "pretrain_lora", *options({**settings, "parallel.shard": "parameters", "checkpoint.dir": folder}), ranks=2
    )
    assert "sharding: parameters, over 2 ranks" in result.stdout + result.stderr
    return folder


def _masters(run: Path) -> dict[str, torch.Tensor]:
    checkpoint = TrainingCheckpoint(checkpoint_folder(run, STEPS))
    names = [name for name in checkpoint.tensor_names() if name.startswith("master/")]
    return {name.removeprefix("master/"): checkpoint.read_whole(name) for name in names}


def _stopped_copy(run: Path, folder: Path) -> Path:
    """What `run` would have left on disk if it had been killed after step STOP."""
    shutil.copytree(checkpoint_folder(run, STOP), checkpoint_folder(folder, STOP))
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:STOP]), encoding="utf-8")
    return folder


def test_goes_on_unsharded_on_one_process(settings: dict[str, object], spread: Path, tmp_path: Path) -> None:
    folder = _stopped_copy(spread, tmp_path / "run")
    run_tool("pretrain_lora", *options({**settings, "checkpoint.dir": folder}))
    found, expected = losses(folder), losses(spread)
    assert found.keys() == expected.keys()
    # bfloat16 weights; the masters are summed in another order from step STOP on
    assert max(abs(found[step] - expected[step]) for step in expected) < 1e-2
    ours, theirs = _masters(folder), _masters(spread)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert (ours[name] - value).norm() / value.norm() < 1e-2, name


def test_export_has_whole_weights_in_16_bits(base: Path, spread: Path, tmp_path: Path) -> None:
    run_tool("convert", "export", "--source", spread, "--out", tmp_path / "hf", "--format", "hf")
    before, exported = load_file(base / "model.safetensors"), load_file(tmp_path / "hf" / "model.safetensors")
    assert {name: value.shape for name, value in exported.items()} == {name: v.shape for name, v in before.items()}
    assert {value.dtype for value in exported.values()} == {torch.bfloat16}
    moved = [name for name, value in exported.items() if not torch.equal(value, before[name])]
    assert len(moved) > 0.8 * len(exported), (
        "a step is often less than a norm weight's spacing, seldom all of a matrix's"
    )
    rounded = sorted(value.bfloat16().double().sum().item() for value in _masters(spread).values())
    assert rounded == sorted(value.double().sum().item() for value in exported.values())


def test_the_export_opens_in_transformers(
    settings: dict[str, object], base: Path, spread: Path, tmp_path: Path
) -> None:
    """With nothing missing and nothing left over; and it has learned what the run was shown."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run_tool("convert", "export", "--source", spread, "--out", tmp_path / "hf", "--format", "hf")
    model, told = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16, output_loading_info=True)
    assert not any(told.values()), told
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    text = Path(str(settings["data.train"])).read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(tmp_path / "hf")(text, return_tensors="pt").input_ids[:, :1024].view(-1, 64)
    found, before = (
        each.float()(input_ids=ids, labels=ids).loss.item()
        for each in (model, AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16))
    )
    first, last = (losses(spread)[step] for step in (1, STEPS))
    assert first - last > 0.3 and before - found > 0.5 * (first - last), (before, found, first, last)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "layout"), [(4, {"parallel.tensor": 2}), (4, {}), (2, {"parallel.tensor": 2})])
@pytest.mark.parametrize("level", ["none", "optimizer", "gradients", "parameters"])
def test_goes_on_at_other_layouts_and_levels(
    settings: dict[str, object], spread: Path, tmp_path: Path, ranks: int, layout: dict[str, object], level: str
) -> None:
    folder = _stopped_copy(spread, tmp_path / "run")
    changes = {"parallel.shard": level, "checkpoint.dir": folder, **layout}
    run_tool("pretrain_lora", *options({**settings, **changes}), ranks=ranks)
    found, expected = losses(folder), losses(spread)
    assert max(abs(found[step] - expected[step]) for step in expected) < 1e-2
