"""Runs on a base that is stored encoded, through the command lines: their loss curves, resuming, and export."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.checkpoint.run.training_state import open_run
from engine.config.load import load_config
from engine.errors import UserError
from engine.training.trainer import train
from tests.support.commands import losses, options, run_tool
from tests.support.shared_data import settings_on_plays

STEPS = 24
ENCODINGS = ("nf4", "int8", "fp8", "fp8_row")

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, stories_dir: Path, data_dir: Path) -> dict[str, object]:
    """The small trained Llama on a text of another kind, so that there is something to learn."""
    given = settings_on_plays(tmp_path_factory.mktemp("text"), stories_dir, data_dir, 60000)
    return {**given, "train.steps": STEPS, "train.micro_batch_size": 4, "train.global_batch_size": 8}


@pytest.fixture(scope="module")
def runs(settings: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same run on the base as it is and in each encoding, one after the other in this process."""
    folders = {base: tmp_path_factory.mktemp(base) / "run" for base in ("null", *ENCODINGS)}
    for base, folder in folders.items():
        arguments = options({**settings, "model.base_dtype": base, "checkpoint.dir": folder})
        train(load_config(arguments))
    return folders


ROUNDING = {"nf4": 0.15, "int8": 0.01, "fp8": 0.04, "fp8_row": 0.04}
"""How far a loss may be from the loss on the base as it is, at any step. Measured are 0.106, 0.005, 0.025 and 0.013,
and 0.048, 0.001, 0.008 and 0.006 on average: layers of 64 features have little to average errors over."""


@pytest.mark.parametrize("base", ENCODINGS)
def test_the_loss_curve_is_next_to_that_of_the_base_as_it_is(base: str, runs: dict[str, Path]) -> None:
    plain, found = losses(runs["null"]), losses(runs[base])
    assert found.keys() == plain.keys() and len(plain) == STEPS
    assert plain[STEPS] < plain[1] - 1.0, "there was nothing to learn"
    gaps = {step: abs(found[step] - plain[step]) for step in plain}
    assert 0 < max(gaps.values()) < ROUNDING[base], gaps


def test_a_run_goes_on_only_with_the_base_that_it_had(
    runs: dict[str, Path], settings: dict[str, object], tmp_path: Path
) -> None:
    """The adapters have learnt to make up for the rounding."""
    more = {**settings, "train.steps": STEPS + 2, "checkpoint.resume": runs["nf4"]}
    refused = run_tool(
        "pretrain_lora",
        *options({**more, "model.base_dtype": "int8", "checkpoint.dir": tmp_path / "other"}),
        status=2,
    )
    last = refused.stderr.strip().splitlines()[-1]
    assert "was trained with model.base_dtype nf4, but this run has int8: set model.base_dtype to nf4" in last
    run_tool("pretrain_lora", *options({**more, "model.base_dtype": "nf4", "checkpoint.dir": tmp_path / "same"}))
    assert list(losses(tmp_path / "same")) == [STEPS + 1, STEPS + 2]


def test_adapters_are_exported_as_ever_and_the_base_is_identified_by_what_was_read(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    run_tool("convert", "export", "--source", runs["nf4"], "--out", tmp_path / "adapter", "--format", "peft")
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    checkpoint = open_run(runs["nf4"])
    trained = checkpoint.trained()
    name = "layers.2.mlp.down_proj"
    for leaf in ("lora_A", "lora_B"):
        tensor = written[f"base_model.model.model.{name}.{leaf}.weight"]
        assert torch.equal(tensor, trained.read_whole(f"{name}.{leaf}").to(tensor.dtype))
    assert len(written) == 2 * 35
    assert checkpoint.base["dtype"] == "nf4"
    assert checkpoint.base["fingerprint"] == open_run(runs["null"]).base["fingerprint"]


def test_clashes_are_one_sentence(settings: dict[str, object], tmp_path: Path) -> None:
    common = {**settings, "model.base_dtype": "nf4", "checkpoint.dir": tmp_path / "run"}
    cut = run_tool("pretrain_lora", *options({**common, "parallel.tensor": 2}), ranks=2, status=1)
    assert "cuts the 64 input features of layers.0.attention.o_proj into 32 a rank" in cut.stderr
    with pytest.raises(UserError, match=r"one of stored, nf4, .* or null is expected: did you mean nf4\?"):
        load_config(options({**common, "model.base_dtype": "nf5"}))
