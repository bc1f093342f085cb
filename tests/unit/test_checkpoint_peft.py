"""Adapters and merged models against stock PEFT and transformers: keys, weights, logits."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from engine.checkpoint.loading import load_parameters
from engine.checkpoint.model_folder import open_model
from engine.checkpoint.model_weights import open_source
from engine.checkpoint.run.training_state import MASTER, open_run
from engine.conversion.import_export import export_hf, import_checkpoint
from engine.conversion.merged_model import MergedSource
from engine.conversion.peft_read import AdapterSource
from engine.conversion.peft_write import export_peft
from engine.distributed.sharding import NamedShard, replicated_spec, split_spec
from engine.errors import UserError
from tests.support.saved_training import save_training
from tests.unit.checkpoint_models import tiny_llama

RANK = 3
SIZES = {
    "attention.q_proj": (16, 32), "attention.k_proj": (16, 16), "attention.v_proj": (16, 16),
    "attention.o_proj": (32, 16), "mlp.gate_proj": (16, 24), "mlp.up_proj": (16, 24), "mlp.down_proj": (24, 16),
    "attention.qkv_proj": (16, 64), "mlp.gate_up_proj": (16, 48), "embed_tokens": (37, 16), "lm_head": (16, 37),
}  # fmt: skip
"""Engine's module -> (in, out) of the tiny model."""


def factors(modules: list[str]) -> dict[str, Tensor]:
    """Random factors, B not zero, of these modules in both layers (or of the model's ends)."""
    torch.manual_seed(1)
    tensors: dict[str, Tensor] = {}
    for module in modules:
        wide, tall = SIZES[module]
        for name in [module] if "." not in module else [f"layers.{layer}.{module}" for layer in (0, 1)]:
            tensors[f"{name}.lora_A"] = torch.randn(RANK, wide) * 0.2
            tensors[f"{name}.lora_B"] = torch.randn(tall, RANK) * 0.2
    return tensors


def trained_run(folder: Path, tensors: dict[str, Tensor], base: Path, **lora: Any) -> Path:
    """A run whose only checkpoint has these trained values."""
    settings = {"rank": RANK, "alpha": 5.0, "dropout": 0.0, "rslora": False, "fused": "none", **lora}
    shards = [
        NamedShard(MASTER + name, tensor, replicated_spec(tuple(tensor.shape), rank=0, size=1))
        for name, tensor in tensors.items()
    ]
    save_training(
        folder, step=1, tensors=shards, state={"step": 1}, run_config="", lora=settings, layout={}, rank=0,
        base={"path": str(base), "fingerprint": open_source(base).fingerprint()},
    )  # fmt: skip
    return folder


def export_both(tmp_path: Path, tensors: dict[str, Tensor], **lora: Any) -> tuple[Any, Any]:
    """Writes tmp_path/adapter and tmp_path/merged from tmp_path/hf; returns both reports."""
    checkpoint = open_run(trained_run(tmp_path / "run", tensors, tmp_path / "hf", **lora))
    base = open_source(tmp_path / "hf")
    settings = checkpoint.lora
    scale = settings["alpha"] / (RANK**0.5 if settings["rslora"] else RANK)
    adapter = export_peft(checkpoint.trained(), settings, base.model, tmp_path / "adapter")
    merged = export_hf(
        MergedSource(base.model, base, checkpoint.trained(), scale=scale), tmp_path / "merged", max_shard_bytes=4000
    )
    return adapter, merged


def open_in_peft(tmp_path: Path) -> PeftModel:
    """Loads tmp_path/adapter over tmp_path/hf; any missing or unexpected key fails."""
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert not [str(w.message) for w in caught if "key" in str(w.message).lower()]
    info = model.load_adapter(tmp_path / "adapter", "again")
    assert not info.unexpected_keys and not [key for key in info.missing_keys if "again" in key]
    return model.eval()


def open_in_transformers(folder: Path) -> LlamaForCausalLM:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(30).reshape(2, 15)).logits


BLOCK = ["attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj"]
BLOCK += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


