"""Models with a vision model in front of another family's language model: names, configs, and conversions."""

from __future__ import annotations

import functools
import json
import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.checkpoint.model_weights import open_source
from engine.conversion.import_export import export_hf, import_checkpoint
from engine.conversion.live_logits import Overlay
from engine.conversion.peft_write import export_peft
from engine.errors import UserError
from engine.models.describe import num_parameters
from engine.models.families import WRAPPINGS, family_of, vision_left_out
from engine.seams import resolve
from engine.vision.tower_defaults import MODEL_TOWERS, TOWER_DEFAULTS
from tests.support.stock_vision import make_model

GEMMA = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "max_position_embeddings": 64}
V5, V4 = "model.language_model.", "language_model.model."
SPELLINGS = {
    "released": (V4, "language_model.lm_head", "vision_tower.vision_model", "multi_modal_projector"),
    "as transformers 5 saves them": (V4, "language_model.lm_head", "vision_tower", "multi_modal_projector"),
    "modules of transformers 5": (V5, "lm_head", "model.vision_tower", "model.multi_modal_projector"),
    "modules of transformers 4": (V5, "lm_head", "model.vision_tower.vision_model", "model.multi_modal_projector"),
}


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="wrapping-")


@functools.cache
def _saved() -> Path:
    folder = Path(_folder().name) / "llava"
    make_model("llava", folder)
    return folder


def _spelled(spelling: str, folder: Path) -> Path:
    """The model with other names, as `SPELLINGS` has them."""
    body, head, tower, projector = SPELLINGS[spelling]
    before = SPELLINGS["as transformers 5 saves them"]
    folder.mkdir()
    shutil.copy(_saved() / "config.json", folder)
    renamed = {}
    for name, tensor in load_file(_saved() / "model.safetensors").items():
        old, new = next(
            pair for pair in zip(before, (body, head, tower, projector), strict=True) if name.startswith(pair[0])
        )
        renamed[new + name.removeprefix(old)] = tensor
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_names_that_came_in_go_out(spelling: str, tmp_path: Path) -> None:
    folder = _spelled(spelling, tmp_path / "hf")
    source = open_source(folder)
    assert (source.model.names.body, source.model.names.head) == SPELLINGS[spelling][:2]
    assert list(source.model.names.vision.values()) == list(SPELLINGS[spelling][2:])
    import_checkpoint(source, tmp_path / "base", tensor=2)
    export_hf(open_source(tmp_path / "base"), tmp_path / "out")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    whole = open_source(_saved())
    again = open_source(tmp_path / "out")
    assert all(torch.equal(whole.read_whole(name), again.read_whole(name)) for name in whole.tensor_names())


def test_layers_behind_the_features_are_carried_along() -> None:
    """vision_feature_layer -2 of three layers: the third and the last norm are stored, and not computed."""
    source = open_source(_saved())
    assert {re.sub(r"\.(self_attn|mlp|layer_norm).*", "", name) for name in source.outside_names()} == {
        "vision_tower.encoder.layers.2", "vision_tower.post_layernorm.bias", "vision_tower.post_layernorm.weight",
    }  # fmt: skip


@pytest.mark.parametrize("shares", [False, True])
def test_of_a_config_that_is_ambiguous_the_weights_are_believed(shares: bool, tmp_path: Path) -> None:
    """InternVL's config has tied embeddings by default, whatever its `text_config` says, and transformers ties them
    only if they are equal. A tied head instead of its own moves the logits by more than their own size."""
    model = make_model("internvl")
    model.config.tie_word_embeddings = True
    assert model.config.text_config.tie_word_embeddings is False
    if shares:
        model.lm_head.weight.data.copy_(model.model.language_model.embed_tokens.weight)
    model.save_pretrained(tmp_path / "hf")
    stock = type(model).from_pretrained(tmp_path / "hf")
    assert (stock.lm_head.weight is stock.model.language_model.embed_tokens.weight) == shares
    source = open_source(tmp_path / "hf")
    assert source.model.decoder.tied_embeddings == shares
    head = source.read_whole("embed_tokens.weight" if shares else "lm_head.weight")
    assert torch.equal(head, stock.lm_head.weight)
    import_checkpoint(source, tmp_path / "base", tensor=2)
    base = open_source(tmp_path / "base")
    assert base.model.decoder == source.model.decoder and base.fingerprint() == source.fingerprint()
    export_hf(base, tmp_path / "out")
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("hf", "out"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(type(model).from_pretrained(tmp_path / "out").lm_head.weight, stock.lm_head.weight)


@pytest.mark.parametrize("name", ["multi_modal_projector.linear_1.bias", "vision_tower.pre_layrnorm.weight"])
def test_what_is_missing_or_beside_is_refused(name: str, tmp_path: Path) -> None:
    shutil.copy(_saved() / "config.json", tmp_path)
    tensors = load_file(_saved() / "model.safetensors")
    kept = tensors.pop(name)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=f"lacks {name}, which its config.json calls for"):
        open_source(tmp_path)
    save_file({**tensors, name: kept, f"{name}_2": kept.clone()}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=f"has {name}_2, which a llava model with its config.json does not have"):
        open_source(tmp_path)


