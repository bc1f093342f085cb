"""A run that stops and goes on is the run that never stopped; on another layout it goes on at the same sample."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.checkpoint.run.step_folders import checkpoint_folder
from engine.checkpoint.run.training_state import TrainingCheckpoint
from tests.distributed.test_shared_checks import flip_a_bit_of
from tests.support.commands import losses, options, run_tool
from tests.support.shared_data import write_plays
from tests.support.sweeps import sampled

STEPS, STOP = 12, 5

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, stories_dir: Path, data_dir: Path) -> dict[str, object]:
    """12 steps of 6 samples over 40-odd samples: step 5 stands in the middle of the first epoch."""
    text = write_plays(tmp_path_factory.mktemp("text") / "text.txt", data_dir, 6000)
    return {
        "model.path": stories_dir, "data.train": text, "data.seq_length": 64, "train.steps": STEPS,
        "train.micro_batch_size": 2, "train.global_batch_size": 6, "lora.dropout": 0.1, "optim.lr": 3e-3,
        "optim.weight_decay": 0.01, "checkpoint.every": STOP, "checkpoint.keep": 0,
        "optim.lr_pattern": "{lora_A: 1e-3}",
    }  # fmt: skip


@pytest.fixture(scope="module")
def whole_run(settings: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that never stops, on one process."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run_tool("pretrain_lora", *options(settings), "--checkpoint.dir", folder)
    return folder


def _stopped_copy(run: Path, folder: Path) -> Path:
    """What `run` would have left on disk if it had been killed after step STOP, in the middle of writing metrics."""
    shutil.copytree(checkpoint_folder(run, STOP), checkpoint_folder(folder, STOP))
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[: STOP + 2]) + '{"step": 8, "lo', encoding="utf-8")
    return folder


def _tensors(run: Path) -> dict[str, torch.Tensor]:
    checkpoint = TrainingCheckpoint(checkpoint_folder(run, STEPS))
    return {name: checkpoint.read_whole(name) for name in checkpoint.tensor_names()}


def test_resumed_run_has_the_bits_of_the_whole_one(
    settings: dict[str, object], whole_run: Path, tmp_path: Path
) -> None:
    resumed = _stopped_copy(whole_run, tmp_path / "run")
    result = run_tool("pretrain_lora", *options(settings), "--checkpoint.dir", resumed)
    assert f"after step {STOP}, {STOP * 6} samples consumed" in result.stdout + result.stderr
    assert losses(resumed) == losses(whole_run)
    ours, theirs = _tensors(resumed), _tensors(whole_run)
    assert ours.keys() == theirs.keys()
    assert any(name.startswith("optim.exp_avg_sq/") for name in ours)
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different


def test_what_is_written_beside_training_is_what_is_waited_for(
    settings: dict[str, object], whole_run: Path, tmp_path: Path
) -> None:
    """The run above went on while its checkpoints were written; so whatever resumes from either is the same run."""
    folder = tmp_path / "run"
    result = run_tool(
        "pretrain_lora", *options({**settings, "checkpoint.dir": folder, "checkpoint.asynchronous": "false"})
    )
    assert losses(folder) == losses(whole_run)
    for step in (STOP, 2 * STOP, STEPS):
        assert f"step {step}: saved" in result.stdout + result.stderr
        ours, theirs = (checkpoint_folder(run, step) / "rank_00000.safetensors" for run in (folder, whole_run))
        assert ours.read_bytes() == theirs.read_bytes(), step


MOVES = {
    "tensor 2, then 4 and 1": ({"parallel.tensor": 2}, [({"parallel.tensor": 4}, 4), ({}, 0)]),
    "pipeline 2, then tensor 2 and context 2": (
        {"parallel.pipeline": 2, "parallel.virtual": 2},
        [({"parallel.tensor": 2}, 2), ({"parallel.context": 2}, 2)],
    ),
}


@pytest.mark.parametrize("move", sampled(MOVES, ["pipeline 2, then tensor 2 and context 2"]))
def test_run_goes_on_at_other_layouts(move: str, settings: dict[str, object], whole_run: Path, tmp_path: Path) -> None:
    """Saved on two ranks, it goes on elsewhere with the losses and the weights of one process, up to rounding."""
    saved, others = MOVES[move]
    at_two = tmp_path / "two"
    run_tool("pretrain_lora", *options({**settings, "checkpoint.dir": at_two, **saved}), ranks=2)
    expected, reference = losses(whole_run), _tensors(whole_run)
    for place, (layout, ranks) in enumerate(others):
        folder = _stopped_copy(at_two, tmp_path / f"from-two-{place}")
        run_tool("pretrain_lora", *options({**settings, "checkpoint.dir": folder, **layout}), ranks=ranks)
        found = losses(folder)
        assert found.keys() == expected.keys()
        assert max(abs(found[step] - expected[step]) for step in expected) < 1e-4
        for name, tensor_found in _tensors(folder).items():
            if name.startswith("master/"):
                difference = (tensor_found - reference[name]).norm() / reference[name].norm()
                assert difference < 1e-3, f"{name} deviates by {difference:.1e}"


def test_files_of_a_rank_hold_only_its_part(settings: dict[str, object], tmp_path: Path) -> None:
    """At TP2 neither rank's file holds a whole split factor."""
    folder = tmp_path / "two"
    run_tool(
        "pretrain_lora",
        *options({**settings, "checkpoint.dir": folder, "parallel.tensor": 2, "train.steps": 1}),
        ranks=2,
    )
    checkpoint = TrainingCheckpoint(checkpoint_folder(folder, 1))
    whole = checkpoint.shape("master/layers.0.attention.q_proj.lora_B")
    for rank in (0, 1):
        stored = load_file(checkpoint.folder / f"rank_{rank:05d}.safetensors")
        rows = sum(
            value.shape[0]
            for key, value in stored.items()
            if "layers.0.attention.q_proj.lora_B" in key and key.startswith("master/")
        )
        assert rows == whole[0] // 2


def test_a_base_that_changed_in_the_middle_is_refused(
    settings: dict[str, object], whole_run: Path, stories_dir: Path, tmp_path: Path
) -> None:
    """One bit in the middle of one matrix, which neither its first nor its last row shows; on two ranks."""
    changed = tmp_path / "base"
    shutil.copytree(stories_dir, changed)
    path = flip_a_bit_of(changed, "model.layers.1.mlp.up_proj.weight")
    resumed = _stopped_copy(whole_run, tmp_path / "run")
    layout = {"model.path": changed, "checkpoint.dir": resumed, "parallel.tensor": 2}
    result = run_tool("pretrain_lora", *options({**settings, **layout}), ranks=2, status=1)
    sentences = [line for line in result.stderr.splitlines() if "error: " in line]
    assert any(f"{path} has changed: model.layers.1.mlp.up_proj.weight has checksum" in line for line in sentences)
    assert not any((resumed / "checkpoints").glob(f"step_{2 * STOP:08d}"))
