"""Work units: pieces of input files that are tokenised independently, and the records in them."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.data.formats import Sample, detect_format, parse_record, read_samples
from engine.data.record_files import Place, Record, first_byte, line_record, read_records
from engine.data.tables import TableFile, is_table, open_parquet
from engine.errors import UserError
from engine.files.documents import open_file

UNIT_BYTES = 4 * 2**20
"""Approximate bytes of a JSONL file in one unit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """A work unit: a piece of a file.

    Args:
        file: its path.
        kind: "lines", "rows" (of Parquet) or "whole".
        start, end: bytes of lines; row groups; 0 and the file's size for a whole file.
        first: number of the first line or row, counted as places count them.
        size: bytes of input, for progress.
    """

    file: str
    kind: str
    start: int
    end: int
    first: int
    size: int


def plan_units(files: Iterable[Path]) -> list[Unit]:
    """Cuts files into units, in order.

    Raises:
        UserError: a file of a kind that cannot be read.
    """
    return [unit for file in files for unit in _units(file)]


def _units(file: Path) -> Iterable[Unit]:
    size = file.stat().st_size
    if file.suffix.lower() == ".parquet":
        return _row_groups(file, size)
    if file.suffix.lower() in (".txt", ".csv") or _is_array(file):
        return [Unit(file=str(file), kind="whole", start=0, end=size, first=0, size=size)]
    return _line_runs(file)


def unit_samples(unit: Unit, data_format: str) -> Iterator[Sample | UserError]:
    """Yields the samples of a unit, and in place of a record that gives none its refusal.

    Args:
        data_format: "auto" looks at the first record of the whole file.
    """
    file = Path(unit.file)
    if unit.kind == "whole" and file.suffix.lower() == ".txt":
        yield from read_samples(file, data_format)[1]
        return
    for item in _raw(unit):
        if isinstance(item, UserError):
            yield item
            continue
        if data_format == "auto":
            data_format = _first_format(file)
        try:
            yield parse_record(*item, data_format)
        except UserError as error:
            yield error


def _raw(unit: Unit) -> Iterator[tuple[Place, Record] | UserError]:
    file = Path(unit.file)
    if unit.kind == "rows":
        yield from _parquet_records(unit)
    elif unit.kind == "lines":
        with open_file(file) as source:
            source.seek(unit.start)
            data = source.read(unit.end - unit.start)
        for number, line in enumerate(data.split(b"\n"), start=unit.first):
            line = line.strip(b" \t\r\n")
            if line:
                try:
                    yield line_record(Place(file, "line", number), line)
                except UserError as error:
                    yield error
    else:
        records = TableFile(file).records() if is_table(file) else read_records(file)[1]
        while True:
            try:
                yield next(records)
            except StopIteration:
                return
            except UserError as error:
                yield error
                return


def _first_format(file: Path) -> str:
    """Returns the format of the file's first valid record; the same for every unit of a file."""
    for unit in _units(file):
        for item in _raw(unit):
            if not isinstance(item, UserError):
                return detect_format(*item)
    raise UserError(f"{file} has no record whose format could be recognised: set --format.")


def _is_array(file: Path) -> bool:
    if file.suffix.lower() not in (".json", ".jsonl"):
        raise UserError(f"{file} ends in '{file.suffix}', expected .jsonl, .json, .parquet, .csv or .txt; rename it.")
    with open_file(file) as source:
        return first_byte(source) == b"["


def _line_runs(file: Path) -> Iterator[Unit]:
    """Yields runs of whole lines of about UNIT_BYTES, with the number of their first line."""
    with open_file(file) as source:
        start = len(codecs.BOM_UTF8) if source.read(3) == codecs.BOM_UTF8 else 0
        source.seek(start)
        line = 1
        while block := source.read(UNIT_BYTES):
            if not block.endswith(b"\n"):
                block += source.readline()
            end = start + len(block)
            yield Unit(file=str(file), kind="lines", start=start, end=end, first=line, size=len(block))
            line += block.count(b"\n")
            start = end


def _row_groups(file: Path, size: int) -> list[Unit]:
    metadata = open_parquet(file, str(file)).metadata
    units, first = [], 0
    for group in range(metadata.num_row_groups):
        share = size // metadata.num_row_groups
        units.append(Unit(file=str(file), kind="rows", start=group, end=group + 1, first=first, size=share))
        first += metadata.row_group(group).num_rows
    return units


def _parquet_records(unit: Unit) -> Iterator[tuple[Place, Record]]:
    file = Path(unit.file)
    table = open_parquet(file, str(file)).read_row_group(unit.start)
    number = unit.first
    for batch in table.to_batches(max_chunksize=1024):
        for record in batch.to_pylist():
            yield Place(file, "row", number), {name: value for name, value in record.items() if value is not None}
            number += 1
