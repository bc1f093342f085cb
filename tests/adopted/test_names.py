"""Names and bits of adopted models in and out, against what `save_pretrained` writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.checkpoint.model_folder import open_model
from engine.checkpoint.model_weights import open_source
from engine.checkpoint.weight_source import WeightSource
from engine.choices import Implementation
from engine.conversion.import_export import export_hf, import_checkpoint
from engine.errors import UserError
from tests.adopted.saved_models import assert_same, save_small, stored

TYPES = {"cohere2": {}, "exaone_moe": {"tie_word_embeddings": False}, "gpt_bigcode": {}}
"""Dense, a mixture whose experts are stored one by one, and one whose body and ends have other names."""


def test_a_mixture_is_stored_otherwise_than_it_is_made(tmp_path: Path) -> None:
    model = save_small("exaone_moe", tmp_path / "hf")
    assert stored(tmp_path / "hf").keys() != model.state_dict().keys()


@pytest.mark.parametrize("model_type", TYPES)
def test_in_and_out(tmp_path: Path, model_type: str) -> None:
    model = save_small(model_type, tmp_path / "hf", **TYPES[model_type])
    source = open_source(tmp_path / "hf")
    state = model.state_dict()
    for name in source.tensor_names():
        assert torch.equal(source.read_whole(name), state[source.model.names.to_hf(name).name]), name
    import_checkpoint(source, tmp_path / "base", tensor=1)
    base = open_source(tmp_path / "base")
    assert base.model.manifest is not None
    assert base.model.manifest.model["implementation"] == "adopted"
    assert base.computed_fingerprint() == source.fingerprint()
    expected = stored(tmp_path / "hf")
    for name, one in (("direct", source), ("round", base)):
        export_hf(one, tmp_path / name, max_shard_bytes=200_000)
        assert_same(stored(tmp_path / name), expected)


def test_partitions_of_a_mixture_go_back(tmp_path: Path) -> None:
    save_small("mixtral", tmp_path / "hf")
    source = open_source(tmp_path / "hf", "adopted")
    import_checkpoint(source, tmp_path / "two", tensor=2)
    two = open_source(tmp_path / "two")
    import_checkpoint(two, tmp_path / "four", tensor=1)
    four = open_source(tmp_path / "four")
    assert two.sums() == four.sums()
    assert all(torch.equal(source.read_whole(name), two.read_whole(name)) for name in source.tensor_names())
    for name, one in (("from two", two), ("from one", four)):
        export_hf(one, tmp_path / name)
        assert_same(stored(tmp_path / name), stored(tmp_path / "hf"))


def test_a_tied_head_that_is_stored_and_others_pass_through(tmp_path: Path) -> None:
    model = save_small("qwen3_next", tmp_path / "hf", tie_word_embeddings=True)
    tensors = stored(tmp_path / "hf")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    assert any("mtp" in pattern for pattern in model._keys_to_ignore_on_load_unexpected)
    tensors["mtp.fc.weight"] = torch.randn(3, 5)
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    source = open_source(tmp_path / "hf", "adopted")
    assert source.has_tied_head
    assert source.outside_names() == ["mtp.fc.weight"]
    import_checkpoint(source, tmp_path / "base", tensor=1)
    for name, one in (("direct", source), ("round", open_source(tmp_path / "base"))):
        export_hf(one, tmp_path / name)
        assert_same(stored(tmp_path / name), tensors)
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1.0
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="its head differs from its table of tokens"):
        open_source(tmp_path / "hf", "adopted")


def test_a_language_model_beside_a_vision_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Mistral3Config

    sizes = {"intermediate_size": 48, "num_attention_heads": 2, "head_dim": 16}
    text = {"model_type": "ministral3", "hidden_size": 32, "num_hidden_layers": 2, "num_key_value_heads": 1, **sizes}
    vision = {"model_type": "pixtral", "hidden_size": 32, "num_hidden_layers": 1, "image_size": 28, **sizes}
    config = Mistral3Config(
        text_config={**text, "vocab_size": 99}, vision_config={**vision, "patch_size": 14}, tie_word_embeddings=False
    )
    monkeypatch.setattr("engine.adopted.images.refusal.sees_images", lambda hf_config: False)
    source, state = check_in_and_out(
        config, tmp_path, lambda name: name.replace("model.", "model.language_model.", 1), "adopted"
    )
    assert len(source.outside_names()) == len(state) - len(source.tensor_names())


def test_a_model_with_its_vision_model(tmp_path: Path) -> None:
    from transformers import LlavaConfig

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14, **sizes}
    text = {"model_type": "stablelm", "vocab_size": 99, "num_key_value_heads": 2, **sizes}
    config = LlavaConfig(text_config=text, vision_config=vision, image_token_id=9, tie_word_embeddings=False)
    source, state = check_in_and_out(config, tmp_path, lambda name: name, "adopted")
    assert len(source.tensor_names()) == len(state)


def check_in_and_out(
    config: Any, folder: Path, place_of: Callable[[str], str], implementation: Implementation = "auto"
) -> tuple[WeightSource, dict[str, Tensor]]:
    """Checks that a model's tensors are read as transformers names them, and written as they were; returns both.

    Args:
        place_of: the name that a tensor has in transformers' whole model.
    """
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(folder / "hf")
    source, state = open_source(folder / "hf", implementation), model.state_dict()
    for name in source.tensor_names():
        place = place_of(source.model.names.to_hf(name).name)
        assert torch.equal(source.read_whole(name), state[place]), name
    import_checkpoint(source, folder / "base", tensor=1)
    for name, one in (("direct", source), ("round", open_source(folder / "base"))):
        export_hf(one, folder / name)
        assert_same(stored(folder / name), stored(folder / "hf"))
    return source, state


def test_checksums_of_whole_tensors_find_a_changed_expert(tmp_path: Path) -> None:
    save_small("mixtral", tmp_path / "hf")
    source = open_source(tmp_path / "hf", "adopted")
    import_checkpoint(source, tmp_path / "base", tensor=1)
    sums = open_source(tmp_path / "base").sums()
    assert sums is not None
    tensors = stored(tmp_path / "hf")
    name = next(name for name in tensors if ".experts.1." in name)
    tensors[name][0, 0] += 1.0
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    changed = open_source(tmp_path / "hf", "adopted")
    changed.expect(sums, "a checkpoint")
    with pytest.raises(UserError, match="has changed"):
        changed.checks.begin(together=False, learn=True)
        for logical in changed.tensor_names():
            changed.read_whole(logical)


def test_a_partitioned_base_has_the_implementation_of_its_import(tmp_path: Path) -> None:
    save_small("llama", tmp_path / "hf")
    for implementation, first in (("native", "self_attn"), ("adopted", "module.self_attn")):
        import_checkpoint(open_source(tmp_path / "hf", implementation), tmp_path / implementation, tensor=1)
        model = open_model(tmp_path / implementation)
        assert model.implementation == implementation
        assert any(first in name for name in model.expected_shapes()) == (implementation == "adopted")
    with pytest.raises(UserError, match="was partitioned for implementation adopted, but native is asked for"):
        open_model(tmp_path / "adopted", "native")
    assert open_model(tmp_path / "hf").implementation == "native"


@pytest.mark.parametrize("fault", ["missing", "unknown", "mixed"])
def test_folders_that_are_not_the_model_are_refused(tmp_path: Path, fault: str) -> None:
    save_small("exaone_moe", tmp_path / "hf")
    tensors = stored(tmp_path / "hf")
    expert = next(name for name in tensors if ".experts.1.up_proj" in name)
    if fault == "missing":
        del tensors[expert]
    elif fault == "unknown":
        tensors["model.layers.0.extra.weight"] = torch.zeros(2)
    else:
        tensors[expert] = tensors[expert].to(torch.bfloat16)
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    expected = {
        "missing": r"transformers cannot make|has shape .* but its config.json calls for",
        "unknown": r"has model.layers.0.extra.weight, which",
        "mixed": r"save the model in one dtype",
    }
    with pytest.raises(UserError, match=expected[fault]):
        open_source(tmp_path / "hf")


def test_a_config_of_more_layers_lacks_tensors(tmp_path: Path) -> None:
    save_small("cohere2", tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text())
    config["num_hidden_layers"] += 1
    config["layer_types"] = [*config["layer_types"], "full_attention"]
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"lacks model\.layers\.4\."):
        open_source(tmp_path / "hf")
