"""The chat template of a model that sees, where it is not its tokenizer's: against transformers' AutoProcessor."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest
from transformers import AutoProcessor

from engine.data.tokenizer import ChatOptions, load_tokenizer
from engine.errors import UserError
from tests.support.sweeps import portion
from tests.unit.test_vision_data_processors import written

PLACES = ("processor_config.json", "chat_template.json", "chat_template.jinja", "tokenizer_config.json")


def put(folder: Path, place: str, template: str) -> None:
    """Writes a template where some release of transformers wrote it."""
    file = folder / place
    if place.endswith(".jinja"):
        file.write_text(template)
    else:
        content = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps({**content, "chat_template": template}))


@pytest.mark.parametrize(
    "places",
    portion([" ".join(chosen) for count in (1, 2, 4) for chosen in combinations(PLACES, count)], 4, [" ".join(PLACES)]),
)
def test_the_template_is_that_of_transformers_processor(places: str, tmp_path: Path) -> None:
    """The processor's, where it has one. Files that are passed over, or read in another order, give another."""
    written("llava", tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_class": "LlavaProcessor", "patch_size": 7}))
    for place in places.split():
        put(tmp_path, place, f"{place}: {{{{ messages[0]['content'] }}}}")
    stock = AutoProcessor.from_pretrained(tmp_path)
    expected = stock.chat_template or stock.tokenizer.chat_template
    found = load_tokenizer(tmp_path)
    assert found.chat_template == expected
    assert load_tokenizer(tmp_path, ChatOptions(template="chatml")).chat_template != expected


def test_a_model_of_text_has_its_tokenizers(tmp_path: Path) -> None:
    tokenizer, _ = written("llava", tmp_path)
    put(tmp_path, "chat_template.json", "{{ 1 }}")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert load_tokenizer(tmp_path).chat_template == tokenizer.chat_template


def test_a_template_that_is_no_text_is_refused(tmp_path: Path) -> None:
    written("llava", tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": ["a"]}))
    with pytest.raises(UserError, match=r"^\S+chat_template.json has chat_template \['a'\], but text is expected"):
        load_tokenizer(tmp_path)
