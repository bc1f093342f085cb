"""Small models that transformers writes, and what is in folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from engine.adopted.forms import seeded, small_model
from engine.adopted.structure import quiet


def save_small(model_type: str, folder: Path, **changes: Any) -> Any:
    """Writes a small model of a type with `save_pretrained`, every number drawn, and returns it."""
    from transformers import CONFIG_MAPPING
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = small_model({**CONFIG_MAPPING[model_type](**changes).to_dict(), "model_type": model_type})
    with torch.no_grad(), seeded(5):
        for value in model.state_dict().values():
            if value.is_floating_point():
                value.copy_(torch.randn(value.shape) * 0.1)
    with quiet():
        model.save_pretrained(folder)
    return model


def stored(folder: Path) -> dict[str, Tensor]:
    """Returns the tensors of all safetensors files of a folder."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as reader:
            found |= {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118 - not a mapping
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Checks names, dtypes and every bit."""
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())[:8]
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name
