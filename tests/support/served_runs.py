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
    from transformers import AutoConfig, AutoModelForCausalLM

    given: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    tokenizer = {one.name: one.read_bytes() for one in model.iterdir()}
    torch.manual_seed(7)
    config = AutoConfig.for_model(**given, initializer_range=0.15)
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    (model / "generation_config.json").unlink(missing_ok=True)
    for name, data in tokenizer.items():
        (model / name).write_bytes(data)


def make_mixture(model: Path) -> None:
    """Makes a Qwen3-MoE of the model in a folder: two of its four layers have routers."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config |= {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 8, "moe_intermediate_size": 20,
        "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True, "decoder_sparse_step": 2,
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_weights(model)


def mixture_settings(folder: Path, url: str | None = None, **changes: object) -> dict[str, object]:
    """Options of a run of such a mixture, whose adapters PEFT reads: those of attention."""
    settings = rollout_settings(folder, lora__targets="q_proj,k_proj,v_proj,o_proj", **changes)
    make_mixture(folder / "model")
    del settings["model.init"]
    return settings if url is None else settings | {"rollout.server": url}
