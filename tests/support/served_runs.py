"""What tests of runs with a server of completions share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.support.rollout_runs import rollout_settings


def served_settings(folder: Path, url: str | None = None, **changes: object) -> dict[str, object]:
    """Options of a run whose model lies on the disk, for the server to read; its factors B are zero at first."""
    folder.mkdir(exist_ok=True)
    settings = rollout_settings(folder, **changes)
    if not (folder / "model" / "model.safetensors").exists():
        save_weights(folder / "model")
    del settings["model.init"]
    return settings if url is None else settings | {"rollout.server": url}


def save_weights(model: Path) -> None:
    """Weights of a fixed seed for the config.json of a folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    given: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    tokenizer = {one.name: one.read_bytes() for one in model.iterdir()}
    torch.manual_seed(7)
    LlamaForCausalLM(LlamaConfig(**given, initializer_range=0.15)).save_pretrained(model)
    (model / "generation_config.json").unlink(missing_ok=True)
    for name, data in tokenizer.items():
        (model / name).write_bytes(data)
