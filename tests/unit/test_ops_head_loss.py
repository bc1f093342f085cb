"""The blocks of tokens in which the loss under a frozen head is computed."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.layers.recompute import MemoryPlan
from engine.ops import head_loss
from engine.ops.backends import NATIVE
from engine.ops.kernels import REFERENCE, backend, shape_backend
from tests.distributed.cases import Case, small_config
from tests.support.memory_models import build_with, num_targets, packed_batches

LLAMA3, BF16 = 128256, 2
TABLE = [
    # vocabulary here, multiple, tokens: 128 MiB of logits hold 523 tokens of Llama 3's, 4184 of an eighth of it
    (LLAMA3, 1, 523),
    (LLAMA3, 1024, 1024),
    (LLAMA3 // 8, 1024, 4096),
    (32000, 1024, 2048),
    (32000, 1, 2097),
]


@pytest.mark.parametrize(("vocabulary", "multiple", "tokens"), TABLE)
def test_blocks_are_multiples_of_what_fills_the_machine(vocabulary: int, multiple: int, tokens: int) -> None:
    assert head_loss.block_tokens(vocabulary * BF16, multiple) == tokens


def test_a_model_computes_its_loss_in_these_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """48 tokens and room for 13: blocks of 8, or of 16 where less would not fill the machine."""
    case = Case(config=small_config(), adapters=r"layers\..*_proj", dropout=0.0)
    batches = packed_batches(case.config.vocab_size)[:1]
    monkeypatch.setattr(head_loss, "BLOCK_BYTES", 13 * case.config.vocab_size * 4)
    found = {}
    for multiple in (1, 8, 16):
        seen: list[int] = []

        def product(left: Tensor, right: Tensor, *, seen: list[int] = seen, **options: Any) -> Tensor:
            seen.append(left.shape[0])
            return torch.mm(left, right, **options)

        loss = replace(REFERENCE.loss, product=product, tokens_multiple=multiple)
        built = build_with(case, MemoryPlan(), kernels=replace(REFERENCE, loss=loss))
        built.step(batches, num_targets(batches), 1e-3)
        found[multiple] = seen[::2]  # logits, then the input's gradient
    assert found == {1: [13, 13, 13, 9], 8: [8] * 6, 16: [16] * 3}


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_the_planner_knows_the_blocks_and_what_is_folded() -> None:
    TRITON = backend("triton")

    for kernels, multiple in ((REFERENCE, 1), (NATIVE, 1), (TRITON, 1024)):
        shapes = shape_backend(kernels.name)
        assert kernels.loss.tokens_multiple == shapes.loss.tokens_multiple == multiple
        assert kernels.folds is shapes.folds
