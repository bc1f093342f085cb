"""Every supported PEFT option, both ways: what stock PEFT saves gives PEFT's logits here; what is written here opens in
stock PEFT without a missing or unexpected key, gives the live model's logits, and reads back as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from engine.checkpoint.model_weights import open_source
from engine.checkpoint.run.training_state import open_run
from engine.config.lora import LoraOptions
from engine.config.matching import BLOCK_LINEARS
from engine.conversion.import_export import export_hf
from engine.conversion.live_logits import live_logits
from engine.conversion.merged_model import MergedSource, recorded_scale
from engine.conversion.peft_read import AdapterSource
from engine.conversion.peft_write import export_peft
from engine.conversion.proof import live_model
from engine.errors import UserError
from tests.support.sweeps import portion
from tests.unit.checkpoint_models import tiny_llama
from tests.unit.test_checkpoint_peft import open_in_peft, trained_run

RANK, ALPHA = 4, 6
TOKENS = torch.arange(30).reshape(2, 15)
LINEARS = list(BLOCK_LINEARS)
PATTERNS = {
    "rank_pattern": {"down_proj": 2, r"layers\.1\.self_attn\.q_proj": 7},
    "alpha_pattern": {"o_proj": 3, r".*layers\.0\.mlp\.up_proj": 11.5},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "patterns": PATTERNS,
    "rslora and patterns": {**PATTERNS, "use_rslora": True},
    "some layers": {"layers_to_transform": [1], "layers_pattern": "layers"},
    "excluded": {"exclude_modules": ["k_proj", "model.layers.0.mlp.up_proj"]},
    "ends with patterns": {
        "target_modules": ["q_proj", "embed_tokens", "lm_head"],
        "rank_pattern": {"lm_head": 3, "embed_tokens": 5},
        "alpha_pattern": {"embed_tokens": 2},
    },
    "head in full": {"modules_to_save": ["lm_head"], **PATTERNS},
    "embedding in full": {"modules_to_save": ["embed_tokens"]},
    "linear in full": {"target_modules": ["q_proj"], "modules_to_save": ["down_proj", "norm"]},
    "biases": {"lora_bias": True, "bias_in_base": True, **PATTERNS},
    "dora beside biases": {"use_dora": True, "bias_in_base": True},
    "dora": {"use_dora": True},
    "dora and patterns": {"use_dora": True, "use_rslora": True, **PATTERNS},
    "dora of the head": {"use_dora": True, "target_modules": ["o_proj", "lm_head"]},
    "gaussian": {"init_lora_weights": "gaussian"},
    "dropout": {"lora_dropout": 0.3},
}
RECORDS = {"rank": RANK, "alpha": float(ALPHA)}


def stock(tmp_path: Path, **options: Any) -> PeftModel:
    """Saved by PEFT in tmp_path/stock, every trained value drawn, over tmp_path/hf."""
    tiny_llama(tmp_path / "hf", bias=options.pop("bias_in_base", False))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    settings = {"r": RANK, "lora_alpha": ALPHA, "target_modules": LINEARS, **options}
    torch.manual_seed(4)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **settings))
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / "stock")
    return model.eval()


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def opened(tmp_path: Path, folder: str) -> AdapterSource:
    model = open_source(tmp_path / "hf").model
    return AdapterSource(tmp_path / folder, names=model.names, decoder=model.decoder, with_saved_modules=True)


@pytest.mark.parametrize("name", portion(OPTIONS, 2))
def test_both_ways(name: str, tmp_path: Path) -> None:
    options = OPTIONS[name]
    theirs = stock(tmp_path, **options)
    expected = logits(theirs)
    base, source = open_source(tmp_path / "hf"), opened(tmp_path, "stock")
    source.require_base(base)
    with theirs.disable_adapter():
        assert (logits(theirs) - expected).abs().max() > 0.05, "the adapter does nothing"
    live = live_model(base.model.decoder, base, source, source.scale)
    torch.testing.assert_close(live_logits(live.config, live.tensors, TOKENS, live.plan), expected, rtol=0, atol=1e-4)
    export_hf(MergedSource(base.model, base, source, scale=source.scale), tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-4)

    lora = {
        **RECORDS,
        "dropout": options.get("lora_dropout", 0.0),
        "rslora": options.get("use_rslora", False),
        "alpha_pattern": options.get("alpha_pattern", {}),
        "dora": options.get("use_dora", False),
        "bias": options.get("lora_bias", False),
    }
    tensors = {tensor: source.read_whole(tensor) for tensor in source.tensor_names()}
    run = open_run(trained_run(tmp_path / "run", tensors, tmp_path / "hf", **lora))
    export_peft(run.trained(), run.lora, base.model, tmp_path / "adapter")
    assert recorded_scale(run.lora, run.trained(), base.model.names) == source.scale
    torch.testing.assert_close(logits(open_in_peft(tmp_path)), expected, rtol=0, atol=1e-6)
    again = opened(tmp_path, "adapter")
    assert again.tensor_names() == source.tensor_names() and again.scale == source.scale
    assert all(torch.equal(again.read_whole(tensor), value) for tensor, value in tensors.items())


def test_patterns_are_written_short_where_they_can_be(tmp_path: Path) -> None:
    test_both_ways("patterns", tmp_path)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["rank_pattern"] == {"down_proj": 2, r"model\.layers\.1\.self_attn\.q_proj": 7}
    assert config["alpha_pattern"] == {"o_proj": 3, r"model\.layers\.0\.mlp\.up_proj": 11.5}
    assert (config["r"], config["lora_alpha"]) == (RANK, ALPHA)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_a_finished_adapter_that_altered_its_base_is_read_once_it_is_converted(init: str, tmp_path: Path) -> None:
    """PEFT takes the altered part of the base into a plain adapter of twice the rank."""
    tiny_llama(tmp_path / "hf")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=LINEARS, init_lora_weights=init))
    model.save_pretrained(tmp_path / "start")
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "raw")
    expected = logits(model.eval())
    # PEFT leaves the run's own settings, which say pissa, in what it starts the conversion from
    path = tmp_path / "start" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "init_lora_weights": True}))
    model.save_pretrained(tmp_path / "stock", path_initial_model_for_weight_conversion=str(tmp_path / "start"))
    source = opened(tmp_path, "stock")
    assert source.settings.rank == 2 * RANK
    weights = open_source(tmp_path / "hf")
    live = live_model(weights.model.decoder, weights, source, source.scale)
    torch.testing.assert_close(live_logits(live.config, live.tensors, TOKENS, live.plan), expected, rtol=0, atol=1e-4)
    with pytest.raises(UserError, match=f"init_lora_weights '{init}', which alters the base: convert it"):
        opened(tmp_path, "raw")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rank_pattern": [3]}, r"rank_pattern \[3\]: expected an object"),
        ({"rank_pattern": {"q_proj": 0}}, "0 for 'q_proj' in rank_pattern: expected a positive number"),
        ({"rank_pattern": {"q_proj": 2.5}}, "2.5 for 'q_proj' in rank_pattern"),
        ({"alpha_pattern": {"q_proj": True}}, "true for 'q_proj' in alpha_pattern"),
        ({"alpha_pattern": {"(q": 2}}, r"'\(q' in alpha_pattern, which is no expression"),
        ({"rank_pattern": {"q_proj": 2}}, "has rank 4 at layers.0.attention.q_proj, but .* says r 2"),
        ({"layer_replication": [[0, 1]]}, "layer_replication .* not supported: use an adapter without it"),
        ({"target_parameters": ["experts"]}, "target_parameters"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora"),
        ({"something_new": 1}, "something_new 1, which is not supported"),
    ],
)
def test_what_is_wrong_or_unsupported_is_named(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    stock(tmp_path)
    path = tmp_path / "stock" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=words):
        opened(tmp_path, "stock")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"init": "pissa"}, "lora.init is pissa, which changes the base"),
        ({"init": "pissa_niter_4"}, "lora.init is pissa_niter_4, which changes the base"),
        ({"init": "eva"}, "lora.init is 'eva'"),
        ({"rank_pattern": {"q_proj": 0}}, "lora.rank_pattern of q_proj is 0"),
        ({"alpha_pattern": {"(q": 1.0}}, "lora.alpha_pattern contains '\\(q', which is not a valid regular"),
        ({"exclude": ("",)}, "lora.exclude contains an empty name"),
        ({"layers": (-1,)}, "lora.layers is -1"),
    ],
)
def test_wrong_options_of_a_run(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        LoraOptions(**options)
