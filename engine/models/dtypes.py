"""The dtypes that options name."""

from __future__ import annotations

import torch

from engine.layers.rounding import FLOAT8

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""`model.dtype`, and the dtype in a config.json, -> the dtype of weights and activations."""
STORED_DTYPES = {"bfloat16": torch.bfloat16, "float8": FLOAT8}
"""`memory.activation_dtype` -> the dtype in which activations are kept for backward; null keeps them as they are."""
