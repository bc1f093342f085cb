"""Rows of Parquet and CSV files as records: the row of a table gives what the same record in a JSONL file would.

CSV is as spreadsheets write it (RFC 4180): UTF-8, the first row names the columns, and every cell is text. A field that
is null in a row of a Parquet file is left out of its record.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from engine.data.record_files import Place, Record
from engine.data.sources import RecordSource, without_nulls
from engine.errors import UserError
from engine.files.documents import open_file

TABLES = (".parquet", ".csv")
"""The endings of these files."""
_LONGEST_CELL = 1 << 30
_BATCH = 1024


class TableFile(RecordSource):
    """A Parquet or CSV file.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path

    def records(self) -> Iterator[tuple[Place, Record]]:
        with open_file(self._path) as file:
            for number, row in enumerate(rows_of(file, self._path.suffix, self.name)):
                place = self.place(number, "row", self._path.parent)
                yield place, without_nulls(self.plain(place, row))


def is_table(path: Path) -> bool:
    """Returns whether a file is a table by its ending."""
    return path.suffix.lower() in TABLES


def rows_of(file: BinaryIO, suffix: str, name: str) -> Iterator[dict[str, Any]]:
    """Yields the rows of an open table: values as Arrow has them, None for nulls.

    Args:
        file: at its beginning.
        suffix: one of `TABLES`.
        name: in messages.

    Raises:
        UserError: it is no such table, or pyarrow is not installed.
    """
    return _parquet_rows(file, name) if suffix.lower() == ".parquet" else _csv_rows(file, name)


def open_parquet(file: BinaryIO | Path, name: str) -> Any:
    """Opens a Parquet file with pyarrow.

    Raises:
        UserError: it is none, or pyarrow is not installed.
    """
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise UserError(f"{name} is Parquet, which needs pyarrow: install it, or convert the file to JSONL.") from None
    try:
        return parquet.ParquetFile(file)
    except (OSError, ValueError) as error:
        raise UserError(f"{name} cannot be read as Parquet ({error}): copy it again.") from error


def _parquet_rows(file: BinaryIO, name: str) -> Iterator[dict[str, Any]]:
    table = open_parquet(file, name)
    try:
        for batch in table.iter_batches(_BATCH):
            yield from batch.to_pylist()
    except (OSError, ValueError) as error:
        raise UserError(f"{name} cannot be read as Parquet ({error}): copy it again.") from error


def _csv_rows(file: BinaryIO, name: str) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(_LONGEST_CELL)  # of the process; the library's own limit is 128 KiB
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    reader = csv.reader(text, strict=True)
    try:
        columns = next(reader, [])
        if not columns or len(set(columns)) < len(columns) or not all(columns):
            raise UserError(f"the first row of {name} does not name its columns, each once: add such a row.")
        for number, cells in enumerate(filter(None, reader)):
            if len(cells) != len(columns):
                raise UserError(
                    f"{name} row {number} has {len(cells)} cells, but the first row names {len(columns)} columns: "
                    "correct it, and put cells with commas or line breaks in quotes."
                )
            yield dict(zip(columns, cells, strict=True))
    except csv.Error as error:
        raise UserError(f"{name} line {reader.line_num} cannot be read as CSV ({error}): correct it.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 (byte {error.start}): convert it.") from error
    finally:
        text.detach()
