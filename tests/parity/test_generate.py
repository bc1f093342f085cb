"""Greedy generation against transformers' and PEFT's generate: on real weights, and on random models of the families
that differ in attention. Rows come and go in one batch; transformers has each prompt alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from engine.checkpoint.model_folder import open_model
from engine.checkpoint.model_weights import open_source
from engine.conversion.import_export import import_checkpoint
from engine.conversion.peft_read import AdapterSource
from engine.inference.options import Limits, Sampling
from engine.quantization.encoding import encoding
from tests.support.family_models import make_model
from tests.support.family_table import FAMILIES
from tests.support.generation import STORIES, engine_answers, engine_tokens, random_prompts, stock_greedy
from tests.support.sweeps import sampled
from tests.unit.test_checkpoint_peft import trained_run

LENGTHS = (5, 1, 13, 9)
INDEXED = ("deepseek v32", "glm moe dsa")
"""Generation has no choice of keys: rows are no longer than what a query sees."""
ATTENTION = (
    "llama fused",
    "mistral",
    "qwen3",
    "gemma3",
    "gemma2",
    "phi3 longrope",
    "gpt oss",
    "deepseek v3",
    "qwen3.5",
    "falcon h1",
)
"""Full, with a window, with norms on queries and keys, with two ropes and windows, with soft caps, partly rotated, with
sinks, latent, with the states of linear attention, and beside those of Mamba2 in the same layer."""


def test_real_weights(stories_dir: Path) -> None:
    expected = stock_greedy(AutoModelForCausalLM.from_pretrained(stories_dir), STORIES, 64)
    assert engine_tokens(stories_dir, STORIES, 64) == expected


@pytest.mark.parametrize(
    "name", [name if name in ATTENTION else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_families(name: str, tmp_path: Path) -> None:
    model = make_model(name, tmp_path / "hf", **({"index_topk": 64} if name in INDEXED else {}))
    prompts = random_prompts(67, LENGTHS)
    expected = stock_greedy(model, prompts, 24)
    assert len({tuple(answer) for answer in expected}) == len(LENGTHS), "the prompts make no difference"
    assert engine_tokens(tmp_path / "hf", prompts, 24) == expected


@pytest.mark.parametrize("name", sampled(ATTENTION, ("gemma3", "gpt oss", "deepseek v3", "qwen3.5")))
def test_members_of_a_group_share_their_prompt(name: str, tmp_path: Path) -> None:
    """Three sampled rows of each prompt with five slots, so that groups are cut: the same tokens as where each has
    the prompt to itself. Rows of a group differ, so each needs what it wrote itself."""
    make_model(name, tmp_path / "hf")
    prompts = [prompt for prompt in random_prompts(67, (5, 17, 1, 33)) for _ in range(3)]
    limits, sampling = Limits(max_new_tokens=30, slots=5), Sampling(temperature=1.0, seed=3)
    shared, alone = (
        [answer.ids for answer in engine_answers(tmp_path / "hf", prompts, limits, sampling=sampling, group=group)]
        for group in (3, 1)
    )
    assert shared == alone
    assert len(set(shared)) == len(prompts)


def test_a_batch_of_different_lengths_is_each_alone(stories_dir: Path) -> None:
    together = engine_tokens(stories_dir, STORIES, 24, slots=4)
    alone = [engine_tokens(stories_dir, [prompt], 24, slots=1)[0] for prompt in STORIES]
    assert together == alone


def test_a_partitioned_base(stories_dir: Path, tmp_path: Path) -> None:
    import_checkpoint(open_source(stories_dir), tmp_path / "base", tensor=2)
    assert engine_tokens(tmp_path / "base", STORIES, 12) == engine_tokens(stories_dir, STORIES, 12)


def _adapter(stories_dir: Path, folder: Path, **options: object) -> PeftModel:
    torch.manual_seed(3)
    config = LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **options)  # B is not zero
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(stories_dir), config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]},
        {"target_modules": ["k_proj"], "modules_to_save": ["up_proj"], "use_rslora": True},
    ],
    ids=["linears", "full"],
)
def test_an_adapter_that_is_not_merged(stories_dir: Path, tmp_path: Path, options: dict[str, object]) -> None:
    model = _adapter(stories_dir, tmp_path / "adapter", **options)
    expected = stock_greedy(model, STORIES, 32)
    assert expected != stock_greedy(AutoModelForCausalLM.from_pretrained(stories_dir), STORIES, 32)
    assert engine_tokens(stories_dir, STORIES, 32, adapter=tmp_path / "adapter") == expected


def test_a_runs_adapter(stories_dir: Path, tmp_path: Path) -> None:
    expected = stock_greedy(_adapter(stories_dir, tmp_path / "adapter", target_modules="all-linear"), STORIES, 16)
    base = open_model(stories_dir)
    source = AdapterSource(tmp_path / "adapter", names=base.names, decoder=base.decoder)
    tensors = {name: source.read_whole(name) for name in source.tensor_names()}
    run = trained_run(tmp_path / "run", tensors, stories_dir, alpha=8)
    assert engine_tokens(stories_dir, STORIES, 16, adapter=run) == expected


@pytest.mark.parametrize("name", ["int8", "nf4"])
def test_an_encoded_base(name: str, stories_dir: Path) -> None:
    """transformers with the weights that the encoding makes of the linears."""
    model = AutoModelForCausalLM.from_pretrained(stories_dir)
    code = encoding(name)
    changed = 0
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("_proj.weight"):
                code.decode(code.encode(parameter.data), parameter.data)
                changed += 1
    assert changed == 35
    assert engine_tokens(stories_dir, STORIES, 24, base_dtype=name) == stock_greedy(model, STORIES, 24)


def test_stop_tokens_and_texts(stories_dir: Path) -> None:
    """Rows end where transformers' answer has the token, and before the text that its ids spell."""
    (expected,) = stock_greedy(AutoModelForCausalLM.from_pretrained(stories_dir), [STORIES[0]], 40)
    stop = next(token for token in expected[5:] if token not in expected[:5])
    first = expected.index(stop)
    (answer,) = engine_answers(stories_dir, [STORIES[0]], Limits(max_new_tokens=40, stop_ids=frozenset((stop,))))
    assert (list(answer.ids), answer.ending) == (expected[: first + 1], "stop_token")
    assert answer.text == "".join(f" {token}" for token in expected[:first])
    text = f" {expected[first - 1]} {stop}"
    (answer,) = engine_answers(stories_dir, [STORIES[0]], Limits(max_new_tokens=40, stop_texts=(text, "never")))
    whole = "".join(f" {token}" for token in expected)
    assert (answer.text, answer.ending) == (whole[: whole.index(text)], "stop_text")


def test_rows_that_end_at_different_times(stories_dir: Path) -> None:
    """A row that goes on moves into the slot of one that has ended, and the next prompt begins beside it."""
    whole = stock_greedy(AutoModelForCausalLM.from_pretrained(stories_dir), STORIES, 40)
    in_all = set(whole[0]).intersection(*whole)
    stop = max(in_all, key=lambda token: len({answer.index(token) for answer in whole}))
    order = sorted(range(len(whole)), key=lambda row: whole[row].index(stop))
    expected = [whole[row][: whole[row].index(stop) + 1] for row in order]
    assert len(expected[0]) < len(expected[2]), "the first row must leave a gap below the third"
    limits = Limits(max_new_tokens=40, slots=3, stop_ids=frozenset((stop,)))
    answers = engine_answers(stories_dir, [STORIES[row] for row in order], limits)
    assert [list(answer.ids) for answer in answers] == expected
    assert {answer.ending for answer in answers} == {"stop_token"}
