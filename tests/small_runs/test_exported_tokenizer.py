"""What lies beside exported weights: the run's tokenizer, its chat template, and a model card."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.checkpoint.tokenizer_files import TrainedTokenizer
from engine.conversion.commands import Options, run_export, run_merge
from engine.data.build_store import Request, preprocess
from engine.data.named_templates import template_text
from engine.data.tokenizer import ChatOptions, load_tokenizer
from engine.errors import UserError
from tests.small_runs.conftest import SmallRuns
from tests.support.commands import run_tool

TALK = [{"role": "user", "content": "abab"}, {"role": "assistant", "content": "baba"}]
OWN = "{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"
CUSTOM = "{% for message in messages %}{{ message.role + ': ' + message.content }}{{ eos_token }}{% endfor %}"


def write_tokenizer(folder: Path, template: str | None, *, tokenizer_class: str | None) -> None:
    """A tokenizer.json of characters, and the settings beside it."""
    letters = "\n aabcderstuimnopfhlvkA.:<|>_#IRBNwghqyE"
    vocabulary = {token: number for number, token in enumerate(["<s>", "</s>", "<unk>", *dict.fromkeys(letters)])}
    assert len(vocabulary) <= 48
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>"])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings |= {} if template is None else {"chat_template": template}
    settings |= {} if tokenizer_class is None else {"tokenizer_class": tokenizer_class}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture
def chat(run: SmallRuns) -> SmallRuns:
    """Runs on a conversation, with a model that has a chat template of its own."""
    (run.place.model / "tokenizer.model").unlink()
    write_tokenizer(run.place.model, OWN, tokenizer_class=None)
    run.place.records(*[{"messages": TALK}] * 4)
    run.place.set(data__seq_length=240, train__steps=2)
    return run


def export(run: SmallRuns, form: Any, out: Path, **options: Any) -> Path:
    quick = Options(proof=False)
    run_export(run.folder, out, form=form, merge=form == "hf", base=None, step=None, options=quick, **options)
    return out


def rendered(folder: Path) -> str:
    """The conversation by the tokenizer that stock transformers opens in a folder."""
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    ids = tokenizer("abab cab", add_special_tokens=False)["input_ids"]
    assert len(ids) == 8 and ids == load_tokenizer(folder).encode("abab cab")
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    return str(tokenizer.apply_chat_template(TALK, tokenize=False))


def test_the_template_that_was_trained_with_travels(chat: SmallRuns, tmp_path: Path) -> None:
    file = tmp_path / "custom.jinja"
    file.write_text(CUSTOM)
    chat(data__chat_template=str(file))
    file.write_text(OWN)  # what a run was trained with is not what that file has become
    for form in ("peft", "hf"):
        folder = export(chat, form, tmp_path / form)
        assert rendered(folder) == "user: abab</s>assistant: baba</s>"
        assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"] == CUSTOM
    run_merge(chat.place.model, tmp_path / "peft", tmp_path / "merged", base_dtype=None, options=Options(proof=False))
    assert rendered(tmp_path / "merged") == "user: abab</s>assistant: baba</s>"
    base = ["--model", chat.place.model]
    for adapter in (["--adapter", chat.folder], ["--adapter", tmp_path / "peft", *base]):
        assert prompt_tokens(chat, *adapter) == len("user: abab") + 1
    assert prompt_tokens(chat, *base) == len("abab") + 1


def test_the_template_of_a_processor_travels(chat: SmallRuns, tmp_path: Path) -> None:
    """An adapter leaves without the files of a processor, and a tokenizer's own template is another."""
    config = chat.place.model / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "vision_config": {"depth": 1}}))
    (chat.place.model / "chat_template.json").write_text(json.dumps({"chat_template": CUSTOM}))
    chat()
    for form in ("peft", "hf"):
        folder = export(chat, form, tmp_path / form)
        assert rendered(folder) == "user: abab</s>assistant: baba</s>"
    (tmp_path / "peft" / "chat_template.json").unlink()
    base = ["--model", chat.place.model]
    for adapter in (["--adapter", chat.folder], ["--adapter", tmp_path / "peft", *base]):
        assert prompt_tokens(chat, *adapter) == len("user: abab") + 1
    TrainedTokenizer(None, OWN).write_template(tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "chat_template.json").read_text())["chat_template"] == OWN


def prompt_tokens(run: SmallRuns, *options: object) -> int:
    """How many tokens generate.py --chat makes of what a user says."""
    prompts = run.place.folder / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "abab"}) + "\n")
    result = run_tool("generate", "--chat", "--prompts", prompts, "--max-new-tokens", 1, *options)
    return int(json.loads(result.stdout)["prompt_tokens"])


def test_the_bases_own_template_and_tokenizer(chat: SmallRuns, tmp_path: Path) -> None:
    (chat.place.model / "README.md").write_text("the base's")
    chat()
    folder = export(chat, "peft", tmp_path / "adapter", base_name="somebody/base")
    assert rendered(folder) == "abab</s>baba</s>"
    assert not (folder / "chat_template.jinja").exists() and not (folder / "config.json").exists()
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "somebody/base"
    card = (folder / "README.md").read_text()
    assert card.startswith('---\nbase_model: "somebody/base"\nlibrary_name: peft\n')
    for row in ("| Rank | 2 |", "| Steps | 2 |", "| Targets | `", "| Training loss of the last step | "):
        assert row in card, card
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(chat.place.model), str(folder))
    with pytest.raises(UserError, match="--base-name is written into an adapter"):
        export(chat, "hf", tmp_path / "hf", base_name="somebody/base")


def test_another_tokenizer_than_the_bases(chat: SmallRuns, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_tokenizer(other, None, tokenizer_class="PreTrainedTokenizerFast")
    (tmp_path / "secret").write_text("not the tokenizer's")
    os.symlink(tmp_path / "secret", other / "vocab.txt")
    said = chat(data__tokenizer=str(other), data__chat_template="alpaca")
    assert "done" in said
    for form in ("peft", "hf"):
        folder = export(chat, form, tmp_path / form)
        assert (folder / "tokenizer.json").read_bytes() == (other / "tokenizer.json").read_bytes()
        assert "### Response:\nbaba</s>" in rendered(folder)
        assert not (folder / "vocab.txt").exists()
        assert (folder / "chat_template.jinja").read_text() == template_text("alpaca")


def test_a_store_says_what_its_conversations_were_rendered_with(chat: SmallRuns, tmp_path: Path) -> None:
    request = Request(
        files=(chat.place.train,), tokenizer=chat.place.model, chat=ChatOptions(template="vicuna"), workers=1
    )
    preprocess(request, tmp_path / "store")
    chat(data__train=str(tmp_path / "store"))
    assert "USER: abab ASSISTANT: baba</s>" in rendered(export(chat, "peft", tmp_path / "adapter"))
    said = chat(data__chat_template="alpaca")
    assert "were rendered with another chat template than that of data.chat_template" in said
