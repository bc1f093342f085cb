"""Tenants of small mixtures of experts, on one rank or several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.batch import Batch
from engine.config.run import RunConfig
from engine.distributed.sharding import ShardSpec, shard_of
from engine.runtime.launch import Launch
from engine.telemetry.log import Log
from engine.tenants.tenants import Tenants
from engine.training.build import Training
from rankfold.benchmarking.small_run import SMALL_LLAMA
from tests.support.small_training import packed_batch
from tests.tenants.test_shared_base import MIXTURE, SMALLER, launched, trained

MODELS: dict[str, dict[str, Any]] = {
    "qwen3 moe": MIXTURE,
    "mixtral": {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 6,
        "num_experts_per_tok": 2, "intermediate_size": 48,
    },
    "qwen2 moe": {
        "model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"], "num_experts": 6,
        "num_experts_per_tok": 3, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 40,
        "decoder_sparse_step": 1, "norm_topk_prob": True, "mlp_only_layers": [],
    },
    "deepseek v3": {
        "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 8,
        "num_experts_per_tok": 3, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 24,
        "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16, "v_head_dim": 16, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_key_value_heads": 4, "head_dim": 8,
        "rope_interleave": True,
    },
    "gpt-oss": {
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "num_local_experts": 6,
        "num_experts_per_tok": 2, "intermediate_size": 32, "layer_types": ["full_attention"] * 2,
        "sliding_window": 128,
    },
}  # fmt: skip
"""config.json: softmax and sigmoid, with and without a shared expert and its gate, biases, and a clamped gate."""
MODELS = {name: {**SMALL_LLAMA, **SMALLER, **sizes} for name, sizes in MODELS.items()}

ADAPTERS: tuple[dict[str, Any], ...] = (
    {"rank": 4, "alpha": 8},
    {"rank": 16, "alpha": 4, "dropout": 0.1, "targets": ["o_proj", "down_proj"]},
    {"rank": 1, "alpha": 3, "dropout": 0.05, "experts": "shared_outer"},
    {"rank": 8, "alpha": 3, "experts": "shared", "exclude": ["down_proj"]},
    {"rank": 2, "alpha": 3, "targets": ["o_proj"]},
)
APART: dict[str, Any] = {"rank": 2, "alpha": 4, "targets": ["o_proj", "router"]}
"""Of a tenant whose router has an adapter, and which so has micro-batches of its own."""


def batches(number: int, step: int, rank: int = 0) -> list[Batch]:
    """Two micro-batches, of documents and lengths that differ between tenants and ranks, and which two tensor ranks can
    share."""
    seed = 1000 * rank + 100 * number + 10 * step
    return [
        packed_batch([(9 + number, 13 - number + 2 * rank)], SMALLER["vocab_size"], seed),
        packed_batch([(5 + number, 7 + number + 2 * rank)], SMALLER["vocab_size"], seed + 1),
    ]


def draw_factors(training: Training, number: int) -> None:
    """Gives each B, which is zero at first, numbers that depend on its name and this one alone."""
    for entry in training.stages.entries():
        if entry.name.endswith("lora_B"):
            seed = sum(map(ord, entry.name)) + number
            whole = torch.randn(entry.spec.global_shape, generator=torch.Generator().manual_seed(seed)) * 0.05
            entry.parameter.data.copy_(shard_of(whole, entry.spec))
    training.optimizer.flat._start_from_parameters()


class Together:
    """Runs that are trained together.

    Args:
        runs: number, by which its data differ, and configuration.
        launch: of this rank; None for a lone one.
        rank: of those with other data; None for the data of two of them.
    """

    def __init__(
        self, runs: Sequence[tuple[int, RunConfig]], *, launch: Launch | None = None, rank: int | None = 0
    ) -> None:
        self.tenants = Tenants(runs[0][1], launch or launched(), Log(1), tokens=118)
        self.numbers = {number: self.tenants.add(config) for number, config in runs}
        for number, own in self.numbers.items():
            draw_factors(self.tenants[own], number)
        self._ranks = range(2) if rank is None else (rank,)
        self._every = range(2) if rank is None else range(self.tenants.base.mesh.dp.size)

    def add_gradients(self, step: int = 0) -> dict[int, Tensor]:
        """Returns the losses of a step, by a tenant's place."""
        given, targets = {}, {}
        for number, own in self.numbers.items():
            given[own] = [one for rank in self._ranks for one in batches(number, step, rank)]
            everyone = [one for rank in self._every for one in batches(number, step, rank)]
            targets[own] = float(sum(one.loss_weights_BS.sum() for one in everyone))
        return self.tenants.gradients(given, targets)

    def gradients(self) -> dict[int, dict[str, tuple[Tensor, ShardSpec]]]:
        """Returns the gradients of a step, of each tensor's part on this rank."""
        self.add_gradients()
        found: dict[int, dict[str, tuple[Tensor, ShardSpec]]] = {}
        for number, own in self.numbers.items():
            self.tenants[own].reducer.finish()
            entries = self.tenants[own].stages.entries()
            found[number] = {one.name: (one.sink.buffer.clone(), one.spec) for one in entries if one.sink is not None}
        return found

    def train(self, steps: int = 3) -> dict[int, dict[str, Tensor]]:
        """Returns what steps make of the adapters on this rank."""
        for step in range(steps):
            for own, loss in self.add_gradients(step).items():
                self.tenants.update(own, 1e-2, loss)
        return {number: trained(self.tenants[own]) for number, own in self.numbers.items()}
