"""Adapters over a base that ties its head to its embedding, with one or both of them trained in full, or adapted: the
same training, answers and exports as PEFT's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from engine.checkpoint.model_folder import open_model
from engine.conversion.commands import Options, run_export, run_merge
from engine.conversion.peft_read import AdapterSource
from engine.errors import UserError
from tests.parity.test_family_training import LIMIT, differences
from tests.support.generation import engine_tokens, random_prompts, stock_greedy
from tests.support.peft_following import ALONE, build, our_losses, peft_start, their_losses
from tests.support.sweeps import sampled
from tests.unit.checkpoint_models import tiny_llama
from tests.unit.test_checkpoint_peft import trained_run

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "head": ({"modules_to_save": ["lm_head"]}, {"trainable": "lm_head"}),
    "embedding": ({"modules_to_save": ["embed_tokens"]}, {"trainable": "embed_tokens"}),
    "both": ({"modules_to_save": ["embed_tokens", "lm_head"]}, {"trainable": "embed_tokens,lm_head"}),
    "one for both": (
        {"modules_to_save": ["lm_head"], "ensure_weight_tying": True},
        {"trainable": "lm_head", "lora.ensure_weight_tying": "true"},
    ),
    "embedding, head adapted": (
        {"modules_to_save": ["embed_tokens"], "target_modules": [*LINEARS, "lm_head"]},
        {"trainable": "embed_tokens", "lora.targets": "all-linear,lm_head"},
    ),
    "head, embedding adapted": (
        {"modules_to_save": ["lm_head"], "target_modules": [*LINEARS, "embed_tokens"]},
        {"trainable": "lm_head", "lora.targets": "all-linear,embed_tokens"},
    ),
    "both adapted": (
        {"target_modules": [*LINEARS, "embed_tokens", "lm_head"]},
        {"lora.targets": "all-linear,embed_tokens,lm_head"},
    ),
}
"""What PEFT is asked for, and the engine."""
QUICK = ("head", "embedding", "one for both")
ADAPTED_TOGETHER = {"target_modules": [*LINEARS, "embed_tokens"], "ensure_weight_tying": True}
LENGTHS = (5, 1, 13, 9)


@pytest.mark.parametrize("case", sampled(CASES, QUICK))
def test_training_follows_peft(case: str, tmp_path: Path) -> None:
    """From the first loss on, with what is saved of head and embedding drawn."""
    theirs, ours = CASES[case]
    model = peft_start("llama", tmp_path, tied=True, **theirs)
    given = {"lora.rank": 3, "lora.alpha": 5, "lora.init_from": tmp_path / "start", **ours}
    losses, lines = our_losses(tmp_path, given)
    assert max(differences(losses, their_losses(model))) < LIMIT
    assert any("a copy of" in line for line in lines) == ("trainable" in ours and case != "one for both")


@pytest.mark.parametrize("family", sampled(("gemma2", "smollm3", "granite"), ("gemma2",)))
def test_families_that_tie_follow_peft(family: str, tmp_path: Path) -> None:
    model = peft_start(family, tmp_path, tied=True, modules_to_save=["lm_head"])
    given = {"lora.rank": 3, "lora.alpha": 5, "lora.init_from": tmp_path / "start", "trainable": "lm_head"}
    assert max(differences(our_losses(tmp_path, given)[0], their_losses(model))) < LIMIT


def _logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(60).reshape(2, 30)).logits


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(theirs, id=case, marks=() if case in QUICK else pytest.mark.slow)
        for case, (theirs, _) in CASES.items()
    ]
    + [pytest.param(ADAPTED_TOGETHER, id="adapted together")],
)
def test_answers_and_exports_are_pefts(settings: dict[str, Any], tmp_path: Path) -> None:
    """The folder beside the base, merged into it, and as a run's, exported again in both forms."""
    peft = peft_start("llama", tmp_path, tied=True, **settings).eval()
    base, start = tmp_path / "hf", tmp_path / "start"
    prompts = random_prompts(67, LENGTHS)
    expected, logits = stock_greedy(peft, prompts, 12), _logits(peft)
    assert expected != stock_greedy(AutoModelForCausalLM.from_pretrained(base), prompts, 12)
    assert engine_tokens(base, prompts, 12, adapter=start) == expected
    ties = bool(settings.get("ensure_weight_tying"))
    run_merge(base, start, tmp_path / "merged", base_dtype=None, options=Options())
    found = open_model(base)
    source = AdapterSource(start, names=found.names, decoder=found.decoder, with_saved_modules=True)
    tensors = {name: source.read_whole(name) for name in source.tensor_names()}
    together = ties and "modules_to_save" in settings
    run = trained_run(tmp_path / "run", tensors, base, alpha=5.0, rank=3, ensure_weight_tying=together)
    assert engine_tokens(base, prompts, 12, adapter=run) == expected
    whole = {"merge": True, "base": None, "step": None, "options": Options()}
    run_export(run, tmp_path / "merged again", form="hf", **whole)
    run_export(run, tmp_path / "adapter", form="peft", **{**whole, "merge": False})
    for folder in (tmp_path / "merged", tmp_path / "merged again"):
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        torch.testing.assert_close(_logits(model), logits, rtol=0, atol=1e-4)
        assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] == together
        assert ("lm_head.weight" in load_file(folder / "model.safetensors")) == (not together)
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    torch.testing.assert_close(_logits(again), logits, rtol=0, atol=1e-6)
    one, other = (load_file(place / "adapter_model.safetensors") for place in (start, tmp_path / "adapter"))
    one = {key: value for key, value in one.items() if ".base_layer." not in key}  # copies of the base
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(
    ("theirs", "ours", "words"),
    [
        ("one for both", {"trainable": "lm_head"}, "set lora.ensure_weight_tying to true"),
        ("head", {"trainable": "lm_head", "lora.ensure_weight_tying": "true"}, "set lora.ensure_weight_tying to false"),
        ("head", {}, "add lm_head to trainable"),
        ("both", {"trainable": "embed_tokens"}, "add lm_head to trainable"),
        (None, {"lora.targets": "all-linear,embed_tokens"}, "start from one without it, or merge it into the base"),
    ],
)
def test_starts_that_would_train_otherwise_are_refused(
    theirs: str | None, ours: dict[str, Any], words: str, tmp_path: Path
) -> None:
    peft_start("llama", tmp_path, tied=True, **(ADAPTED_TOGETHER if theirs is None else CASES[theirs][0]))
    given = {"lora.rank": 3, "lora.alpha": 5, "lora.targets": "all-linear", "lora.init_from": tmp_path / "start"}
    with pytest.raises(UserError, match=words):
        build(tmp_path, given | ours, ALONE)


@pytest.mark.parametrize(
    ("tied", "given", "words"),
    [
        (False, {"trainable": "lm_head"}, "has a head of its own"),
        (True, {}, "neither embed_tokens nor lm_head is in trainable"),
        (True, {"lora.targets": "all-linear,lm_head", "trainable": "embed_tokens"}, "adapters that embedding and head"),
    ],
)
def test_tying_that_means_nothing_is_refused(tied: bool, given: dict[str, Any], words: str, tmp_path: Path) -> None:
    tiny_llama(tmp_path / "hf", tied=tied)
    with pytest.raises(UserError, match=words):
        build(tmp_path, {"lora.ensure_weight_tying": "true", **given}, ALONE)


def test_a_folder_whose_tied_tensors_differ_is_refused(tmp_path: Path) -> None:
    peft_start("llama", tmp_path, tied=True, modules_to_save=["embed_tokens", "lm_head"])
    path = tmp_path / "start" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "ensure_weight_tying": True}))
    found = open_model(tmp_path / "hf")
    with pytest.raises(UserError, match=r"lm_head\.weight, which differ.*set that to false"):
        AdapterSource(tmp_path / "start", names=found.names, decoder=found.decoder, with_saved_modules=True)
