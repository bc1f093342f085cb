"""Declares an option of a section: its default, whether a resumed run reports a change of it, and its objectives.

Another value of a reported option changes training, evaluation or the kept checkpoints; that of an ignored one does
not. Changes that are not allowed at all (of the adapters' shape, or the base) are refused where the checkpoint is
opened.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, field, fields
from typing import Any, Literal

Change = Literal["reported", "ignored"]
"""The treatment of a change of the option."""
REPORTED: Change = "reported"
IGNORED: Change = "ignored"


def option(default: Any, change: Change, objectives: tuple[str, ...] = ()) -> Any:
    """Returns the field of an option.

    Args:
        default: its default; MISSING where it must be given.
        change: REPORTED or IGNORED.
        objectives: the only ones that the option is for; () for all.
    """
    metadata = {"change": change, "objectives": objectives}
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


def is_reported(declared: Field[Any]) -> bool:
    """Returns whether a resumed run reports a change of an option."""
    return bool(declared.metadata["change"] == REPORTED)


def changed(section: Any) -> list[Field[Any]]:
    """Returns the options of a section, in their order, whose value is not the default."""
    return [field for field in fields(section) if getattr(section, field.name) != field.default]
