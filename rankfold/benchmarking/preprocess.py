"""Section `preprocess`: speed of tokenising records into a store, beside plain loops over the same tokenizer.

The plain loops parse each line, encode its texts and add the ids to an array file: one record at a time, as a script
does it and as Megatron's tool does in each worker, and in batches of a thousand.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from engine.data.build_store import Request, preprocess
from engine.data.record_files import read_records
from engine.data.store import open_store
from engine.telemetry.processors import available_processors
from rankfold.benchmarking.machine import describe
from rankfold.benchmarking.sections import PreprocessOptions
from rankfold.benchmarking.table import Table
from rankfold.benchmarking.timing import paired_ratio, summarise

ONE, BATCHED, STORE, ALL = "one record at a time", "batches of 1000", "store, one process", "store, all cores"


def run(options: PreprocessOptions) -> Table:
    """Times all four in turns."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core each, but for the last
    folder = Path(tempfile.mkdtemp(prefix="preprocess-"))
    try:
        records = _grown(Path(options.records), folder / "records.jsonl", options.mb * 10**6)
        kinds: dict[str, Callable[[], int]] = {
            ONE: lambda: _plain(records, options.tokenizer, folder / "plain.bin", 1),
            BATCHED: lambda: _plain(records, options.tokenizer, folder / "plain.bin", 1000),
            STORE: lambda: _store(records, options.tokenizer, folder / "store", 1),
            ALL: lambda: _store(records, options.tokenizer, folder / "store", available_processors()),
        }
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        tokens: dict[str, int] = {}
        for _ in range(options.repeats):
            for kind, work in kinds.items():
                begin = time.monotonic()
                tokens[kind] = work()
                seconds[kind].append(time.monotonic() - begin)
    finally:
        shutil.rmtree(folder)
    return _table(options, seconds, tokens)


def _grown(source: Path, target: Path, size: int) -> Path:
    """Returns the records as text only, repeated until there is `size` of them."""
    texts = []
    for _, record in read_records(source)[1]:
        values = [value for value in record.values() if isinstance(value, str) and value]
        texts.append(json.dumps({"text": "\n".join(values)}) + "\n")
    with target.open("w", encoding="utf-8") as file:
        while file.tell() < size:
            file.writelines(texts)
    return target


def _plain(records: Path, tokenizer: str, out: Path, batch: int) -> int:
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(str(Path(tokenizer) / "tokenizer.json"))
    count = 0
    with records.open(encoding="utf-8") as lines, out.open("wb") as file:
        for texts in _chunks((json.loads(line)["text"] for line in lines), batch):
            many = [encoder.encode(texts[0])] if batch == 1 else encoder.encode_batch(texts)
            for encoded in many:
                np.array(encoded.ids, dtype=np.int32).tofile(file)
                count += len(encoded.ids)
    return count


def _chunks(items: Iterator[str], size: int) -> Iterator[list[str]]:
    while chunk := list(islice(items, size)):
        yield chunk


def _store(records: Path, tokenizer: str, out: Path, workers: int) -> int:
    shutil.rmtree(out, ignore_errors=True)
    preprocess(Request(files=(records,), tokenizer=Path(tokenizer), workers=workers), out)
    return len(open_store(out).tokens)


def _table(options: PreprocessOptions, seconds: dict[str, list[float]], tokens: dict[str, int]) -> Table:
    rows = []
    for kind, samples in seconds.items():
        middle = summarise(samples).median
        ratio = paired_ratio(seconds[ONE], samples).median
        rows.append((kind, f"{middle:.2f}", f"{tokens[kind] / middle / 1e3:,.0f}", f"{ratio:.2f}"))
    return Table(
        title=f"Tokenising {options.mb} MB of records",
        columns=("", "seconds", "thousand tokens per second", "over one record at a time"),
        rows=tuple(rows),
        findings=(
            f"Stores hold the end token of each record too: {tokens[STORE]:,} tokens beside {tokens[ONE]:,}. Start-up "
            "of processes and tokenizers is counted. A store takes longer than a batched loop for its targets, "
            "lengths, checksums, and durable files.",
        ),
        machine=describe(torch.device("cpu"), ("tokenizers", "transformers")),
        data={"seconds": seconds, "tokens": tokens},
    )
