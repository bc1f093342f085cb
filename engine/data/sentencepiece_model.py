"""Opens tokenizers that are a sentencepiece `.model` file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.data.chat import Learn, Message
from engine.data.placeholders import Placeholders
from engine.data.template import no_template
from engine.errors import UserError
from engine.files.documents import read_bytes

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor


def with_special(ids: list[int], bos_id: int | None, eos_id: int | None) -> list[int]:
    """Returns token ids with the begin and end tokens around them, where there are any."""
    if bos_id is not None:
        ids = [bos_id, *ids]
    if eos_id is not None:
        ids = [*ids, eos_id]
    return ids


class SentencePieceTokenizer:
    """The tokenizer of a sentencepiece `.model` file.

    Args:
        path: the file.
        adds_bos: whether documents open with the begin token; the file itself does not say. None: they do where the
            model defines one, as in the Llama family.
        added: whole tokens beside the pieces, by their text, as tokenizer_config.json names them; only what takes
            a text apart at them encodes them.
    """

    has_chat_template = False
    chat_template = None

    def __init__(self, path: Path, *, adds_bos: bool | None = None, added: Mapping[str, int] | None = None) -> None:
        from sentencepiece import SentencePieceProcessor

        model = read_bytes(path, "give a .model file or a folder with tokenizer.json")
        try:
            if not model:  # the library would take empty bytes for no model at all
                raise RuntimeError("it is empty")
            self._processor: SentencePieceProcessor = SentencePieceProcessor(model_proto=model)
        except (RuntimeError, UnicodeError) as error:  # its own words may be no text
            raise UserError(
                f"{path} is not a sentencepiece model ({error}); give a .model file or a folder with tokenizer.json."
            ) from error
        self._path = path
        self.added_tokens: Mapping[str, int] = added or {}
        self._added_texts = {token_id: text for text, token_id in self.added_tokens.items()}
        self.vocab_size = max(self._processor.vocab_size(), 1 + max(self._added_texts, default=-1))
        self.bos_id = self._defined(self._processor.bos_id())
        self.eos_id = self._defined(self._processor.eos_id())
        padding_id = self._defined(self._processor.pad_id())
        self.padding_id = self.eos_id if padding_id is None else padding_id
        self.adds_bos = self.bos_id is not None and adds_bos is not False

    @staticmethod
    def _defined(token_id: int) -> int | None:
        return token_id if token_id >= 0 else None

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> list[int]:
        ids: list[int] = self._processor.encode(text)
        return with_special(ids, self.bos_id if bos else None, self.eos_id if eos else None)

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = self._processor.encode(list(texts))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        # A model's vocabulary may be padded beyond the tokenizer's pieces; such a token has no text.
        pieces = self._processor.get_piece_size()
        text: str = self._processor.decode([int(token_id) for token_id in ids if token_id < pieces])
        return text

    def decode_many(self, ids: Sequence[Sequence[int]]) -> list[str]:
        return [self.decode(one) for one in ids]

    def show(self, ids: Sequence[int]) -> str:
        pieces: list[list[int] | str] = [[]]
        for token_id in map(int, ids):
            last = pieces[-1]
            if token_id in self._added_texts:
                pieces += [self._added_texts[token_id], []]
            elif token_id < self._processor.vocab_size() and self._processor.is_control(token_id):
                pieces += [self._processor.id_to_piece(token_id), []]
            elif isinstance(last, list):
                last.append(token_id)
        return "".join(piece if isinstance(piece, str) else self.decode(piece) for piece in pieces)

    def apply_chat(
        self, messages: Sequence[Message], *, learn: Learn = "answers", images: Placeholders | None = None
    ) -> tuple[list[int], list[bool]]:
        raise UserError(no_template(self._path))

    def apply_chats(self, conversations: Sequence[Sequence[Message]], *, learn: Learn) -> list[UserError]:
        return [UserError(no_template(self._path)) for _ in conversations]

    def chat_warnings(self, *, training: bool = False) -> list[str]:
        return []

    def chat_prompt(self, messages: Sequence[Message], *, images: Placeholders | None = None) -> list[int]:
        raise UserError(no_template(self._path))

    def chat_ids(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, prompt: bool = False
    ) -> list[int]:
        raise UserError(no_template(self._path))
