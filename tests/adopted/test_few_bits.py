"""Adopted models whose checkpoints are in few bits: computed with the numbers that transformers decodes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, StableLmConfig, StableLmForCausalLM

from engine.checkpoint.model_weights import open_source
from engine.conversion.import_export import import_checkpoint
from engine.quantization.shipped.spelling import StoredMatrix
from tests.adopted.saved_models import stored
from tests.small_runs.conftest import SmallRuns
from tests.support.commands import losses
from tests.support.family_models import batch_of, engine_model, stock_losses
from tests.support.shipped_models import SIZES, compress
from tests.wrong_inputs.workplace import VOCABULARY, make_place


def saved(folder: Path, vocabulary: int = 67) -> Path:
    """A model in NVFP4; what else is in the folder stays."""
    torch.manual_seed(3)
    sizes = {**SIZES, "vocab_size": vocabulary}
    config = StableLmConfig(**sizes, attn_implementation="eager", max_position_embeddings=64)
    model = StableLmForCausalLM(config).to(torch.bfloat16)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    compress(model, folder, {"NVFP4A16": ["Linear"]}, ["lm_head"])
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path / "model")


def test_logits_are_those_of_transformers(folder: Path) -> None:
    stock = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=CompressedTensorsConfig(dequantize=True), attn_implementation="eager"
    )
    built, batch = engine_model(folder), batch_of()
    with torch.no_grad():
        context = built.model.context(batch, built.stage.step, training=False)
        logits = built.model.logits(built.model.run_layers(built.model.embed(batch), context), context)
        expected, _ = stock_losses(stock.eval().float(), batch)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_an_import_is_decoded_and_says_so(folder: Path, tmp_path: Path) -> None:
    source = open_source(folder)
    report = import_checkpoint(source, tmp_path / "parts", tensor=1)
    assert "14 tensors in NVFP4), and were decoded: they are bfloat16 here" in report.notes[0]
    decoded = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=CompressedTensorsConfig(dequantize=True), dtype=torch.bfloat16
    ).state_dict()
    found = stored(tmp_path / "parts")
    assert any(torch.equal(value, decoded["model.layers.1.mlp.down_proj.weight"]) for value in found.values())


def test_a_fingerprint_decodes_the_rows_that_it_reads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, rows = StoredMatrix.decode, list[int]()

    def counted(self: StoredMatrix, out: Tensor, across: slice, columns: slice) -> None:
        rows.append(across.stop - across.start)
        decode(self, out, across, columns)

    monkeypatch.setattr(StoredMatrix, "decode", counted)
    open_source(folder).fingerprint()
    assert rows == [1] * 28  # the first and the last of each matrix


def test_a_run_keeps_the_stored_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And computes what one on the decoded weights does, bit for bit where both multiply by torch's products."""
    run = SmallRuns(make_place(tmp_path / "place"), capsys)
    saved(run.place.model, VOCABULARY)
    run.place.set(data__seq_length=20, optim__lr=0.01, train__steps=3, model__dtype="bfloat16", log__peak_tflops=0)
    run.place.set(lora__targets='["q_proj","o_proj","up_proj","down_proj"]', model__kernels="reference")
    found = []
    for name, base in (("decoded", "null"), ("stored", "stored")):
        run.place.set(checkpoint__dir=tmp_path / name, model__base_dtype=base)
        printed = run()
        assert ("14 weights of the layers are as the checkpoint has them (nvfp4)" in printed) == (base == "stored")
        found.append(losses(tmp_path / name))
    assert len(found[0]) == 3 and found[0] == found[1]
    printed = run(status=2, lora__merge_aware="true", checkpoint__dir=tmp_path / "merged")
    assert "of which no merged checkpoint is written in few bits: set lora.merge_aware to false." in printed
