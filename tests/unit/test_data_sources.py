"""Records of Python programs: the rows of the same records in a file, whatever holds them, and what is refused."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image

from engine.data import python_records
from engine.data.python_records import PythonRecords
from engine.data.sources import without_nulls
from engine.data.text_reader import build_texts
from engine.data.tokenizer import Tokenizer, load_tokenizer
from engine.errors import UserError
from engine.rollouts.data.prompts import read_prompts
from tests.support.answer_data import build_judged, build_pairs

ASKED = {"role": "user", "content": "Ünd?"}
TURNS = [ASKED, {"role": "assistant", "content": "Ja."}]
KINDS: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": "Once upon a time"}, {"text": "two\nlines\n", "source": 0.1}],
    "completion": [{"prompt": "2+3=", "completion": "5"}],
    "alpaca": [{"instruction": "Add.", "input": "2, 3", "output": "5"}, {"instruction": "Say a.", "output": "a"}],
    "sharegpt": [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"}],
    "messages": [{"messages": TURNS}, {"messages": [{"role": "system", "content": "Be brief."}, *TURNS]}],
    "tokens": [{"input_ids": [1, 5, 6], "labels": [-100, 5, 6]}],
    "pairs": [{"prompt": [ASKED], "chosen": TURNS[1:], "rejected": [{"role": "assistant", "content": "Nein."}]}],
    "judged": [{"prompt": "a", "completion": "b", "label": True}, {"prompt": "c", "completion": "d", "label": False}],
    "prompts": [{"prompt": "2+3=", "answer": 5}, {"prompt": [ASKED], "answer": 6, "why": ["x", {"y": 0.5}]}],
}


@pytest.fixture(scope="module")
def tokenizer(data_dir: Path) -> Tokenizer:
    return load_tokenizer(data_dir / "tokenizers" / "minimind")


def _fingerprint(kind: str, given: Any, tokenizer: Tokenizer) -> str:
    if kind == "prompts":
        return read_prompts(given, tokenizer=tokenizer, room=100).fingerprint()
    build = {"pairs": build_pairs, "judged": build_judged}.get(kind, build_texts)
    return build(given, tokenizer=tokenizer, seq_length=64, packing=kind == "text").fingerprint()


def _written(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_a_file(kind: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    records = KINDS[kind]
    expected = _fingerprint(kind, _written(tmp_path / "a.jsonl", records), tokenizer)
    holders: list[Any] = [
        records,
        tuple(records),
        iter(records),
        lambda: (record for record in records),
        [{key: np.array(one) if key == "input_ids" else one for key, one in record.items()} for record in records],
    ]
    if kind not in ("prompts",):  # Arrow has one type in a column
        columns = datasets.Dataset.from_list(records)
        holders += [columns, columns.to_iterable_dataset()]
    for holder in holders:
        with PythonRecords("data", holder) as source:
            assert _fingerprint(kind, source, tokenizer) == expected, holder
    other = [*records[:-1], *records[:-1], *records[-1:], *records[-1:]]
    assert _fingerprint(kind, PythonRecords("data", other), tokenizer) != expected


def test_a_column_of_a_table_that_a_record_lacks(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Fields of None would decide the format of a record that has none of them."""
    records = [{"text": "a"}, {"text": "b", "messages": [ASKED, {"role": "assistant", "content": "a"}]}]
    expected = _fingerprint("text", _written(tmp_path / "a.jsonl", records), tokenizer)
    columns = {name: [record.get(name) for record in records] for name in ("text", "messages")}
    table = datasets.Dataset.from_dict(columns)
    assert table[0]["messages"] is None
    assert _fingerprint("text", PythonRecords("data", table), tokenizer) == expected
    turns = {"messages": [{"content": "a", "name": None, "parts": [{"type": "text", "image": None}]}], "level": None}
    assert without_nulls(turns) == {"messages": [{"content": "a", "parts": [{"type": "text"}]}]}


def _endless() -> Iterator[dict[str, str]]:
    return ({"text": str(number)} for number in itertools.count())


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("train.jsonl", "data is of type str, but records are expected"),
        (3, "data is of type int, but records are expected"),
        ({"text": "a"}, "data is one mapping with text, but a list of records is expected"),
        (
            datasets.DatasetDict({"train": datasets.Dataset.from_list([{"text": "a"}])}),
            "DatasetDict with the splits tr",
        ),
        (lambda: None, "the function in data returned a value of type NoneType"),
        ([], "data has no records"),
        (["a"], "data record 0: the record is of type str, expected an object with named fields"),
        ([{"text": "a"}, {"text": 3}], "data record 1: field 'text' is a number, expected a string"),
        ([{"text": "a", 3: "b"}], "data record 0: the record has the key 3 of type int, expected a string"),
        ([{"text": "a", "x": [{1}]}], "data record 0: field 'x[0]' is of type set, expected text, numbers, lists"),
        ([{"text": "a", "x": {"y": b""}}], "data record 0: field 'x.y' is of type bytes, expected text"),
        (_endless, "data is an iterator that has not ended after 100 records: cut it with itertools.islice"),
    ],
)
def test_refusals(given: Any, sentence: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_records, "MOST_OF_UNKNOWN", 100)
    with pytest.raises(UserError) as refused:
        build_texts(PythonRecords("data", given), tokenizer=tokenizer, seq_length=64)
    assert sentence in str(refused.value)


def test_a_list_within_itself(tokenizer: Tokenizer) -> None:
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(UserError, match="has more than 100 levels"):
        build_texts(PythonRecords("data", [{"text": "a", "x": circle}]), tokenizer=tokenizer, seq_length=64)


def _noise(mode: str) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def _bytes(image: Image.Image) -> dict[str, Any]:
    written = io.BytesIO()
    image.save(written, format="BMP")
    return {"bytes": written.getvalue(), "path": None}


@pytest.mark.parametrize("held", [lambda image: image, _bytes])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK", "RGBA"])
def test_images_in_memory_become_files_without_loss(mode: str, held: Callable[[Image.Image], Any]) -> None:
    image = _noise(mode if held is not _bytes else "RGB")
    source = PythonRecords("data", [{"images": [held(image), held(image)], "messages": [{"content": held(image)}]}])
    with source:
        ((_, record),) = source.records()
        files = {*record["images"], record["messages"][0]["content"]}
        (file,) = files  # equal images share one
        assert np.array_equal(np.asarray(Image.open(file).convert("RGB")), np.asarray(image.convert("RGB")))
    assert not Path(file).parent.exists()


def test_an_images_orientation_is_kept() -> None:
    image = _noise("RGB")
    exif = Image.Exif()
    exif[0x0112] = 6
    written = io.BytesIO()
    image.save(written, format="PNG", exif=exif)
    with PythonRecords("data", [{"image": Image.open(written)}]) as source:
        ((_, record),) = source.records()
        assert Image.open(record["image"]).getexif()[0x0112] == 6
