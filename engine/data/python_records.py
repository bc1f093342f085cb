"""Records of a Python program: lists, iterators, functions that return them, and data sets of `datasets`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

from engine.data.record_files import Place, Record
from engine.data.sources import RecordSource, without_nulls
from engine.errors import UserError

MOST_OF_UNKNOWN = 1_000_000
"""Records that are read of an iterator that has no length, which may have no end."""

Records = Iterable[Mapping[str, Any]] | Callable[[], Iterable[Mapping[str, Any]]]
"""Records as a program has them; see `PythonRecords`."""


class PythonRecords(RecordSource):
    """Records of a Python program, which are read once, to their end.

    Args:
        name: of the argument that they are given in.
        given: a list or another collection of mappings, an iterator or a generator of them, a `datasets.Dataset` or
            `datasets.IterableDataset`, or a function without arguments that returns one of these.

    Raises:
        UserError: it is none of these.
    """

    def __init__(self, name: str, given: Records) -> None:
        super().__init__(name)
        kind = type(given).__name__
        if isinstance(given, Mapping):
            raise UserError(_not_records(name, given))
        if isinstance(given, (str, bytes)) or not (isinstance(given, Iterable) or callable(given)):
            raise UserError(
                f"{name} is of type {kind}, but records are expected: give a list, an iterator or a datasets.Dataset "
                "of mappings, or a function that returns one."
            )
        self._given = given

    def records(self) -> Iterator[tuple[Place, Record]]:
        given: Any = self._given
        if callable(given) and not isinstance(given, Iterable):
            given = given()
            if not isinstance(given, Iterable) or isinstance(given, (str, bytes, Mapping)):
                raise UserError(
                    f"the function in {self.name} returned a value of type {type(given).__name__}, but records are "
                    "expected: return a list, or write a generator that yields mappings."
                )
        limit = None if isinstance(given, Sized) else MOST_OF_UNKNOWN
        in_columns = type(given).__module__.partition(".")[0] == "datasets"
        for number, record in enumerate(given):
            if number == limit:
                raise UserError(
                    f"{self.name} is an iterator that has not ended after {limit:,} records: cut it with "
                    "itertools.islice, or give a list or a datasets.Dataset, which may have more."
                )
            place = self.place(number)
            plain = self.plain(place, record)
            yield place, without_nulls(plain) if in_columns else plain


def _not_records(name: str, given: Mapping[Any, Any]) -> str:
    names = ", ".join(map(str, list(given)[:5]))
    if type(given).__module__.partition(".")[0] == "datasets":
        return f"{name} is a DatasetDict with the splits {names}, but one of them is expected: name it in brackets."
    return f"{name} is one mapping with {names}, but a list of records is expected: write [record]."
