"""Writes the rows that are trained and evaluated on: OUT/train.jsonl and OUT/validation.jsonl.

    python prepare_data.py packed --source FOLDER --out OUT
    python prepare_data.py raw --source FOLDER --tokenizer MODEL --out OUT

`packed` reads the benchmark's public parquet files (regisss/scrolls_gov_report_preprocessed_mlperf_2), whose rows are
tokens already, and needs pyarrow. `raw` reads GovReport, train and validation files of records with input and output
(or report and summary), JSON, JSONL or parquet, and tokenises and packs them as the benchmark's reference does.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from packing import SHARES, Tokens, documents, rows
from rules import EVAL_SAMPLES, SEQUENCE_LENGTH, TRAIN_SAMPLES

from engine.batch import IGNORE_LABEL
from engine.data.record_files import Place, read_records
from engine.data.tokenizer import load_tokenizer
from engine.errors import UserError
from engine.telemetry.errors import run_command

SPLITS = ("train", "validation")
FIELDS = (("input", "output"), ("report", "summary"))


def files_of(source: Path, split: str) -> list[Path]:
    """The files of a split, by their names: train*, or data/train*.

    Raises:
        UserError: there are none.
    """
    kinds = (".parquet", ".jsonl", ".json")
    found = sorted(path for path in source.glob(f"**/{split}*") if path.suffix in kinds and path.is_file())
    if not found:
        raise UserError(
            f"--source {source} has no file whose name begins with {split} and ends in {', '.join(kinds)}: give the "
            "folder of the downloaded data."
        )
    return found


def records_of(path: Path) -> Iterator[tuple[Place, dict[str, Any]]]:
    """The records of a JSON, JSONL or parquet file, with their places.

    Raises:
        UserError: it cannot be read, or pyarrow is not installed.
    """
    if path.suffix != ".parquet":
        yield from read_records(path)[1]
        return
    try:
        parquet = importlib.import_module("pyarrow.parquet")
        arrow = importlib.import_module("pyarrow")
    except ImportError:
        raise UserError(f"{path} is a parquet file, which pyarrow reads: install it (pip install pyarrow).") from None
    try:
        number = 0
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=64):
            for record in batch.to_pylist():
                yield Place(path, "row", number), record
                number += 1
    except arrow.ArrowException as error:
        raise UserError(f"{path} is no parquet file that can be read ({error}): download it again.") from None


def packed_rows(files: Iterable[Path], seq_length: int) -> Iterator[Tokens]:
    """Rows that are tokens already; without labels all of a row is learnt."""
    for path in files:
        for place, record in records_of(path):
            ids = record.get("input_ids")
            labels = record.get("labels") or ids
            if not isinstance(ids, list) or not isinstance(labels, list) or len(ids) != len(labels):
                raise place.error("the row has no input_ids, or labels of another length; give the benchmark's files.")
            if len(ids) != seq_length:
                raise place.error(f"the row has {len(ids)} tokens, expected {seq_length}; give the benchmark's files.")
            yield Tokens(ids, labels)


def raw_records(files: Iterable[Path]) -> list[tuple[str, str]]:
    """(text, summary) of each record.

    Raises:
        UserError: a record without them.
    """
    found = []
    for path in files:
        for place, record in records_of(path):
            for text, summary in FIELDS:
                if isinstance(record.get(text), str) and isinstance(record.get(summary), str):
                    found.append((record[text], record[summary]))
                    break
            else:
                raise place.error(
                    f"the record has the fields {', '.join(record) or 'none'}, expected texts in input and output, or "
                    "in report and summary; give GovReport's files."
                )
    return found


def write(path: Path, found: Iterable[Tokens]) -> tuple[int, int]:
    """Writes rows; labels only where a row has tokens that are not learnt.

    Returns:
        How many rows, and how many of their tokens are learnt.
    """
    count = learnt = 0
    with path.open("w", encoding="utf-8") as file:
        for tokens in found:
            record = {"input_ids": tokens.ids}
            masked = tokens.labels.count(IGNORE_LABEL)
            if masked:
                record["labels"] = tokens.labels
            file.write(json.dumps(record, separators=(",", ":")) + "\n")
            count, learnt = count + 1, learnt + len(tokens.ids) - masked
    return count, learnt


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the rows that llama2_70b_lora trains and evaluates on.")
    parser.add_argument("kind", choices=("packed", "raw"), help="rows of tokens, or texts")
    parser.add_argument(
        "--source", type=Path, required=True, metavar="FOLDER", help="with train* and validation* files"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--tokenizer", metavar="PATH", help="of raw texts: the model's folder or its tokenizer.model")
    parser.add_argument(
        "--seq-length", type=int, default=SEQUENCE_LENGTH, help="tokens of a row (default: %(default)s)"
    )
    options = parser.parse_args()
    if options.kind == "raw" and options.tokenizer is None:
        raise UserError("raw texts need a tokenizer: give --tokenizer, the model's folder or its tokenizer.model.")
    sources = {split: files_of(options.source, split) for split in SPLITS}
    options.out.mkdir(parents=True, exist_ok=True)
    for split, expected in zip(SPLITS, (TRAIN_SAMPLES, EVAL_SAMPLES), strict=True):
        if options.kind == "packed":
            found = packed_rows(sources[split], options.seq_length)
        else:
            texts = raw_records(sources[split])
            tokens = list(documents(texts, load_tokenizer(options.tokenizer), masked=split == "validation"))
            found = rows(tokens, seq_length=options.seq_length, shares=SHARES[split])
        count, learnt = write(options.out / f"{split}.jsonl", found)
        print(f"{split}: {count} rows of {options.seq_length} tokens, {learnt} learnt: {options.out / split}.jsonl")
        if options.seq_length == SEQUENCE_LENGTH and count != expected:
            raise UserError(
                f"--source {options.source} gives {count} rows for {split}, but the benchmark has {expected}: give the "
                "benchmark's files."
            )


if __name__ == "__main__":
    run_command(main)
