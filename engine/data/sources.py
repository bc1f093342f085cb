"""Record sources: the way in for records that do not come from a file of a format that the engine reads.

A run names its data by texts, in data.train, data.validation and data.mix. A table (`Sources`) says which of these
texts name a source; all others are paths. It is made before the run begins and given to
`engine.training.trainer.train` and `engine.config.rules.check_files`; each reader of records looks into it. Everything
behind is the same for a source as for a JSONL file of the same records: formats, chat templates, packing, mixtures,
held-out rows, and the rows, bit for bit.

A source of the rows of a Parquet file, for example:

    class Split(RecordSource):
        def __init__(self, name: str, file: Path) -> None:
            super().__init__(name)  # "owner/name (train)", which stands in messages where a file has its path
            self._file = file

        def records(self) -> Iterator[tuple[Place, Record]]:
            for number, row in enumerate(rows_of(self._file)):
                place = self.place(number, "row")
                yield place, self.plain(place, without_nulls(row))

    trainer.train(config, supplied=Supplied(sources={"owner/name:train": Split(...)}))

where config.data.train is "owner/name:train".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engine.data.plain_records import plain_record
from engine.data.record_files import Place, Record, read_records
from engine.seams import resolve

_KEPT_IMAGES = "engine.vision.data.kept_images:KeptImages"


class RecordSource(ABC):
    """Records that a run trains on or is evaluated on. To be closed, as a context, when the run has ended.

    A source needs no fingerprint of its own. Resuming compares a hash of the rows, or of the prompts, that its records
    give, as it does for a file: another order, number or content of the training records is noticed and reported.

    Under torchrun, every rank makes the same table. Records of language modeling and of preferences are read on the
    first rank of each machine alone, prompts of rollouts on every rank; both must give the same records on each.

    Args:
        name: in messages, where a file has its path.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._images: Any = None

    def __str__(self) -> str:
        return self.name

    def __enter__(self) -> RecordSource:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @abstractmethod
    def records(self) -> Iterator[tuple[Place, Record]]:
        """Yields every record with its place, in the order in which a file would have them. Called once in a run.

        A record is an object as JSON has it, which `plain` makes of the values of Python, numpy and Arrow.

        Raises:
            UserError: records cannot be read, or one is malformed; while they are being read.
        """

    def place(self, number: int, unit: str = "record", folder: Path | None = None) -> Place:
        """Returns the place of a record.

        Args:
            number: of the record, from 0.
            unit: of the numbers, as a word.
            folder: that relative paths of its images begin at; None for the current folder.
        """
        return Place(Path(self.name), unit, number, Path() if folder is None else folder)

    def plain(self, place: Place, record: object) -> Record:
        """Returns a record as JSON has it; see `engine.data.plain_records.plain_record`. Images that are Pillow's, or
        the bytes of a file, are written to a folder that `close` deletes, and become paths.

        Raises:
            UserError: it is not a mapping, or has a value that neither JSON nor an image file can hold.
        """
        return plain_record(place, record, self._keep_image)

    def _keep_image(self, place: Place, field: str, image: Any) -> str:
        if self._images is None:
            self._images = resolve(_KEPT_IMAGES)()
        path: str = self._images.keep(place, field, image)
        return path

    def close(self) -> None:
        """Deletes the files of its images."""
        if self._images is not None:
            self._images.close()


Sources = Mapping[str, RecordSource]
"""A text in data.train, data.validation or data.mix -> the source that it names; absent for a path."""
Given = Path | RecordSource
"""A .json or .jsonl file, or a source."""


def open_records(given: Given) -> Iterator[tuple[Place, Record]]:
    """Returns the records of a file or a source, with their places.

    Raises:
        UserError: it cannot be read, or (while it is read) a record is none.
    """
    return read_records(given)[1] if isinstance(given, Path) else given.records()


def without_nulls(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a record without the fields, also of its turns, that are None: tables of columns have them in every row
    that lacks a field."""
    return {name: _turns(value) for name, value in record.items() if value is not None}


def _turns(value: Any) -> Any:
    if isinstance(value, list):
        return [without_nulls(item) if isinstance(item, Mapping) else item for item in value]
    return value
