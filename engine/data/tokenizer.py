"""One interface for the two libraries that turn text into token ids, which work in a process of their own.

A tokenizer's files and its chat template are programs of the model's authors: normalizers that multiply a text,
patterns that backtrack without end, loops. So they are opened by a process (`engine.data.tokenizer_worker`) whose time
and memory are limited, which is killed beyond that, and started again for a later call.

Special tokens are the caller's decision (`bos=`, `eos=`), never added implicitly.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.config.rollout import KEY_VARIABLE
from engine.data import tokenizer_calls as calls
from engine.data.chat import Learn, Message
from engine.data.placeholders import Placeholders
from engine.data.tokenizer_calls import Runaway
from engine.errors import UserError
from engine.foreign.limited_process import Crashed, LimitedProcess, OutOfTime
from engine.telemetry.torchrun import without_rank

_WORKER = "engine.data.tokenizer_worker"

Conversation = Sequence[Message]
EncodedChat = tuple[NDArray[np.int32], NDArray[np.bool_]]
"""The token ids of a conversation, int32 [T], and whether each is a target, bool [T]."""


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Options of rendering conversations, and of which tokens are targets.

    Args:
        template: name or file of a chat template; None takes the trained one, else the tokenizer's.
        trained_template: text of the template that the model was trained with, where it is not the tokenizer's own.
        arguments: variables for the template.
        learn_after_end: train on the white space after the token that ends an answer.
    """

    template: str | None = None
    trained_template: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    learn_after_end: bool = True


