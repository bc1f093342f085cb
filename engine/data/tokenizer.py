"""One face for the two libraries that turn text into token ids.

A folder with `tokenizer.json` is opened by transformers' generic fast tokenizer, which takes that file as it stands
(the class named in `tokenizer_config.json` may rebuild it with rules of its own). A bare sentencepiece `.model` is
opened by sentencepiece itself: rebuilt as a fast tokenizer it orders merges differently and encodes some texts
differently. Nothing is ever fetched from a hub, and no code that lies in the folder is run.

Special tokens are the caller's decision (`bos=`, `eos=`), never added behind its back.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from engine.data.chat import Message, assistant_spans, mask_tokens
from engine.errors import UserError

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor
    from transformers import PreTrainedTokenizerFast

FORMATS_WITHOUT_TEMPLATE = "text, completion or alpaca"


class Tokenizer(Protocol):
    """What the data package asks of a tokenizer.

    Attributes:
        vocab_size: number of ids, added tokens included; every id is smaller.
        bos_id: id that opens a document, or None.
        eos_id: id that closes a document, or None.
        adds_bos: whether the model behind this tokenizer expects `bos_id` in front of every document.
        has_chat_template: whether `apply_chat` can work.
    """

    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    adds_bos: bool
    has_chat_template: bool

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> list[int]:
        """Token ids of `text`, with `bos_id` in front and `eos_id` behind where asked for and defined."""
        ...

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """The same as `encode` of each text, without special tokens, faster."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; control tokens are left out."""
        ...

    def apply_chat(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Render a conversation through the chat template.

        Args:
            messages: each with "role" and "content", and whatever else the template reads.

        Returns:
            Token ids, and for each whether an assistant turn wrote it, the token that ends the turn included.

        Raises:
            UserError: no template, a template that refuses these messages, or one that cannot tell turns apart.
        """
        ...

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation up to where the assistant's next turn begins.

        Args:
            messages: as of `apply_chat`.

        Raises:
            UserError: no template, or one that refuses these messages.
        """
        ...


def _with_special(ids: list[int], bos_id: int | None, eos_id: int | None) -> list[int]:
    if bos_id is not None:
        ids = [bos_id, *ids]
    if eos_id is not None:
        ids = [*ids, eos_id]
    return ids


class SentencePieceTokenizer:
    """A sentencepiece `.model` file.

    Args:
        path: the file.
        adds_bos: whether documents open with the begin token; the file itself does not say. None: they do where the
            model defines one, which is the habit of the Llama family.
    """

    has_chat_template = False

    def __init__(self, path: Path, *, adds_bos: bool | None = None) -> None:
        from sentencepiece import SentencePieceProcessor

        try:
            self._processor: SentencePieceProcessor = SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise UserError(
                f"{path} is not a sentencepiece model ({error}); give a .model file or a folder with tokenizer.json."
            ) from error
        self._path = path
        self.vocab_size: int = self._processor.vocab_size()
        self.bos_id = self._defined(self._processor.bos_id())
        self.eos_id = self._defined(self._processor.eos_id())
        self.adds_bos = self.bos_id is not None and adds_bos is not False

    @staticmethod
    def _defined(token_id: int) -> int | None:
        return token_id if token_id >= 0 else None

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> list[int]:
        ids: list[int] = self._processor.encode(text)
        return _with_special(ids, self.bos_id if bos else None, self.eos_id if eos else None)

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = self._processor.encode(list(texts))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._processor.decode([int(token_id) for token_id in ids])
        return text

    def apply_chat(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        raise UserError(_no_template(self._path))

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        raise UserError(_no_template(self._path))


class HuggingFaceTokenizer:
    """A `tokenizer.json` with the settings that lie beside it, opened by transformers.

    Args:
        tokenizer: a fast tokenizer of transformers.
        path: where it came from, for messages.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, path: Path) -> None:
        self._tokenizer = tokenizer
        self._path = path
        self._special_ids = frozenset(tokenizer.all_special_ids)
        self.vocab_size = len(tokenizer)
        self.bos_id: int | None = tokenizer.bos_token_id
        self.eos_id: int | None = tokenizer.eos_token_id
        # The post-processor decides what is added, and it can only be seen at work.
        self.adds_bos = self.bos_id is not None and tokenizer("a")["input_ids"][:1] == [self.bos_id]
        self.has_chat_template = tokenizer.chat_template is not None

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return _with_special(ids, self.bos_id if bos else None, self.eos_id if eos else None)

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        # Straight to the Rust side and without offsets: transformers' own call spends most of its time on records
        # that nobody reads here.
        encodings = self._tokenizer.backend_tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode([int(token_id) for token_id in ids], skip_special_tokens=True))

    def apply_chat(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        if not self.has_chat_template:
            raise UserError(_no_template(self._path))
        text, spans = assistant_spans(messages, self._render)
        if spans is None:
            return self._template_mask(messages)
        encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids: list[int] = encoding["input_ids"]
        is_special = [token_id in self._special_ids for token_id in ids]
        return ids, mask_tokens(text, spans, encoding["offset_mapping"], is_special)

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        if not self.has_chat_template:
            raise UserError(_no_template(self._path))
        return self.encode(self._render(messages, True))

    def _render(self, messages: Sequence[Message], generate: bool) -> str:
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=generate
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:  # a template is a program
            raise UserError(
                f"the chat template of {self._path} refuses these messages ({error}); change the order of their roles "
                f"or use a format that needs no template ({FORMATS_WITHOUT_TEMPLATE})."
            ) from error
        return str(text)

    def _template_mask(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """The way of a template that marks its assistant turns itself, with {% generation %} blocks."""
        template = self._tokenizer.get_chat_template()
        if "endgeneration" not in template:
            raise UserError(
                f"the chat template of {self._path} changes earlier turns when later ones are added and marks no turns "
                "with {% generation %} blocks, so the assistant's tokens cannot be found; add such blocks to the "
                "template or give conversations with one assistant turn."
            )
        encoding: Any = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages], return_dict=True, return_assistant_tokens_mask=True
        )
        return list(encoding["input_ids"]), [bool(flag) for flag in encoding["assistant_masks"]]


def _no_template(path: Path) -> str:
    return (
        f"the tokenizer of {path} has no chat template, which conversations (messages, sharegpt) need; give "
        f"data.tokenizer a folder that has one or write the data in the format {FORMATS_WITHOUT_TEMPLATE}."
    )


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Open the tokenizer that lies at `path`.

    Args:
        path: a folder (a Hugging Face checkpoint, or a checkpoint that was imported with its tokenizer), a
            sentencepiece `.model` file, or a `tokenizer.json` file. In a folder `tokenizer.json` comes first, then
            `tokenizer.model`.

    Raises:
        UserError: nothing there, or nothing that opens.
    """
    source = Path(path).expanduser()
    if source.is_dir():
        if (source / "tokenizer.json").is_file():
            return _load_fast(source)
        models = sorted(source.glob("tokenizer.model*"))
        if models:
            return SentencePieceTokenizer(models[0], adds_bos=_configured_bos(source))
        raise UserError(
            f"{source} has neither tokenizer.json nor tokenizer.model; set data.tokenizer to a folder or a .model file "
            "that has the tokenizer of this model."
        )
    if not source.is_file():
        raise UserError(
            f"there is no tokenizer at {source}; set data.tokenizer to a folder with tokenizer.json or to a .model "
            "file."
        )
    return _load_fast(source) if source.suffix == ".json" else SentencePieceTokenizer(source)


def _load_fast(source: Path) -> HuggingFaceTokenizer:
    # Imported late: it takes seconds, and a command that only prints its help has no use for it.
    from transformers import PreTrainedTokenizerFast

    file = source / "tokenizer.json" if source.is_dir() else source
    content = _read_mapping(file, "replace it by the model's tokenizer.json")
    if not isinstance(content.get("model"), dict) or not isinstance(content.get("added_tokens"), list):
        raise UserError(f"{file} has no model and added_tokens; replace it by the model's tokenizer.json.")
    opened: Any = PreTrainedTokenizerFast
    try:
        if source.is_dir():
            _check_settings(source)
            tokenizer = opened.from_pretrained(str(source), local_files_only=True)
        else:
            tokenizer = opened(tokenizer_file=str(source))
    except Exception as error:
        # what the Rust library raises is of no kind of its own; the others are settings of a wrong kind
        if type(error) is not Exception and not isinstance(error, TypeError | ValueError | LookupError):
            raise
        raise UserError(
            f"{file}, with the settings beside it, is not one that transformers can open ({error}); copy the model's "
            "tokenizer files again."
        ) from error
    return HuggingFaceTokenizer(tokenizer, source)


def _check_settings(folder: Path) -> None:
    """Raises UserError where the files beside tokenizer.json are not what transformers reads them for."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            _read_mapping(folder / name, "repair or remove it")
    if (file := folder / "tokenizer_config.json").is_file():
        template = _read_mapping(file, "repair or remove it").get("chat_template")
        if template is not None and not isinstance(template, str | list):
            raise UserError(f"{file} has chat_template {template!r}, expected text; repair the file.")


def _read_mapping(file: Path, remedy: str) -> dict[str, Any]:
    """What a JSON file holds.

    Raises:
        UserError: it is no JSON, or no mapping; ends in `remedy`.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deeply
        raise UserError(f"{file} is not a JSON file ({error}); {remedy}.") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} holds no JSON mapping; {remedy}.")
    return content


def _configured_bos(folder: Path) -> bool | None:
    """What tokenizer_config.json says about the begin token, or None."""
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return None
    value = _read_mapping(file, "repair or remove it").get("add_bos_token")
    return value if isinstance(value, bool) else None
