"""Reads files into data sets: records -> documents -> columns -> rows.

A `RecordReader` knows one kind of records: it opens a file, tokenises records into documents, and arranges those that
are kept. What is too long is decided in `engine.data.overlong`, for all kinds.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from engine.config.data import OVERLONG, Packing
from engine.data.columns import Columns
from engine.data.data_report import DatasetReport
from engine.data.dataset import TokenDataset
from engine.data.document import Document
from engine.data.overlong import LongRecords, RecordKind
from engine.data.record_files import expand_paths
from engine.data.sources import Given, RecordSource
from engine.data.tables import TableFile, is_table
from engine.data.tokenize import CHUNK, ConversationReader, tokenize_samples
from engine.data.tokenizer import Tokenizer
from engine.errors import UserError
from engine.sentences import listed
from engine.telemetry.format import counted

Paths = str | Path | Sequence[str]
Advance = Callable[[int], object]
"""Is called with the number of records that were read since its last call."""
Parsed = TypeVar("Parsed")
Made = TypeVar("Made")


class RecordReader(ABC, Generic[Parsed]):
    """Reads one kind of records into documents.

    Args:
        tokenizer: encodes the text.
        images: as for `engine.data.tokenize.tokenize_samples`.
        encoding: the other arguments of that.
    """

    kind: ClassVar[RecordKind]
    expects: ClassVar[str] = "nothing to train on"
    """Ends the sentence that refuses files of which too little is kept; with {kept}."""
    least: ClassVar[int] = 1
    """Records that must be kept."""

    def __init__(self, tokenizer: Tokenizer, *, images: ConversationReader | None = None, **encoding: Any) -> None:
        self._tokenizer, self.images, self._encoding = tokenizer, images, encoding

    @abstractmethod
    def open(self, given: Given) -> Iterator[Parsed]:
        """Returns the records of a file or a source.

        Raises:
            UserError: it cannot be read, or (while it is read) a malformed record.
        """

    def documents(self, records: Sequence[Any]) -> Iterator[Document]:
        """Yields the documents of some records of one file, those of a record side by side. Here records are samples.

        Raises:
            UserError: a record that cannot be tokenised.
        """
        return tokenize_samples(records, self._tokenizer, images=self.images, **self._encoding)

    def gather(self, documents: list[Document]) -> Any:
        """Returns documents that are kept in the form that `arrange` takes: columns, which need less memory."""
        return Columns.of_documents(documents, group=self.kind.width)

    def arrange(
        self, gathered: Sequence[Any], *, seq_length: int, packing: Packing, report: DatasetReport
    ) -> TokenDataset:
        """Returns the rows of the documents that are kept.

        Args:
            gathered: the results of `gather`, at least one.
            seq_length: maximum tokens of a document.
        """
        columns = Columns.joined(gathered)
        if packing == "concatenate":
            from engine.data.concatenate import concatenate

            columns, left_over = concatenate(columns, seq_length)
            report = replace(report, left_over=left_over)
        return TokenDataset(columns, seq_length=self.kind.width * seq_length, packing=bool(packing), report=report)


def build_dataset(
    paths: Paths | RecordSource,
    reader: RecordReader[Any],
    *,
    seq_length: int,
    packing: Packing = False,
    overlong: str = "truncate",
    progress: Advance | None = None,
) -> TokenDataset:
    """Reads and tokenises records.

    Args:
        paths: one file, several, or patterns with *, read in the order given; or a source.
        reader: of their records.
        seq_length: maximum tokens of a document; a row has room for one record of them.
        packing: put several records into a row, or "concatenate" all and cut rows, which are documents then.
        overlong: what to do with a longer record; see `engine.data.overlong.LongRecords`.
        progress: see `Advance`.

    Raises:
        UserError: a file or record that cannot be used, or nothing left to train on.
    """
    assert overlong in OVERLONG, overlong
    if seq_length < 2:
        raise UserError(f"data.seq_length is {seq_length}, expected at least 2: a token and the one it predicts.")
    started, width = time.monotonic(), reader.kind.width
    files = given_by(paths)
    names = listed(files)
    long = LongRecords(reader.kind, limit=seq_length, overlong=overlong, concatenates=packing == "concatenate")
    gathered: list[Any] = []
    records = kept = 0
    for count, documents in read_chunks(files, reader.open, reader.documents, CHUNK // width, progress):
        records += count
        if fitting := long.fit(documents):
            kept += len(fitting)
            gathered.append(reader.gather(fitting))
    if not records:
        raise UserError(f"{names} has no records; give some.")
    report = long.report(records)
    if kept < reader.least * width:
        raise UserError(
            report.nothing_left(names, reader.expects.format(kept=counted(kept // width, reader.kind.unit)))
        )
    dataset = reader.arrange(gathered, seq_length=seq_length, packing=packing, report=report)
    dataset.report = replace(dataset.report, seconds=time.monotonic() - started)
    dataset.read_with(None if reader.images is None else reader.images.family)
    return dataset


def given_by(paths: Paths | RecordSource) -> Sequence[Given]:
    """Returns the files that paths name, tables as sources; or the source.

    Raises:
        UserError: a path that is no file, or a pattern that matches none.
    """
    if isinstance(paths, RecordSource):
        return [paths]
    return [TableFile(path) if is_table(path) else path for path in expand_paths(paths)]


def read_chunks(
    files: Sequence[Given],
    open_file: Callable[[Given], Iterator[Parsed]],
    make: Callable[[list[Parsed]], Iterable[Made]],
    size: int,
    progress: Advance | None,
) -> Iterator[tuple[int, list[Made]]]:
    """Yields how many records were read, up to `size` of one file at a time, and the results of `make` for them.

    A record that is refused ends it once the results before that record have been yielded: a caller that refuses one
    of those names the first of both.

    Args:
        open_file: returns the records of a file or a source.
        make: makes of some records, in their order, whatever they are read for.
        progress: see `Advance`.

    Raises:
        UserError: a record is refused, by the file's reader or by `make`.
    """
    for records in [open_file(file) for file in files]:
        while True:
            chunk, unreadable = _until_refused(islice(records, size))
            if not chunk and unreadable is None:
                break
            made, unusable = _until_refused(make(chunk))
            yield len(chunk), made
            if (refusal := unusable or unreadable) is not None:
                raise refusal
            if progress is not None:
                progress(len(chunk))


def _until_refused(items: Iterable[Made]) -> tuple[list[Made], UserError | None]:
    """Returns the items before the first that is refused, and its refusal; None where none is."""
    found: list[Made] = []
    try:
        for item in items:
            found.append(item)
    except UserError as refusal:
        return found, refusal
    return found, None
