"""Names and values in messages: as the user writes them, and no more than can be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_origin

import pytest
import yaml

from engine.config.load import _example, load_config
from engine.config.option_names import option_types
from engine.data.formats import detect_format
from engine.data.record_files import Place
from engine.errors import UserError
from engine.sentences import as_written, listed, on_one_line


def test_many_names_are_counted() -> None:
    assert listed(["a", "b"]) == "a, b" and listed([]) == ""
    assert listed((str(n) for n in range(20000)), most=2) == "0, 1 and 19,998 more"
    assert listed(["a\nb", "c" * 999]) == r"a\nb, " + "c" * 200 + "..."


@pytest.mark.parametrize("value", [None, True, False, 3, 0.5, "text", "no", [1, None, [True]], {"a": None, "b": [1.5]}])
def test_values_are_what_yaml_reads(value: object) -> None:
    assert yaml.safe_load(as_written(value)) == value


def test_a_value_is_short() -> None:
    assert len(as_written(["x" * 10**6] * 3)) < 100
    assert as_written({"r": 10**5000}) == "{r: a number of many digits}"
    assert on_one_line(" a\n\tb " + "c" * 999) == "a b " + "c" * 296 + "..."


@pytest.mark.parametrize(
    ("option", "given", "words"),
    [
        ("lora.rank", "null", "lora.rank is null, but a whole number"),
        ("data.seq_length", "true", "data.seq_length is true, but a whole number"),
        ("data.packing", "maybe", "data.packing is 'maybe', but true or false"),
        ("data.seq_length", "{a: [null, true]}", "data.seq_length is {a: [null, true]}, but a whole number"),
        (
            "data.chat_arguments",
            "foo",
            "data.chat_arguments is 'foo', but a mapping of names to values or null is expected: use for example "
            "{enable_thinking: false}.",
        ),
    ],
)
def test_options_are_shown_as_they_are_written(option: str, given: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(["--model.path", "x", f"--{option}", given])
    assert words in str(caught.value)


@pytest.mark.parametrize("option", [name for name, kind in option_types().items() if "dict" in str(kind)])
def test_examples_of_mappings_are_such(option: str) -> None:
    kind = option_types()[option].__args__[0]
    assert get_origin(kind) is dict
    name, value = next(iter(yaml.safe_load(_example(option, kind)).items()))
    wanted = {"data.chat_arguments": bool, "lora.rank_pattern": int}.get(option, (int, float))
    assert isinstance(name, str) and isinstance(value, wanted)


def test_a_record_with_many_fields(tmp_path: Path) -> None:
    record = json.loads("{" + ", ".join(f'"field{n}": 1' for n in range(20000)) + "}")
    with pytest.raises(UserError, match="and 19,992 more, expected those of one format") as caught:
        detect_format(Place(tmp_path / "a.jsonl", "line", 1), record)
    assert len(str(caught.value)) < 900
