"""Prompts and answers: texts, files of records, and their tokens."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from engine.data.tokenizer import Tokenizer
from engine.errors import UserError
from engine.files.documents import parse_record, read_text
from engine.files.durable import write_named
from engine.files.refusals import writing
from engine.inference.generate import Answer, Request


@dataclass(frozen=True, kw_only=True, slots=True)
class Writer:
    """Tokenises texts and conversations.

    Args:
        tokenizer: of the model.
        chat: whether a plain text is a user's message.
        system: in front of each conversation that has no system message of its own; None for nothing.
    """

    tokenizer: Tokenizer
    chat: bool
    system: str | None

    def __post_init__(self) -> None:
        if self.chat and not self.tokenizer.has_chat_template:
            raise UserError(
                "--chat needs a chat template, which the tokenizer of this model does not have: give the one that it "
                "was trained with as --chat-template, or leave --chat out."
            )

    def text(self, text: str) -> tuple[int, ...]:
        """Returns the tokens of a prompt."""
        if self.chat:
            return self.conversation([{"role": "user", "content": text}])
        return tuple(self.tokenizer.encode(text, bos=self.tokenizer.adds_bos))

    def conversation(self, messages: Sequence[dict[str, Any]]) -> tuple[int, ...]:
        """Returns the tokens of a conversation, up to the beginning of the assistant's next turn."""
        if self.system is not None and messages[0].get("role") != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        return tuple(self.tokenizer.chat_prompt(messages))


def read_records(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a JSONL file of prompts, each of which has a prompt or messages.

    Raises:
        UserError: the file cannot be read, or a line is something else; names the line.
    """
    lines = read_text(path, "give a JSONL file in UTF-8 as --prompts").splitlines()
    records = [_record(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not records:
        raise UserError(f'--prompts {path} has no records: write lines such as {{"prompt": "Once upon a time"}}.')
    return records


def _record(line: str, place: str) -> dict[str, Any]:
    record = parse_record(line, place, 'write {"prompt": ...} or {"messages": [...]}')
    if ("prompt" in record) == ("messages" in record):
        raise UserError(f"{place} has {', '.join(record) or 'nothing'}: give it either prompt or messages.")
    if "prompt" in record and not isinstance(record["prompt"], str):
        raise UserError(f"{place} has a prompt that is no text: write it in quotes.")
    messages = record.get("messages", [{"role": "user", "content": ""}])
    good = isinstance(messages, list) and messages and all(isinstance(one, dict) and "role" in one for one in messages)
    if not good:
        raise UserError(f'{place} has messages that are no list of {{"role": ..., "content": ...}}: correct it.')
    return record


def record_ids(record: dict[str, Any], writer: Writer) -> tuple[int, ...]:
    """Returns the tokens of a record."""
    return writer.text(record["prompt"]) if "prompt" in record else writer.conversation(record["messages"])


class RecordsOut:
    """Writes each record with its answer, in the order of the prompts, as soon as all before it are done.

    Args:
        records: as they were read.
        path: of the JSONL file; None for stdout.
        with_ids: the answers' token ids too.

    Raises:
        UserError: the file cannot be written.
    """

    def __init__(self, records: Sequence[dict[str, Any]], path: Path | None, *, with_ids: bool) -> None:
        self._records, self._with_ids = records, with_ids
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
            record = {**self._records[self._next], **self._fields(self._ready.pop(self._next))}
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
        return fields | ({"completion_ids": list(answer.ids)} if self._with_ids else {})


def requests_of(prompts: Sequence[tuple[int, ...]]) -> list[Request]:
    """Returns prompts as requests, numbered in order."""
    return [Request(row=row, ids=ids) for row, ids in enumerate(prompts)]
