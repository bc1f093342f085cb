"""Names of hybrids' adapters as vLLM takes them: each is a part of one of its linears, and no part is left out.

The table is data of vLLM 0.33.0: `packed_modules_mapping` and `hf_to_vllm_mapper` of vllm/model_executor/models/
(qwen3_next, qwen3_5, nemotron_h, granitemoehybrid, falcon_h1, lfm2, lfm2_moe, olmo_hybrid, gemma4), and the linears of
vllm/model_executor/layers/mamba/. vLLM refuses a folder that names a linear which it does not have, and loads one with
half a linear without a word.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.checkpoint.model_weights import open_source
from engine.checkpoint.run.training_state import TrainingCheckpoint, open_run
from engine.conversion.expert_stacks import expert_module
from engine.conversion.peft_experts import TrainedAdapters, obstacle, readers_line
from engine.conversion.peft_read import AdapterSource
from engine.conversion.peft_write import export_peft
from engine.errors import UserError
from engine.models.decoder_config import DecoderConfig
from tests.distributed.cases import RANK, SCALE
from tests.support.family_models import engine_model, make_model
from tests.support.qwen_vl import make_model as make_with_images
from tests.support.sweeps import sampled
from tests.unit.test_checkpoint_peft import trained_run

_QKV = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "o_proj": ("o_proj",)}
_GATE_UP = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_EXPERTS = {"experts": tuple(f"experts.*.{name}_proj" for name in ("gate", "up", "down"))}
_MAMBA = {"in_proj": ("in_proj",), "out_proj": ("out_proj",)}
_LFM2 = {
    "short_conv": _MAMBA,
    "self_attn": {"qkv_proj": _QKV["qkv_proj"], "out_proj": ("out_proj",)},
    "feed_forward": {"w13": ("w1", "w3"), "w2": ("w2",)},
}
_APART = {
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"), "in_proj_ba": ("in_proj_b", "in_proj_a"), "out_proj": ("out_proj",)
}  # fmt: skip
VLLM: dict[str, dict[str, dict[str, tuple[str, ...]]]] = {
    "qwen3 next": {
        "linear_attn": {name: (name,) for name in ("in_proj_qkvz", "in_proj_ba", "out_proj")},
        "self_attn": _QKV,
        "mlp": _GATE_UP | _EXPERTS,
        "mlp.shared_expert": _GATE_UP,
    },
    "qwen3.5": {"linear_attn": _APART, "self_attn": _QKV, "mlp": _GATE_UP},
    "granite hybrid": {
        "mamba": _MAMBA,
        "self_attn": _QKV,
        "shared_mlp": {name: (name,) for name in ("input_linear", "output_linear")},
    },
    "nemotron h": {
        "mixer": _MAMBA | _QKV | {"up_proj": ("up_proj",), "down_proj": ("down_proj",)}
        | {"experts": ("experts.*.up_proj", "experts.*.down_proj")},
        "mixer.shared_experts": {"up_proj": ("up_proj",), "down_proj": ("down_proj",)},
    },
    "falcon h1": {
        "mamba.mamba": {"in_proj": ("in_proj",)}, "self_attn": _QKV, "feed_forward": _GATE_UP
    },
    "olmo hybrid": {
        "linear_attn": {
            "in_proj_qkvg": ("q_proj", "k_proj", "v_proj", "g_proj"),
            **{name: (name,) for name in ("b_proj", "a_proj", "o_proj")},
        },
        "self_attn": _QKV,
        "mlp": _GATE_UP,
    },
    "lfm2": _LFM2,
    "lfm2 moe": _LFM2 | {"feed_forward": _LFM2["feed_forward"] | {"experts": tuple(f"experts.*.w{i}" for i in "132")}},
    "gemma4 with values": {"self_attn": _QKV, "mlp": _GATE_UP},
}  # fmt: skip
"""Model -> place in a layer of vLLM's -> its linear -> the names of adapters that it is packed from."""
RENAMED = {"falcon h1": ("mamba", "mamba.mamba"), "lfm2": ("conv", "short_conv"), "lfm2 moe": ("conv", "short_conv")}
"""Where a layer's part has another name in vLLM than in checkpoints."""
ADAPTED = {
    "falcon h1": r"layers\..*(?<!out)_proj",  # PEFT has none of out_proj
    "qwen3 next": r"layers\..*_proj(_[a-z]+)?|layers\..*in_proj_[a-z]+",
}


def _run(name: str, base: Path, folder: Path, adapters: str, **lora: object) -> TrainingCheckpoint:
    built = engine_model(base, trained="", adapters=adapters)
    return open_run(trained_run(folder / "run", built.parameters(), base, alpha=SCALE * RANK, **lora))


@pytest.mark.parametrize("name", sampled(VLLM, ["qwen3.5", "nemotron h"]))
def test_every_adapter_is_part_of_a_linear_of_vllm(name: str, tmp_path: Path) -> None:
    make_model(name, tmp_path / "hf")
    adapters = ADAPTED.get(name, r"layers\..*(?<!weights)(_proj|in_proj_[a-z]+)")
    run, source = _run(name, tmp_path / "hf", tmp_path, adapters), open_source(tmp_path / "hf")
    export_peft(run.trained(), run.lora, source.model, tmp_path / "adapter", reader="vllm")
    found = set()
    for key in load_file(tmp_path / "adapter" / "adapter_model.safetensors"):
        match = re.fullmatch(r"base_model\.model\.model\.layers\.\d+\.(.*)\.lora_[AB]\.weight", key)
        assert match is not None, key
        place, experts, leaf = re.sub(r"\.experts\.\d+\.", ".experts.*.", match[1]).rpartition(".experts.*.")
        if not experts:
            place, _, leaf = match[1].rpartition(".")
        old, new = RENAMED.get(name, ("", ""))
        place = new if place == old and old else place
        found.add((place, f"experts.*.{leaf}" if experts else leaf))
    expected = {(place, leaf) for place, linears in VLLM[name].items() for parts in linears.values() for leaf in parts}
    assert found == expected
    again = AdapterSource(tmp_path / "adapter", names=source.model.names, decoder=source.model.decoder)
    trained = run.trained()
    assert sorted(again.tensor_names()) == sorted(trained.tensor_names())
    assert all(torch.equal(again.read_whole(one), trained.read_whole(one)) for one in trained.tensor_names())


