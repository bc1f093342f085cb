"""Adapters of every family against stock PEFT: exported, merged, read back, and trained for some steps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine.checkpoint.loading import load_parameters
from engine.checkpoint.model_folder import open_model
from engine.checkpoint.model_weights import open_source
from engine.checkpoint.run.training_state import open_run
from engine.conversion.import_export import export_hf, import_checkpoint
from engine.conversion.merged_model import MergedSource
from engine.conversion.peft_read import AdapterSource
from engine.conversion.peft_write import export_peft
from engine.conversion.proof import prove_model
from engine.errors import UserError
from tests.distributed.cases import RANK, SCALE, Built, relative_error, uncut
from tests.support.family_models import batch_of, engine_model, make_model, stock_losses
from tests.support.family_table import FAMILIES, ROUTED
from tests.support.sweeps import portion
from tests.unit.test_checkpoint_peft import trained_run

EVERY_LINEAR = r"layers\..*(?<!weights)_proj(_[a-z]+)?|.*per_layer_(input_gate|(model_)?projection)"
LINEARS = {
    "qwen3.5": 31, "bamba": 22, "granite hybrid": 22, "lfm2": 22, "olmo hybrid": 37, "falcon h1": 36, "gemma4": 26,
    "gemma4 small": 33, "arcee": 24,
}  # fmt: skip
"""Linears of all four layers, and of what is before them; others have seven in each."""
# transformers has no class that reads these folders
NOT_STOCK = ("llama fused", "minicpm")
# PEFT refuses adapters on the output projections of Mamba
NOT_PEFT = ("falcon h1",)


def _logits(built: Built) -> Tensor:
    batch = batch_of()
    with torch.no_grad():
        context = built.model.context(batch, built.stage.step, training=False)
        return built.model.logits(built.model.run_layers(built.model.embed(batch), context), context)


def _stock_logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return stock_losses(model, batch_of())[0]


def _stock(folder: Path) -> torch.nn.Module:
    """Stock transformers with the family's own attention: its default may leave out a soft cap on scores."""
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def _export(tmp_path: Path, base: Path, tensors: dict[str, Tensor], *, rslora: bool = False) -> None:
    """tmp_path/adapter and tmp_path/merged, with the scale that the live model has."""
    alpha = SCALE * (RANK**0.5 if rslora else RANK)
    run = trained_run(tmp_path / "run", tensors, base, alpha=alpha, rslora=rslora)
    checkpoint, source = open_run(run), open_source(base)
    export_peft(checkpoint.trained(), checkpoint.lora, source.model, tmp_path / "adapter")
    export_hf(MergedSource(source.model, source, checkpoint.trained(), scale=SCALE), tmp_path / "merged")


@pytest.mark.parametrize(
    "name", portion([name for name in FAMILIES if " with" not in name and name not in ROUTED], 4, ["llama"])
)
def test_adapter_and_merged_model_give_the_live_models_logits(name: str, tmp_path: Path):
    plain = make_model(name, tmp_path / "hf")
    built = engine_model(tmp_path / "hf", trained="", adapters=EVERY_LINEAR)
    specs = built.specs()
    tensors = {key: uncut(value, specs[key]) for key, value in built.parameters().items()}
    assert len(tensors) == 2 * LINEARS.get(name, 28)
    live = _logits(built)
    assert (live - _stock_logits(plain)).abs().max() > 0.05, "the adapters do nothing"
    _export(tmp_path, tmp_path / "hf", tensors)
    # fp32 products of merged weights and of separate factors
    torch.testing.assert_close(_logits(engine_model(tmp_path / "merged")), live, rtol=0, atol=1e-4)
    base = open_model(tmp_path / "hf")
    source = AdapterSource(tmp_path / "adapter", names=base.names, decoder=base.decoder)
    assert source.tensor_names() == sorted(tensors)
    for key, value in tensors.items():
        assert torch.equal(source.read_whole(key), value), key
    if name not in NOT_STOCK:
        merged, info = AutoModelForCausalLM.from_pretrained(
            tmp_path / "merged", attn_implementation="eager", output_loading_info=True
        )
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        torch.testing.assert_close(_stock_logits(merged.eval()), live, rtol=0, atol=1e-4)
    if name not in NOT_STOCK and name not in NOT_PEFT:
        peft = PeftModel.from_pretrained(_stock(tmp_path / "hf"), tmp_path / "adapter")
        info = peft.load_adapter(tmp_path / "adapter", "again")
        assert not info.unexpected_keys and not [key for key in info.missing_keys if "again" in key]
        torch.testing.assert_close(_stock_logits(peft.eval()), live, rtol=0, atol=1e-4)


def test_a_soft_cap_is_not_lost_in_the_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """transformers 5.17 takes SDPA for Gemma 2 unless told otherwise, and drops the soft cap; 5.23 refuses the pair."""
    make_model("gemma2", tmp_path / "hf")
    monkeypatch.setattr(transformers.Gemma2PreTrainedModel, "_supports_sdpa", True)
    assert "checked with transformers" in prove_model(tmp_path / "hf", open_source(tmp_path / "hf"))


