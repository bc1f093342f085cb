"""Record formats: reads files into samples, still as text.

| format     | file        | fields of a record                                                                      |
|------------|-------------|-----------------------------------------------------------------------------------------|
| text       | .txt        | none: the whole file is one stream of text                                              |
| text       | JSON, JSONL | text                                                                                    |
| completion | JSON, JSONL | prompt, completion                                                                      |
| alpaca     | JSON, JSONL | instruction, output, and optionally input                                               |
| sharegpt   | JSON, JSONL | conversations: turns of {from, value} or {role, content}; optionally system             |
| messages   | JSON, JSONL | messages: turns of {role, content, and whatever the chat template reads}                |
| tokens     | JSON, JSONL | input_ids, and optionally labels: the same ids, or -100 where a token is no target       |

Conversations may have images (image, images, or content in parts); see engine.vision.data.records.

`auto` looks at the fields of a file's first record. Other fields (ids, sources) are ignored, but a field that
carries content which the format cannot use (sounds, an earlier history) is an error, because ignoring it would
train on something else than the record says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.batch import IGNORE_LABEL
from engine.config.data import FORMATS
from engine.data.chat import ALPACA_TASK, Message
from engine.data.record_files import Place, Record, read_records, read_text
from engine.errors import UserError
from engine.seams import resolve
from engine.sentences import listed

ALPACA_PROMPT = ALPACA_TASK + "\n\n### Instruction:\n{instruction}\n\n"
ALPACA_PROMPT_WITH_INPUT = (
    "Below is an instruction, followed by the input it refers to. Write a response that fulfils it.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n"
)
ALPACA_RESPONSE = "### Response:\n"

IMAGE_FIELDS = ("image", "images")
"""Fields that name images."""
VIDEOS = "videos"
"""The field that names the frames of videos, which are images."""
LABELS, LABELLED = ("label", "kto_tag"), "kto"
"""Fields that say whether a record's answer was liked, and the objective that learns from it."""
_IMAGE_SAMPLE = "engine.vision.data.records:image_sample"
_FIELDS = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "completion": ("prompt", "completion"),
    "text": ("text",),
    "tokens": ("input_ids",),
}
_UNUSABLE = ("audios", "history", "tools", "chat_template_kwargs")
_ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}
_MESSAGE_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class TextSample:
    """Text that is trained on from its first token to its last. A stream is cut into rows; a document is not."""

    place: Place
    text: str
    is_stream: bool = False


@dataclass(frozen=True, slots=True)
class CompletionSample:
    """A question and the answer that is trained on."""

    place: Place
    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class ChatSample:
    """A conversation; its assistant turns are trained on."""

    place: Place
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class TokenSample:
    """Text that is tokens already, begin and end tokens included.

    Args:
        ids: int32 [T], not negative.
        answers: bool [T], target tokens where prompts are masked.
    """

    place: Place
    ids: NDArray[np.int32]
    answers: NDArray[np.bool_]


class FamilySample(ABC):
    """A conversation that only the family of a vision-language model can lay out, because it has images.

    Attributes:
        place: of its record.
    """

    place: Place

    @abstractmethod
    def refusal(self) -> str:
        """Returns why a model of text alone cannot read it."""


Sample = TextSample | CompletionSample | ChatSample | FamilySample | TokenSample


def read_samples(path: Path, data_format: str) -> tuple[int, Iterator[Sample]]:
    """Returns how many samples a file has, and the samples in its order; every record gives exactly one.

    Args:
        path: a .txt, .json or .jsonl file.
        data_format: one of FORMATS.

    Raises:
        UserError: a file that cannot be read, or (while being read) a malformed record: names file, record and field.
    """
    assert data_format in FORMATS, data_format
    if path.suffix.lower() != ".txt":
        count, records = read_records(path)
        return count, parse_records(records, data_format)
    if data_format not in ("auto", "text"):
        raise UserError(
            f"{path} is a text file but data.format is {data_format}; set data.format to text or auto, or give a JSON "
            "or JSONL file."
        )
    return 1, iter([TextSample(Place(path, "line", 1), read_text(path), is_stream=True)])


def parse_records(records: Iterator[tuple[Place, Record]], data_format: str) -> Iterator[Sample]:
    """Yields the samples of records with their places; arguments and errors as for `read_samples`."""
    for place, record in records:
        if data_format == "auto":
            data_format = detect_format(place, record)
        yield parse_record(place, record, data_format)


