"""Merge-aware runs on bases that compressed-tensors wrote, in formats that the engine reads and does not make."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.small_runs.conftest import SmallRuns
from tests.small_runs.test_low_precision_export import TEXTS, export, scores
from tests.support.few_bits import group
from tests.support.shipped_models import compress
from tests.support.sweeps import sampled
from tests.unit.test_checkpoint_source import load_folder
from tests.wrong_inputs.workplace import VOCABULARY

_INPUTS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
GROUPS: dict[str, dict[str, Any]] = {
    "fp8 with one scale": group(["Linear"], "float", 8, "tensor"),
    "fp8 channels": group(["Linear"], "float", 8, "channel"),
    "int8 with one scale": group(["Linear"], "int", 8, "tensor", input_activations=_INPUTS),
    "int8 channels": group(["Linear"], "int", 8, "channel", input_activations=_INPUTS),
    "int4 with zero points": group(["Linear"], "int", 4, "group", 32),
    "int4 channels": group(["Linear"], "int", 4, "channel"),
    "int4 channels with zero points": group(["Linear"], "int", 4, "channel"),
}


def _make_base(run: SmallRuns, name: str) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    folder = run.place.model
    tokenizer = (folder / "tokenizer.model").read_bytes()
    shutil.rmtree(folder)
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=VOCABULARY, max_position_embeddings=64,
    )  # fmt: skip
    scheme = json.loads(json.dumps(GROUPS[name]))
    scheme["weights"]["symmetric"] = "zero points" not in name
    compress(LlamaForCausalLM(config).to(torch.bfloat16), folder, {"group_0": scheme}, ["lm_head"])
    (folder / "tokenizer.model").write_bytes(tokenizer)
    run.place.records(*TEXTS)
    run.place.set(train__steps=3, lora__targets='["q_proj","v_proj","o_proj","up_proj","down_proj"]', optim__lr=0.02)


def _dequantised(folder: Path) -> dict[str, torch.Tensor]:
    """The linears' weights as transformers and compressed-tensors read them, with numbers in place of codes."""
    from transformers import CompressedTensorsConfig

    given = CompressedTensorsConfig(run_compressed=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=given)
    return {name: weight for name, weight in model.state_dict().items() if name.endswith("proj.weight")}


@pytest.mark.parametrize("name", sampled(GROUPS, ["fp8 with one scale", "int4 with zero points"]))
def test_the_written_model_is_the_one_that_was_trained(run: SmallRuns, name: str) -> None:
    _make_base(run, name)
    run(model__base_dtype="stored", lora__merge_aware="true", model__dtype="bfloat16")
    export(run)
    out = run.place.folder / "out"
    trained = scores(adapter=run.folder, base_dtype="stored", dtype="bfloat16")
    assert scores(model=out, base_dtype="stored", dtype="bfloat16") == trained
    before, after = load_folder(run.place.model), load_folder(out)
    shapes = [{name: (one.shape, one.dtype) for name, one in tensors.items()} for tensors in (before, after)]
    assert shapes[0] == shapes[1]
    theirs = [_dequantised(folder) for folder in (run.place.model, out)]
    assert sum(not torch.equal(theirs[0][name], theirs[1][name]) for name in theirs[0]) == 10
