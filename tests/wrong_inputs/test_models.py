"""Wrong configs of models and wrong weights: one sentence, before any weight is read."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.wrong_inputs.workplace import CONFIG, Workplace, run_here

Q = "model.layers.0.self_attn.q_proj.weight"
KINDS: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": "sixteen"}, "hidden_size 'sixteen', but a whole number above 0 is expected"),
    ({"hidden_size": 0}, "hidden_size 0, but a whole number above 0"),
    ({"hidden_size": 16.5}, "hidden_size 16.5, but a whole number"),
    ({"hidden_size": [16]}, "hidden_size [16], but a whole number"),
    ({"hidden_size": True}, "hidden_size true, but a whole number"),
    ({"intermediate_size": -24}, "intermediate_size -24"),
    ({"num_hidden_layers": 0}, "num_hidden_layers 0, but a whole number from 1 to 1000"),
    ({"num_hidden_layers": 10**6}, "num_hidden_layers 1000000, but at most 1,000 is expected"),
    ({"num_hidden_layers": 3}, "lacks model.layers.2.input_layernorm.weight"),
    ({"num_hidden_layers": 1}, "has model.layers.1.input_layernorm.weight"),
    ({"num_attention_heads": 3}, "3 num_attention_heads and 2 num_key_value_heads"),
    ({"num_attention_heads": 6}, "hidden_size 16, which does not divide into 6 num_attention_heads"),
    ({"head_dim": 5}, "heads of 5 features, which do not pair up"),
    ({"head_dim": 6}, "with shape [16, 16], but its config.json calls for [24, 16]"),
    ({"vocab_size": "many"}, "vocab_size 'many'"),
    ({"vocab_size": 40}, "shape [48, 16], but its config.json calls for [40, 16]"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps 'small', but a number above 0"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps nan"),
    ({"rope_theta": -1.0}, "rope_theta -1.0"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings 'no', but true or false is expected"),
    ({"tie_word_embeddings": True}, "its lm_head.weight differs from model.embed_tokens.weight"),
    ({"attention_bias": 1}, "attention_bias 1, but true or false"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu', but the MLP of a llama model"),
    ({"rope_scaling": "linear"}, "rope_scaling 'linear', but a mapping is expected"),
    ({"rope_scaling": {"type": "linear"}}, "rotary embedding of type linear without factor"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3 without low_freq_factor"),
    ({"rope_scaling": {"type": "linear", "factor": "two"}}, "rope_scaling.factor 'two'"),
    ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope type 'ntk' in config.json is not supported"),
    ({"rope_scaling": {"type": "dynamic"}}, "rotary embedding of type dynamic without factor"),
    ({"model_type": None}, "a model without model_type (LlamaForCausalLM) in config.json is not supported"),
    ({"model_type": ["llama"]}, "model_type ['llama'], but text is expected"),
    ({"model_type": "dots1", "n_routed_experts": "x"}, "transformers cannot read config.json of a dots1 model"),
    ({"model_type": "dots1", "num_experts_per_tok": None}, "transformers cannot build a dots1 model of this config"),
    ({"model_type": "llava", "text_config": [1]}, "text_config [1], but a mapping is expected"),
    ({"model_type": "mistral", "sliding_window": "far"}, "sliding_window 'far'"),
    ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": 3}, "layer_types 3, but a list of texts"),
    ({"model_type": "gemma2", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar 0"),
    ({"model_type": "granite", "logits_scaling": 0}, "logits_scaling 0"),
    ({"model_type": "minicpm", "scale_emb": "x"}, "scale_emb 'x'"),
    ({"model_type": "smollm3", "no_rope_layer_interval": 0}, "no_rope_layer_interval 0"),
    (
        {"model_type": "phi3", "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
        "1 numbers in short_factor for 4 rotated features",
    ),
    ({"model_type": "olmo2"}, "self_attn.q_norm.weight"),
]


Refused = Callable[..., None]


def test_without_a_fault_it_trains(place: Workplace, capsys: pytest.CaptureFixture[str]):
    """So that each refusal is for its own reason."""
    seen = run_here("pretrain_lora", place.arguments(), capsys)
    assert seen.status == 0 and "step 1/1" in seen.printed and "reading weights" in seen.printed


@pytest.mark.parametrize(("changes", "words"), KINDS, ids=lambda value: str(value)[:50])
def test_configs(changes: dict[str, Any], words: str, place: Workplace, refused: Refused):
    place.change_config(**changes)
    refused(words)


def test_a_size_given_as_null(place: Workplace, refused: Refused):
    for key, words in (("vocab_size", "config.json lacks vocab_size"), ("rms_norm_eps", "has rms_norm_eps null")):
        (place.model / "config.json").write_text(json.dumps({**CONFIG, key: None}))
        refused(words)


TEXTS = [
    (b"", "is not valid JSON"),
    (b"{", "is not valid JSON"),
    (b"[1]", "holds no JSON mapping"),
    (bytes(range(256)), "is not valid JSON"),
    (b"[" * 100_000, "is not valid JSON"),
]


@pytest.mark.parametrize(("content", "words"), TEXTS, ids=["empty", "open", "list", "binary", "deep"])
def test_config_files(content: bytes, words: str, place: Workplace, refused: Refused):
    (place.model / "config.json").write_bytes(content)
    refused(words)


def _tensor(change: Callable[[torch.Tensor], torch.Tensor], name: str = Q) -> Callable[[Workplace], None]:
    return lambda place: place.change_tensors(lambda tensors: tensors.update({name: change(tensors[name])}))


def _bytes(change: Callable[[bytes], bytes]) -> Callable[[Workplace], None]:
    return lambda place: _rewrite(place, change)


def _rewrite(place: Workplace, change: Callable[[bytes], bytes]) -> None:
    place.weights.write_bytes(change(place.weights.read_bytes()))


def _renamed(name: str) -> Callable[[Workplace], None]:
    return lambda place: _rename(place, name)


def _rename(place: Workplace, name: str) -> None:
    place.weights.rename(place.model / name)


SHARD = "model-00001-of-00002.safetensors"


def _index(content: Any) -> Callable[[Workplace], None]:
    """With an index, or the text of one, beside the only shard."""

    def change(place: Workplace) -> None:
        _rename(place, SHARD)
        text = content if isinstance(content, str) else json.dumps(content)
        (place.model / "model.safetensors.index.json").write_text(text)

    return change


def _gptq(place: Workplace) -> None:
    place.change_config(quantization_config={"quant_method": "gptq", "bits": 4})
    place.change_tensors(lambda tensors: tensors.update({Q.replace("weight", "qweight"): tensors.pop(Q).int()}))


def _hqq(place: Workplace) -> None:
    place.change_config(quantization_config={"quant_method": "hqq"})
    place.change_tensors(lambda tensors: tensors.update({Q.replace("weight", "W_q"): tensors.pop(Q).to(torch.uint8)}))


WEIGHTS: dict[str, tuple[Callable[[Workplace], Any], str]] = {
    "a tensor is missing": (lambda place: place.change_tensors(lambda tensors: tensors.pop(Q)), f"lacks {Q}"),
    "a tensor too many": (
        lambda place: place.change_tensors(lambda tensors: tensors.update({"model.layers.0.extra": torch.ones(1)})),
        "has model.layers.0.extra, which a llama model",
    ),
    "half of its rows": (_tensor(lambda x: x[:8].clone()), "with shape [8, 16], but its config.json"),
    "transposed": (
        _tensor(lambda x: x.T.contiguous(), "model.layers.0.mlp.down_proj.weight"), "with shape [24, 16]"
    ),
    "flat": (_tensor(lambda x: x.flatten()), "with shape [256]"),
    "int8": (_tensor(lambda x: x.to(torch.int8)), "as int8, which is no dtype of weights but of codes"),
    "float8": (_tensor(lambda x: x.to(torch.float8_e4m3fn)), "as float8_e4m3fn, which is no dtype of weights"),
    "complex": (_tensor(lambda x: x.to(torch.complex64)), f"stores {Q} as C64, which is not supported"),
    "gptq": (_gptq, "lacks model.layers.0.self_attn.q_proj.scales"),
    "hqq": (_hqq, "is stored encoded (quantization_config.quant_method hqq in config.json"),
    "cut off": (_bytes(lambda data: data[:-10]), "is damaged or truncated (its tensors take"),
    "cut off in the header": (_bytes(lambda data: data[:20]), "is damaged or truncated (its header would take"),
    "empty file": (_bytes(lambda data: b""), "is damaged or truncated (it has 0 bytes"),
    "zeros": (_bytes(lambda data: bytes(len(data))), "is damaged or truncated"),
    "noise": (_bytes(lambda data: os.urandom(len(data))), "is damaged or truncated"),
    "header without end": (_bytes(lambda data: struct.pack("<Q", 2**60) + b"{}"), "is damaged or truncated"),
    "no weights": (lambda place: place.weights.unlink(), "has no weights: expected model.safetensors"),
    "a pickle": (_renamed("pytorch_model.bin"), "holds pytorch_model.bin only, a pickle, which is never opened here"),
    "gguf": (_renamed("model.gguf"), "has no weights"),
    "shards without index": (_renamed(SHARD), "has no weights"),
    "index to nowhere": (_index({"weight_map": {Q: "2-of-00002.safetensors"}}), "of-00002.safetensors is missing"),
    "index to outside": (_index({"weight_map": {Q: "../place.safetensors"}}), "which is not in its own folder"),
    "index without map": (_index({"metadata": {}}), "has no weight_map from tensor names to files"),
    "index of numbers": (_index({"weight_map": {Q: 1}}), "has no weight_map from tensor names to files"),
    "index to a tensor that is not there": (_index({"weight_map": {"more": SHARD}}), "lacks more, which"),
    "index of some tensors": (_index({"weight_map": {Q: SHARD}}), "has lm_head.weight, model.embed_tokens.weight"),
    "index that is no JSON": (_index("{"), "index.json is not valid JSON"),
}  # fmt: skip


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights(case: str, place: Workplace, refused: Refused):
    change, words = WEIGHTS[case]
    change(place)
    refused(words)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nowhere", "model.path is nowhere, which is not a folder"),
        (
            "meta-llama/Llama-2-7b-hf",
            "meta-llama/Llama-2-7b-hf, which is not a folder, but looks like a model on the Hugging Face hub",
        ),
        ("", "model.path is empty"),
    ],
)
def test_paths(path: str, words: str, place: Workplace, refused: Refused):
    place.set(model__path=path)
    refused(words)


def test_other_folders(place: Workplace, refused: Refused):
    for folder, words in ((place.adapter, "has no config.json"), (place.weights, "which is not a folder")):
        place.set(model__path=folder)
        refused(words)