@pytest.mark.parametrize("rslora", [False, True])
def test_some_parts_of_a_fused_matrix(rslora: bool, tmp_path: Path):
    """In PEFT the whole matrix has an adapter; what is not adapted here is zero there."""
    make_model("phi3", tmp_path / "hf")
    built = engine_model(tmp_path / "hf", trained="", adapters=r"layers\..*\.(q_proj|v_proj|up_proj)")
    tensors = built.parameters()
    _export(tmp_path, tmp_path / "hf", tensors, rslora=rslora)
    peft = PeftModel.from_pretrained(_stock(tmp_path / "hf"), tmp_path / "adapter")
    torch.testing.assert_close(_stock_logits(peft.eval()), _logits(built), rtol=0, atol=1e-4)
    base = open_model(tmp_path / "hf")
    source = AdapterSource(tmp_path / "adapter", names=base.names, decoder=base.decoder)
    assert source.tensor_names() == sorted(tensors)
    assert source.scale == pytest.approx(SCALE)


@pytest.mark.parametrize("partitioned", [False, True])
def test_a_fused_adapter_of_a_fused_matrix_stays_one(partitioned: bool, tmp_path: Path):
    make_model("llama fused", tmp_path / "hf")
    folder = tmp_path / "hf"
    if partitioned:
        folder = tmp_path / "parts"
        import_checkpoint(open_source(tmp_path / "hf"), folder, tensor=2)
    built = engine_model(folder, trained="", adapters=r"layers\..*\.(qkv_proj|o_proj)", fused=r".*qkv_proj")
    tensors = built.parameters()
    _export(tmp_path, folder, tensors)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["o_proj", "qkv_proj"] and not config.get("rank_pattern")
    base = open_model(folder)
    source = AdapterSource(tmp_path / "adapter", names=base.names, decoder=base.decoder, fused=None)
    assert source.tensor_names() == sorted(tensors)
    assert all(torch.equal(source.read_whole(key), value) for key, value in tensors.items())
    torch.testing.assert_close(_logits(engine_model(tmp_path / "merged")), _logits(built), rtol=0, atol=1e-4)


def test_a_stock_adapter_of_a_fused_matrix_is_read_whole_or_as_its_parts(tmp_path: Path):
    torch.manual_seed(0)
    settings = LoraConfig(r=RANK, lora_alpha=RANK * SCALE, target_modules=["qkv_proj", "gate_up_proj", "down_proj"])
    peft = get_peft_model(make_model("phi3", tmp_path / "hf"), settings)
    for key, parameter in peft.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(parameter, std=0.2)
    peft.save_pretrained(tmp_path / "stock")
    base = open_model(tmp_path / "hf")
    for fused in ((), None):
        source = AdapterSource(tmp_path / "stock", names=base.names, decoder=base.decoder, fused=fused)
        built = engine_model(
            tmp_path / "hf",
            trained="",
            adapters=r"layers\..*\.(?!o_proj)[a-z_]*_proj",
            fused="" if fused is not None else r".*\.(qkv|gate_up)_proj",
        )
        assert sorted(built.parameters()) == source.tensor_names()
        load_parameters(built.flat.master_shards(), source)
        built.flat.publish()
        torch.testing.assert_close(_logits(built), _stock_logits(peft.eval()), rtol=0, atol=1e-4)


def test_parts_of_a_fused_matrix_trained_in_full_have_no_peft_folder(tmp_path: Path):
    make_model("phi3", tmp_path / "hf")
    built = engine_model(
        tmp_path / "hf", trained=r"layers\.0\.attention\.q_proj", adapters=r"layers\.0\.mlp\.down_proj"
    )
    with pytest.raises(UserError, match="stores it as rows of a larger matrix"):
        _export(tmp_path, tmp_path / "hf", built.parameters())


@pytest.mark.parametrize("name", ["qwen3", "granite", "gemma2", "phi3"])
def test_training_follows_peft(name: str, tmp_path: Path):
    """Five steps of AdamW, from the same adapter: losses, and the adapter at the end."""
    torch.manual_seed(1)
    targets = ["o_proj", "down_proj"] if name == "phi3" else ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"]
    model = make_model(name, tmp_path / "hf")
    peft = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=RANK * SCALE, target_modules=targets))
    for key, parameter in peft.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(parameter, std=0.2)
    peft.save_pretrained(tmp_path / "start")
    base = open_model(tmp_path / "hf")
    built = engine_model(tmp_path / "hf", trained="", adapters=rf"layers\..*\.({'|'.join(targets)})")
    start = AdapterSource(tmp_path / "start", names=base.names, decoder=base.decoder)
    load_parameters(built.flat.master_shards(), start)
    built.flat.publish()
    trained = [parameter for parameter in peft.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.01)
    ours, theirs = [], []
    for step in range(5):
        batch = batch_of(step)
        targets_in_batch = float(batch.loss_weights_BS.sum())
        ours.append(built.step([batch], targets_in_batch, 1e-2).loss.item())
        loss = stock_losses(peft, batch)[1].sum() / targets_in_batch
        loss.backward()
        theirs.append(loss.item())
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=0, atol=1e-4)
    peft.save_pretrained(tmp_path / "end")
    end = AdapterSource(tmp_path / "end", names=base.names, decoder=base.decoder)
    for key, value in built.parameters().items():
        moved = end.read_whole(key) - start.read_whole(key)
        # five steps of about 0.01 each; where a gradient is next to nothing its sign, and so its step, is rounding's
        assert relative_error(value - start.read_whole(key), moved) < 1e-2, key
    shutil.rmtree(tmp_path / "hf")
