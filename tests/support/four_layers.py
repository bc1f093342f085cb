"""A model of four layers whose activations are worth moving or rounding, for tests of what is kept for backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.choices import RECOMPUTE_LEVELS
from engine.kernels.native.loader import native_status
from engine.layers.recompute import MemoryPlan
from engine.ops.kernels import REFERENCE, Kernels
from tests.distributed.cases import Case, small_config
from tests.distributed.gradient_table import EVERY_LINEAR
from tests.support.memory_models import LONG, build_with, long_batch, two_alive

CPU = torch.device("cpu")
CONFIG = small_config(num_layers=4)
CASE = Case(config=CONFIG, adapters=EVERY_LINEAR, trained=".*norm")
TOKENS = 2 * LONG
"""Number of tokens in `long_batch`."""

every_level = pytest.mark.parametrize("level", RECOMPUTE_LEVELS)
needs_native = pytest.mark.skipif(not native_status().available, reason=native_status().reason)


def results(memory: MemoryPlan, kernels: Kernels = REFERENCE, transfer: Any = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss sum and gradients by name of two micro-batches that are alive at once."""
    built = build_with(CASE, memory, kernels=kernels, transfer=transfer)
    return two_alive(built, [long_batch(CONFIG.vocab_size), long_batch(CONFIG.vocab_size, 1)])
