"""A training with the compiled kernels follows the one with plain torch; a backend that cannot run is refused."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.errors import UserError
from engine.kernels.native import product
from engine.kernels.native.loader import native_status
from engine.models.decoder_config import DecoderConfig, Rope
from engine.ops import backends
from engine.ops.backends import NATIVE, choose_kernels
from engine.ops.kernels import REFERENCE
from tests.support.small_training import SmallTraining
from tests.support.sweeps import sampled

ROOT = Path(__file__).resolve().parents[2]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CONFIG = DecoderConfig(
    family="llama", hidden=72, intermediate=100, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=10, vocab_size=131,
    norm_eps=1e-5, ropes=(Rope(theta=1e4),),
)  # fmt: skip

needs_native = pytest.mark.skipif(not native_status().available, reason=native_status().reason)
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@needs_native
@pytest.mark.parametrize(
    ("trained", "dropout", "products"),
    sampled(
        itertools.product(((), ("norm",), ("lm_head",)), (0.0, 0.1), ("torch", "vectors", "tiles")),
        [
            ((), 0.1, "torch"), ((), 0.1, "vectors"), (("norm",), 0.0, "tiles"), (("norm",), 0.1, "tiles"),
            (("lm_head",), 0.0, "vectors"),
        ],
    ),
    ids=str,
)  # fmt: skip
def test_native_training_follows_the_reference(
    dropout: float, trained: tuple[str, ...], products: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if products == "tiles" and not product.has_tiles():
        pytest.skip("this processor, system or compiler has no AMX tiles")
    if products != "torch":  # these matrices are too small for the others otherwise
        monkeypatch.setattr(product, "FEWEST", 1)
        monkeypatch.setattr(product, "FEWEST_BY_ROWS", 1)
        monkeypatch.setattr(product, "FEWEST_PRODUCTS", 1 if products == "tiles" else 1 << 60)
    training = SmallTraining(config=CONFIG, documents=((37,), (20, 17), (37,)), dropout=dropout, trained=trained)
    losses, gradients = training.run(NATIVE, steps=20, device=CPU)
    expected_losses, expected = training.run(REFERENCE, steps=20, device=CPU)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).norm() <= 1e-5 * expected[name].norm(), name
    assert (losses - expected_losses).abs().max() < 1e-5
    assert losses[-1] != losses[0]


def test_reference_is_taken_where_the_native_kernels_cannot_compute() -> None:
    kernels, why = choose_kernels("auto", device=CPU, dtype=torch.float16)
    assert kernels is REFERENCE and "float32 and bfloat16" in why


def test_native_by_name_is_refused_where_it_cannot_run() -> None:
    with pytest.raises(UserError, match="set model.kernels to auto or reference"):
        choose_kernels("native", device=CPU, dtype=torch.float16)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_auto_takes_the_native_kernels(dtype: torch.dtype) -> None:
    assert choose_kernels("auto", device=CPU, dtype=dtype)[0].name == "native"


def test_without_triton_a_gpu_computes_in_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    kernels, why = choose_kernels("auto", device=CUDA, dtype=torch.bfloat16)
    assert kernels is REFERENCE and why.endswith("the package triton is not installed")
    with pytest.raises(UserError, match="model.kernels is triton, but the package triton is not installed"):
        choose_kernels("triton", device=CUDA, dtype=torch.bfloat16)


# Triton decides at its import whether it interprets, so these run in processes of their own
_CHOICE = """
import sys, torch
from engine.errors import UserError
from engine.ops.backends import choose_kernels
wanted, device, dtype = sys.argv[1:4]
try:
    kernels, sentence = choose_kernels(wanted, device=torch.device(device), dtype=getattr(torch, dtype))
    print(kernels.name, "triton" in sys.modules, sentence, sep="|")
except UserError as error:
    print("refused", "triton" in sys.modules, error, sep="|")
"""


def _choice(wanted: str, device: str, dtype: str, *, interpret: bool) -> tuple[str, bool, str]:
    """(name or "refused", whether Triton was imported, the sentence)."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_INTERPRET": "1"} if interpret else {}
    command = [sys.executable, "-c", _CHOICE, wanted, device, dtype]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    name, imported, sentence = done.stdout.strip().split("|")
    return name, imported == "True", sentence


@needs_triton
def test_a_run_on_a_cpu_does_not_import_triton() -> None:
    name, imported, _ = _choice("auto", "cpu", "float32", interpret=True)
    assert name in ("native", "reference") and not imported


@needs_triton
def test_auto_on_a_gpu_takes_triton() -> None:
    assert _choice("auto", "cuda", "bfloat16", interpret=False)[0] == "triton"
    name, _, sentence = _choice("auto", "cuda", "float64", interpret=False)
    assert name == "reference" and "torch.float64" in sentence


@needs_triton
def test_triton_on_a_cpu_needs_the_interpreter() -> None:
    name, _, sentence = _choice("triton", "cpu", "float32", interpret=False)
    assert name == "refused" and "TRITON_INTERPRET=1" in sentence and "set model.kernels to auto" in sentence
    name, _, sentence = _choice("triton", "cpu", "float32", interpret=True)
    assert name == "triton" and "interpreted" in sentence
    name, imported, sentence = _choice("triton", "cpu", "bfloat16", interpret=True)
    assert name == "refused" and not imported and "right in float32" in sentence
