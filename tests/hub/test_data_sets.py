"""Data sets on the hub as training data: the rows of the same records in a JSONL file, for every format and place."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import yaml
from huggingface_hub import constants

from engine.data.sources import RecordSource
from engine.data.tables import TableFile
from engine.data.text_reader import build_texts
from engine.data.tokenizer import load_tokenizer
from engine.errors import UserError
from engine.hub.data_names import parse_data_name
from engine.hub.data_sets import HubRecords, find_data
from tests.hub.conftest import files_of
from tests.hub.local_hub import LocalHub
from tests.support.commands import REPOSITORY, losses
from tests.wrong_inputs.workplace import Workplace, run_here

NAME, MODEL = "tiny-org/data", "tiny-org/tiny"
RECORDS: list[dict[str, Any]] = [
    {"prompt": "abab", "completion": " baba"}, {"prompt": "cab", "completion": " bac, \"abc\""},
    {"prompt": "aa\nbb", "completion": " cc"}, {"prompt": "ab", "completion": " ba"},
]  # fmt: skip
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba", "weight": 1}]},
    {"messages": [{"role": "user", "content": "cab"}, {"role": "assistant", "content": "bac"}], "id": 7},
]


def _jsonl(records: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def _parquet(records: list[dict[str, Any]]) -> bytes:
    names = sorted({name for record in records for name in record})
    written = io.BytesIO()
    columns = {name: [record.get(name) for record in records] for name in names}
    parquet.write_table(pa.table(columns), written, row_group_size=3)
    return written.getvalue()


def _csv(records: list[dict[str, Any]]) -> bytes:
    lines = [",".join(records[0])]
    lines += [",".join('"' + str(cell).replace('"', '""') + '"' for cell in record.values()) for record in records]
    return ("\ufeff" + "\r\n".join(lines) + "\r\n").encode()


WRITERS: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    "jsonl": _jsonl, "json": lambda records: json.dumps(records).encode(), "parquet": _parquet, "csv": _csv,
    "jsonl.gz": lambda records: gzip.compress(_jsonl(records)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def library(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The `datasets` library asks the same hub."""
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", hub.address)


@pytest.fixture
def rows(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], list[Any]]]:
    """Tokens and targets of the rows that a file or a source gives."""
    tokenizer = load_tokenizer(place.model)

    def read(given: Any) -> list[Any]:
        data = build_texts(given, tokenizer=tokenizer, seq_length=64)
        columns = data.columns
        return [columns.tokens.tolist(), np.asarray(columns.targets).tolist(), columns.lengths.tolist()]

    yield read


def _file(place: Workplace, records: list[dict[str, Any]]) -> Path:
    place.records(*records)
    return place.train


def _source(text: str) -> RecordSource:
    return HubRecords(find_data(text, download=True))


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=pytest.mark.slow) if form in ("jsonl.gz", "json") else form for form in WRITERS]
)
def test_rows_are_those_of_a_file(form: str, hub: LocalHub, place: Workplace, rows: Callable[[Any], list[Any]]) -> None:
    files = {
        f"data/train-00000-of-00002.{form}": WRITERS[form](RECORDS[:3]),
        f"data/train-00001-of-00002.{form}": WRITERS[form](RECORDS[3:]),
        f"data/test-00000-of-00001.{form}": WRITERS[form](RECORDS[:1]), "README.md": b"# A data set\n",
    }  # fmt: skip
    hub.dataset(NAME, files)
    want = rows(_file(place, RECORDS))
    assert rows(_source(f"hub:{NAME}")) == want and len(want[2]) == 4
    assert not any("test-00000" in asked for asked in hub.seen)
    assert rows(_source(f"hub:{NAME}?split=test")) == rows(_file(place, RECORDS[:1]))
    if form != "json":
        assert rows(_source(f"hub:{NAME}?stream=true")) == want
    assert rows(_source(f"hub:{NAME}?limit=2")) == rows(_file(place, RECORDS[:2]))
    if form in ("parquet", "csv"):
        (place.folder / f"train.{form}").write_bytes(WRITERS[form](RECORDS))
        assert rows(place.folder / f"train.{form}") == want


