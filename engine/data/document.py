"""A document: what attention may see together, one record, or one cut of a .txt stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

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
        extras: what it has beside its tokens; None where it has nothing.
        sign: 1 for an answer that was preferred, -1 for one that was not, 0 for anything else.
    """

    place: Place
    tokens: NDArray[np.int32]
    targets: NDArray[np.bool_]
    extras: DocumentExtras | None = None
    sign: int = 0

    def beginning(self, length: int) -> Document | None:
        """Returns the first tokens of the document; None where its extras must not be cut there."""
        extras = self.extras
        if extras is not None and len(self.tokens) > length and (extras := extras.cut(length)) is None:
            return None
        return replace(self, tokens=self.tokens[:length], targets=self.targets[:length], extras=extras)

    def cut(self, length: int) -> Iterator[Document]:
        """Yields pieces of the document, each target of which is a target of exactly one piece.

        Neighbouring pieces share one token: the last of one, a target there, is the first of the next, where it is
        none.
        """
        for start in range(0, max(len(self.tokens) - 1, 1), length - 1):
            part = slice(start, start + length)
            targets = self.targets[part].copy()
            targets[:1] = False
            yield Document(self.place, self.tokens[part], targets)
