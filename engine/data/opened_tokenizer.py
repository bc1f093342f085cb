"""Opens the two kinds of tokenizer in this process: of tokenizer.json, and of a sentencepiece `.model` file.

A folder with `tokenizer.json` is opened by transformers' generic fast tokenizer, which takes that file as it is
(the class named in `tokenizer_config.json` may rebuild it with rules of its own). A bare sentencepiece `.model` is
opened by sentencepiece itself: rebuilt as a fast tokenizer it orders merges differently and encodes some texts
differently. Nothing is ever fetched from a hub, and no code in the folder is run.

Nothing here limits what such files may cost: the engine opens them in a process of their own
(`engine.data.tokenizer`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config.hub import instead_of
from engine.data.chat import Learn, Message, covered_tokens, without_tail
from engine.data.named_templates import template_text
from engine.data.placeholders import Placeholders
from engine.data.processor_template import processor_template
from engine.data.sentencepiece_model import SentencePieceTokenizer, with_special
from engine.data.template import ChatTemplate, no_template
from engine.data.tokenizer import ChatOptions, Conversation, EncodedChat, encoded_chat
from engine.data.tokenizer_calls import MOST_TEMPLATE
from engine.errors import UserError
from engine.files.documents import read_json
from engine.sentences import as_written

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_MOST_TOKENS = 1 << 31
"""Ids are int32."""

Limits = Callable[[], AbstractContextManager[None]]


class HuggingFaceTokenizer:
    """The tokenizer of a `tokenizer.json` with the settings beside it, opened by transformers.

    Args:
        tokenizer: a fast tokenizer of transformers.
        path: where it came from, for messages.
        chat: how conversations are rendered.
        limits: is entered around what a chat template does.

    Raises:
        UserError: a chat template that does not exist.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        path: Path,
        chat: ChatOptions | None = None,
        limits: Limits = nullcontext,
    ) -> None:
        self._tokenizer = tokenizer
        self._path = path
        self._chat = chat or ChatOptions()
        added = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if str(token).strip()}
        self._control_ids = frozenset(added)
        self.added_tokens: Mapping[str, int] = {text: number for number, text in added.items()}
        control = "|".join(re.escape(token) for token in sorted(added.values(), key=len, reverse=True))
        self._template = self._chosen_template(re.compile(control or "(?!)"), limits)
        self.vocab_size = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=-1))
        if self.vocab_size > _MOST_TOKENS:
            raise UserError(
                f"the tokenizer of {path} has the id {self.vocab_size - 1}, beyond {_MOST_TOKENS - 1}; copy the "
                "model's own tokenizer files again."
            )
        self.bos_id: int | None = tokenizer.bos_token_id
        self.eos_id: int | None = tokenizer.eos_token_id
        self.padding_id: int | None = self.eos_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        # The post-processor decides what is added, which shows only in its output.
        self.adds_bos = self.bos_id is not None and tokenizer("a")["input_ids"][:1] == [self.bos_id]
        self.has_chat_template = self._template is not None

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return with_special(ids, self.bos_id if bos else None, self.eos_id if eos else None)

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        # Straight to the Rust side and without offsets: transformers' own call spends most of its time on records
        # that are not needed here.
        encodings = self._tokenizer.backend_tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode([int(token_id) for token_id in ids], skip_special_tokens=True))

    def decode_many(self, ids: Sequence[Sequence[int]]) -> list[str]:
        return [self.decode(one) for one in ids]

    def show(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode([int(token_id) for token_id in ids]))

    @property
    def chat_template(self) -> str | None:
        return None if self._template is None else self._template.source

    def apply_chat(
        self, messages: Sequence[Message], *, learn: Learn = "answers", images: Placeholders | None = None
    ) -> tuple[list[int], list[bool]]:
        template = self._required_template()
        if learn == "last" and len(messages) > 1:
            return self._last_answer(template, messages, images)
        if learn == "all":
            ids, _ = self._encode(_expanded(template.render(messages), images))
            return ids, [True] * len(ids)
        text, spans = template.render_with_targets(messages)
        if images is not None:
            text, spans = images.put_into(text, spans)
        ids, offsets = self._encode(text)
        return ids, self._cut(covered_tokens(spans[-1:] if learn == "last" else spans, offsets), text, ids, offsets)

    def apply_chats(self, conversations: Sequence[Conversation], *, learn: Learn) -> list[EncodedChat | UserError]:
        return [encoded_chat(self, one, learn) for one in conversations]

    def chat_warnings(self, *, training: bool = False) -> list[str]:
        if self._template is None or (self._chat.template is None and not training):
            return []
        ending = self._template.ending()
        if ending is None or self._template.control.search(ending):
            return []
        if self._chat.template is None:
            return [
                f"the chat template of {self._template.where} ends an answer with {ending.strip()!r}, in which this "
                "tokenizer has no control token, so training teaches no end of an answer: to teach one, write a "
                f"template with {self._tokenizer.eos_token} behind answers to a file, for data.chat_template."
            ]
        return [
            f"the chat template {self._chat.template} ends an answer with {ending.strip()!r}, in which this tokenizer "
            "has no control token, so generation does not stop there unless --stop names it; llama2, mistral, zephyr, "
            "vicuna and alpaca end answers with the end token."
        ]

    def chat_prompt(self, messages: Sequence[Message], *, images: Placeholders | None = None) -> list[int]:
        return self.encode(_expanded(self._required_template().render(messages, prompt=True), images))

    def chat_ids(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, prompt: bool = False
    ) -> list[int]:
        return self.encode(self._required_template().render(messages, prompt=prompt, tools=tools))

    def _last_answer(
        self, template: ChatTemplate, messages: Sequence[Message], images: Placeholders | None
    ) -> tuple[list[int], list[bool]]:
        """Returns targets for the last answer: the tokens after its prompt's, or from where the two differ."""
        text = _expanded(template.render(messages), images)
        ids, offsets = self._encode(text)
        prompt = self.chat_prompt(messages[:-1], images=images)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, prompt, strict=False)))
        return ids, self._cut([at >= same for at in range(len(ids))], text, ids, offsets)

    def _encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns token ids, and the characters of each."""
        encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return encoding["input_ids"], encoding["offset_mapping"]

    def _cut(self, mask: list[bool], text: str, ids: Sequence[int], offsets: Sequence[tuple[int, int]]) -> list[bool]:
        if self._chat.learn_after_end:
            return mask
        return without_tail(mask, text, offsets, [token_id in self._control_ids for token_id in ids])

    def _required_template(self) -> ChatTemplate:
        if self._template is None:
            raise UserError(no_template(self._path))
        return self._template

    def _chosen_template(self, control: re.Pattern[str], limits: Limits) -> ChatTemplate | None:
        where = str(self._path)
        if self._chat.template is not None:
            source, where = template_text(self._chat.template), self._chat.template
        elif self._chat.trained_template is not None:
            source, where = self._chat.trained_template, "the adapter"
        elif self._tokenizer.chat_template is None:
            return None
        else:
            try:
                source = self._tokenizer.get_chat_template()
            except ValueError as error:  # several, and none is the default
                raise UserError(f"{self._path} has several chat templates ({error}); name a file of one.") from error
        if not isinstance(source, str):
            raise UserError(
                f"{where} has {as_written(source)} as its chat template, expected text; repair its files, or give "
                "another template with data.chat_template."
            )
        if len(source) > MOST_TEMPLATE:
            raise UserError(
                f"the chat template of {where} has {len(source):,} characters, more than {MOST_TEMPLATE:,}; give "
                "another one with data.chat_template."
            )
        tokens = self._tokenizer.special_tokens_map
        return ChatTemplate(source, where, tokens, self._chat.arguments, control, limits)


def _expanded(text: str, images: Placeholders | None) -> str:
    return text if images is None else images.put_into(text)[0]


def open_tokenizer(
    path: str | Path, chat: ChatOptions | None = None, limits: Limits = nullcontext
) -> HuggingFaceTokenizer | SentencePieceTokenizer:
    """Opens the tokenizer at `path`.

    Args:
        path: a folder (a Hugging Face checkpoint, or a checkpoint that was imported with its tokenizer), a
            sentencepiece `.model` file, or a `tokenizer.json` file. In a folder `tokenizer.json` comes first, then
            `tokenizer.model`.
        chat: how conversations are rendered; None for the tokenizer's own template.
        limits: is entered around what a chat template does.

    Raises:
        UserError: nothing there, or nothing that opens.
    """
    source = Path(path)
    if source.is_dir():
        if (source / "tokenizer.json").is_file():
            return _load_fast(source, chat, limits)
        models = sorted(source.glob("tokenizer.model*"))
        if models:
            return _load_sentencepiece(models[0], chat, folder=source)
        raise UserError(
            f"{source} has neither tokenizer.json nor tokenizer.model; set data.tokenizer to a folder or a .model file "
            "that has the tokenizer of this model."
        )
    if not source.is_file():
        raise UserError(
            f"there is no tokenizer at {source}"
            + instead_of(source, "set data.tokenizer to a folder with tokenizer.json or to a .model file")
            + "."
        )
    return _load_fast(source, chat, limits) if source.suffix == ".json" else _load_sentencepiece(source, chat)


def _load_sentencepiece(
    source: Path, chat: ChatOptions | None, *, folder: Path | None = None
) -> SentencePieceTokenizer:
    if chat is not None and chat.template is not None:
        raise UserError(
            f"{source} is a sentencepiece model, which cannot encode the control tokens of a chat template, and "
            f"data.chat_template is {chat.template}; give a tokenizer with tokenizer.json, or remove the template."
        )
    settings = {} if folder is None else _settings(folder)
    begins = settings.get("add_bos_token")
    return SentencePieceTokenizer(
        source, adds_bos=begins if isinstance(begins, bool) else None, added=_added_tokens(source, settings)
    )


def _load_fast(source: Path, chat: ChatOptions | None, limits: Limits) -> HuggingFaceTokenizer:
    # Imported late: it takes seconds, and a command that only prints its help has no use for it.
    import transformers.utils.chat_template_utils  # noqa: F401 - takes seconds, which are not a template's
    from transformers import PreTrainedTokenizerFast

    file = source / "tokenizer.json" if source.is_dir() else source
    content = read_json(file, "replace it by the model's tokenizer.json")
    if not isinstance(content.get("model"), dict) or not isinstance(content.get("added_tokens"), list):
        raise UserError(f"{file} has no model and added_tokens; replace it by the model's tokenizer.json.")
    opened: Any = PreTrainedTokenizerFast
    beside = None
    if source.is_dir():
        _check_settings(source)
        beside = processor_template(source)
    try:
        if source.is_dir():
            tokenizer = opened.from_pretrained(str(source), local_files_only=True)
            tokenizer.chat_template = beside or tokenizer.chat_template
        else:
            tokenizer = opened(tokenizer_file=str(source))
        # some settings of a wrong kind show only in use
        tokenizer.decode(tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"])
    except Exception as error:
        # the Rust library raises bare Exceptions; the others are settings of a wrong kind
        if type(error) is not Exception and not isinstance(
            error, TypeError | ValueError | LookupError | AttributeError | ArithmeticError
        ):
            raise
        raise UserError(
            f"{file}, with the settings beside it, is not one that transformers can open ({error}); copy the model's "
            "tokenizer files again."
        ) from error
    return HuggingFaceTokenizer(tokenizer, source, chat, limits)


def _check_settings(folder: Path) -> None:
    """Raises UserError where the files beside tokenizer.json are not what transformers expects."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            read_json(folder / name, "repair or remove it")
    if (file := folder / "tokenizer_config.json").is_file():
        template = read_json(file, "repair or remove it").get("chat_template")
        if template is not None and not isinstance(template, str | list):
            raise UserError(f"{file} has chat_template {as_written(template)}, expected text; repair the file.")


def _settings(folder: Path) -> Mapping[str, Any]:
    """Returns tokenizer_config.json, or nothing where there is none."""
    file = folder / "tokenizer_config.json"
    return read_json(file, "repair or remove it") if file.is_file() else {}


def _added_tokens(source: Path, settings: Mapping[str, Any]) -> dict[str, int]:
    """Returns the whole tokens that tokenizer_config.json adds to a sentencepiece model, with their ids."""
    entries = settings.get("added_tokens_decoder") or {}
    try:
        return {str(entry["content"]): int(number) for number, entry in entries.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{source.parent / 'tokenizer_config.json'} has an added_tokens_decoder that is not a map from ids to "
            "tokens with content; copy the model's own file again."
        ) from error
