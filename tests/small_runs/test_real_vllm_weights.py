"""vLLM's loader reads exports in few bits, where RANKFOLD_VLLM names the executable of one for CPUs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import tests.support
from engine.checkpoint.model_weights import open_source
from engine.choices import ExportDType, QuantMethod
from engine.conversion.import_export import export_hf
from engine.conversion.low_precision.linears import low_precision

VLLM = os.environ.get("RANKFOLD_VLLM")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(VLLM is None, reason="RANKFOLD_VLLM does not name the executable of a vLLM"),
]
KINDS: list[tuple[ExportDType, QuantMethod | None]] = [
    ("nvfp4", None), ("mxfp8", None), ("fp8_block", None), ("fp8_block", "fp8"), ("int4", None), ("int8", None),
]  # fmt: skip
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Exports of one model, each with vLLM's numbers in vllm.pt."""
    assert VLLM is not None
    place = tmp_path_factory.mktemp("exports")
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, max_position_embeddings=64, initializer_range=0.05,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(place / "plain")
    made = []
    for dtype, method in KINDS:
        source = open_source(place / "plain")
        made.append(place / f"{dtype} {method}")
        export_hf(source, made[-1], low=low_precision(source, dtype, method))
    told = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    script = Path(tests.support.__path__[0]) / "vllm_numbers.py"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    seen = subprocess.run(
        [Path(VLLM).parent / "python", script, *made], env={**environment, **told}, capture_output=True, text=True
    )
    assert not seen.returncode, seen.stderr[-3000:]
    return made


def parts_of(name: str) -> list[str]:
    """The modules of the checkpoint that one of vLLM's has in its rows."""
    place, _, leaf = name.rpartition(".")
    return [f"{place}.{one}".removeprefix(".") for one in FUSED.get(leaf, (leaf,))]


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


@pytest.mark.parametrize("place", range(len(KINDS)))
def test_vllm_has_the_exports_codes_and_numbers(place: int, folders: list[Path]) -> None:
    """Each parameter is the files' tensors, all of them used, and each linear multiplies with the engine's numbers."""
    folder = folders[place]
    found, stored = torch.load(folder / "vllm.pt"), load_file(folder / "model.safetensors")
    source, used = open_source(folder), set()
    own = {source.model.names.to_hf(name).name: name for name in source.tensor_names()}
    products = {name.removeprefix("product."): one for name, one in found.items() if name.startswith("product.")}
    for name, one in found.items():
        if name.startswith("product."):
            continue
        module, _, ending = name.rpartition(".")
        names = [f"{part}.{ending}" for part in parts_of(module)]
        each = [stored[part] for part in names]
        expected = (
            each[-1] if ending == "weight_shape" else torch.cat([part if part.dim() else part[None] for part in each])
        )
        assert one.dtype == expected.dtype and torch.equal(bits(one), bits(expected)), name
        used.update(names)
    assert used == set(stored)
    for name, product in products.items():
        expected = torch.cat([source.read_whole(own[f"{part}.weight"]) for part in parts_of(name)])
        assert torch.equal(product.t(), expected), name
    assert len(products) == 8
