"""Token ids and masks of conversations against TRL's, for every chat template that TRL has.

TRL keeps the templates of released models in a folder, and for most of them a second one with marks around what is
learnt. What its SFTTrainer learns with `assistant_only_loss` is what transformers reads from these marks. A template
that a new version of TRL brings is compared too.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers import AddedToken, PreTrainedTokenizerFast

from engine.data.opened_tokenizer import HuggingFaceTokenizer
from engine.errors import UserError
from tests.parity.trl_training import NEEDS_TRL
from tests.support.answer_data import build_pairs
from tests.support.shared_data import shared

pytestmark = NEEDS_TRL

_SPEC = importlib.util.find_spec("trl")
FOLDER = Path(_SPEC.origin).parent / "chat_templates" if _SPEC and _SPEC.origin else Path("nowhere")
STOCK = sorted(path.stem for path in FOLDER.glob("*.jinja") if not path.stem.endswith("_training"))

WITHOUT_MARKS = {"gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5", "llama3_1", "llama3_2"}
"""Templates of which TRL has no training form, so that its trainer refuses them."""

PARTS_ONLY = {"idefics3", "smolvlm", "llava_next"}
"""Templates that read lists of parts; TRL makes such lists where it has an image processor, the engine always."""

SOURCES = ["minimind", "llama2_32000"]
"""Bytes and sentencepiece; a vocabulary that drops characters loses transformers' masks."""

U, A, S = "user", "assistant", "system"
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo", "days": 2}}}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one turn": [{"role": U, "content": "Hi"}, {"role": A, "content": "Hello there."}],
    "three turns": [
        {"role": U, "content": "One?"}, {"role": A, "content": "The first."},
        {"role": U, "content": "Two?"}, {"role": A, "content": "第二个。\n\nNew line"},
        {"role": U, "content": "Three?"}, {"role": A, "content": "Last 🙂."},
    ],
    "system": [
        {"role": S, "content": "Be brief."}, {"role": U, "content": "a"}, {"role": A, "content": "b"},
        {"role": U, "content": "c"}, {"role": A, "content": "d"},
    ],
    "assistant first": [
        {"role": A, "content": "欢迎！"}, {"role": U, "content": "你是谁"}, {"role": A, "content": "我是助手"},
    ],
    "user last": [{"role": U, "content": "a"}, {"role": A, "content": "b"}, {"role": U, "content": "c"}],
    "spaces": [
        {"role": U, "content": " a\n"}, {"role": A, "content": "\n b \n\n"},
        {"role": U, "content": "\n"}, {"role": A, "content": "  c"},
    ],
    "empty": [
        {"role": U, "content": "a"}, {"role": A, "content": ""},
        {"role": U, "content": ""}, {"role": A, "content": "c"},
    ],
    "two in a row": [
        {"role": U, "content": "a"}, {"role": U, "content": "b"},
        {"role": A, "content": "c"}, {"role": A, "content": "d"},
    ],
    "thoughts within": [
        {"role": U, "content": "a"}, {"role": A, "content": "<think>\nhm\n</think>\n\nb"},
        {"role": U, "content": "c"}, {"role": A, "content": "<think>\nso\n</think>\n\nd"},
    ],
    "thoughts apart": [
        {"role": U, "content": "a"}, {"role": A, "reasoning_content": "hm", "content": "b"},
        {"role": U, "content": "c"}, {"role": A, "reasoning_content": "so\n", "content": "d"},
    ],
    "tools": [
        {"role": U, "content": "weather?"}, {"role": A, "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "weather", "content": "rain"}, {"role": A, "content": "Rain."},
        {"role": U, "content": "thanks"}, {"role": A, "content": "Welcome."},
    ],
    "tools with words": [
        {"role": S, "content": "s"}, {"role": U, "content": "?"},
        {"role": A, "content": "Let me look.", "tool_calls": [CALL, CALL]},
        {"role": "tool", "name": "weather", "content": "rain"}, {"role": "tool", "name": "weather", "content": "sun"},
        {"role": A, "content": "Both."},
    ],
}  # fmt: skip


@cache
def tokenizer_with(source: str, name: str) -> PreTrainedTokenizerFast:
    """A real vocabulary to which a template's control tokens are added."""
    template = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    loaded: Any = PreTrainedTokenizerFast.from_pretrained(str(shared(f"tokenizers/{source}")), local_files_only=True)
    written = sorted(set(re.findall(r"<[|｜][^<>{}'\s]+[|｜]?>|<[a-z_]+_of_[a-z]+>|<[a-z]*\|>|\[/?INST\]", template)))
    loaded.add_tokens([AddedToken(token, special=True, normalized=False) for token in [*written, "<s>", "</s>"]])
    loaded.bos_token, loaded.eos_token = "<s>", "</s>"
    loaded.chat_template = template
    return loaded


