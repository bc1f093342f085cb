"""Prompts and answers: texts, conversations, images and files of records, and their tokens."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from engine.data.formats import IMAGE_FIELDS, VIDEOS, conversation_turns, has_images
from engine.data.record_files import Place
from engine.data.tokenizer import Tokenizer
from engine.errors import UserError
from engine.files.documents import parse_record, read_text
from engine.files.durable import write_named
from engine.files.refusals import writing
from engine.inference.rows import Answer, Request
from engine.sentences import listed
from engine.vision.data.columns import PlacedImage
from engine.vision.data.reader import ImageReader
from engine.vision.data.records import (
    ImageSample,
    image_sample,
    plain_conversation,
    prompt_sample,
)

_TURNS = ("messages", "conversations")


class Prompt(NamedTuple):
    """The tokens of a prompt, and its images in their order."""

    ids: tuple[int, ...]
    images: tuple[PlacedImage, ...] = ()


class PromptRecord(NamedTuple):
    """A record of a file of prompts."""

    place: Place
    fields: dict[str, Any]

    @property
    def image(self) -> str | None:
        """The place of an image that it names; None where it has text alone."""
        for field in (*IMAGE_FIELDS, VIDEOS):
            if self.fields.get(field):
                return f"{self.place}: field '{field}'"
        for at, message in enumerate(self.fields.get("messages", ())):
            content = message.get("content")
            for part in content if isinstance(content, list) else ():
                if isinstance(part, Mapping) and part.get("type") in ("image", "image_url", "video"):
                    return f"{self.place}: field 'messages[{at}].content'"
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Writer:
    """Tokenises texts and conversations.

    Args:
        tokenizer: of the model.
        chat: whether a plain text is a user's message.
        system: in front of each conversation that has no system message of its own; None for nothing.
        reader: of conversations with images, and without, for a model with a vision tower; None for one of text
            alone.
        images: paths of images that texts and conversations are about, those of records excepted.
    """

    tokenizer: Tokenizer
    chat: bool
    system: str | None
    reader: ImageReader | None = None
    images: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.chat and self.reader is None and not self.tokenizer.has_chat_template:
            raise UserError(
                "--chat needs a chat template, which the tokenizer of this model does not have: give the one that it "
                "was trained with as --chat-template, or leave --chat out."
            )

    def text(self, text: str, number: int) -> Prompt:
        """Returns the tokens of a prompt, with its number for messages."""
        # a model whose layers attend to an image has no other prompts
        needs_image = self.reader is not None and self.reader.family.cross_patch_features is not None
        if self.chat or self.images or needs_image:
            return self.conversation([{"role": "user", "content": text}], number)
        return Prompt(tuple(self.tokenizer.encode(text, bos=self.tokenizer.adds_bos)))

    def conversation(self, messages: Sequence[dict[str, Any]], number: int) -> Prompt:
        """Returns the tokens of a conversation, up to the beginning of the assistant's next turn."""
        return self._conversation(Place(Path("prompt"), "number", number), messages)

    def record(self, record: PromptRecord, number: int) -> Prompt:
        """Returns the tokens of a record."""
        place, fields = record
        if self.reader is None:
            if "prompt" in fields:
                return self.text(fields["prompt"], number)
            return self._conversation(place, fields.get("messages") or conversation_turns(place, fields, _TURNS[1]))
        if "prompt" in fields and record.image is None:
            return self.text(fields["prompt"], number)
        if "prompt" in fields:
            return self._read(prompt_sample(place, fields, self._begun([_question(fields["prompt"])])))
        field = next(name for name in _TURNS if name in fields)
        messages = self._begun(conversation_turns(place, fields, field))
        if has_images(fields, messages):
            return self._read(image_sample(place, fields, messages))
        return self._conversation(place, messages)

    def _conversation(self, place: Place, messages: Sequence[dict[str, Any]]) -> Prompt:
        messages = self._begun(messages)
        if self.reader is None:
            return Prompt(tuple(self.tokenizer.chat_prompt(messages)))
        if has_images({}, messages):
            return self._read(image_sample(place, {}, messages))
        if not self.images:
            return self._read(ImageSample(place, plain_conversation(messages), ()))
        sample = prompt_sample(place, {"images": list(self.images)}, messages)
        return self._read(replace(sample, images=tuple(replace(image, option="--image") for image in sample.images)))

    def _read(self, sample: ImageSample) -> Prompt:
        assert self.reader is not None
        return Prompt(*self.reader.prompt(sample))

    def _begun(self, messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Returns the messages with the system message in front, where they have none."""
        if self.system is None or messages[0].get("role") == "system":
            return messages
        return [{"role": "system", "content": self.system}, *messages]


def _question(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def read_records(path: Path) -> list[PromptRecord]:
    """Returns the records of a JSONL file of prompts, each of which has a prompt, messages or conversations.

    Raises:
        UserError: the file cannot be read, or a line is something else; names the line.
    """
    lines = read_text(path, "give a JSONL file in UTF-8 as --prompts").splitlines()
    records = [_record(line, Place(path, "line", number)) for number, line in enumerate(lines, 1) if line.strip()]
    if not records:
        raise UserError(f'--prompts {path} has no records: write lines such as {{"prompt": "Once upon a time"}}.')
    return records


def _record(line: str, place: Place) -> PromptRecord:
    record = parse_record(line, str(place), 'write {"prompt": ...} or {"messages": [...]}')
    if sum(field in record for field in ("prompt", *_TURNS)) != 1:
        raise UserError(f"{place} has {listed(record) or 'nothing'}: give it either prompt or messages.")
    if "prompt" in record and not isinstance(record["prompt"], str):
        raise UserError(f"{place} has a prompt that is no text: write it in quotes.")
    messages = record.get("messages", [{"role": "user", "content": ""}])
    good = isinstance(messages, list) and messages and all(isinstance(one, dict) and "role" in one for one in messages)
    if not good:
        raise UserError(f'{place} has messages that are no list of {{"role": ..., "content": ...}}: correct it.')
    return PromptRecord(place, record)


class RecordsOut:
    """Writes each record with its answer, in the order of the prompts, as soon as all before it are done.

    Args:
        records: as they were read.
        path: of the JSONL file; None for stdout.
        with_ids: the answers' token ids too.
        base: the answers without the adapter, by the numbers of the prompts; None for none.

    Raises:
        UserError: the file cannot be written.
    """

    def __init__(
        self,
        records: Sequence[PromptRecord],
        path: Path | None,
        *,
        with_ids: bool,
        base: Mapping[int, Answer] | None = None,
    ) -> None:
        self._records, self._with_ids, self._base = records, with_ids, base or {}
        self._ready: dict[int, Answer] = {}
        self._next = 0
        self._path = path
        self._file: TextIO = sys.stdout
        if path is not None:
            with self._writing():
                self._file = write_named(path)

    def add(self, answer: Answer) -> None:
        """Takes an answer in any order."""
        self._ready[answer.request.row] = answer
        while self._next in self._ready:
            record = {**self._records[self._next].fields, **self._fields(self._ready.pop(self._next))}
            with self._writing():
                print(json.dumps(record, ensure_ascii=False), file=self._file, flush=True)
            self._next += 1

    def close(self) -> None:
        """Closes the file."""
        if self._path is not None:
            with self._writing():
                self._file.close()

    def _writing(self) -> AbstractContextManager[None]:
        """Returns a context that turns errors of a file into sentences; a closed stdout is left to `run_command`."""
        return nullcontext() if self._path is None else writing(self._path, "give another --out")

    def _fields(self, answer: Answer) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "completion": answer.text,
            "ending": answer.ending,
            "prompt_tokens": len(answer.request.ids),
            "completion_tokens": len(answer.ids),
        }
        fields |= {"completion_ids": list(answer.ids)} if self._with_ids else {}
        if (base := self._base.get(answer.request.row)) is not None:
            fields |= {
                "base_completion": base.text,
                "base_ending": base.ending,
                "base_completion_tokens": len(base.ids),
            }
            fields |= {"base_completion_ids": list(base.ids)} if self._with_ids else {}
        return fields


def requests_of(prompts: Sequence[Prompt]) -> list[Request]:
    """Returns prompts as requests, numbered in order."""
    return [Request(row=row, ids=prompt.ids, images=prompt.images) for row, prompt in enumerate(prompts)]
