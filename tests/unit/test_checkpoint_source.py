"""Models from Hugging Face folders and partitioned checkpoints: every layout reads every other; bad input is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from engine.checkpoint.loading import load_parameters
from engine.checkpoint.manifest import read_manifest, write_manifest
from engine.checkpoint.model_folder import open_model
from engine.checkpoint.model_weights import open_source
from engine.conversion.import_export import export_hf, import_checkpoint
from engine.distributed.sharding import NamedShard
from engine.errors import UserError
from engine.models.describe import parameter_specs
from tests.unit.checkpoint_models import expected_slice, hf_name, tiny_llama, total_bytes


def load_folder(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        part = load_file(path)
        assert not part.keys() & tensors.keys()
        tensors |= part
    return tensors


def assert_same_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("kv_heads", "bias"), [(2, False), (1, True), (4, True)])
def test_any_layout_reads_any_other(tmp_path: Path, tied: bool, kv_heads: int, bias: bool) -> None:
    model = tiny_llama(tmp_path / "hf", tied=tied, kv_heads=kv_heads, bias=bias)
    state = model.state_dict()
    sources = [open_source(tmp_path / "hf")]
    for size in (1, 2, 4):
        import_checkpoint(sources[0], tmp_path / f"tp{size}", tensor=size)
        sources.append(open_source(tmp_path / f"tp{size}"))
    for source in sources:
        for size in (1, 2, 4):
            for rank in range(size):
                specs = parameter_specs(source.model.decoder, tensor_rank=rank, tensor_size=size)
                assert ("lm_head.weight" in specs) != tied
                for name, spec in specs.items():
                    expected = expected_slice(name, state[hf_name(name)], rank, size, kv_heads)
                    assert torch.equal(source.read(name, spec), expected), (source.label, name, rank, size)
    assert len({source.fingerprint() for source in sources}) == 1
    assert sources[0].fingerprint() == sources[2].computed_fingerprint()


def test_no_partition_holds_a_full_matrix(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "hf", kv_heads=1)
    source = open_source(tmp_path / "hf")
    import_checkpoint(source, tmp_path / "tp4", tensor=4)
    stored = 0
    for path in sorted((tmp_path / "tp4").glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            stored += tensor.nbytes
            replicated = name.endswith(("k_proj.weight", "v_proj.weight"))  # one head cannot be split over 4 ranks
            assert tensor.dim() == 1 or replicated or tensor.numel() < source.read_whole(name).numel(), (path, name)
    # replicas are stored once: nothing is stored twice
    assert stored == total_bytes(source)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("dtype", "shard"), [(torch.float32, "1GB"), (torch.bfloat16, "3KB")])
def test_round_trip_is_bit_identical(tmp_path: Path, tied: bool, dtype: torch.dtype, shard: str) -> None:
    tiny_llama(tmp_path / "hf", tied=tied, dtype=dtype, max_shard_size=shard)
    (tmp_path / "hf" / "tokenizer.model").write_bytes(b"\x00\xfftokens")
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists() == (shard == "3KB")
    import_checkpoint(open_source(tmp_path / "hf"), tmp_path / "tp2", tensor=2)
    report = export_hf(open_source(tmp_path / "tp2"), tmp_path / "back", max_shard_bytes=3000)
    assert len(report.files) > 3
    assert_same_tensors(load_folder(tmp_path / "hf"), load_folder(tmp_path / "back"))
    assert ("lm_head.weight" in load_folder(tmp_path / "back")) != tied
    for name in ("config.json", "generation_config.json", "tokenizer.model"):
        assert (tmp_path / "hf" / name).read_bytes() == (tmp_path / "back" / name).read_bytes()
    _, info = LlamaForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_a_tied_model_that_stores_its_head_gets_it_back(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "hf", tied=True)
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path, {"format": "pt"})
    import_checkpoint(open_source(tmp_path / "hf"), tmp_path / "tp2", tensor=2)
    assert "lm_head.weight" not in open_source(tmp_path / "tp2")
    export_hf(open_source(tmp_path / "tp2"), tmp_path / "back")
    assert path.read_bytes() == (tmp_path / "back" / "model.safetensors").read_bytes()
    tensors["lm_head.weight"][3, 5] += 1
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(UserError, match=r"tie_word_embeddings true, but its lm_head\.weight differs"):
        open_source(tmp_path / "hf")


@pytest.mark.parametrize("prefix", ["llm.", "language_model."])
def test_a_nested_language_model_keeps_what_is_beside_it(tmp_path: Path, prefix: str) -> None:
    model = tiny_llama(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({"model_type": "some_vlm", "llm_config": config}))
    tensors = {prefix + name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors["vpm.blocks.0.q_proj.weight"] = torch.randn(3, 4).bfloat16()
    tensors["resampler.query"] = torch.randn(5)
    save_file(tensors, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    source = open_source(tmp_path / "hf")
    assert source.outside_names() == ["resampler.query", "vpm.blocks.0.q_proj.weight"]
    assert torch.equal(source.read_whole("layers.1.mlp.up_proj.weight"), model.model.layers[1].mlp.up_proj.weight)
    import_checkpoint(source, tmp_path / "tp2", tensor=2)
    export_hf(open_source(tmp_path / "tp2"), tmp_path / "back")
    assert_same_tensors(tensors, load_folder(tmp_path / "back"))
    tensors[f"{prefix}model.layers.0.extra.weight"] = torch.ones(1)
    save_file(tensors, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"layers\.0\.extra\.weight"):
        open_source(tmp_path / "hf")


def test_fingerprints_tell_models_apart(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "hf")
    before = open_source(tmp_path / "hf").fingerprint()
    config = tmp_path / "hf" / "config.json"
    text = json.loads(config.read_text())
    config.write_text(json.dumps({**text, "transformers_version": "0", "use_cache": False}))
    assert open_source(tmp_path / "hf").fingerprint() == before
    config.write_text(json.dumps({**text, "rms_norm_eps": 1e-3}))
    assert open_source(tmp_path / "hf").fingerprint() != before
    config.write_text(json.dumps(text))
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][-1, -1] += 1
    save_file(tensors, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    assert open_source(tmp_path / "hf").fingerprint() != before


def test_loading_casts_fills_padding_and_writes_into_views(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "hf")
    source = open_source(tmp_path / "hf")
    spec = parameter_specs(source.model.decoder, tensor_rank=3, tensor_size=4)["embed_tokens.weight"]
    storage = torch.full((10, 20), 7.0, dtype=torch.bfloat16)
    seen: list[int] = []
    shard = NamedShard("embed_tokens.weight", storage[:, :16], spec)
    assert load_parameters([shard], source, progress=seen.append) == 1
    expected = model.model.embed_tokens.weight[30:].detach().bfloat16()
    assert torch.equal(storage[:7, :16], expected)
    assert storage[7:, :16].eq(0).all() and storage[:, 16:].eq(7).all()
    assert seen == [10 * 16 * 2]
    with pytest.raises(UserError, match=r"has no tensor layers\.9\.norm"):
        load_parameters([NamedShard("layers.9.norm", storage, spec)], source)
    with pytest.raises(UserError, match=r"norm\.weight with shape \[16\], but \[37, 16\] is expected"):
        load_parameters([NamedShard("norm.weight", storage[:, :16], spec)], source)


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Stores the model again with tensors replaced, added, or (None) left out."""
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **{name.replace("__", "."): value for name, value in changes.items()}}
    save_file({name: value for name, value in tensors.items() if value is not None}, path, {"format": "pt"})