def _skip_unknown(model_type: str) -> None:
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")


@pytest.mark.parametrize(
    ("kind", "text"),
    [(kind, text) for kind, one in WRAPPINGS.items() for text in dict.fromkeys(resolve(one).texts.values())],
)
def test_what_a_config_leaves_out_is_what_transformers_has(kind: str, text: str) -> None:
    """LLaVA 1.5 is published without the sizes that are the class's own, and fine-tuned Qwen2.5-VL without most of
    `vision_config`. Nothing but the features' width has to be given, which must fit between the two."""
    _skip_unknown(kind)
    stock = transformers.AutoConfig.for_model(text)
    fitting = {"gemma3": {"image_size": 896, "patch_size": 14}, "qwen2_5_vl": {"out_hidden_size": stock.hidden_size}}
    fitting |= dict.fromkeys(("qwen3_vl", "qwen3_5", "qwen3_5_moe"), fitting["qwen2_5_vl"])
    vision = {"model_type": MODEL_TOWERS[kind], **fitting.get(kind, {})}
    hf: dict[str, Any] = {"model_type": kind, "text_config": {"model_type": text}, "vision_config": vision}
    family, found = family_of(hf)
    config = family.config_from_hf(found)
    whole = transformers.AutoConfig.for_model(kind, text_config=stock.to_dict(), vision_config=vision)
    theirs = json.loads(whole.to_json_string(use_diff=False))
    complete, found = family_of(theirs)
    expected = complete.config_from_hf(found)
    if kind != "internvl":  # whose class ties by default, which its text_config may not
        assert config == expected
    assert replace(config, tied_embeddings=True) == replace(expected, tied_embeddings=True)
    assert config.num_layers == stock.num_hidden_layers and config.vocab_size == stock.vocab_size


@pytest.mark.parametrize("tower", TOWER_DEFAULTS)
def test_defaults_of_towers_are_those_of_transformers_classes(tower: str) -> None:
    _skip_unknown(tower)
    stock = transformers.AutoConfig.for_model(tower).to_dict()
    square = {key: stock[key][0] if isinstance(stock[key], list | tuple) else stock[key] for key in ("patch_size",)}
    if "image_size" in stock:
        square["image_size"] = stock["image_size"][0] if tower == "internvl_vision" else stock["image_size"]
    found = {key: {**stock, **square}[key] for key in TOWER_DEFAULTS[tower]}
    assert {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()} == dict(
        TOWER_DEFAULTS[tower]
    )


# transformers 4 and 5 read an InternVL config that says so at neither place differently, so that it is left out
@pytest.mark.parametrize(
    ("kind", "own", "inner"),
    [
        (kind, own, inner)
        for kind in ("Llava", "InternVL", "Qwen2_5_VL")
        for own in (False, True)
        for inner in (False, True)
    ]
    + [("Llava", None, False), ("Llava", None, True), ("InternVL", None, True)],
)
def test_embeddings_are_tied_as_in_transformers(kind: str, own: bool | None, inner: bool) -> None:
    given = {} if own is None else {"tie_word_embeddings": own}
    made = getattr(transformers, f"{kind}Config")
    text_config = {
        "model_type": "qwen2_5_vl_text" if kind.startswith("Qwen") else "qwen2",
        "tie_word_embeddings": inner,
    }
    stock = made(text_config=dict(text_config), **given)
    hf = {"model_type": stock.model_type, "vision_config": {}, **given}
    found = resolve(WRAPPINGS[stock.model_type]).text_config({**hf, "text_config": text_config})
    assert found.get("tie_word_embeddings", False) == stock.tie_word_embeddings


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"text_config": {"model_type": "mamba"}}, "language model of type 'mamba' in a llava model, which is"),
        ({"text_config": {"model_type": ["llama"]}}, r"language model of type \['llama'\] in a llava model"),
        ({"text_config": None}, "lacks text_config, which describes the language model"),
        ({"text_config": 3}, "has text_config 3, but a mapping is expected"),
        ({"vision_config": None}, "lacks vision_config"),
        ({"vision_config": {"model_type": "pixtral"}}, "vision tower of type 'pixtral', but a llava model is"),
        ({"vision_config": {"hidden_size": 25, "num_attention_heads": 3}}, "25, which does not divide into 3 heads"),
        ({"vision_config": {"hidden_act": "snake"}}, "vision_config.hidden_act 'snake', but one of gelu"),
        ({"vision_config": {"layer_norm_eps": 0}}, "vision_config.layer_norm_eps 0, but a number above 0"),
        ({"vision_config": {"image_size": 31}}, "31 pixels in vision_config, which are less than a patch of 32"),
        ({"vision_feature_layer": -14}, "vision_feature_layer -14, but a tower of 12 layers is expected to give"),
        ({"vision_feature_layer": []}, r"vision_feature_layer \[\]"),
        ({"vision_feature_select_strategy": "cls"}, "vision_feature_select_strategy 'cls', but default or full"),
        ({"projector_hidden_act": 3}, "projector_hidden_act 3, but one of"),
        (
            {
                "model_type": "gemma3",
                "text_config": {**GEMMA, "hidden_size": None, "num_hidden_layers": None},
                "vision_config": {"image_size": 256},
            },
            "config.json lacks hidden_size, num_hidden_layers",
        ),
        (
            {
                "model_type": "gemma3",
                "text_config": {**GEMMA, "final_logit_softcapping": 5.0},
                "vision_config": {"image_size": 256},
            },
            "final_logit_softcapping 5, which a Gemma 3 with images does not apply",
        ),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], words: str) -> None:
    hf = {"model_type": "llava", "text_config": {"model_type": "llama"}, "vision_config": {}}
    with pytest.raises(UserError, match=words):
        family, text = family_of({**hf, **changes})
        family.config_from_hf(text)


