"""A locked door beside which a note has its code: an environment with TRL's interface.

The code is a column of the record, which the model does not see. So a reward can be had only by reading the note with
one tool and giving the other what it says.
"""

from __future__ import annotations

from typing import Any


class Door:
    """One door, for one conversation."""

    def reset(self, code: str, **columns: Any) -> None:
        """Locks the door.

        Args:
            code: opens it.
            columns: further ones of the record, and its prompt.
        """
        self._code, self._opened = code, False

    def read_note(self) -> str:
        """Reads the note beside the door."""
        return self._code

    def open_door(self, code: str) -> str:
        """Types a code.

        Args:
            code: Two digits.

        Returns:
            Whether the door opens.
        """
        self._opened = self._opened or code == self._code
        return "It opens." if code == self._code else "It stays shut."

    def get_reward(self) -> float:
        """Returns 1 for an open door."""
        return float(self._opened)


class BlankNote(Door):
    """The same door without a code on its note: with it, there is nothing to learn."""

    def read_note(self) -> str:
        """Reads the note beside the door."""
        return "??"