def test_nulls_of_columns(hub: LocalHub, place: Workplace, rows: Callable[[Any], list[Any]]) -> None:
    """Fields that some turns of a table lack are no fields of these records."""
    hub.dataset(NAME, {"train.parquet": _parquet(CHATS)})
    records = [record for _, record in _source(f"hub:{NAME}").records()]
    assert records == CHATS


def test_subsets_splits_and_columns(hub: LocalHub, place: Workplace, rows: Callable[[Any], list[Any]]) -> None:
    card = {
        "configs": [
            {
                "config_name": "main",
                "data_files": [{"split": "train", "path": "m/a.jsonl"}, {"split": "held", "path": "m/b.jsonl"}],
            },
            {"config_name": "other", "data_files": "o/*.jsonl"},
        ]
    }  # fmt: skip
    asked = [{"question": one["prompt"], "answer": one["completion"], "text": "not read"} for one in RECORDS]
    files = {
        "README.md": f"---\n{yaml.safe_dump(card)}---\n".encode(), "m/a.jsonl": _jsonl(asked[:2]),
        "m/b.jsonl": _jsonl(asked[2:]), "o/1.jsonl": _jsonl(RECORDS),
    }  # fmt: skip
    hub.dataset(NAME, files)
    assert rows(_source(f"hub:{NAME}?subset=other")) == rows(_file(place, RECORDS))
    text = f"hub:{NAME}?subset=main&split=held&columns=question:prompt,answer:completion"
    assert rows(_source(text)) == rows(_file(place, RECORDS[2:]))
    wrong = {
        "": "Config name is missing", "?subset=mian": "BuilderConfig 'mian' not found",
        "?subset=main&split=test": "tiny-org/data has no split test in main, but train, held: write for example",
    }  # fmt: skip
    for query, words in wrong.items():
        with pytest.raises(UserError, match=words):
            find_data(f"hub:{NAME}{query}", download=True)
    with pytest.raises(
        UserError, match=r"\(main, split train\) row 0: the record has none of the columns q, but quest"
    ):
        list(_source(f"hub:{NAME}?subset=main&columns=q:prompt").records())


def test_a_record_that_is_none(hub: LocalHub) -> None:
    hub.dataset(NAME, {"train.jsonl": _jsonl(RECORDS) + b"{\n"})
    with pytest.raises(UserError, match=r"^tiny-org/data \(split train\) row 4: not a JSON record"):
        list(_source(f"hub:{NAME}").records())


@pytest.mark.parametrize("path", ["/etc/passwd", "../../../../../../../../etc/passwd", "https://example.org/a.jsonl"])
def test_a_hostile_card(hub: LocalHub, path: str) -> None:
    card = {"configs": [{"config_name": "default", "data_files": [{"split": "train", "path": path}]}]}
    hub.dataset(NAME, {"README.md": f"---\n{yaml.safe_dump(card)}---\n".encode(), "a.jsonl": _jsonl(RECORDS)})
    with pytest.raises(UserError, match="which is no file of it: it is not read|cannot be opened"):
        find_data(f"hub:{NAME}", download=True)


def test_offline_and_revisions(hub: LocalHub) -> None:
    with pytest.raises(UserError, match="whose files are not all in .*: add --download, which fetches them"):
        find_data(f"hub:{NAME}", download=False)
    first = hub.dataset(NAME, {"train.jsonl": _jsonl(RECORDS[:1])})
    assert find_data(f"hub:{NAME}", download=True) == f"hub:{NAME}@{first}"
    asked = hub.seen.total()
    assert find_data(f"hub:{NAME}", download=False) == f"hub:{NAME}@{first}"
    assert find_data(f"hub:{NAME}@{first}", download=True) == f"hub:{NAME}@{first}" and hub.seen.total() == asked
    second = hub.dataset(NAME, {"train.jsonl": _jsonl(RECORDS), "test.jsonl": _jsonl(RECORDS)})
    assert find_data(f"hub:{NAME}?limit=1", download=True) == f"hub:{NAME}@{second}?limit=1"
    before = [f"hub:{NAME}@{first}", f"hub:{NAME}@{first}?split=test"]
    assert find_data(f"hub:{NAME}?split=train", download=True, before=before) == f"hub:{NAME}@{first}"
    with pytest.raises(UserError, match="whose files are not all in"):
        find_data(f"hub:{NAME}?split=test", download=False)
    hub.dataset(NAME, {"train.jsonl": _jsonl(RECORDS), "test.jsonl": _jsonl(RECORDS[1:])})
    hub.repos["datasets", NAME].gated = "agree first"
    with pytest.raises(UserError, match="is gated .agree first.: ask for access on http://127.0.0.1:.*/datasets/tiny"):
        find_data(f"hub:{NAME}?split=test", download=True)
    with pytest.raises(UserError, match="has no dataset tiny-org/other, or does not show it"):
        find_data("hub:tiny-org/other", download=True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hub:name", "is no name of a data set: write hub:OWNER/NAME"),
        ("hub:a/b?spilt=train", "has the unknown key 'spilt': did you mean split"),
        ("hub:a/b?split", "has 'split', but one split=VALUE is expected"),
        ("hub:a/b?split=train[:10%]", "has a slice of a split, which is not read: give the split, with limit=1000"),
        ("hub:a/b?limit=0", "has limit=0, but a number of records is expected"),
        ("hub:a/b?stream=yes", "has stream=yes, but true or false is expected"),
        ("hub:a/b?columns=:b", "has ':b' in columns, but COLUMN:FIELD is expected"),
        ("hub:a/b?columns=a:c,b:c", "gives several columns to one field"),
        ("hub:a/b?stream=true", "is read from the hub while training starts: add --download"),
    ],
)
def test_names_that_are_none(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words.replace("?", r"\?").replace("[", r"\[")):
        find_data(text, download=False)


