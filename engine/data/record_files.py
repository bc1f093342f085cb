"""Reads .json, .jsonl and .txt files: bytes in, records and their places out.

Files are UTF-8, with or without a byte order mark, with Unix or Windows line ends. Whether a JSON file is one array
or one record a line is decided by its first character, not by its name. Blank lines carry no record; anything
else that is no record is an error that names its place.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from engine.config.hub import instead_of
from engine.errors import UserError
from engine.files.documents import open_file

Record = dict[str, Any]
_WHITE_SPACE = b" \t\r\n"


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a record: "line" counts from 1, "index" (of a JSON array) from 0.

    Args:
        path: of its file, or the name of its source.
        folder: that relative paths of its images begin at; None for that of its file.
    """

    path: Path
    unit: str
    number: int
    folder: Path | None = None

    def __str__(self) -> str:
        return f"{self.path} {self.unit} {self.number}"

    @property
    def image_folder(self) -> Path:
        """The folder that relative paths of its images begin at."""
        return self.path.parent if self.folder is None else self.folder

    def error(self, message: str) -> UserError:
        """Returns the error about this record, to be raised by the caller."""
        return UserError(f"{self}: {message}")


def expand_paths(paths: str | Path | list[str] | tuple[str, ...]) -> list[Path]:
    """Returns the files that an option names: one path, several, or patterns with * (in sorted order).

    Raises:
        UserError: a path that is no file, or a pattern that matches none.
    """
    files: list[Path] = []
    for name in [paths] if isinstance(paths, str | Path) else paths:
        path = Path(name)
        if path.is_file():
            files.append(path)
            continue
        matches = sorted(match for match in path.parent.glob(path.name) if match.is_file()) if "*" in path.name else []
        if not matches:
            given = "is a folder" if path.is_dir() else "does not exist"
            advice = instead_of(
                path, "give a .txt, .json, .jsonl, .csv or .parquet file or a pattern with *", "dataset"
            )
            raise UserError(f"the data file {path} {given}{advice}.")
        files.extend(matches)
    return files


def read_text(path: Path) -> str:
    """Returns the text of a file, with line ends as \\n.

    Raises:
        UserError: it is not UTF-8, or has no text.
    """
    with open_file(path, "convert the file to UTF-8, or give another") as file:
        text = file.read().decode("utf-8-sig")
    if not text.strip():
        raise UserError(f"{path} has no text; give a file that has some.")
    return text.replace("\r\n", "\n")


def read_records(path: Path) -> tuple[int, Iterator[tuple[Place, Record]]]:
    """Returns how many records a JSON or JSONL file has, and the records with their places.

    Raises:
        UserError: not UTF-8, not JSON, or a record that is no object; for JSONL while it is being read.
    """
    if path.suffix.lower() not in (".json", ".jsonl"):
        raise UserError(
            f"{path} ends in '{path.suffix}', expected .txt, .json, .jsonl, .csv or .parquet; rename or convert the "
            "file."
        )
    with open_file(path) as file:
        if first_byte(file) == b"[":
            records = _load_array(path)
            return len(records), (checked_record(Place(path, "index", index), one) for index, one in enumerate(records))
        # Counted in a separate pass, which takes a fraction of parsing, so that lines need not stay in memory.
        return sum(1 for line in file if line.strip(_WHITE_SPACE)), _line_records(path)


def first_byte(file: BinaryIO) -> bytes:
    """Returns the first character that is neither a byte order mark nor white space; seeks to after the mark."""
    start = len(codecs.BOM_UTF8) if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0
    file.seek(start)
    byte = file.read(1)
    while byte and byte in _WHITE_SPACE:
        byte = file.read(1)
    file.seek(start)
    return byte


def _load_array(path: Path) -> list[Any]:
    with open_file(path, "convert the file to UTF-8") as file:
        text = file.read().decode("utf-8-sig")
    try:
        records = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path} line {error.lineno}: the array is not JSON ({error.msg}, column {error.colno}); correct the file."
        ) from error
    except (ValueError, RecursionError) as error:  # a number with thousands of digits, or lists in lists without end
        raise UserError(f"{path}: the array cannot be read ({error}); correct the file.") from error
    assert isinstance(records, list)
    return records


def _line_records(path: Path) -> Iterator[tuple[Place, Record]]:
    # Lines of bytes: str.splitlines would also break at separators that may stand inside a JSON string.
    with open_file(path) as file:
        first_byte(file)
        for number, line in enumerate(file, start=1):
            line = line.strip(_WHITE_SPACE)
            if line:
                place = Place(path, "line", number)
                yield checked_record(place, _parse_line(place, line))


def _parse_line(place: Place, line: bytes) -> object:
    try:
        record: object = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise place.error(f"not UTF-8 at byte {error.start} of the line; convert the file to UTF-8.") from error
    except json.JSONDecodeError as error:
        raise place.error(
            f"not a JSON record ({error.msg}, column {error.colno}); each line must be one complete object."
        ) from error
    except (ValueError, RecursionError) as error:  # a number with thousands of digits, or lists in lists without end
        raise place.error(f"the record cannot be read ({error}); correct it.") from error
    return record


def line_record(place: Place, line: bytes) -> tuple[Place, Record]:
    """Returns the record in one line of a JSONL file, with its place.

    Raises:
        UserError: it is none.
    """
    return checked_record(place, _parse_line(place, line))


def checked_record(place: Place, record: object) -> tuple[Place, Record]:
    """Returns a record that is an object, with its place.

    Raises:
        UserError: it is anything else.
    """
    if not isinstance(record, dict):
        raise place.error(f"the record is of type {type(record).__name__}, expected an object with named fields.")
    return place, record
