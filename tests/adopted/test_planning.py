"""The planner on adopted models: the peak it predicts against the storages that real steps make and keep, and FLOPs
against torch's count of transformers' own forward."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from engine.adopted.config import adopted_config
from engine.adopted.forms import small_model
from engine.adopted.structure import quiet
from engine.checkpoint.model_weights import open_source
from engine.config.load import from_yaml
from engine.distributed.mesh import Axis
from engine.errors import UserError
from engine.layers.context import TensorLayout, TrainingPlan
from engine.layers.module import shard_entries
from engine.layers.storage import WeightPlacement
from engine.models.decoder import build_decoder
from engine.models.flops import forward_flops, step_flops, trained_work
from engine.planning.peak import PeakEstimate
from engine.planning.predict import predict_peak
from engine.runtime.launch import Launch
from engine.telemetry.log import Log
from engine.training.base_encoding import fill_base, named_encoding
from engine.training.device_choices import choose_for_device
from engine.training.start_model import check_model, model_source
from rankfold.planning.memory_measure import measure
from rankfold.planning.memory_question import answer_for
from tests.adopted.saved_models import save_small
from tests.support.fake_world import fake_world
from tests.support.sweeps import sampled

EXACT, MIXED = 0.002, 0.006
"""Largest relative errors of a peak; of mixtures, which experts tokens choose is not known."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A small model of a type, how it is trained, and on how many ranks."""

    model_type: str
    world: int = 1
    packing: bool | str = True
    lora: str = "{rank: 8}"
    trainable: str = "[]"
    dtype: str = "float32"
    base: str = "null"
    kernels: str = "reference"
    parallel: str = "{}"
    memory: str = "{}"
    tolerance: float = EXACT

    def compare(self, folder: Path) -> tuple[PeakEstimate, int]:
        """Returns the prediction, and the peak bytes of a step."""
        (folder / "config.json").write_text(json.dumps(sizes(self.model_type)))
        config = from_yaml(
            f"model: {{path: '{folder}', dtype: {self.dtype}, init: random, kernels: {self.kernels},"
            f" base_dtype: {self.base}, implementation: adopted}}\n"
            f"lora: {self.lora}\ntrainable: {self.trainable}\n"
            f"data: {{seq_length: 256, packing: {str(self.packing).lower()}}}\n"
            f"train: {{micro_batch_size: 1, global_batch_size: {self.world}}}\n"
            f"optim: {{backend: torch}}\nparallel: {self.parallel}\nmemory: {self.memory}\n"
        )
        source = model_source(config)
        plan = check_model(config, source.model, self.world).modules
        found = predict_peak(config, source.model.decoder, plan, world_size=self.world, device_type="cpu")
        with fake_world(0, self.world) if self.world > 1 else nullcontext():
            launch = Launch(rank=0, world_size=self.world, device=torch.device("cpu"))
            return found, measure(config, launch).step - found.host


def sizes(model_type: str) -> dict[str, Any]:
    """Returns the `config.json` of a small model, large enough for activations to count."""
    from transformers import CONFIG_MAPPING

    changes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 512, "max_position_embeddings": 2048}
    model = small_model({**CONFIG_MAPPING[model_type]().to_dict(), "model_type": model_type})
    return {**model.config.to_dict(), **changes, "model_type": model_type, "transformers_version": None}


ALL_PROJECTIONS = "{rank: 8, dropout: 0.1, targets: ['.*_proj']}"
CASES = {
    "glm4, bf16, dropout": Case(model_type="glm4", dtype="bfloat16", lora="{rank: 8, dropout: 0.1}"),
    "glm4, full": Case(model_type="glm4", memory="{recompute: full}"),
    "glm4, tensor 2": Case(model_type="glm4", world=2, parallel="{tensor: 2, sequence: false}"),
    "glm4, native kernels, offloaded": Case(model_type="glm4", kernels="native", memory="{offload_weights: true}"),
    "qwen3, nf4, full": Case(model_type="qwen3", base="nf4", memory="{recompute: full}"),
    "qwen3, shard parameters": Case(model_type="qwen3", world=2, parallel="{shard: parameters}"),
    "qwen3, all": Case(model_type="qwen3", lora="{rank: 0}", trainable="['*']"),
    "olmo3": Case(model_type="olmo3"),
    "ernie4_5_moe": Case(model_type="ernie4_5_moe", tolerance=MIXED),
    "ernie4_5_moe, all, full": Case(
        model_type="ernie4_5_moe", lora="{rank: 0}", trainable="['*']", memory="{recompute: full}"
    ),
    "ernie4_5_moe, adapters of experts": Case(model_type="ernie4_5_moe", lora=ALL_PROJECTIONS, tolerance=MIXED),
    "gpt_oss": Case(model_type="gpt_oss", tolerance=MIXED),
    "deepseek_v3, shard parameters, full": Case(
        model_type="deepseek_v3", world=2, parallel="{shard: parameters}", memory="{recompute: full}"
    ),
    "qwen3_next, own attention": Case(model_type="qwen3_next", packing="concatenate", tolerance=MIXED),
    "qwen3_next, own attention, full": Case(
        model_type="qwen3_next", packing=False, memory="{recompute: full}", tolerance=MIXED
    ),
}
QUICK = (
    "glm4, bf16, dropout", "ernie4_5_moe, adapters of experts", "deepseek_v3, shard parameters, full",
)  # fmt: skip


