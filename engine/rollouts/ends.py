"""The tokens that end a completion."""

from __future__ import annotations

from pathlib import Path

from engine.checkpoint.tokenizer_files import end_tokens
from engine.data.tokenizer import Tokenizer
from engine.errors import UserError


def completion_ends(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """Returns the tokens that end a completion, as in TRL: those named in the model's folder, and the tokenizer's own.

    Args:
        folder: of the model.

    Raises:
        UserError: there is none.
    """
    own = set() if tokenizer.eos_id is None else {tokenizer.eos_id}
    ends = end_tokens(folder, tokenizer.eos_id) | own
    if not ends:
        raise UserError(
            f"no token of {folder} ends a completion: name eos_token_id in its generation_config.json, or eos_token in "
            "its tokenizer_config.json."
        )
    return ends
