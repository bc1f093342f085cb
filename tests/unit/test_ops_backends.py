"""A training with the compiled kernels follows the one with plain torch; a backend that cannot run is refused."""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.errors import UserError
from engine.kernels.native import product
from engine.kernels.native.loader import native_status
from engine.models.decoder_config import DecoderConfig
from engine.models.ropes import Rope
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


# Triton decides at its import whether it interprets, so each choice is made in a fork of a process without Triton
_CHOICES = """
import os, sys, torch
from engine.errors import UserError
from engine.ops.backends import choose_kernels
for request in sys.argv[1:]:
    if os.fork() == 0:
        wanted, device, dtype, os.environ["TRITON_INTERPRET"] = request.split()
        try:
            kernels, sentence = choose_kernels(wanted, device=torch.device(device), dtype=getattr(torch, dtype))
            print(kernels.name, "triton" in sys.modules, sentence, sep="|", flush=True)
        except UserError as error:
            print("refused", "triton" in sys.modules, error, sep="|", flush=True)
        os._exit(0)
    os.wait()
"""


def _choices(*requests: str) -> list[tuple[str, bool, str]]:
    """(name or "refused", whether Triton was imported, the sentence) of each request: the wanted kernels, a device, a
    dtype, and TRITON_INTERPRET."""
    command = [sys.executable, "-c", _CHOICES, *requests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    answers = [line.split("|") for line in done.stdout.splitlines()]
    return [(name, imported == "True", sentence) for name, imported, sentence in answers]


@needs_triton
def test_a_run_imports_and_takes_triton_on_a_gpu_or_by_name() -> None:
    on_a_cpu, on_a_gpu, in_float64, compiled, interpreted, in_bfloat16 = _choices(
        "auto cpu float32 1", "auto cuda bfloat16 0", "auto cuda float64 0", "triton cpu float32 0",
        "triton cpu float32 1", "triton cpu bfloat16 1",
    )  # fmt: skip
    name, imported, _ = on_a_cpu
    assert name in ("native", "reference") and not imported
    assert on_a_gpu[0] == "triton"
    name, _, sentence = in_float64
    assert name == "reference" and "torch.float64" in sentence
    name, _, sentence = compiled
    assert name == "refused" and "TRITON_INTERPRET=1" in sentence and "set model.kernels to auto" in sentence
    name, _, sentence = interpreted
    assert name == "triton" and "interpreted" in sentence
    name, imported, sentence = in_bfloat16
    assert name == "refused" and not imported and "right in float32" in sentence