def parse_record(place: Place, record: Record, data_format: str) -> Sample:
    """Parses one record of a known format.

    Raises:
        UserError: a field is missing or is not what the format expects.
    """
    refuse_unusable(place, record)
    if data_format in ("messages", "sharegpt"):
        return _conversation(place, record, data_format)
    refuse_images(place, record, f"the format {data_format}")
    if data_format == "text":
        return TextSample(place, string_field(place, record, "text", data_format))
    if data_format == "completion":
        return CompletionSample(
            place,
            string_field(place, record, "prompt", data_format),
            string_field(place, record, "completion", data_format),
        )
    if data_format == "alpaca":
        return _alpaca(place, record)
    assert data_format == "tokens", data_format
    return _tokens(place, record)


def refuse_unusable(place: Place, record: Record) -> None:
    """Refuses a record with content that would be silently ignored.

    Raises:
        UserError: it has such a field.
    """
    for field in _UNUSABLE:
        if record.get(field):
            raise place.error(f"field '{field}' is not supported; remove it, or remove such records from the data.")


def refuse_images(place: Place, record: Record, what: str) -> None:
    """Refuses a record that names images where what it is written in has no place for them.

    Raises:
        UserError: it names one.
    """
    for field in (*IMAGE_FIELDS, VIDEOS):
        if record.get(field):
            named = "a video" if field == VIDEOS else "an image"
            raise place.error(
                f"field '{field}' names {named}, for which {what} has no place; write conversations or messages."
            )


class ComparedAnswers(UserError):
    """A record whose answers are compared or rated, where all of it would be trained on."""


def detect_format(place: Place, record: Record) -> str:
    """Returns the format whose fields a record has.

    Raises:
        UserError: it is none of them.
    """
    if "chosen" in record and "rejected" in record:
        raise ComparedAnswers(
            f"{place}: the record is a pair of answers (chosen, rejected), but objective.name language_modeling trains "
            "on all of it: set objective.name to dpo."
        )
    label = next((record[field] for field in LABELS if field in record), None)
    if isinstance(label, bool) and "text" not in record:
        raise ComparedAnswers(
            f"{place}: the record has a label that says whether its answer was liked, but objective.name "
            f"language_modeling trains on all it is given: set objective.name to {LABELLED}, or remove the label."
        )
    for data_format, fields in _FIELDS.items():
        if all(field in record for field in fields):
            return data_format
    expected = "; ".join(f"{' + '.join(fields)} ({data_format})" for data_format, fields in _FIELDS.items())
    found = listed(record) or "none"
    raise place.error(f"the record has the fields {found}, expected those of one format: {expected}; rename them.")


def string_field(place: Place, record: Mapping[str, Any], field: str, data_format: str, prefix: str = "") -> str:
    """Returns the text in a field.

    Args:
        data_format: the format's name in messages.
        prefix: of the field's name in a message.

    Raises:
        UserError: the field is missing or is no text.
    """
    if field not in record:
        raise place.error(
            f"field '{prefix}{field}' is missing, which the format {data_format} needs; add it or change data.format."
        )
    value = record[field]
    if not isinstance(value, str):
        raise place.error(f"field '{prefix}{field}' is {_kind(value)}, expected a string; correct the record.")
    _check_encodable(value, place, prefix + field)
    return value


