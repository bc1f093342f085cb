"""The tokenizer of a model as the harness uses it: transformers' own, from local files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.errors import UserError
from engine.sentences import on_one_line


def open_text_tokenizer(path: Path, chat_template: str | None = None) -> Any:
    """Returns the tokenizer of a folder.

    Args:
        path: of the folder.
        chat_template: that conversations were trained with; None for the tokenizer's own.

    Raises:
        UserError: transformers cannot open it.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(
            f"the tokenizer of {path} cannot be opened by transformers ({on_one_line(str(error))}): give the folder of "
            "one with --tokenizer."
        ) from None
    if tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer of {path} has no end token, by which texts end: give another with --tokenizer.")
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer
