"""Token stores: what preprocessing writes, what training maps, and Megatron's indexed files."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import engine
from engine.data import build_store
from engine.data.build_store import Request, preprocess
from engine.data.checked_file import CheckedFile
from engine.data.collate import build_batch
from engine.data.dataset import TokenDataset
from engine.data.store import open_store
from engine.data.store_paths import MANIFEST
from engine.data.stored_rows import cut_spans, stored_dataset
from engine.data.text_reader import build_texts
from engine.data.tokenizer import load_tokenizer
from engine.data.work_units import plan_units
from engine.errors import UserError
from engine.files.staging import staged_folder
from tests.support.commands import REPOSITORY
from tests.support.megatron_data import write_megatron
from tests.support.sweeps import sampled


@pytest.fixture
def tokenizer_dir(data_dir: Path) -> Path:
    return data_dir / "tokenizers" / "minimind"


def _lines(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def _same(left: TokenDataset, right: TokenDataset) -> None:
    assert len(left) == len(right) and left.max_token >= right.max_token  # a store knows that of all its documents
    assert np.array_equal(left.target_counts, right.target_counts)
    assert np.array_equal(left.row_lengths, right.row_lengths)
    for row in range(len(left)):
        pairs = zip(left.documents(row), right.documents(row), strict=True)
        for (tokens, targets), (other_tokens, other_targets) in pairs:
            assert np.array_equal(tokens, other_tokens) and np.array_equal(targets, other_targets)


@pytest.mark.parametrize(
    ("packing", "overlong"),
    sampled(
        [(packing, overlong) for packing in (False, True) for overlong in ("truncate", "cut", "drop")],
        [(False, "truncate"), (True, "cut")],
    ),
)
def test_store_gives_the_rows_of_the_records(
    packing: bool, overlong: str, tmp_path: Path, data_dir: Path, tokenizer_dir: Path
) -> None:
    records = data_dir / "instruct" / "alpaca_en_demo.json"
    preprocess(Request(files=(records,), tokenizer=tokenizer_dir), tmp_path / "store")
    tokenizer = load_tokenizer(tokenizer_dir)
    settings = {"tokenizer": tokenizer, "seq_length": 96, "packing": packing, "overlong": overlong}
    stored, read = stored_dataset(tmp_path / "store", **settings), build_texts(records, **settings)
    _same(stored, read)
    assert isinstance(stored.tokens, CheckedFile) and isinstance(stored.targets, CheckedFile)
    assert stored.report.target_tokens == read.report.target_tokens
    batch, other = (build_batch(data, [0, 3, None], range(3), length=96) for data in (stored, read))
    assert batch.tokens_BS.equal(other.tokens_BS) and batch.labels_BS.equal(other.labels_BS)


def test_concatenated_rows_are_the_same(tmp_path: Path, data_dir: Path, tokenizer_dir: Path) -> None:
    records = data_dir / "instruct" / "identity.json"
    preprocess(Request(files=(records,), tokenizer=tokenizer_dir), tmp_path / "store")
    settings = {"tokenizer": load_tokenizer(tokenizer_dir), "seq_length": 64, "packing": "concatenate"}
    _same(stored_dataset(tmp_path / "store", **settings), build_texts(records, **settings))


def test_store_does_not_depend_on_workers_or_units(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = _lines(tmp_path / "a.jsonl", [{"text": f"document {n} " * (1 + n % 7)} for n in range(300)])
    request = {"files": (records,), "tokenizer": tokenizer_dir}
    preprocess(Request(**request), tmp_path / "one")
    monkeypatch.setattr("engine.data.work_units.UNIT_BYTES", 2000)
    assert len(plan_units([records])) > 5
    preprocess(Request(**request, workers=2), tmp_path / "many")
    for name in ("tokens.bin", "offsets.bin", "blocks.bin", MANIFEST):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "many" / name).read_bytes()
    assert not (tmp_path / "one" / "targets.bin").exists(), "every token of a text is learnt"
    assert not (tmp_path / "one" / "parts").exists()


def test_bad_records_are_named_or_left_out(tmp_path: Path, tokenizer_dir: Path) -> None:
    path = _lines(tmp_path / "a.jsonl", [{"text": "fine"}, {"text": 3}, {"text": "fine too"}])
    with path.open("a", encoding="utf-8") as file:
        file.write('{"text": "cut off\n')
    with pytest.raises(UserError, match=r"a\.jsonl line 2: field 'text' is a number"):
        preprocess(Request(files=(path,), tokenizer=tokenizer_dir), tmp_path / "stopped")
    request = Request(files=(path,), tokenizer=tokenizer_dir, skip_bad_records=True)
    summary = preprocess(request, tmp_path / "store")
    assert (summary.records, summary.documents, summary.skipped) == (4, 2, 2)
    skipped = [json.loads(line) for line in (tmp_path / "store" / "skipped.jsonl").read_text().splitlines()]
    assert [entry["record"] for entry in skipped] == [f"{path} line 2", f"{path} line 4"]
    assert "field 'text' is a number" in skipped[0]["reason"] and "not a JSON record" in skipped[1]["reason"]


def test_parquet_and_arrays(tmp_path: Path, tokenizer_dir: Path) -> None:
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    records = [{"prompt": f"What is {n}?", "completion": f"It is {n}."} for n in range(50)]
    parquet.write_table(arrow.Table.from_pylist(records), tmp_path / "a.parquet", row_group_size=7)
    (tmp_path / "a.json").write_text(json.dumps(records), encoding="utf-8")
    _lines(tmp_path / "a.jsonl", records)
    for name in ("a.parquet", "a.json", "a.jsonl"):
        preprocess(Request(files=(tmp_path / name,), tokenizer=tokenizer_dir), tmp_path / f"{name}-store")
    settings = {"tokenizer": None, "seq_length": 64}
    expected = build_texts(tmp_path / "a.jsonl", tokenizer=load_tokenizer(tokenizer_dir), seq_length=64)
    for name in ("a.parquet", "a.json", "a.jsonl"):
        _same(stored_dataset(tmp_path / f"{name}-store", **settings), expected)


def test_killed_and_gone_on(tmp_path: Path, tokenizer_dir: Path) -> None:
    """A call that is killed leaves units behind that the next call of the same command does not do again."""
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "import engine.data.work_units as units, engine.data.build_store as work\n"
        "units.UNIT_BYTES = 2000\ndo = work._do_unit\n"
        "def slow(*arguments):\n    time.sleep(0.1)\n    return do(*arguments)\nwork._do_unit = slow\n"
        "request = work.Request(files=(Path(sys.argv[1]),), tokenizer=Path(sys.argv[2]))\n"
        "print(work.preprocess(request, Path(sys.argv[3])).resumed)\n"
    )
    records = _lines(tmp_path / "a.jsonl", [{"text": f"document {n} " * (1 + n % 7)} for n in range(400)])
    arguments = [sys.executable, "-c", code, str(records), str(tokenizer_dir)]
    process = subprocess.Popen([*arguments, str(tmp_path / "store")], cwd=REPOSITORY)
    while not (tmp_path / ".store.partial" / "parts" / "000003.json").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "store" / MANIFEST).exists()
    again = subprocess.run(
        [*arguments, str(tmp_path / "store")], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert int(again.stdout) >= 4
    preprocess(Request(files=(records,), tokenizer=tokenizer_dir), tmp_path / "whole")
    assert (tmp_path / "store" / "tokens.bin").read_bytes() == (tmp_path / "whole" / "tokens.bin").read_bytes()
    with pytest.raises(UserError, match="holds a finished token store already"):
        preprocess(Request(files=(records,), tokenizer=tokenizer_dir), tmp_path / "store")


def test_what_another_version_left_is_made_anew(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(files=(_lines(tmp_path / "a.jsonl", [{"text": "a text"}]),), tokenizer=tokenizer_dir)
    left = tmp_path / ".store.partial"
    with monkeypatch.context() as older:
        older.setattr(engine, "__version__", "0.0.1")
        older.setattr(build_store, "_SUMMARY", "parts")  # a folder cannot be deleted as a file: stops near the end
        with pytest.raises(UserError):
            preprocess(request, tmp_path / "store")
    (left / ".summary").write_text('{"rows": 1, "size": 2}')  # as it may have looked then
    assert preprocess(request, tmp_path / "store").resumed == 0
    preprocess(request, tmp_path / "fresh")
    for path in (tmp_path / "fresh").iterdir():
        assert path.read_bytes() == (tmp_path / "store" / path.name).read_bytes(), path.name
    assert not left.exists()


def test_one_call_at_a_time(tmp_path: Path, tokenizer_dir: Path) -> None:
    request = Request(files=(_lines(tmp_path / "a.jsonl", [{"text": "a text"}]),), tokenizer=tokenizer_dir)
    refused = pytest.raises(UserError, match=rf"store is being written by process {os.getpid()} on .* since")
    with staged_folder(tmp_path / "store", check=lambda: None, plan="another"), refused:  # as a call in progress
        preprocess(request, tmp_path / "store")
    preprocess(request, tmp_path / "store")
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl", "store"}


def test_what_is_no_store_is_refused(tmp_path: Path, data_dir: Path, tokenizer_dir: Path) -> None:
    store, records = tmp_path / "store", data_dir / "instruct" / "identity.json"
    preprocess(Request(files=(records,), tokenizer=tokenizer_dir), store)
    other = load_tokenizer(data_dir / "tokenizers" / "llama2_32000")
    with pytest.raises(UserError, match="was tokenised with another tokenizer than the run's"):
        stored_dataset(store, tokenizer=other, seq_length=64)
    with pytest.raises(UserError, match="raise it, or set data.overlong to truncate, cut or drop"):
        stored_dataset(store, tokenizer=None, seq_length=8, overlong="error")
    with (store / "tokens.bin").open("ab") as file:
        file.write(b"x")
    with pytest.raises(UserError, match=r"tokens\.bin has \d+ bytes, expected \d+ bytes"):
        open_store(store)
    (store / "tokens.bin").unlink()
    with pytest.raises(UserError, match=r"tokens\.bin is missing"):
        open_store(store)
    (store / MANIFEST).write_text("{}")
    with pytest.raises(UserError, match="is not that of a token store"):
        open_store(store)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="is not empty: choose another --out"):
        preprocess(
            Request(files=(data_dir / "instruct" / "identity.json",), tokenizer=tokenizer_dir), tmp_path / "mine"
        )
    assert (tmp_path / "mine" / "thesis.txt").exists()


@pytest.mark.parametrize(("code", "dtype"), [(8, np.uint16), (4, np.int32), (5, np.int64), (1, np.uint8)])
@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_megatron_files(suffix: str, code: int, dtype: type, tmp_path: Path) -> None:
    """Sequences 0 and 1 make the first document, 2 the second; each token but a document's first is learnt once."""
    sequences = [[5, 6, 7], [8, 9], [10, 11, 12, 13, 14, 15, 16]]
    write_megatron(tmp_path / "corpus", sequences, [0, 2, 3], code, dtype)
    store = open_store((tmp_path / "corpus").with_suffix(suffix))
    assert store.offsets.tolist() == [0, 5, 12] and store.max_token == 16
    data = stored_dataset(tmp_path / "corpus.bin", tokenizer=None, seq_length=4, overlong="cut")
    found = [(tokens.tolist(), targets.tolist()) for row in range(len(data)) for tokens, targets in data.documents(row)]
    expected = [[5, 6, 7, 8], [8, 9], [10, 11, 12, 13], [13, 14, 15, 16]]
    assert found == [(piece, [False] + [True] * (len(piece) - 1)) for piece in expected]
    assert data.target_counts.tolist() == [3, 1, 3, 3]


