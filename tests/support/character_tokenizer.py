"""A tokenizer of characters in Hugging Face's files, which a chat template can be given to."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

END = "<end>"


def write_character_tokenizer(folder: Path, **settings: object) -> None:
    """Writes it in place of the tokenizer.model of a workplace's model.

    Args:
        settings: further ones of tokenizer_config.json.
    """
    (folder / "tokenizer.model").unlink(missing_ok=True)
    characters = [END, *"abcdefghijklmnopqrstuvwxyz OW.:?+23Q5A"]
    tokenizer = Tokenizer(models.WordLevel({one: number for number, one in enumerate(characters)}, unk_token=END))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(folder / "tokenizer.json"))
    own = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(own | settings), encoding="utf-8")
