"""Reading of files and records: what each format means, and what every kind of malformed record says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.data.formats import ChatSample, CompletionSample, Sample, TextSample, parse_record, read_samples
from engine.data.record_files import Place, expand_paths, read_records
from engine.errors import UserError
from engine.vision.data.records import ImageSample
from tests.support.shared_data import shared


def parse(record: dict[str, Any], data_format: str) -> Sample:
    return parse_record(Place(Path("x.jsonl"), "line", 7), record, data_format)


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def records_of(path: Path) -> list[dict[str, Any]]:
    count, records = read_records(path)
    listed = [record for _, record in records]
    assert count == len(listed)
    return listed


def samples_of(path: Path, data_format: str = "auto") -> list[Sample]:
    return list(read_samples(path, data_format)[1])


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1000, 1000) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(
    records=st.lists(st.dictionaries(st.text(max_size=4), JSON_VALUES, max_size=3), max_size=5),
    mark=st.booleans(),
    line_end=st.sampled_from(["\n", "\r\n"]),
    blank=st.integers(0, 2),
    escape=st.booleans(),
)
def test_records_survive_every_way_of_writing_them(
    tmp_path_factory: pytest.TempPathFactory,
    records: list[dict[str, Any]],
    mark: bool,
    line_end: str,
    blank: int,
    escape: bool,
) -> None:
    folder = tmp_path_factory.mktemp("records")
    start = "\ufeff" if mark else ""
    lines = [json.dumps(record, ensure_ascii=escape) + line_end for record in records]
    array = json.dumps(records, ensure_ascii=escape, indent=1).replace("\n", line_end)
    assert records_of(write(folder, "lines.jsonl", start + "".join(lines) + line_end * blank)) == records
    assert records_of(write(folder, "array.json", start + line_end * blank + array + line_end * blank)) == records


def test_json_extension_does_not_decide(tmp_path: Path) -> None:
    assert records_of(write(tmp_path, "a.json", '{"text": "x"}\n{"text": "y"}')) == [{"text": "x"}, {"text": "y"}]
    assert records_of(write(tmp_path, "b.jsonl", '[{"text": "x"}]')) == [{"text": "x"}]


def test_line_separators_inside_a_string_do_not_end_the_line(tmp_path: Path) -> None:
    record = {"text": "a\u2028b\u0085c\x0cd"}
    path = write(tmp_path, "a.jsonl", json.dumps(record, ensure_ascii=False) + "\n")
    assert records_of(path) == [record]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "x"}\n\n{"text": \n', "a.jsonl line 3: not a JSON record"),
        ("a.jsonl", '{"text": "x"}\n"y"\n', "a.jsonl line 2: the record is of type str"),
        ("a.json", '[{"text": "x"}, 3]', "a.json index 1: the record is of type int"),
        ("a.json", '[{"text": "x"},\n {"text" 3}]', "a.json line 2: the array is not JSON"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xe9"}\n', "a.jsonl line 2: not UTF-8"),
        ("a.json", b'[{"text": "\xe9"}]', "a.json is not UTF-8 text (byte 11)"),
        ("a.txt", b"abc\xff", "a.txt is not UTF-8 text (byte 3)"),
        ("a.csv", "text\nx\n", "ends in '.csv'"),
        ("a.jsonl", '{"text": "x"}\n{"txt": "y"}\n', "a.jsonl line 2: field 'text' is missing"),
        ("a.jsonl", '{"text": "\\ud83d"}\n', "a.jsonl line 1: field 'text' has half of a surrogate pair"),
        ("a.json", '[{"question": "x", "answer": "y"}]', "a.json index 0: the record has the fields question, answer"),
    ],
)
def test_malformed_file_names_file_place_and_field(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    with pytest.raises(UserError) as caught:
        samples_of(write(tmp_path, name, content))
    assert message in str(caught.value)
    assert str(caught.value).endswith(".")


@pytest.mark.parametrize(
    ("data_format", "record", "message"),
    [
        ("text", {"text": 3}, "field 'text' is a number, expected a string"),
        ("completion", {"prompt": "x"}, "field 'completion' is missing"),
        ("completion", {"prompt": None, "completion": "y"}, "field 'prompt' is null"),
        ("alpaca", {"instruction": "x", "output": ["y"]}, "field 'output' is a list"),
        ("alpaca", {"instruction": "x", "input": 1, "output": "y"}, "field 'input' is a number"),
        ("alpaca", {"instruction": "x", "output": "y", "history": [["a", "b"]]}, "field 'history' is not supported"),
        ("alpaca", {"instruction": "x", "output": "y", "system": "s"}, "field 'system'"),
        ("sharegpt", {"conversations": []}, "field 'conversations' is empty"),
        ("sharegpt", {"messages": []}, "field 'conversations' is missing"),
        ("sharegpt", {"conversations": ["hi"]}, "field 'conversations[0]' is a string"),
        ("sharegpt", {"conversations": [{"from": "bot", "value": "x"}]}, "field 'conversations[0].from' is 'bot'"),
        ("sharegpt", {"conversations": [{"from": "gpt"}]}, "field 'conversations[0].value' is missing"),
        ("sharegpt", {"conversations": [{"from": "human", "value": "x"}]}, "no turn of the assistant"),
        ("messages", {"messages": {"role": "user"}}, "field 'messages' is an object"),
        ("messages", {"messages": [{"content": "x"}]}, "field 'messages[0].role' is missing"),
        ("messages", {"messages": [{"role": "user", "content": None}]}, "field 'messages[0].content' is null"),
        ("messages", {"messages": [{"role": "User", "content": "x"}]}, "field 'messages[0].role' is 'User'"),
    ],
)
def test_malformed_record_names_place_and_field(data_format: str, record: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(record, data_format)
    assert str(caught.value).startswith("x.jsonl line 7: ")
    assert message in str(caught.value)


def test_alpaca_prompt_has_every_part_once_and_keeps_braces() -> None:
    sample = parse({"instruction": "Say {input}", "input": "{x} 2", "output": "y {output}", "id": 3}, "alpaca")
    assert isinstance(sample, CompletionSample)
    assert sample.completion == "y {output}"
    assert sample.prompt.endswith("### Instruction:\nSay {input}\n\n### Input:\n{x} 2\n\n### Response:\n")
    for extra in ({}, {"input": ""}, {"input": None}):
        short = parse({"instruction": "Say", "output": "y", **extra}, "alpaca")
        assert isinstance(short, CompletionSample)
        assert short.prompt.endswith("### Instruction:\nSay\n\n### Response:\n")
        assert "Input" not in short.prompt


def test_both_spellings_of_sharegpt_mean_the_same() -> None:
    named = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    roles = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    first, second = parse({"conversations": named}, "sharegpt"), parse({"conversations": roles}, "sharegpt")
    assert isinstance(first, ChatSample) and isinstance(second, ChatSample)
    assert list(first.messages) == list(second.messages) == roles
    with_system = parse({"conversations": named, "system": "s"}, "sharegpt")
    assert isinstance(with_system, ChatSample)
    assert list(with_system.messages) == [{"role": "system", "content": "s"}, *roles]


def test_messages_keep_what_the_template_reads() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    turns = [{"role": "user", "content": "a"}, call, {"role": "tool", "content": "1", "name": "f"}]
    sample = parse({"messages": turns}, "messages")
    assert isinstance(sample, ChatSample) and list(sample.messages) == turns


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        ({"text": "x"}, TextSample),
        ({"prompt": "x", "completion": "y"}, CompletionSample),
        ({"instruction": "x", "input": "", "output": "y"}, CompletionSample),
        ({"conversations": [{"from": "gpt", "value": "x"}]}, ChatSample),
        ({"messages": [{"role": "assistant", "content": "x"}]}, ChatSample),
    ],
)
def test_auto_looks_at_the_first_record(tmp_path: Path, record: dict[str, Any], kind: type) -> None:
    path = write(tmp_path, "a.jsonl", json.dumps(record) + "\n" + json.dumps({**record, "id": 1}))
    assert [type(sample) for sample in samples_of(path)] == [kind, kind]


def test_text_file_is_one_stream(tmp_path: Path) -> None:
    path = write(tmp_path, "a.TXT", b"\xef\xbb\xbfone\r\n\r\ntwo\n")
    (sample,) = samples_of(path)
    assert isinstance(sample, TextSample) and sample.is_stream and sample.text == "one\n\ntwo\n"
    with pytest.raises(UserError, match=r"data\.format is alpaca"):
        read_samples(path, "alpaca")


def test_real_files() -> None:
    alpaca = samples_of(shared("instruct/alpaca_en_demo.json"))
    raw = json.loads(shared("instruct/alpaca_en_demo.json").read_text(encoding="utf-8"))
    assert len(alpaca) == len(raw) == 999
    for sample, record in zip(alpaca, raw, strict=True):
        assert isinstance(sample, CompletionSample)
        assert sample.completion == record["output"] and record["instruction"] in sample.prompt
    with pytest.raises(UserError, match=r"val\.jsonl line 1: the record has the fields topic_list"):
        samples_of(shared("longdoc/qmsum/val.jsonl"))
    images = samples_of(shared("multimodal/mllm_demo.json"))
    assert all(isinstance(sample, ImageSample) for sample in images) and len(images) > 2
    with pytest.raises(UserError, match=r"dpo_en_demo\.json index 0: the record is a pair of answers"):
        samples_of(shared("preference/dpo_en_demo.json"))


def test_paths_expand_in_order_and_missing_ones_are_named(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.json"):
        write(tmp_path, name, "x")
    assert [path.name for path in expand_paths([str(tmp_path / "c.json"), str(tmp_path / "*.txt")])] == [
        "c.json",
        "a.txt",
        "b.txt",
    ]
    with pytest.raises(UserError, match="does not exist"):
        expand_paths(str(tmp_path / "*.jsonl"))
    with pytest.raises(UserError, match="is a folder"):
        expand_paths(tmp_path)
