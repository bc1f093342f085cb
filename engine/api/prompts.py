"""Prompts of a Python program, and their tokens and images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from engine.data.formats import conversation_turns, has_images, refuse_images, string_field
from engine.data.python_records import PythonRecords
from engine.data.record_files import Place, Record
from engine.data.tokenizer import Tokenizer
from engine.errors import UserError
from engine.seams import resolve

Messages = Sequence[Mapping[str, Any]]
"""The turns of a conversation: {"role": "user", "content": ...}, where content is a text or a list of parts."""
Prompt = str | Messages | Mapping[str, Any] | Sequence[int]
"""A text, which is continued as it is; the messages of a conversation, which the chat template writes up to the next
answer; a record with `prompt` or `messages` and images, named as in training; or token ids."""


class PromptTokens(NamedTuple):
    """The tokens of a prompt, and its images in their order."""

    ids: tuple[int, ...]
    images: tuple[Any, ...] = ()


class PromptWriter:
    """Tokenises prompts. To be closed: images in memory are files until then.

    Args:
        tokenizer: of the model.
        reader: of conversations with images (`engine.vision.data.reader.ImageReader`), for a model that sees them; None
            for one of text alone.
    """

    def __init__(self, tokenizer: Tokenizer, reader: Any) -> None:
        self._tokenizer, self._reader = tokenizer, reader
        self._source = PythonRecords("prompt", [])

    def close(self) -> None:
        """Deletes the files of images."""
        self._source.close()

    def write(self, prompt: Prompt, number: int) -> PromptTokens:
        """Returns the tokens and images of a prompt.

        Args:
            number: of the prompt, from 1, for messages.

        Raises:
            UserError: it is no prompt, has messages and the model no chat template, or has images and the model reads
                text alone.
        """
        place = Place(self._source.place(number).path, "number", number, self._source.place(number).folder)
        if isinstance(prompt, str):
            return self._text(place, {"prompt": prompt}, prompt)
        if isinstance(prompt, Mapping):
            record = self._source.plain(place, prompt)
            if "prompt" in record:
                return self._text(place, record, string_field(place, record, "prompt", "prompt"))
            return self._conversation(place, record)
        if isinstance(prompt, Sequence) and prompt and all(isinstance(one, int) for one in prompt):
            return PromptTokens(tuple(int(one) for one in prompt if isinstance(one, int)))
        if isinstance(prompt, Sequence) and prompt and all(isinstance(one, Mapping) for one in prompt):
            return self._conversation(place, self._source.plain(place, {"messages": list(prompt)}))
        raise place.error(
            f"the prompt is of type {type(prompt).__name__}, but a text, a list of messages, a record or token ids are "
            "expected: correct it."
        )

    def _text(self, place: Place, record: Record, text: str) -> PromptTokens:
        if self._reader is None:
            refuse_images(place, record, "a model that reads text alone")
        elif has_images(record, ()) or self._reader.family.cross_patch_features is not None:
            # a model whose layers attend to an image has no other prompts
            sample = resolve("engine.vision.data.records:prompt_sample")
            question = [{"role": "user", "content": text}]
            return PromptTokens(*self._reader.prompt(sample(place, record, question)))
        return PromptTokens(tuple(self._tokenizer.encode(text, bos=self._tokenizer.adds_bos)))

    def _conversation(self, place: Place, record: Record) -> PromptTokens:
        name = "conversations" if "conversations" in record else "messages"
        messages = conversation_turns(place, record, name)
        if self._reader is None:
            if has_images(record, messages):
                raise place.error("the messages have an image, but the model reads text alone: leave images out.")
            if not self._tokenizer.has_chat_template:
                raise UserError(
                    "a prompt has messages, but this model has no chat template: give a text, or load the model with "
                    "chat_template."
                )
            return PromptTokens(tuple(self._tokenizer.chat_prompt(messages)))
        if has_images(record, messages):
            sample = resolve("engine.vision.data.records:image_sample")(place, record, messages)
        else:
            plain = resolve("engine.vision.data.records:plain_conversation")
            sample = resolve("engine.vision.data.records:ImageSample")(place, plain(messages), ())
        return PromptTokens(*self._reader.prompt(sample))
