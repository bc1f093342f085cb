"""The rule for a folder's tensors: every one is used, or refused by name.

A tensor that is silently left over means that another model is computed than the folder's. So each reader of a folder
compares its names with those that are read, before any weight is. Tensors that no computation uses are listed here, or
in a family's `NameMap.unused`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from engine.errors import UserError
from engine.sentences import listed

BUFFERS = {
    ".rotary_emb.inv_freq": "rotary frequencies, which follow from config.json and are computed again",
    ".rotary_emb.cos_cached": "tables of the same",
    ".rotary_emb.sin_cached": "tables of the same",
    ".masked_bias": "the score of a masked token, a constant of old releases of transformers",
}
"""Ends of names of tensors that old checkpoints have, and why leaving them out changes nothing."""


def is_buffer(name: str) -> bool:
    """Returns whether a tensor is one of `BUFFERS`."""
    return name.endswith(tuple(BUFFERS))


def refuse_leftover(label: str, stored: Iterable[str], used: Collection[str], *, because: str) -> None:
    """Refuses tensors that nothing would read.

    Args:
        label: the folder or file that holds them.
        stored: the names of all tensors in it.
        used: the names of those that are read.
        because: ends the sentence "LABEL has NAME, which ...": why nothing reads them, and the remedy.

    Raises:
        UserError: names the first few.
    """
    if left := sorted(name for name in set(stored) - set(used) if not is_buffer(name)):
        raise UserError(f"{label} has {listed(left)}, which {because}")
