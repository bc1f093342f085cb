"""A document: what attention may see together, one record, or one cut of a .txt stream."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from engine.data.record_files import Place
from engine.vision.data.columns import Extras


@dataclass(frozen=True, slots=True)
class Document:
    """The tokens of one document.

    Args:
        place: the record it came from.
        tokens: int32 ids.
        targets: bool; whether the token is a target. The first never is.
        extras: images and odd labels; None where it has neither.
    """

    place: Place
    tokens: NDArray[np.int32]
    targets: NDArray[np.bool_]
    extras: Extras | None = None

    def beginning(self, length: int) -> Document | None:
        """Returns the first tokens of the document; None where the cut would go through an image."""
        extras = self.extras
        if extras is not None and len(self.tokens) > length and (extras := extras.cut(length)) is None:
            return None
        return replace(self, tokens=self.tokens[:length], targets=self.targets[:length], extras=extras)
