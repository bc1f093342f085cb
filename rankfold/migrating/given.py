"""One key and its value as they were written, as readers return and rules take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Value = str | int | float | bool | None | list[Any] | dict[str, Any]

PROGRAM = "(program)"
"""Key of the program that a command line starts: a Python script, a module, or a command with its subcommand."""
PROGRAM_CODE = "(script)"
"""Key of the Python script that a command line starts, as its path; its own arguments have defaults."""
OWN_LOOP = "(loop)"
"""Key of a Python script that trains without a trainer of a library."""
PROGRAM_FILE = "(configuration)"
"""Key of the file that a program reads all its options from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """A key and its value, with where they came from.

    Args:
        source: name of the file, or "flags".
        key: with dots where it was nested; dashes of flags have become underscores.
        value: as YAML reads it; True of a flag without a value.
        file_read: it names a file, whose keys have been read.
        idle: a variable of a script that nothing uses; it counts only where a rule knows it.
    """

    source: str
    key: str
    value: Value
    file_read: bool = False
    idle: bool = False

    @property
    def open(self) -> bool:
        """Whether only the shell, or the script when it runs, knows the value."""
        return isinstance(self.value, str) and ("$" in self.value or self.value.startswith("<computed"))