def test_tensors_that_do_not_fit_the_config(tmp_path: Path) -> None:
    hf = tmp_path / "hf"
    tiny_llama(hf)
    rewrite(hf, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    open_source(hf)
    rewrite(hf, model__norm__weight=torch.ones(15))
    with pytest.raises(UserError, match=r"model\.norm\.weight with shape \[15\], but its config\.json .* \[16\]"):
        open_source(hf)
    rewrite(hf, model__norm__weight=None)
    with pytest.raises(UserError, match=r"lacks model\.norm\.weight"):
        open_source(hf)
    rewrite(hf, model__norm__weight=torch.ones(16), model__layers__0__self_attn__q_proj__bias=torch.ones(32))
    with pytest.raises(UserError, match=r"has model\.layers\.0\.self_attn\.q_proj\.bias, which a llama"):
        open_source(hf)


def test_damaged_folders_are_named(tmp_path: Path) -> None:
    hf = tmp_path / "hf"
    with pytest.raises(UserError, match="is not a folder"):
        open_source(hf)
    tiny_llama(hf, max_shard_size="3KB")
    index = hf / "model.safetensors.index.json"
    shards = sorted(hf.glob("model-*.safetensors"))
    whole = shards[1].read_bytes()
    shards[1].write_bytes(whole[:-10])
    with pytest.raises(UserError, match=f"{shards[1].name} is damaged or truncated"):
        open_source(hf)
    shards[1].unlink()
    with pytest.raises(UserError, match=f"{shards[1].name} is missing"):
        open_source(hf)
    text = index.read_text()
    index.write_text(text.replace(shards[1].name, f"../{shards[1].name}"))
    with pytest.raises(UserError, match="not in its own folder"):
        open_source(hf)
    index.write_text(text.replace(shards[1].name, shards[0].name))
    with pytest.raises(UserError, match=f"{shards[0].name} lacks"):
        open_source(hf)
    index.unlink()
    with pytest.raises(UserError, match="has no weights"):
        open_source(hf)
    assert open_model(hf).decoder.hidden == 16  # the description alone needs no weights
    (hf / "pytorch_model.bin").touch()
    with pytest.raises(UserError, match="convert it to safetensors first"):
        open_source(hf)
    (hf / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        open_source(hf)
    (hf / "config.json").unlink()
    with pytest.raises(UserError, match="no config.json"):
        open_source(hf)


def test_a_damaged_partition_is_named(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "hf")
    import_checkpoint(open_source(tmp_path / "hf"), tmp_path / "tp2", tensor=2)
    path = tmp_path / "tp2" / "tensor_01_of_02.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1  # in the last tensor of the file
    path.write_bytes(data)
    source = open_source(tmp_path / "tp2")
    with pytest.raises(UserError, match=r"tensor_01_of_02\.safetensors is damaged: .* has checksum"):
        for name in source.tensor_names():
            source.read_whole(name)
    with pytest.raises(UserError, match="is damaged"):
        export_hf(source, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_layout_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "hf")
    with pytest.raises(UserError, match="do not divide over parallel.tensor 5"):
        import_checkpoint(open_source(tmp_path / "hf"), tmp_path / "tp", tensor=5)
    assert not list(tmp_path.glob(".tp*")) and not (tmp_path / "tp").exists()
    with pytest.raises(UserError, match="at least 1 partition"):
        import_checkpoint(open_source(tmp_path / "hf"), tmp_path / "tp", tensor=0)


@pytest.mark.parametrize("record", [None, {"hidden": 32, "rope_theta": 10000.0, "rope_axes": [], "routed": None}])
def test_manifests_describe_the_decoder_for_people_alone(tmp_path: Path, record: dict[str, object] | None) -> None:
    """config.json is what a model is made by, whatever fields an engine's own description of it had."""
    tiny_llama(tmp_path / "hf")
    source = open_source(tmp_path / "hf")
    import_checkpoint(source, tmp_path / "base", tensor=2)
    manifest = read_manifest(tmp_path / "base")
    kept = {key: value for key, value in manifest.model.items() if key != "decoder"}
    model = kept if record is None else {**kept, "decoder": record}
    write_manifest(tmp_path / "base", replace(manifest, model=model))
    again = open_source(tmp_path / "base")
    assert again.model.decoder == source.model.decoder and again.fingerprint() == source.fingerprint()
    export_hf(again, tmp_path / "back")
    assert_same_tensors(load_folder(tmp_path / "back"), load_folder(tmp_path / "hf"))
