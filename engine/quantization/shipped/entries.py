"""The values of a `quantization_config`, checked as they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from engine.errors import UserError
from engine.sentences import as_written

_MOST = 1 << 20


class Entries(NamedTuple):
    """A mapping inside a `quantization_config`.

    Args:
        raw: its values.
        place: its name, as a user reads it.
    """

    raw: Mapping[str, Any]
    place: str = "quantization_config"

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a value, `default` where it is missing or null."""
        value = self.raw.get(key)
        return default if value is None else value

    def wrong(self, key: str, expected: str) -> UserError:
        """Returns the refusal of a value."""
        return UserError(
            f"config.json has {self.place}.{key} {as_written(self.raw.get(key))}, but {expected} is read: use another "
            "copy of the model, or the model as it was before it was encoded."
        )

    def mapping(self, key: str, *, needed: bool = False) -> Entries:
        """Returns a mapping, an empty one where it is missing and not needed.

        Raises:
            UserError: it is something else, or missing.
        """
        value = self.get(key)
        if value is None and not needed:
            value = {}
        if not isinstance(value, Mapping):
            raise self.wrong(key, "a mapping")
        return Entries(value, f"{self.place}.{key}")

    def texts(self, key: str) -> list[str]:
        """Returns a list of texts, an empty one where it is missing."""
        value = self.get(key, [])
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self.wrong(key, "a list of texts")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """Returns a whole number above 0."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MOST:
            raise self.wrong(key, "a whole number above 0")
        return value

    def pair(self, key: str) -> tuple[int, int]:
        """Returns two whole numbers above 0; older files have them as "128x128"."""
        value = self.get(key)
        if isinstance(value, str) and all(part.isdecimal() and len(part) < 8 for part in value.split("x")):
            value = [int(part) for part in value.split("x")]
        right = isinstance(value, list | tuple) and len(value) == 2
        if not right or not all(type(one) is int and 0 < one <= _MOST for one in value):
            raise self.wrong(key, "two whole numbers above 0")
        return value[0], value[1]

    def switch(self, key: str, *, default: bool) -> bool:
        """Returns true or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value
