"""A document: what attention may see together, one record, or one cut of a .txt stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.data.extras import DocumentExtras
from engine.data.record_files import Place


@dataclass(frozen=True, slots=True)
class Document:
    """The tokens of one document.

    Args:
        place: the record it came from.
        tokens: int32 ids.
        targets: bool; whether the token is a target. The first never is.
        extras: what it has beside its tokens.
    """

    place: Place
    tokens: NDArray[np.int32]
    targets: NDArray[np.bool_]
    extras: tuple[DocumentExtras, ...] = ()

    def beginning(self, length: int) -> Document | None:
        """Returns the first tokens of the document; None where its extras must not be cut there."""
        return self if len(self.tokens) <= length else self._part(0, length)

    def cut(self, length: int) -> Iterator[Document]:
        """Yields pieces of the document, each target of which is a target of exactly one piece.

        Neighbouring pieces share one token: the last of one, a target there, is the first of the next, where it is
        none.
        """
        for start in range(0, max(len(self.tokens) - 1, 1), length - 1):
            piece = self._part(start, start + length)
            assert piece is not None, "extras of the document cannot be cut into several"
            yield piece

    def _part(self, start: int, end: int) -> Document | None:
        """Returns some tokens, the first of which is no target; None where extras must not be cut there."""
        extras = tuple(extra.cut(start, end) for extra in self.extras)
        if None in extras:
            return None
        targets = self.targets[start:end].copy()
        targets[:1] = False
        return Document(self.place, self.tokens[start:end], targets, extras)  # type: ignore[arg-type]
