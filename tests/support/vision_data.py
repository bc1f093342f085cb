"""The vision fixtures' folders, and tokenizers as their models have them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from engine.data.tokenizer import Tokenizer, load_tokenizer
from engine.vision.data.family import Conversation, Turn
from tests.support.shared_data import shared

LLAMA = ("<unk>", "<s>", "</s>")
MINICPM = (
    "<image>", "</image>", "<ref>", "</ref>", "<box>", "</box>", "<quad>", "</quad>", "<point>", "</point>", "<slice>",
    "</slice>",
)  # fmt: skip
OMNILMM = ("<im_patch>", "<im_start>", "<im_end>", "<box>", "</box>", "<ref>", "</ref>", "<quad>", "</quad>")
ADDED = {
    "minicpm-v-2": MINICPM,
    "omnilmm": OMNILMM,
    "cogvlm2": ("<|reserved_0|>", "<|reserved_1|>", "<|pad|>"),
    "cogvlm-v1": (),
    "cogagent": (),
}


def read_json(folder: str, name: str) -> Any:
    return json.loads((shared("vision") / folder / name).read_text(encoding="utf-8"))


def write_tokenizer(folder: Path, name: str) -> Path:
    """Writes the tokenizer of a fixture, as released folders have it, and returns the folder."""
    folder.mkdir(exist_ok=True, parents=True)
    if name == "minicpm-v-2_6":
        shutil.copytree(shared("vision") / name / "tokenizer", folder, dirs_exist_ok=True)
        return folder
    shutil.copy(shared("tokenizers/tok512/tok512.model"), folder / "tokenizer.model")
    tokens = dict(enumerate(LLAMA)) | {512 + at: token for at, token in enumerate(ADDED[name])}
    settings = {"added_tokens_decoder": {str(at): {"content": token, "special": True} for at, token in tokens.items()}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def fixture_tokenizer(folder: Path, name: str) -> Tokenizer:
    return load_tokenizer(write_tokenizer(folder, name))


def turns(messages: list[dict[str, str]], *, markers: tuple[str, ...] = ("<image>",)) -> tuple[Turn, ...]:
    """Turns of messages whose markers are images, numbered in their order."""
    found, count = [], 0
    for message in messages:
        parts: list[str | int] = [message["content"]]
        for marker in markers:
            split: list[str | int] = []
            for part in parts:
                pieces = part.split(marker) if isinstance(part, str) else [part]
                for at, piece in enumerate(pieces):
                    if at:
                        split.append(count)
                        count += 1
                    split.append(piece)
            parts = split
        found.append(Turn(message["role"], tuple(parts)))
    return tuple(found)


def chat(messages: list[dict[str, str]], **options: Any) -> Conversation:
    return Conversation(turns(messages), **options)
