"""Names and types of every hybrid's tensors: from Hugging Face through a partitioned base and back, bit for bit.

Checkpoints come in more than one spelling, and keep small parameters in fp32 beside weights in bfloat16.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.checkpoint.model_weights import open_source
from engine.conversion.import_export import export_hf, import_checkpoint
from tests.support.family_models import make_model
from tests.support.family_table import FAMILIES
from tests.support.sweeps import sampled

Rename = Callable[[str], str]
_EXACT = ("A_log", "dt_bias", ".D", "norm.weight", "expert_bias", "e_score_correction_bias", "layer_scalar")
"""Endings of the names of tensors that stay in fp32."""


def _renamed(*pairs: tuple[str, str]) -> Rename:
    """Returns a function of a tensor's name that replaces what patterns match."""

    def rename(name: str) -> str:
        for pattern, replacement in pairs:
            name = re.sub(pattern, replacement, name)
        return name

    return rename


NESTED = _renamed(("^model\\.", "model.language_model."))
SPELLINGS: Mapping[str, Mapping[str, Rename]] = {
    "qwen3 next": {},
    "qwen3.5": {"nested": NESTED},
    "qwen3.5 moe": {"nested": NESTED},
    "bamba": {},
    "granite hybrid": {},
    "granite hybrid moe": {},
    "nemotron h": {"model": _renamed(("^backbone\\.", "model."))},
    "olmo hybrid": {
        "attention's norm": _renamed(("layers\\.2\\.feedforward_layer_norm", "layers.2.post_attention_layernorm"))
    },
    "kimi linear": {"released": _renamed(("layers\\.0\\.block_sparse_moe", "layers.0.mlp"))},
    "lfm2": {},
    "lfm2 with biases": {},
    "lfm2 moe": {},
    "gemma4": {"nested": NESTED},
    "gemma4 moe": {"nested": NESTED},
}
"""Every hybrid, and how its checkpoints are named beside the way in which transformers writes them."""
CASES = [(name, spelling) for name, others in SPELLINGS.items() for spelling in ("transformers", *others)]
QUICK = [("olmo hybrid", "attention's norm"), ("nemotron h", "model")]


def _checkpoint(name: str, spelling: str, folder: Path) -> dict[str, Tensor]:
    """Writes a model in a spelling, with weights in bfloat16 and small parameters in fp32; returns its tensors."""
    make_model(name, folder)
    rename = SPELLINGS[name].get(spelling, str)
    written = load_file(folder / "model.safetensors")
    tensors = {rename(key): value if key.endswith(_EXACT) else value.bfloat16() for key, value in written.items()}
    assert (tensors.keys() == written.keys()) == (spelling == "transformers")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return tensors


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize(("name", "spelling"), sampled(CASES, QUICK))
def test_there_and_back(name: str, spelling: str, tensor: int, tmp_path: Path) -> None:
    before = _checkpoint(name, spelling, tmp_path / "hf")
    source = open_source(tmp_path / "hf")
    assert source.model.implementation == "native"
    import_checkpoint(source, tmp_path / "parts", tensor=tensor)
    export_hf(open_source(tmp_path / "parts"), tmp_path / "back")
    after = load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys()
    assert {value.dtype for value in after.values()} == {torch.bfloat16, torch.float32}
    for key, value in before.items():
        assert value.dtype == after[key].dtype and torch.equal(value, after[key]), key
    assert open_source(tmp_path / "parts").model.names == source.model.names


def test_every_hybrid_is_here() -> None:
    kinds = {name: FAMILIES[name][0] for name in SPELLINGS}
    hybrids = ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "Bamba", "GraniteMoeHybrid", "NemotronH", "OlmoHybrid", "Lfm2")
    assert {*hybrids, "KimiLinear", "Lfm2Moe", "Gemma4"} <= {*kinds.values()}