def trls_answers(
    tokenizer: PreTrainedTokenizerFast, name: str, chat: list[dict[str, Any]]
) -> tuple[list[int], list[bool]]:
    """As its SFTTrainer does it with assistant_only_loss."""
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    template = None
    if not has_generation_markers(tokenizer.chat_template):
        template = get_training_chat_template(tokenizer)
    made = tokenizer.apply_chat_template(
        _read_by(name, chat), chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    return list(made["input_ids"]), [bool(flag) for flag in made["assistant_masks"]]


def trls_answer(
    tokenizer: PreTrainedTokenizerFast, name: str, chat: list[dict[str, Any]]
) -> tuple[list[int], list[bool]]:
    """As its DPOTrainer and KTOTrainer do it with the last turn as answer."""
    from trl.data_utils import common_prefix_length

    chat = _read_by(name, chat)
    prompt = tokenizer.apply_chat_template(chat[:-1], add_generation_prompt=True, return_dict=True)["input_ids"]
    ids = tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]
    same = common_prefix_length(prompt, ids)
    return list(ids), [False] * same + [True] * (len(ids) - same)


def _read_by(name: str, chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if name not in PARTS_ONLY:
        return chat
    return [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in chat]


def _compare(name: str, source: str, trls: Callable[..., Any], chats: list[str], learn: Any) -> None:
    """Compares every conversation that TRL takes."""
    tokenizer = tokenizer_with(source, name)
    ours = HuggingFaceTokenizer(tokenizer, Path(name))
    compared = 0
    for what in chats:
        try:
            expected = trls(tokenizer, name, CHATS[what])
        except (TemplateError, TypeError, ValueError):  # the template refuses this conversation
            with pytest.raises(UserError, match="refuses these messages"):
                ours.apply_chat(CHATS[what], learn=learn)
            continue
        found = ours.apply_chat(CHATS[what], learn=learn)
        assert _shown(tokenizer, *found) == _shown(tokenizer, *expected), what
        assert found == expected, what
        compared += any(expected[1])
    assert compared >= 3, "next to nothing was compared"


def _shown(tokenizer: PreTrainedTokenizerFast, ids: list[int], mask: list[bool]) -> str:
    """A conversation with what is learnt in brackets."""
    pieces = [(tokenizer.decode([token]), flag) for token, flag in zip(ids, mask, strict=True)]
    return "".join(f"⟦{piece}⟧" if flag else piece for piece, flag in pieces).replace("⟧⟦", "")


@pytest.mark.parametrize("name", [name for name in STOCK if name not in WITHOUT_MARKS])
@pytest.mark.parametrize("source", [SOURCES[0], pytest.param(SOURCES[1], marks=pytest.mark.slow)])
def test_all_answers(name: str, source: str) -> None:
    _compare(name, source, trls_answers, list(CHATS), "answers")


@pytest.mark.parametrize("name", STOCK)
@pytest.mark.parametrize("source", [SOURCES[0], pytest.param(SOURCES[1], marks=pytest.mark.slow)])
def test_the_last_answer(name: str, source: str) -> None:
    _compare(name, source, trls_answer, [what for what in CHATS if what != "user last"], "last")


@pytest.mark.parametrize("name", sorted(WITHOUT_MARKS))
def test_templates_that_trl_cannot_mask(name: str) -> None:
    """All that is learnt is the answers with what ends them; TRL's trainer refuses these templates."""
    tokenizer = tokenizer_with(SOURCES[0], name)
    end = "<|eot_id|>" if name.startswith("llama3") else "<turn|>\n"
    ids, mask = HuggingFaceTokenizer(tokenizer, Path(name)).apply_chat(CHATS["system"])
    learnt = re.findall("⟦([^⟧]*)⟧", _shown(tokenizer, ids, mask))
    assert learnt == [f"b{end}", f"d{end}"]
    assert ids == tokenizer.apply_chat_template(CHATS["system"], return_dict=True)["input_ids"]


def test_both_sides_of_a_pair_have_the_same_question(tmp_path: Path) -> None:
    """TRL's rule where the first token of one answer swallows the end of the question, and of the other does not."""
    tokenizer = copy.deepcopy(tokenizer_with(SOURCES[0], "llama3"))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ ' th' if m.role == 'assistant' }}{{ m.content }}{% endfor %}"
        "{{ ' th' if add_generation_prompt }}"
    )
    prompt, chosen, rejected = (
        [{"role": U, "content": "a"}],
        [{"role": A, "content": "e"}],
        [{"role": A, "content": "?"}],
    )
    sides = [trls_answer(tokenizer, "", [*prompt, *answer])[1].index(True) for answer in (chosen, rejected)]
    assert sides[0] < sides[1], "the case is none"
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": prompt, "chosen": chosen, "rejected": rejected}) + "\n", encoding="utf-8")
    data = build_pairs(file, tokenizer=HuggingFaceTokenizer(tokenizer, Path("x")), seq_length=64)
    assert [targets.tolist().index(True) for _, targets in data.documents(0)] == [sides[0]] * 2