def test_a_name_is_written_as_it_is_read() -> None:
    for text in ("hub:a/b", "hub:a/b@v1?subset=m&split=test&columns=a:b,c:c&limit=3&stream=true"):
        assert str(parse_data_name(text)) == text
    assert str(parse_data_name("hub:a/b?split=train&stream=false")) == "hub:a/b"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "does not name its columns"),
        (b"a,a\n1,2\n", "does not name its columns, each once"),
        (b"a,b\n1,2\n1\n", "row 1 has 1 cells, but the first row names 2 columns"),
        (b'a,b\n"1,2\n', "cannot be read as CSV"),
        (b"a,b\n\xff,2\n", "is not UTF-8"),
    ],
)
def test_damaged_csv(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(UserError, match=words):
        list(TableFile(tmp_path / "a.csv").records())
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(UserError, match="cannot be read as Parquet"):
        list(TableFile(tmp_path / "a.parquet").records())


def test_a_run(hub: LocalHub, place: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    """Mixed and evaluated from the hub, recorded with the commit, and resumed with it where the branch has moved."""
    files = {"train.jsonl": _jsonl(RECORDS), "test.jsonl": _jsonl(RECORDS[:2])}
    commit = hub.dataset(NAME, files)
    place.set(data__train=f"hub:{NAME}", data__validation=f"hub:{NAME}?split=test", train__eval_every=1)
    place.set(data__mix=json.dumps([f"hub:{NAME}?split=test&columns=completion:text=0.5"]))
    seen = run_here("pretrain_lora", place.arguments(), capsys)
    assert "add --download, which fetches them" in seen.sentence
    seen = run_here("pretrain_lora", [*place.arguments(), "--download"], capsys)
    assert seen.status == 0, seen.printed
    data = yaml.safe_load((Path(place.options["checkpoint.dir"]) / "config.yaml").read_text())["data"]
    assert data["train"] == f"hub:{NAME}@{commit}" and data["validation"] == f"hub:{NAME}@{commit}?split=test"
    assert data["mix"] == [f"hub:{NAME}@{commit}?split=test&columns=completion:text=0.5"]
    hub.dataset(NAME, {"train.jsonl": _jsonl(RECORDS[:2]), "test.jsonl": _jsonl(RECORDS)})
    place.set(train__steps=2)
    seen = run_here("pretrain_lora", [*place.arguments(), "--download"], capsys)
    assert seen.status == 0 and "data.train differs" not in seen.printed and "1: data." not in seen.printed, (
        seen.printed
    )


def test_records_are_shown(hub: LocalHub, place: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    """As those of a file; a store is still made of files alone, and pairs are shown by a run."""
    hub.dataset(NAME, {"train.jsonl": _jsonl(RECORDS), "test.jsonl": _jsonl([{"chosen": "a", "rejected": "b"}])})
    show = ["--tokenizer", str(place.model), "--show", "2"]
    shown = run_here("preprocess", [*show, str(_file(place, RECORDS))], capsys)
    seen = run_here("preprocess", [*show, f"hub:{NAME}"], capsys)
    assert seen.status == 2 and "add --download" in seen.sentence, seen.printed
    seen = run_here("preprocess", [*show, f"hub:{NAME}", "--download"], capsys)
    assert seen.status == 0, seen.printed
    texts = [[line for line in one.printed.splitlines() if "⟦" in line] for one in (shown, seen)]
    assert len(texts[0]) >= 2 and texts[0] == texts[1]
    seen = run_here("preprocess", [*show, f"hub:{NAME}?split=test", "--download"], capsys)
    assert seen.status == 2 and seen.sentence.endswith("a run with its objective.name prints it, with --data.show 2.")
    assert "but objective" not in seen.sentence
    seen = run_here("preprocess", [*show[:2], "--out", str(place.folder / "store"), f"hub:{NAME}"], capsys)
    assert seen.status == 2 and "a store is made of files" in seen.sentence


@pytest.mark.slow
def test_a_branch_that_moves(hub: LocalHub, place: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that was given a branch by name keeps its commit too, on the machine that has noted it."""
    hub.dataset(NAME, {"train.jsonl": _jsonl(RECORDS)})
    hub.model(MODEL, files_of(place.model))
    place.set(data__train=f"hub:{NAME}@main", model__path=f"{MODEL}@main")
    assert run_here("pretrain_lora", [*place.arguments(), "--download"], capsys).status == 0
    hub.dataset(NAME, {"train.jsonl": _jsonl(RECORDS[:2])})
    place.change_config(rms_norm_eps=0.5)
    hub.model(MODEL, files_of(place.model))
    place.set(train__steps=2)
    seen = run_here("pretrain_lora", [*place.arguments(), "--download"], capsys)
    assert seen.status == 0 and "differs" not in seen.printed and "step 2/2" in seen.printed, seen.printed
    shutil.rmtree(constants.HF_HUB_CACHE)  # as on another machine, which cannot know which branch the run was given
    place.set(train__steps=3, model__path=MODEL)
    seen = run_here("pretrain_lora", [*place.arguments(), "--download"], capsys)
    assert seen.status == 0 and "data.train differs from the data that" in seen.printed, seen.printed


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("stream", ["", "?stream=true"])
def test_two_ranks(
    stream: str, hub: LocalHub, place: Workplace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They train as one process does on a local file, and one of them asks the hub."""
    records = [{"text": f"{'ab' * (1 + n % 5)} {'ba' * (1 + n % 3)} c"} for n in range(12)]
    place.records(*records)
    place.set(train__steps=3, train__global_batch_size=4)
    assert run_here("pretrain_lora", place.arguments(), capsys).status == 0
    hub.dataset(NAME, {"a/train-0.jsonl": _jsonl(records[:7]), "a/train-1.jsonl": _jsonl(records[7:])})
    hub.model(MODEL, files_of(place.model))
    place.set(model__path=MODEL, data__train=f"hub:{NAME}{stream}", checkpoint__dir=tmp_path / "two")
    own = {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    done = subprocess.run(
        [*launcher, "rankfold", "train", *place.arguments(), "--download"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "HF_HUB_CACHE": str(tmp_path / "home" / "hub"), **own},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0 and "2 ranks" in done.stderr, done.stderr
    one, two = losses(tmp_path / "run"), losses(tmp_path / "two")
    # float32 sums of two halves in another order
    assert len(one) == 3 and one == pytest.approx(two, rel=1e-5)
    assert hub.seen[f"GET /api/models/{MODEL}/revision/main"] + hub.seen[f"GET /api/models/{MODEL}"] == 1
    assert sum(count for asked, count in hub.seen.items() if asked.endswith("/model.safetensors")) <= 2
