"""The process in which a tokenizer and its chat template work: `engine.data.tokenizer` starts it and asks it.

What a library does with a hostile file stays here. An exception of it becomes a sentence; what is no exception (a call
without end, memory that is not there) ends the process, and the caller says so.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from engine.data import tokenizer_calls as calls
from engine.data.opened_tokenizer import open_tokenizer
from engine.data.placeholders import Placeholders
from engine.data.tokenizer import ChatOptions, encoded_chat
from engine.data.tokenizer_calls import Runaway
from engine.errors import UserError
from engine.foreign.limited_process import MOST_BYTES, Messages
from engine.foreign.limits import limited, start_limits
from engine.sentences import on_one_line


def main() -> None:
    """Answers requests on standard input until its other end is closed."""
    start_limits()
    worker = _Worker(Messages.of_standard_input())
    try:
        while True:
            worker.answer()
    except (EOFError, ConnectionError):
        return


class _Worker:
    """The tokenizer of the process.

    Args:
        messages: with the process that asks.
    """

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        self._tokenizer: Any = None
        self._path = ""
        self._limits = calls.LIMITS

    def answer(self) -> None:
        """Receives one request, and answers it."""
        kind, data = self._messages.receive()
        how = {calls.OPEN: self._open, calls.CALL: self._call, calls.ENCODE: self._encode, calls.CHATS: self._chats}
        try:
            how[kind](data)
        except (EOFError, ConnectionError):
            raise
        except UserError as refusal:
            self._refuse(refusal)
        except MemoryError:
            most = self._limits.open_bytes if kind == calls.OPEN else self._limits.text_bytes
            self._refuse(self._runaway(f"asks for more than {most / 2**30:g} GiB of memory"))
        except RecursionError:
            self._refuse(self._runaway("nests too deeply"))
        except BaseException as error:  # a panic of the Rust library is no Exception
            foreign = type(error) is Exception or type(error).__name__ == "PanicException"
            if foreign or isinstance(error, UnicodeError):  # pieces that are no text
                self._refuse(self._runaway(f"fails ({on_one_line(str(error))})"))
            else:
                self._messages.send(calls.DEFECT, traceback.format_exc().encode(errors="replace"))

    def _runaway(self, does: str) -> Runaway:
        return Runaway(f"the tokenizer of {self._path} {does}; copy the model's own tokenizer files again.")

    def _answer(self, kind: bytes, data: bytes) -> None:
        if len(data) > MOST_BYTES:
            raise self._runaway(f"makes more than {MOST_BYTES >> 30} GiB of one text")
        self._messages.send(kind, data)

    def _refuse(self, refusal: UserError) -> None:
        self._messages.send(calls.REFUSAL, _json([str(refusal), isinstance(refusal, Runaway)]))

    def _open(self, data: bytes) -> None:
        self._path, chat, limits = json.loads(data)
        self._limits = calls.CallLimits(**limits)
        with limited(self._limits.open_seconds, self._limits.open_bytes, threads=True):
            tokenizer = self._tokenizer = open_tokenizer(self._path, ChatOptions(**chat), self._template_limits)
            facts = {
                "vocab_size": tokenizer.vocab_size,
                "bos_id": tokenizer.bos_id,
                "eos_id": tokenizer.eos_id,
                "padding_id": tokenizer.padding_id,
                "adds_bos": tokenizer.adds_bos,
                "has_chat_template": tokenizer.has_chat_template,
                "chat_template": tokenizer.chat_template,
                "added_tokens": dict(tokenizer.added_tokens),
            }
            answer = _json(facts)
        self._answer(calls.VALUE, answer)

    @contextmanager
    def _template_limits(self) -> Iterator[None]:
        self._messages.send(calls.TEMPLATE)
        try:
            with limited(self._limits.template_seconds, self._limits.template_bytes):
                yield
        finally:
            self._messages.send(calls.TOKENIZER)

    def _call(self, data: bytes) -> None:
        method, arguments, keywords = json.loads(data)
        if keywords.get("images") is not None:
            keywords["images"] = _placeholders(keywords["images"])
        with limited(*self._limits.of_text(len(data)), threads=True):
            answer = _json(getattr(self._tokenizer, method)(*arguments, **keywords))
        self._answer(calls.VALUE, answer)

    def _encode(self, data: bytes) -> None:
        texts = calls.unpack_texts(data)
        with limited(*self._limits.of_text(len(data)), threads=True):
            packed = calls.pack_ids(self._tokenizer.encode_many(texts))
        self._answer(calls.TEXT_IDS, packed)

    def _chats(self, data: bytes) -> None:
        options, conversations = json.loads(data)
        learn, images = options["learn"], _placeholders(options["images"])
        for conversation in conversations:
            with limited(*self._limits.of_text(len(data)), threads=True):
                found = encoded_chat(self._tokenizer, conversation, learn, images)
            if isinstance(found, UserError):
                self._refuse(found)
            else:
                self._answer(calls.CHAT_IDS, calls.pack_chat(*found))


def _placeholders(given: dict[str, Any] | None) -> Placeholders | None:
    return None if given is None else Placeholders(given["mark"], tuple(given["texts"]))


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