@pytest.mark.parametrize(
    ("modules", "tied", "rslora"),
    [
        (BLOCK, False, False),
        (BLOCK, True, True),
        (["attention.q_proj"], False, False),
        ([*BLOCK, "embed_tokens", "lm_head"], False, True),
        (["embed_tokens"], False, False),
        (["lm_head", "mlp.up_proj"], False, False),
    ],
)
def test_adapter_and_merged_model(tmp_path: Path, modules: list[str], tied: bool, rslora: bool) -> None:
    plain = tiny_llama(tmp_path / "hf", tied=tied).eval()
    export_both(tmp_path, factors(modules), rslora=rslora)
    live = open_in_peft(tmp_path)
    merged = open_in_transformers(tmp_path / "merged")
    expected = logits(live)
    assert (expected - logits(plain)).abs().max() > 0.05  # the adapter does something
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-4)
    theirs = live.merge_and_unload().state_dict()
    ours = merged.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-6, msg=name)
    assert merged.config.tie_word_embeddings == tied


@pytest.mark.parametrize("module", ["embed_tokens", "lm_head"])
def test_an_adapter_on_one_side_of_a_tied_matrix_unties_it(tmp_path: Path, module: str) -> None:
    """Against arithmetic by hand: PEFT's own merge changes the shared matrix, and with it the other side."""
    plain = tiny_llama(tmp_path / "hf", tied=True)
    tensors = factors([module])
    _, report = export_both(tmp_path, tensors)
    assert "tie_word_embeddings is false" in report.notes[0]
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    before = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config == {**before, "tie_word_embeddings": False}
    merged = open_in_transformers(tmp_path / "merged")
    delta = 5.0 / RANK * tensors[f"{module}.lora_B"] @ tensors[f"{module}.lora_A"]
    shared = plain.model.embed_tokens.weight.detach()
    sides = {"embed_tokens": shared, "lm_head": shared}
    sides[module] = shared + (delta.T if module == "embed_tokens" else delta)
    torch.testing.assert_close(merged.model.embed_tokens.weight.detach(), sides["embed_tokens"], rtol=0, atol=1e-6)
    torch.testing.assert_close(merged.lm_head.weight.detach(), sides["lm_head"], rtol=0, atol=1e-6)
    live = open_in_peft(tmp_path)
    torch.testing.assert_close(logits(merged), logits(live), rtol=0, atol=1e-4)


def test_an_adapter_over_several_modules_becomes_one_for_each_that_share_a(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "hf")
    tensors = factors(["attention.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj"])
    report, _ = export_both(tmp_path, tensors, fused="all")
    assert "share A" in report.notes[0]
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    rows = {
        "attention.qkv": {"self_attn.q": slice(0, 32), "self_attn.k": slice(32, 48), "self_attn.v": slice(48, 64)},
        "mlp.gate_up": {"mlp.gate": slice(0, 24), "mlp.up": slice(24, 48)},
    }
    for fused, parts in rows.items():
        for part, place in parts.items():
            prefix = f"base_model.model.model.layers.1.{part}_proj"
            assert torch.equal(stored[f"{prefix}.lora_A.weight"], tensors[f"layers.1.{fused}_proj.lora_A"])
            assert torch.equal(stored[f"{prefix}.lora_B.weight"], tensors[f"layers.1.{fused}_proj.lora_B"][place])
    torch.testing.assert_close(
        logits(open_in_transformers(tmp_path / "merged")), logits(open_in_peft(tmp_path)), rtol=0, atol=1e-4
    )
    # and back: they are one again
    base = open_model(tmp_path / "hf")
    modules = [f"layers.{layer}.{fused}_proj" for layer in (0, 1) for fused in rows]
    source = AdapterSource(tmp_path / "adapter", names=base.names, decoder=base.decoder, fused=modules)
    assert set(source.tensor_names()) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(source.read_whole(name), tensor), name


def test_adapters_in_some_layers_only(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "hf")
    tensors = {name: value for name, value in factors(["attention.q_proj"]).items() if name.startswith("layers.1.")}
    export_both(tmp_path, tensors)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["model.layers.1.self_attn.q_proj"]
    torch.testing.assert_close(
        logits(open_in_transformers(tmp_path / "merged")), logits(open_in_peft(tmp_path)), rtol=0, atol=1e-4
    )


def test_modules_trained_in_full_beside_adapters(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "hf")
    tensors = factors(["attention.q_proj"])
    tensors["lm_head.weight"], tensors["norm.weight"] = torch.randn(37, 16), torch.randn(16)
    tensors["layers.1.input_norm.weight"] = torch.randn(16)
    export_both(tmp_path, tensors)
    live = open_in_peft(tmp_path)
    merged = open_in_transformers(tmp_path / "merged")
    assert torch.equal(merged.model.layers[1].input_layernorm.weight, tensors["layers.1.input_norm.weight"])
    torch.testing.assert_close(logits(merged), logits(live), rtol=0, atol=1e-4)