def test_damaged_megatron_files(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", [[1, 2], [3]], [0, 1, 2], 4, np.int32)
    index = (tmp_path / "a.idx").read_bytes()
    for damaged, sentence in (
        (b"NOTINDEX\x00" + index[9:], "is not an index of Megatron's"),
        (index[:40], "is shorter than it says"),
        (index[:17] + b"\x07" + index[18:], "expected version 1 and whole numbers"),
        (index[:34] + struct.pack("<2i", 1, 2) + index[42:], "are not contiguous"),
    ):
        (tmp_path / "a.idx").write_bytes(damaged)
        with pytest.raises(UserError, match=sentence):
            open_store(tmp_path / "a.bin")
    (tmp_path / "a.idx").unlink()
    with pytest.raises(UserError, match=r"a\.idx is missing"):
        open_store(tmp_path / "a.bin")


def test_pieces_of_long_documents() -> None:
    """Every token but a document's first is learnt in exactly one piece."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 40, 50)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    for limit in (2, 3, 7, 39, 100):
        firsts, sizes, _ = cut_spans(starts, lengths, limit)
        assert sizes.max() <= limit and sizes.min() >= 1
        learnt = np.zeros(int(lengths.sum()), dtype=int)
        for first, size in zip(firsts, sizes, strict=True):
            learnt[first + 1 : first + size] += 1
        expected = np.ones_like(learnt)
        expected[starts] = 0
        assert np.array_equal(learnt, expected)
