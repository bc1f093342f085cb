"""What the planner says tenants take, against what they take on a CPU."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from engine.batch import Batch
from engine.config.load import from_yaml
from engine.config.run import RunConfig
from engine.errors import UserError
from engine.models.families import family_of
from engine.planning.ledger import ADAPTERS, GRADIENTS, MASTERS, OPTIMIZER
from engine.planning.memory_plan import memory_plan_of
from engine.planning.peak import PeakEstimate, predict_layout
from engine.planning.rank_layout import Layout
from engine.runtime.launch import Launch
from engine.telemetry.log import Log
from engine.tenants.tenants import Tenants
from rankfold import plan
from rankfold.planning.adapters_answer import adapter_workload, fit_of, together
from rankfold.planning.memory_measure import LiveStorages, draw_batches
from tests.support.sweeps import sampled

CPU = torch.device("cpu")
LENGTH = 128
LINEARS = "[q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]"
SIZES = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1000, "tie_word_embeddings": False,
}  # fmt: skip
MIXTURE = {
    **SIZES, "model_type": "qwen3_moe", "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 160, "norm_topk_prob": True,
}  # fmt: skip


def _config(folder: Path, sizes: dict[str, object], rank: int, dropout: float = 0.0) -> RunConfig:
    (folder / "config.json").write_text(json.dumps(sizes))
    return from_yaml(
        f"model: {{path: '{folder}', init: random, kernels: reference}}\n"
        f"lora: {{rank: {rank}, targets: {LINEARS}, dropout: {dropout}, fused: none}}\n"
        f"data: {{seq_length: {LENGTH}}}\noptim: {{backend: torch}}\n"
        "train: {micro_batch_size: 1, global_batch_size: 2}\n"
    )


class _Round:
    """Steps of several tenants, as a run or a server takes them."""

    def __init__(self, config: RunConfig, adapters: int, sharing: int) -> None:
        launch = Launch(rank=0, world_size=1, device=CPU)
        self.tenants = Tenants(config, launch, Log(1), tokens=sharing * LENGTH)
        self.numbers = [self.tenants.add(config) for _ in range(adapters)]
        self.batches: dict[int, list[Batch]] = {
            number: draw_batches(config, self.tenants[number], launch) for number in self.numbers
        }

    def take(self) -> None:
        targets = dict.fromkeys(self.numbers, 2.0 * LENGTH)
        for number, loss in self.tenants.gradients(self.batches, targets).items():
            self.tenants.update(number, 1e-4, loss)


def _predicted(config: RunConfig, sizes: dict[str, object], adapters: int, sharing: int) -> PeakEstimate:
    family, text = family_of(sizes)
    own = adapter_workload(config, family.config_from_hf(text), family, device_type="cpu", hf_config=text)
    shared = together(own, adapters=adapters, sharing=sharing)
    (found,) = predict_layout(shared, Layout(parallel=config.parallel), memory_plan_of(config))
    return found


@pytest.mark.parametrize(
    ("sizes", "rank", "dropout", "adapters", "sharing"),
    sampled(
        [
            (SIZES, 8, 0.0, 4, 2),
            (SIZES, 64, 0.1, 3, 3),
            (SIZES, 8, 0.0, 3, 1),
            (MIXTURE, 8, 0.0, 4, 2),
        ],
        [(SIZES, 8, 0.0, 4, 2)],
    ),
)
def test_the_peak_of_a_round(
    sizes: dict[str, object], rank: int, dropout: float, adapters: int, sharing: int, tmp_path: Path
) -> None:
    config = _config(tmp_path, sizes, rank, dropout)
    estimate = _predicted(config, sizes, adapters, sharing)
    with LiveStorages() as live:
        steps = _Round(config, adapters, sharing)
        static = live.live
        steps.take()
        live.reset()
        steps.take()
    each = sum(estimate.static[name] for name in (ADAPTERS, MASTERS, GRADIENTS, OPTIMIZER))
    assert static == pytest.approx(sum(estimate.static.values()) + (adapters - 1) * each, rel=0.01)
    assert live.peak == pytest.approx(estimate.step + (adapters - 1) * each, rel=0.02)


def test_an_adapter_takes_what_torchs_own_tracker_counts(tmp_path: Path) -> None:
    config = _config(tmp_path, SIZES, 16)
    steps = _Round(config, 1, 1)
    tracker = MemTracker()
    for part in steps.tenants.base.parts:
        part.requires_grad_(True)  # it wants all parameters to ask for a gradient, which nothing here looks at
    tracker.track_external(*steps.tenants.base.parts)
    with tracker:
        before = tracker.get_tracker_snapshot("current")[CPU]["Total"]
        steps.numbers.append(steps.tenants.add(config))
        found = tracker.get_tracker_snapshot("current")[CPU]["Total"]
    estimate = _predicted(config, SIZES, 2, 1)
    each = sum(estimate.static[name] for name in (ADAPTERS, MASTERS, GRADIENTS, OPTIMIZER))
    assert found - before == pytest.approx(each, rel=0.01)


def test_adapters_that_fit_are_those_that_the_memory_holds(tmp_path: Path) -> None:
    config = _config(tmp_path, SIZES, 16)
    family, text = family_of(SIZES)
    own = adapter_workload(config, family.config_from_hf(text), family, device_type="cpu", hf_config=text)
    shared = together(own, adapters=4, sharing=2)
    (estimate,) = predict_layout(shared, Layout(parallel=config.parallel), memory_plan_of(config))
    capacity = estimate.peak * 1.5
    fit = fit_of(16, estimate, shared, capacity)
    assert fit.peak(fit.count) <= capacity < fit.peak(fit.count + 1) and fit.peak(1) == estimate.peak


def test_the_command_says_what_fits_and_how_fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    words = [
        "plan", "adapters", "--model", str(tmp_path / "config.json"), "--gpu-memory", "1", "--machine", "h200-141",
        "--adapters", "3", "--rank", "5", "--rows", "1", "--seq-length", "64", "--tokens", "128",
        "--json", str(tmp_path / "answer.json"),
    ]  # fmt: skip
    monkeypatch.setattr("sys.argv", words)
    with redirect_stdout(StringIO()) as said:
        plan.main()
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert "micro-batches of 128 tokens, of 2 adapters" in said.getvalue() and "3 adapters of rank 5" in said.getvalue()
    assert answer["sharing"] == 2 and answer["round"]["likely"]["step_seconds"] > 0
    one = next(fit for fit in answer["fits"] if fit["rank"] == 5)
    # q, o: 128 + 128; k, v: 128 + 64; gate, up, down: 128 + 320 features, in three layers
    assert one["parameters"] == 5 * 3 * (2 * 256 + 2 * 192 + 3 * 448)
    assert one["bytes_each"] == one["parameters"] * 18
    monkeypatch.setattr("sys.argv", [*words[:4], "--adapters", "0"])
    with pytest.raises(UserError, match="--adapters is 0"):
        plan.main()