@pytest.mark.parametrize("name", sampled(CASES, QUICK))
def test_the_peak_of_a_step(name: str, tmp_path: Path) -> None:
    found, measured = CASES[name].compare(tmp_path)
    print(f"\n{name:40} predicted {found.step / 2**20:7.2f} MiB  measured {measured / 2**20:7.2f}", end="")
    assert found.step == pytest.approx(measured, rel=CASES[name].tolerance)


@pytest.mark.parametrize("model_type", ["glm4", "ernie4_5_moe", "deepseek_v3"])
def test_forward_flops_are_those_of_transformers(model_type: str) -> None:
    """Products with weights are compared: attention's are counted apart, and so left out of both."""
    tokens = 16
    config, model = _transformers(model_type)
    model.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.arange(tokens)[None], use_cache=False)
    counted = sum(
        count for op, count in counter.get_flop_counts()["Global"].items() if str(op) in ("aten.mm", "aten.addmm")
    )
    linears, _, head = forward_flops(adopted_config(config, "engine"), tokens=tokens, row_tokens=tokens)
    assert linears + head == pytest.approx(counted, rel=0.01)


def test_experts_that_train_count_as_far_as_a_token_meets_them() -> None:
    decoder = adopted_config(_transformers("ernie4_5_moe")[0], "engine")
    experts = {f"layers.1.module.mlp.experts.{leaf}.weight": (4, 64, 32) for leaf in ("gate_up_proj", "down_proj")}
    adapters = {"layers.1.module.mlp.experts.down_proj.lora_A": (8, 4, 32)}
    assert decoder.expert_share == 2 / 4
    assert trained_work(decoder, experts).per_token == 2 * 2 * 2 * 64 * 32
    work = trained_work(decoder, adapters)
    assert work.per_token == 6 * 8 * 2 * 32
    assert step_flops(decoder, tokens=4, row_tokens=4, trained=work) > 0


def _transformers(model_type: str) -> tuple[dict[str, Any], Any]:
    from transformers import CONFIG_MAPPING

    with quiet():
        model = small_model({**CONFIG_MAPPING[model_type]().to_dict(), "model_type": model_type})
    return {**model.config.to_dict(), "model_type": model_type}, model


def test_the_log_says_what_attends_and_what_is_recomputed() -> None:
    cpu = torch.device("cpu")
    own, packed = adopted_config(sizes("qwen3_next"), "own"), adopted_config(sizes("glm4"), "engine")
    config = from_yaml("model: {path: x}\nmemory: {recompute: none}\n")
    said = choose_for_device(config, cpu, own).sentences
    assert "attention: transformers' own (sdpa), in rows of one document" in said
    assert any(line.startswith("memory.recompute none: as selective, ") for line in said)
    full = from_yaml("model: {path: x}\nmemory: {recompute: full}\n")
    said = choose_for_device(full, cpu, packed).sentences
    assert any(line.startswith("attention: compiled kernel, ") for line in said)
    assert not any(line.startswith("memory.recompute") for line in said)
    with pytest.raises(UserError, match="model.attention is flash3, but attention is transformers' own"):
        choose_for_device(from_yaml("model: {path: x, attention: flash3}\n"), cpu, own)


def test_a_search_leaves_out_stages_that_are_not_the_model() -> None:
    """`hy_v4` hands from layer to layer what a stage does not pass on."""
    config = from_yaml("model: {path: x, dtype: float32}\nlora: {rank: 4}\ntrain: {global_batch_size: 2}\n")
    for model_type, is_cut in (("glm4", True), ("hy_v4", False)):
        found = answer_for(sizes(model_type), config, devices=2, gpu_memory=8, reserve=0).found
        reasons = [one.reason for one in found.refused if one.layout.parallel.pipeline == 2]
        assert is_cut == any(one.layout.parallel.pipeline == 2 for one in found.fitting)
        assert is_cut or ["in stages is not the whole one" in reason for reason in reasons] == [True, True]


def test_what_cannot_be_traced_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that looks at its numbers."""
    from transformers.models.glm4.modeling_glm4 import Glm4DecoderLayer

    forward = Glm4DecoderLayer.forward

    def looking(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(self, hidden_states * float(hidden_states.max()), *args, **kwargs)

    monkeypatch.setattr(Glm4DecoderLayer, "forward", looking)
    with pytest.raises(UserError, match="the planner cannot follow"):
        Case(model_type="glm4", lora="{rank: 4}").compare(tmp_path)


def test_the_log_names_stacks_that_are_not_encoded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_small("qwen3_moe", tmp_path, dtype="float32")
    config = from_yaml(
        f"model: {{path: '{tmp_path}', dtype: float32, base_dtype: int8, implementation: adopted}}\n"
        "data: {train: x}\n"
    )
    source = open_source(tmp_path, "adopted")
    model = build_decoder(
        source.model.decoder,
        layout=TensorLayout(base=named_encoding("int8", "reference", torch.device("cpu"))),
        plan=TrainingPlan(),
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    fill_base(config, source.model, source, [model], WeightPlacement(Axis("dp_cp")), Log(0))
    count = sum(entry.parameter.dim() == 3 for entry in shard_entries(model))
    assert f"experts: {count} stacks of their weights, " in capsys.readouterr().err