UNREAD = {
    "bamba": (r"layers\..*in_proj", "vLLM has no bamba models since version 0.23"),
    "kimi linear": (r"layers\..*attention\.q_proj", "serves no adapters of kimi_linear models"),
    "gemma4": (r"layers\..*k_proj", "layers.1.attention.k_proj has an adapter, and its outputs are values too"),
    "nemotron h": (r"layers\..*(in_proj|router)", "router has an adapter, and vLLM leaves out those of routers"),
}


@pytest.mark.parametrize("name", sampled(UNREAD, ["gemma4"]))
def test_adapters_that_vllm_computes_without_are_refused(name: str, tmp_path: Path) -> None:
    """For vLLM; for PEFT they are written, with a note, where it reads them."""
    adapters, words = UNREAD[name]
    make_model(name, tmp_path / "hf")
    run, model = _run(name, tmp_path / "hf", tmp_path, adapters), open_source(tmp_path / "hf").model
    with pytest.raises(UserError, match=f"{words}.*: export with --format hf --merge"):
        export_peft(run.trained(), run.lora, model, tmp_path / "adapter", reader="vllm")
    if name == "nemotron h":
        with pytest.raises(UserError, match="to PEFT a router of a nemotron_h model is no linear"):
            export_peft(run.trained(), run.lora, model, tmp_path / "adapter")
        return
    notes = export_peft(run.trained(), run.lora, model, tmp_path / "adapter").notes
    assert any(words in note for note in notes)


def _experts(decoder: DecoderConfig, **more: object) -> TrainedAdapters:
    every = [
        expert_module(layer, expert, leaf)
        for layer in range(decoder.num_layers)
        for expert in range(decoder.num_experts)
        for leaf in ("gate_proj", "up_proj", "down_proj")
    ]
    values: dict[str, object] = {"adapters": dict.fromkeys(every, (RANK, 2.0)), "in_full": (), "shared": ()}
    return TrainedAdapters(**(values | {"rslora": False} | more))  # type: ignore[arg-type]


def test_stacks_of_released_qwen3_5_moe_are_vllms(tmp_path: Path) -> None:
    """With its tower, vLLM has the experts stacked, and takes expert e's factors from a stack as written below
    (`_stack_moe_lora_weights` of vllm/lora/model_manager.py): `experts.base_layer` is gate and up, `experts` down."""
    make_with_images("qwen3_5_moe", tmp_path / "hf")
    run, source = _run("", tmp_path / "hf", tmp_path, r"layers\..*experts\..*_proj"), open_source(tmp_path / "hf")
    decoder, trained = source.model.decoder, run.trained()
    assert decoder.fronts
    report = export_peft(trained, run.lora, source.model, tmp_path / "adapter", form="stacked", reader="vllm")
    assert "and by vLLM from 0.33 on, with a --max-lora-rank of twice their rank" in report.notes[-1]
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    scale, count = settings["lora_alpha"] / settings["r"], decoder.num_experts
    prefix = "base_model.model.model.language_model.layers"
    assert len(stored) == 4 * decoder.num_layers
    for layer in range(decoder.num_layers):
        for inner, leaves in ((".base_layer", ("gate_proj", "up_proj")), ("", ("down_proj",))):
            a, b = (stored[f"{prefix}.{layer}.mlp.experts{inner}.lora_{factor}.weight"] for factor in "AB")
            a_ERI, b_ORE = a.reshape(count, -1, a.shape[-1]), b.reshape(b.shape[0], -1, count)
            for expert in range(count):
                modules = [expert_module(layer, expert, leaf) for leaf in leaves]
                factors = [[trained.read_whole(f"{one}.lora_{factor}") for factor in "BA"] for one in modules]
                expected = torch.cat([SCALE * (up @ down) for up, down in factors])
                torch.testing.assert_close(scale * b_ORE[..., expert] @ a_ERI[expert], expected, rtol=0, atol=1e-6)


def test_stacks_that_vllm_would_read_otherwise_are_refused(tmp_path: Path) -> None:
    make_with_images("qwen3_5_moe", tmp_path / "hf")
    released = open_source(tmp_path / "hf").model.decoder
    make_model("qwen3.5 moe", tmp_path / "text")
    text = open_source(tmp_path / "text").model.decoder
    found = _experts(released)
    assert obstacle(found, released, "stacked", "vllm") is None
    assert "a qwen3_5_moe_text model without its tower" in str(obstacle(_experts(text), text, "stacked", "vllm"))
    assert "vLLM has not been tried with them" in readers_line("stacked", text, alone=False)
    few = {module: one for module, one in found.adapters.items() if not module.endswith("down_proj")}
    mixed = {**found.adapters, min(found.adapters): (RANK + 1, 2.0)}
    assert "down_proj has no adapter" in str(obstacle(_experts(released, adapters=few), released, "stacked", "vllm"))
    assert "differ in rank" in str(obstacle(_experts(released, adapters=mixed), released, "stacked", "vllm"))
    assert "lora.rslora" in str(obstacle(_experts(released, rslora=True), released, "stacked", "vllm"))
