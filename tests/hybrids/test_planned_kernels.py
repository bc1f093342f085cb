"""What the planner counts of layers with states: Qwen3.5-9B in bf16 on two documents of 4096 tokens."""

from __future__ import annotations

import pytest

from engine.config.train import TrainOptions
from engine.layers.recompute import MemoryPlan
from engine.planning.kernel_times import kernel_times
from engine.planning.machine import MACHINES
from engine.planning.rank_layout import Layout
from tests.unit.test_planning_search import _config, _workload

QWEN_3_5_9B = {
    "model_type": "qwen3_5_text", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 512, "rms_norm_eps": 1e-6,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "attn_output_gate": True, "hidden_act": "silu",
    "max_position_embeddings": 262144, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip
"""One group of its layers: three with a delta net, and one with attention."""


def test_kernels_are_counted_as_the_page_of_hybrids_counts_them() -> None:
    config = _config(4096, 2, train=TrainOptions(micro_batch_size=2, global_batch_size=2))
    found = {}
    for one in kernel_times(_workload(QWEN_3_5_9B, config), Layout(), MemoryPlan(), MACHINES["h200-141"]):
        if one.launch.name in found:
            found[one.launch.name] = None  # of several sizes: none of those below
        else:
            found[one.launch.name] = one
    whole = 2 * 8192 * 4096  # bytes of a tensor of all value heads
    for name, moved in (
        ("conv_forward", 4 * whole),
        ("conv_backward", 6 * whole),
        ("gated_norm_forward", 3 * whole),
        ("gated_norm_backward", 5 * whole),
        ("delta_forward", 1182e6),
        ("delta_backward", 2829e6),
    ):
        assert found[name].launch.nbytes == pytest.approx(moved, rel=2e-3), name
        assert found[name].count == 3, name
    assert found["delta_forward"].launch.flops == pytest.approx(73e9, rel=5e-3)
    assert found["delta_backward"].launch.flops == pytest.approx(116e9, rel=5e-3)
    launches = {name: one.launch.count for name, one in found.items() if one is not None}
    assert (launches["delta_forward"], launches["delta_backward"], launches["conv_forward"]) == (7, 10, 2)