def _check_encodable(text: str, place: Place, field: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise place.error(
            f"field '{field}' has half of a surrogate pair at character {error.start}; escape the character in full."
        ) from error


def _kind(value: object) -> str:
    names = {str: "a string", dict: "an object", list: "a list", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _alpaca(place: Place, record: Record) -> CompletionSample:
    if record.get("system"):
        raise place.error("field 'system' is not part of the format alpaca; use messages or put it into instruction.")
    instruction = string_field(place, record, "instruction", "alpaca")
    output = string_field(place, record, "output", "alpaca")
    # Many sets write null or omit the field where there is no input.
    given = string_field(place, record, "input", "alpaca") if record.get("input") is not None else ""
    return CompletionSample(place, alpaca_prompt(instruction, given), output)


def alpaca_prompt(instruction: str, given: str) -> str:
    """Returns a question in the Alpaca template; `given` is its input, or empty."""
    # One pass of str.format each, so that braces in the record's own text stay unchanged.
    prompt = ALPACA_PROMPT_WITH_INPUT if given else ALPACA_PROMPT
    return prompt.format(instruction=instruction, input=given) + ALPACA_RESPONSE


def _tokens(place: Place, record: Record) -> TokenSample:
    ids = _token_ids(place, record, "input_ids")
    if not len(ids) or ids.min() < 0:
        raise place.error("field 'input_ids' is empty or has negative numbers, expected token ids; correct the record.")
    if record.get("labels") is None:
        return TokenSample(place, ids, np.ones(len(ids), dtype=bool))
    labels = _token_ids(place, record, "labels")
    if len(labels) != len(ids) or (wrong := (labels != ids) & (labels != IGNORE_LABEL)).any():
        where = f"{len(labels)} numbers" if len(labels) != len(ids) else f"{labels[wrong][0]} at {int(wrong.argmax())}"
        raise place.error(
            f"field 'labels' has {where}, expected the {len(ids)} numbers of input_ids, in the same places, or "
            f"{IGNORE_LABEL} where a token is not a target; correct the record."
        )
    return TokenSample(place, ids, labels == ids)


def _token_ids(place: Place, record: Record, field: str) -> NDArray[np.int32]:
    value = record.get(field)
    try:
        numbers = np.asarray(value if value else [0])
    except ValueError:  # lists of different lengths
        numbers = np.empty(0)
    if not isinstance(value, list) or numbers.ndim != 1 or numbers.dtype.kind != "i" or abs(numbers).max() >= 1 << 31:
        given = "missing" if field not in record else _kind(value) if not isinstance(value, list) else "another list"
        raise place.error(f"field '{field}' is {given}, expected a list of token ids; correct the record.")
    return numbers.astype(np.int32)[: len(value)]


def _conversation(place: Place, record: Record, data_format: str) -> ChatSample | FamilySample:
    field = _FIELDS[data_format][0]
    messages = conversation_turns(place, record, field, data_format)
    if all(message["role"] != "assistant" for message in messages):
        raise place.error(
            f"field '{field}' has no turn of the assistant, so there is nothing to train on; add its answer."
        )
    return conversation_sample(place, record, messages)


def conversation_sample(place: Place, record: Record, messages: tuple[Message, ...]) -> ChatSample | FamilySample:
    """Returns a conversation, with the images that its record names.

    Raises:
        UserError: an image and its place do not find each other.
    """
    if has_images(record, messages):
        sample: FamilySample = resolve(_IMAGE_SAMPLE)(place, record, messages)
        return sample
    return ChatSample(place, messages)


def has_images(record: Record, messages: Sequence[Message]) -> bool:
    """Returns whether a record names images, or has turns in parts."""
    return any(record.get(field) for field in (*IMAGE_FIELDS, VIDEOS)) or any(
        has_parts(message) for message in messages
    )


def has_parts(message: Message) -> bool:
    """Returns whether the content of a turn is a list of parts, of which some may be images."""
    return isinstance(message.get("content"), list)


def conversation_turns(place: Place, record: Record, field: str, data_format: str | None = None) -> tuple[Message, ...]:
    """Returns the turns in a field, with the role names of chat templates.

    Args:
        data_format: "sharegpt" or "messages"; None looks at each turn.

    Raises:
        UserError: the field is no list of turns, or a turn is malformed.
    """
    turns = record.get(field)
    if not isinstance(turns, list) or not turns:
        given = "missing" if field not in record else "empty" if turns == [] else _kind(turns)
        raise place.error(f"field '{field}' is {given}, expected a list of turns; correct it or change data.format.")
    messages: list[Message] = []
    if data_format == "sharegpt" and record.get("system") is not None:
        messages.append({"role": "system", "content": string_field(place, record, "system", data_format)})
    for index, turn in enumerate(turns):
        prefix = f"{field}[{index}]"
        if not isinstance(turn, dict):
            raise place.error(f"field '{prefix}' is {_kind(turn)}, expected an object with a role and content.")
        if data_format == "sharegpt" or (data_format is None and "from" in turn):
            messages.append(_sharegpt_turn(place, turn, prefix + "."))
        else:
            messages.append(_message_turn(place, turn, prefix + "."))
    return tuple(messages)


def _sharegpt_turn(place: Place, turn: dict[str, Any], prefix: str) -> Message:
    role_field, text_field = ("from", "value") if "from" in turn else ("role", "content")
    role = string_field(place, turn, role_field, "sharegpt", prefix)
    if role not in _ROLES:
        raise place.error(f"field '{prefix}{role_field}' is '{role}', expected one of {', '.join(_ROLES)}; rename it.")
    return {"role": _ROLES[role], "content": string_field(place, turn, text_field, "sharegpt", prefix)}


def _message_turn(place: Place, turn: dict[str, Any], prefix: str) -> Message:
    role = string_field(place, turn, "role", "messages", prefix)
    if role not in _MESSAGE_ROLES:
        raise place.error(f"field '{prefix}role' is '{role}', expected one of {', '.join(_MESSAGE_ROLES)}; rename it.")
    content = turn.get("content")
    if isinstance(content, list):  # parts are checked where images are looked for
        return turn if len(content) != 1 or not _is_text(content[0]) else {**turn, "content": content[0]["text"]}
    # A turn that only calls tools may have no content.
    if not (turn.get("tool_calls") and turn.get("content") is None):
        string_field(place, turn, "content", "messages", prefix)
    return turn


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
