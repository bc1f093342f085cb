"""The row that stays in the cache when its answer has ended, so that the next turn computes its new tokens alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptRow:
    """A row whose keys and values are in the cache.

    Args:
        ids: of the prompt, and of the answer as far as they are known.
        length: the number of tokens in the cache, which may be a few more.
        images: of the prompt.
        behind: how far the positions of tokens after the images are behind the count of tokens.
    """

    ids: tuple[int, ...]
    length: int
    images: tuple[Any, ...]
    behind: int

    def common(self, ids: tuple[int, ...], images: tuple[Any, ...]) -> int:
        """Returns the number of a prompt's first tokens that need not be computed again: less than all, because the
        last one's logits are needed; 0 where its images are others, or a token of one is not among them."""
        if [(one.file, one.spans) for one in images] != [(one.file, one.spans) for one in self.images]:
            return 0
        length = 0
        for ours, theirs in zip(self.ids, ids[:-1], strict=False):
            if ours != theirs:
                break
            length += 1
        ends = [end for image in images for _, end in image.spans]
        return length if length >= max(ends, default=0) else 0