@pytest.mark.parametrize(
    ("kind", "key", "hint"),
    [
        ("nobodys_vl", "text_config", False),
        ("internvl_chat", "llm_config", True),
    ],
)
def test_a_language_model_that_is_read_alone_is_said(kind: str, key: str, hint: bool) -> None:
    hf = {"model_type": kind, key: {"model_type": "mistral"}, "vision_config": {}}
    assert family_of(hf)[1] == hf[key]
    said = vision_left_out(hf)
    assert said is not None and said.startswith(f"model_type {kind!r} is read as its language model alone")
    assert ("-hf" in said) == hint


def test_nothing_is_said_of_supported_models() -> None:
    adopted = {"model_type": "mistral3", "text_config": {"model_type": "mistral"}, "vision_config": {}}
    assert family_of(adopted)[1] == adopted and vision_left_out(adopted) is None
    assert vision_left_out({"model_type": "llava", "text_config": {}, "vision_config": {}}) is None
    assert vision_left_out({"architectures": ["CogVLMForCausalLM"], "vision_config": {}}) is None
    assert vision_left_out({"model_type": "llama"}) is None


RELEASED_LLAVA = {
    "model_type": "llava",
    "text_config": {
        "max_position_embeddings": 4096, "model_type": "llama", "rms_norm_eps": 1e-05, "torch_dtype": "float16",
        "vocab_size": 32064,
    },
    "tie_word_embeddings": False,
    "vision_config": {
        "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "model_type": "clip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768,
    },
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
}  # fmt: skip
"""What counts of LLaVA 1.5's config, as it is published."""


@pytest.mark.parametrize(
    ("kind", "unused"),
    [
        ("Llava", ("vision_tower.encoder.layers.23.", "vision_tower.post_layernorm.")),
        ("InternVL", ()),
        ("LlavaNext", ("vision_tower.encoder.layers.23.", "vision_tower.post_layernorm.")),
        ("LlavaOnevision", ("vision_tower.post_layernorm.",)),
    ],
)
def test_real_sizes_have_transformers_parameters(kind: str, unused: tuple[str, ...]) -> None:
    """LLaVA 1.5 as it was released, the others as their classes are."""
    made = getattr(transformers, f"{kind}Config")
    config = made.from_dict(RELEASED_LLAVA) if kind == "Llava" else made()
    with torch.device("meta"):
        stock = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
        stock.tie_weights()
    counted = [one.numel() for name, one in stock.named_parameters() if not any(part in name for part in unused)]
    family, text = family_of(RELEASED_LLAVA if kind == "Llava" else json.loads(config.to_json_string()))
    assert num_parameters(family.config_from_hf(text)) == sum(counted)


class _Trained(Overlay):
    """An adapter, and a parameter that is no module."""

    def tensor_names(self) -> list[str]:
        return [*(f"layers.0.attention.q_proj.lora_{leaf}" for leaf in "AB"), "vision.image_newline.weight"]


def test_a_parameter_that_is_no_module_is_in_no_adapters_folder(tmp_path: Path) -> None:
    make_model("llava_onevision", tmp_path / "hf")
    source = open_source(tmp_path / "hf")
    names = source.model.names
    assert names.to_hf("vision.image_newline.weight").name == "image_newline"
    assert names.live.to_hf("vision.image_newline.weight").name == "model.image_newline"
    with pytest.raises(UserError, match="image_newline was trained in full beside adapters, and is no module"):
        export_peft(_Trained(source, None), {"rslora": False}, source.model, tmp_path / "out")