class Tokenizer(Protocol):
    """The interface of a tokenizer.

    Attributes:
        vocab_size: number of ids, added tokens included; every id is smaller.
        bos_id: id that opens a document, or None.
        eos_id: id that closes a document, or None.
        padding_id: id that fills up batches: that of the files, else `eos_id`; or None.
        adds_bos: whether the model behind this tokenizer expects `bos_id` in front of every document.
        has_chat_template: whether `apply_chat` can work.
        chat_template: the template in use, which is exported with a model that was trained with it.
        added_tokens: texts that are one token wherever they are, with their ids, as far as the files name them.
    """

    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    padding_id: int | None
    adds_bos: bool
    has_chat_template: bool

    @property
    def chat_template(self) -> str | None: ...

    @property
    def added_tokens(self) -> Mapping[str, int]: ...

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> list[int]:
        """Returns token ids of `text`, with `bos_id` before and `eos_id` after them where asked for and defined."""
        ...

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the same as `encode` of each text, without special tokens, faster."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids`, without control tokens."""
        ...

    def decode_many(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Returns the same as `decode` of each list, faster."""
        ...

    def show(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids`, control tokens too."""
        ...

    def apply_chat(
        self, messages: Sequence[Message], *, learn: Learn = "answers", images: Placeholders | None = None
    ) -> tuple[list[int], list[bool]]:
        """Renders a conversation with the chat template and tokenises it.

        Args:
            messages: each with "role" and "content", and whatever else the template reads.
            learn: "answers" renders the template's training form, where it has one; the others what a server renders.
            images: stand-ins to be put into the rendered text.

        Returns:
            Token ids, and for each whether it is a target, which includes what ends an answer.

        Raises:
            UserError: no template, a template that refuses these messages, or one whose turns cannot be told apart.
        """
        ...

    def apply_chats(self, conversations: Sequence[Conversation], *, learn: Learn) -> Sequence[EncodedChat | UserError]:
        """Returns the same as `apply_chat` for each conversation, or why it is refused, faster.

        Raises:
            Runaway: the template or the tokenizer exceeds its limits.
        """
        ...

    def chat_warnings(self, *, training: bool = False) -> list[str]:
        """Returns warnings about a chat template that was chosen for this tokenizer.

        Args:
            training: about the tokenizer's own too, which a model knows before it is trained.
        """
        ...

    def chat_prompt(self, messages: Sequence[Message], *, images: Placeholders | None = None) -> list[int]:
        """Returns token ids of a conversation up to where the assistant's next turn begins.

        Args:
            messages, images: as for `apply_chat`.

        Raises:
            UserError: no template, or one that refuses these messages.
        """
        ...

    def chat_ids(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, prompt: bool = False
    ) -> list[int]:
        """Returns token ids of a conversation as a server renders it.

        Args:
            messages: each with "role" and "content", and whatever else the template reads.
            tools: descriptions of the tools that the assistant may call, as JSON schemas; None for none.
            prompt: end with the prompt for the assistant's next turn.

        Raises:
            UserError: as for `chat_prompt`.
        """
        ...


def encoded_chat(
    tokenizer: Tokenizer, conversation: Conversation, learn: Learn, images: Placeholders | None = None
) -> EncodedChat | UserError:
    """Returns the tokens and targets of one conversation, or why it is refused.

    Raises:
        Runaway: the template exceeds its limits.
    """
    try:
        ids, targets = tokenizer.apply_chat(conversation, learn=learn, images=images)
    except Runaway:
        raise
    except UserError as refusal:
        return refusal
    return np.array(ids, dtype=np.int32), np.array(targets, dtype=bool)


def load_tokenizer(path: str | Path, chat: ChatOptions | None = None) -> Tokenizer:
    """Opens the tokenizer at `path`, in a process of its own.

    Args:
        path: a folder (a Hugging Face checkpoint, or a checkpoint that was imported with its tokenizer), a
            sentencepiece `.model` file, or a `tokenizer.json` file. In a folder `tokenizer.json` comes first, then
            `tokenizer.model`.
        chat: how conversations are rendered; None for the tokenizer's own template.

    Raises:
        UserError: nothing there, or nothing that opens within the limits.
    """
    return _ConfinedTokenizer(Path(path), chat or ChatOptions())


class _ConfinedTokenizer:
    """A tokenizer that works in a process of its own. It has one call at a time; threads take turns."""

    def __init__(self, path: Path, chat: ChatOptions) -> None:
        self._path, self._chat = path, chat
        self._process: LimitedProcess | None = None
        self._lock = threading.Lock()
        self._template_of = chat.template or str(path)
        with self._lock:
            facts = self._opened()
        self.vocab_size: int = facts["vocab_size"]
        self.bos_id: int | None = facts["bos_id"]
        self.eos_id: int | None = facts["eos_id"]
        self.padding_id: int | None = facts["padding_id"]
        self.adds_bos: bool = facts["adds_bos"]
        self.has_chat_template: bool = facts["has_chat_template"]
        self.chat_template: str | None = facts["chat_template"]
        self.added_tokens: Mapping[str, int] = facts["added_tokens"]

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> list[int]:
        ids: list[int] = self._call("encode", text, bos=bos, eos=eos)
        return ids

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = []
        for part in _parts(texts):
            answers = self._ask(calls.ENCODE, calls.pack_texts(part), 1)
            ids += calls.unpack_ids(answers[0][1])
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._call("decode", [int(token_id) for token_id in ids]))

    def decode_many(self, ids: Sequence[Sequence[int]]) -> list[str]:
        return list(self._call("decode_many", [[int(token_id) for token_id in one] for one in ids]))

    def show(self, ids: Sequence[int]) -> str:
        return str(self._call("show", [int(token_id) for token_id in ids]))

    def apply_chat(
        self, messages: Conversation, *, learn: Learn = "answers", images: Placeholders | None = None
    ) -> tuple[list[int], list[bool]]:
        (found,) = self._chats([_json(messages)], learn, images)
        if isinstance(found, UserError):
            raise found
        return found[0].tolist(), found[1].tolist()

    def apply_chats(self, conversations: Sequence[Conversation], *, learn: Learn) -> list[EncodedChat | UserError]:
        texts = [_json(one) for one in conversations]
        return [found for part in _parts(texts) for found in self._chats(part, learn, None)]

    def chat_warnings(self, *, training: bool = False) -> list[str]:
        return list(self._call("chat_warnings", training=training))

    def chat_prompt(self, messages: Conversation, *, images: Placeholders | None = None) -> list[int]:
        given = None if images is None else asdict(images)
        ids: list[int] = self._call("chat_prompt", messages, images=given)
        return ids

    def chat_ids(
        self, messages: Conversation, *, tools: Sequence[Mapping[str, Any]] | None = None, prompt: bool = False
    ) -> list[int]:
        ids: list[int] = self._call("chat_ids", messages, tools=tools, prompt=prompt)
        return ids

    def _chats(
        self, conversations: Sequence[str], learn: Learn, images: Placeholders | None
    ) -> list[EncodedChat | UserError]:
        given = _json({"learn": learn, "images": None if images is None else asdict(images)})
        request = f"[{given},[{','.join(conversations)}]]".encode("utf-8", "surrogatepass")
        answers = self._ask(calls.CHATS, request, len(conversations))
        return [_error(kind, data) if kind == calls.REFUSAL else calls.unpack_chat(data) for kind, data in answers]

    def _call(self, method: str, *arguments: object, **keywords: object) -> Any:
        request = _json([method, arguments, keywords]).encode("utf-8", "surrogatepass")
        answers = self._ask(calls.CALL, request, 1)
        return json.loads(answers[0][1])

    def _ask(self, kind: bytes, request: bytes, num_answers: int) -> list[tuple[bytes, bytes]]:
        """Returns the answers to a request."""
        with self._lock:
            if self._process is None:  # killed in an earlier call
                self._opened()
            return self._exchange(kind, request, num_answers, calls.LIMITS.of_text(len(request))[0])

    def _opened(self) -> dict[str, Any]:
        """Starts the process; returns what it finds in the tokenizer's files."""
        environment = {name: value for name, value in without_rank(os.environ).items() if name != KEY_VARIABLE}
        self._process = LimitedProcess(_WORKER, {**environment, "HF_HUB_OFFLINE": "1"})
        request = _json([str(self._path), asdict(self._chat), asdict(calls.LIMITS)]).encode("utf-8", "surrogatepass")
        try:
            answers = self._exchange(calls.OPEN, request, 1, calls.LIMITS.open_seconds)
        except UserError:
            self._end()
            raise
        facts: dict[str, Any] = json.loads(answers[0][1])
        return facts

    def _exchange(self, kind: bytes, request: bytes, num_answers: int, seconds: float) -> list[tuple[bytes, bytes]]:
        blamed = calls.TOKENIZER
        answers: list[tuple[bytes, bytes]] = []
        assert self._process is not None
        try:
            self._process.send(kind, request, calls.WAITS * seconds)
            while len(answers) < num_answers and not _is_last(kind, answers):
                found, data = self._process.receive(calls.WAITS * seconds)
                if found in (calls.TEMPLATE, calls.TOKENIZER):
                    blamed = found
                else:
                    answers.append((found, data))
        except OutOfTime:
            self._end()
            raise self._out_of_time(kind, blamed, seconds) from None
        except Crashed as crash:
            self._end()
            raise self._crashed(kind, blamed, str(crash)) from None
        except BaseException:  # an answer that is still to come must not be taken for one to another request
            self._end()
            raise
        if _is_last(kind, answers):
            raise _error(*answers[-1])
        return answers

    def _end(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def _out_of_time(self, kind: bytes, blamed: bytes, seconds: float) -> Runaway:
        if blamed == calls.TEMPLATE:
            limit = f"{calls.LIMITS.template_seconds:g} seconds"
            return self._runaway(kind, blamed, f"did not finish a conversation within {limit}")
        did = "was not opened" if kind == calls.OPEN else "did not finish a text"
        return self._runaway(kind, blamed, f"{did} within {seconds:.0f} seconds")

    def _crashed(self, kind: bytes, blamed: bytes, how: str) -> Runaway:
        limit = calls.LIMITS.template_bytes if blamed == calls.TEMPLATE else calls.LIMITS.text_bytes
        limit = calls.LIMITS.open_bytes if kind == calls.OPEN else limit
        return self._runaway(
            kind,
            blamed,
            f"ended its process ({how}), as one does that asks for more than {limit / 2**30:g} GiB of memory or does "
            "not come to an end",
        )

    def _runaway(self, kind: bytes, blamed: bytes, does: str) -> Runaway:
        if blamed == calls.TEMPLATE:
            return Runaway(
                f"the chat template of {self._template_of} {does}; correct the template, or give another one with "
                "data.chat_template."
            )
        return Runaway(f"the tokenizer of {self._path} {does}; copy the model's own tokenizer files again.")


def _is_last(kind: bytes, answers: Sequence[tuple[bytes, bytes]]) -> bool:
    """Returns whether the process answers no more to a request of this kind."""
    if not answers or answers[-1][0] not in (calls.REFUSAL, calls.DEFECT):
        return False
    return kind != calls.CHATS or isinstance(_error(*answers[-1]), Runaway | RuntimeError)


def _error(kind: bytes, data: bytes) -> UserError | RuntimeError:
    if kind == calls.DEFECT:
        return RuntimeError(f"in a process that works with a tokenizer:\n{data.decode(errors='replace')}")
    sentence, is_runaway = json.loads(data)
    return Runaway(sentence) if is_runaway else UserError(sentence)


def _json(value: object) -> str:
    """Returns what a process is sent, as JSON.

    Raises:
        UserError: it nests too deeply.
    """
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain)
    except RecursionError:
        raise UserError("a message nests too deeply; flatten its content.") from None


def _plain(value: object) -> object:
    """Returns what a template is shown in place of an object that is no JSON, as in transformers."""
    return dict(value) if isinstance(value, Mapping) else f"<{type(value).__name__}>"


def _parts(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yields the texts in order, as many at a time as one request takes."""
    first = characters = 0
    for place, text in enumerate(texts):
        if characters and characters + len(text) > calls.REQUEST_CHARACTERS:
            yield texts[first:place]
            first, characters = place, 0
        characters += len(text)
    if first < len(texts):
        yield texts[first:]