def test_merging_rounds_once_to_the_bases_dtype(tmp_path: Path) -> None:
    plain = tiny_llama(tmp_path / "hf", dtype=torch.bfloat16)
    tensors = factors(["mlp.up_proj"])
    export_both(tmp_path, tensors)
    stored: dict[str, Tensor] = {}
    for path in (tmp_path / "merged").glob("*.safetensors"):
        stored |= load_file(path)
    for name, tensor in plain.state_dict().items():
        if "up_proj" in name:
            layer = f"layers.{name.split('.')[2]}.mlp.up_proj"
            delta = tensors[f"{layer}.lora_B"].double() @ tensors[f"{layer}.lora_A"].double() * (5.0 / RANK)
            exact = tensor.double() + delta
            # half a unit in the last of bf16's 8 bits, and fp32's own rounding
            assert ((stored[name].double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()
            assert not torch.equal(stored[name], tensor)
        else:
            assert torch.equal(stored[name], tensor), name


def test_full_training_replaces_everything_and_has_no_adapter(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "hf", tied=True)
    base = open_model(tmp_path / "hf")
    other = tiny_llama(tmp_path / "other", tied=True, seed=9)
    source = open_source(tmp_path / "other")
    run = trained_run(
        tmp_path / "run", {name: source.read_whole(name) for name in source.tensor_names()}, tmp_path / "hf"
    )
    trained = open_run(run).trained()
    export_hf(MergedSource(base, None, trained, scale=0.0), tmp_path / "merged")
    merged = open_in_transformers(tmp_path / "merged")
    assert torch.equal(logits(merged), logits(other.eval()))
    assert not torch.equal(logits(merged), logits(model.eval()))
    assert merged.config.tie_word_embeddings
    with pytest.raises(UserError, match="export with --format hf"):
        export_peft(trained, {}, base, tmp_path / "adapter")


def test_values_that_are_not_finite_are_never_exported(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "hf")
    tensors = factors(["mlp.up_proj"])
    tensors["layers.1.mlp.up_proj.lora_B"][0, 0] = float("nan")
    trained = open_run(trained_run(tmp_path / "run", tensors, tmp_path / "hf")).trained()
    base = open_source(tmp_path / "hf")
    lora = {"rank": RANK, "alpha": 5.0, "dropout": 0.0, "rslora": False}
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj\.lora_B\.weight is not finite"):
        export_peft(trained, lora, base.model, tmp_path / "adapter")
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj\.weight is not finite"):
        export_hf(MergedSource(base.model, base, trained, scale=1.0), tmp_path / "merged")
    assert not (tmp_path / "adapter").exists() and not (tmp_path / "merged").exists()


def stock_adapter(tmp_path: Path, **options: Any) -> PeftModel:
    """An adapter saved by PEFT, with B drawn non-zero."""
    torch.manual_seed(2)
    settings = {"r": RANK, "lora_alpha": 7, "target_modules": ["q_proj", "o_proj", "embed_tokens"], **options}
    model = get_peft_model(tiny_llama(tmp_path / "hf"), LoraConfig(task_type="CAUSAL_LM", **settings))
    for name, parameter in model.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path / "stock", save_embedding_layers=False)
    return model


def open_adapter(tmp_path: Path) -> AdapterSource:
    base = open_model(tmp_path / "hf")
    return AdapterSource(tmp_path / "stock", names=base.names, decoder=base.decoder)


def test_a_stock_adapter_is_read_by_shard(tmp_path: Path) -> None:
    model = stock_adapter(tmp_path, use_rslora=True)
    source = open_adapter(tmp_path)
    assert source.modules() == [
        "embed_tokens",
        *(f"layers.{layer}.attention.{name}" for layer in (0, 1) for name in ("o_proj", "q_proj")),
    ]
    settings = source.settings
    assert (settings.rank, settings.alpha, settings.rslora) == (RANK, 7.0, True)
    layer = model.base_model.model.model.layers[1].self_attn.o_proj
    assert settings.scale == pytest.approx(layer.scaling["default"])
    a, b = torch.empty(RANK, 16), torch.empty(16, RANK, dtype=torch.bfloat16)
    name = "layers.1.attention.o_proj"
    load_parameters(
        [
            NamedShard(f"{name}.lora_A", a, split_spec((RANK, 32), 1, rank=1, size=2, what="in")),
            NamedShard(f"{name}.lora_B", b, replicated_spec((16, RANK), rank=1, size=2)),
        ],
        source,
    )
    assert torch.equal(a, layer.lora_A["default"].weight[:, 16:])
    assert torch.equal(b, layer.lora_B["default"].weight.bfloat16())
    embedding = model.base_model.model.model.embed_tokens
    assert torch.equal(source.read_whole("embed_tokens.lora_A"), embedding.lora_embedding_A["default"])
    assert torch.equal(source.read_whole("embed_tokens.lora_B"), embedding.lora_embedding_B["default"])


def test_a_run_that_differs_from_its_adapter_is_refused(tmp_path: Path) -> None:
    stock_adapter(tmp_path)
    source = open_adapter(tmp_path)
    fits = dict.fromkeys(source.modules(), (RANK, 7 / RANK))
    source.require_matching(fits)
    q_proj = "layers.0.attention.q_proj"
    for changed, words in (
        ({**fits, q_proj: (4, 7 / RANK)}, f"gives {q_proj} rank 4, but .* has 3 there: set it to 3"),
        (
            {**fits, q_proj: (RANK, 8.0)},
            rf"{q_proj} by 8, but that in .* by 2.33333: set lora.alpha to 7",
        ),
        ({**fits, "lm_head": fits[q_proj]}, "asks for lm_head"),
        (dict.fromkeys(source.modules()[1:], fits[q_proj]), "has embed_tokens, which lora"),
    ):
        with pytest.raises(UserError, match=words):
            source.require_matching(changed)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"use_dora": True, "target_modules": ["q_proj", "embed_tokens"]}, "use_dora True, .* embed_tokens: DoRA is"),
        ({"modules_to_save": ["norm"]}, "modules_to_save"),
        ({"bias": "lora_only"}, "bias 'lora_only'"),
        ({"trainable_token_indices": [3], "target_modules": ["q_proj"]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 2], [1, 2]], "target_modules": ["q_proj"]}, "layer_replication"),
        ({"init_lora_weights": "pissa", "target_modules": ["q_proj"]}, "init_lora_weights 'pissa'"),
    ],
)
def test_peft_features_that_would_be_computed_otherwise(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    stock_adapter(tmp_path, **options)
    with pytest.raises(UserError, match=words):
        open_adapter(tmp_path)


def test_damaged_adapters_are_named(tmp_path: Path) -> None:
    stock_adapter(tmp_path)
    config, weights = (tmp_path / "stock" / name for name in ("adapter_config.json", "adapter_model.safetensors"))
    tensors = load_file(weights)
    text = json.loads(config.read_text())
    save_file({**tensors, "base_model.model.model.layers.0.self_attn.other.lora_A.weight": torch.ones(3, 3)}, weights)
    with pytest.raises(UserError, match="self_attn.other.lora_A.weight, which is neither a LoRA factor"):
        open_adapter(tmp_path)
    save_file(
        {name: value for name, value in tensors.items() if "layers.1.self_attn.q_proj.lora_B" not in name}, weights
    )
    with pytest.raises(UserError, match="lacks lora_B of layers.1.attention.q_proj"):
        open_adapter(tmp_path)
    save_file(tensors, weights)
    config.write_text(json.dumps({**text, "r": 5}))
    with pytest.raises(UserError, match="has rank 3 at .* says r 5"):
        open_adapter(tmp_path)
    config.write_text(json.dumps({**text, "peft_type": "IA3"}))
    with pytest.raises(UserError, match="peft_type 'IA3': expected LORA"):
        open_adapter(tmp_path)
    config.write_text(json.dumps(text))
    weights.rename(tmp_path / "stock" / "adapter_model.bin")
    with pytest.raises(UserError, match="a pickle"):
        open_adapter(tmp_path)
    config.unlink()
    with pytest.raises(UserError, match="no adapter_config.json"):
        open_adapter(tmp_path)


def test_an_adapter_of_a_partitioned_base_names_the_hugging_face_folder(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "hf")
    import_checkpoint(open_source(tmp_path / "hf"), tmp_path / "tp2", tensor=2)
    trained = open_run(trained_run(tmp_path / "run", factors(["mlp.up_proj"]), tmp_path / "tp2")).trained()
    lora = {"rank": RANK, "alpha": 5.0, "dropout": 0.1, "rslora": False}
    export_peft(trained, lora, open_model(tmp_path / "tp2"), tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str((tmp_path / "hf").resolve())
    assert (config["target_modules"], config["lora_alpha"], config["lora_dropout"]) == (["up_proj"], 5, 0.1)
    open_in_peft(tmp_path)
