"""The adapters of a mixture's experts as a server reads them, written from what trains."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.choices import ServerKind
from engine.errors import UserError
from engine.rollouts.served_adapter import gather_trained, write_adapter
from tests.small_runs.routed_place import put_experts
from tests.support.rollout_runs import prepared
from tests.wrong_inputs.workplace import make_place


def _written(folder: Path, kind: ServerKind, experts: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The tensors of the folder, and the masters by the engine's names; factors B are drawn."""
    place = make_place(folder / "place")
    put_experts(place, 4, sees_signs=False)
    place.train.write_text(json.dumps({"prompt": "ab"}) + "\n", encoding="utf-8")
    settings = place.options | {
        "objective.name": "grpo", "rollout.rewards": "['regex:a']", "rollout.num_generations": 2,
        "rollout.max_completion_length": 5, "train.global_batch_size": 2, "train.micro_batch_size": 1,
        "data.seq_length": 24, "train.steps": 1, "lora.experts": experts, "checkpoint.dir": folder / "run",
    }  # fmt: skip
    with ExitStack() as opened:
        run = prepared({option: value for option, value in settings.items() if value is not None}, opened)
        generator = torch.Generator().manual_seed(3)
        for shard in run.training.optimizer.flat.master_shards():
            shard.tensor.copy_(torch.randn(shard.tensor.shape, generator=generator))
        trained = gather_trained(run.training)
        write_adapter(trained, run.config, run.training, folder / "adapter", kind)
        masters = {one.name: one.tensor.clone() for one in run.training.optimizer.flat.master_shards()}
    return load_file(folder / "adapter" / "adapter_model.safetensors"), masters


def test_each_experts_own_for_vllm(tmp_path: Path) -> None:
    found, masters = _written(tmp_path, "vllm", "per_expert")
    key = "base_model.model.model.layers.1.mlp.experts.2.down_proj.lora_A.weight"
    assert torch.equal(found[key], masters["layers.1.mlp.experts.2.down_proj.lora_A"])


def test_shared_factors_for_sglang(tmp_path: Path) -> None:
    """SGLang reads no others: adapters of each expert's own are refused."""
    found, _ = _written(tmp_path / "shared", "sglang", "shared_outer")
    assert any("experts.gate" in key or "experts.w1" in key for key in found), sorted(found)
    with pytest.raises(UserError, match="SGLang is only known to read .* shared outer factors: train adapters of one"):
        _written(tmp_path / "apart", "sglang", "per_expert")
