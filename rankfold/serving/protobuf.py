"""Messages of the protocol in protobuf's encoding (https://protobuf.dev/programming-guides/encoding).

A message is a dict from names of fields to values; a field that is absent has no entry. Maps are dicts. Fields that the
tables do not know are skipped, as protobuf asks. The numbers and names are those that SDK 0.38 sends and reads.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Scalar = Literal["string", "bytes", "integer", "bool", "double"]
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a message.

    Args:
        name: its key in the dict.
        kind: of a value: a scalar, or the name of a message in `MESSAGES`.
        form: whether it has one value, a list of them, or a map from texts.
    """

    name: str
    kind: str
    form: Literal["one", "list", "map"] = "one"


MESSAGES: Mapping[str, Mapping[int, Field]] = {
    "ForwardBackwardRequest": {
        1: Field("model_id", "string"),
        2: Field("seq_id", "integer"),
        3: Field("data", "Datum", "list"),
        4: Field("loss_fn", "string"),
        5: Field("loss_fn_config", "double", "map"),
        6: Field("forward_only", "bool"),
        7: Field("loss_fn_config_v2", "LossConfigValue", "map"),
    },
    "LossConfigValue": {1: Field("number", "double"), 2: Field("text", "string")},
    "Datum": {1: Field("model_input", "Chunk", "list"), 2: Field("loss_fn_inputs", "Tensor", "map")},
    "Chunk": {1: Field("encoded_text", "EncodedTextChunk"), 2: Field("image", "ImageChunk"), 3: Field("dmel", "Other")},
    "EncodedTextChunk": {1: Field("tokens", "bytes")},
    "ImageChunk": {
        1: Field("data", "bytes"),
        2: Field("format", "string"),
        3: Field("expected_tokens", "integer"),
        4: Field("override_dimensions", "Other"),
    },
    "Other": {},
    "Tensor": {
        1: Field("dense", "bytes"),
        2: Field("sparse_csr", "SparseCsr"),
        3: Field("dtype", "integer"),
        4: Field("shape", "integer", "list"),
    },
    "SparseCsr": {
        1: Field("values", "bytes"),
        2: Field("crow_indices", "bytes"),
        3: Field("col_indices", "bytes"),
    },
    "ForwardBackwardOutput": {
        1: Field("loss_fn_output_type", "string"),
        2: Field("loss_fn_outputs", "ArrayRecord", "list"),
        3: Field("metrics", "double", "map"),
    },
    "ArrayRecord": {
        1: Field("type_tag", "string"),
        2: Field("fields", "BatchedTensor", "map"),
        3: Field("num_datums", "integer"),
    },
    "BatchedTensor": {
        1: Field("data", "bytes"),
        2: Field("offsets", "bytes"),
        3: Field("dtype", "integer"),
        4: Field("trailing_shape", "integer", "list"),
    },
    "SampleResponse": {
        1: Field("sequences", "SampledSequence", "list"),
        2: Field("prompt_logprobs", "bytes"),
        3: Field("topk_prompt_logprobs", "TopkLogprobs"),
        4: Field("prompt_cache_hit_tokens", "integer"),
        5: Field("target_prompt_logprobs", "Tensor"),
        6: Field("prompt_alt_tokens", "PromptAltTokens"),
    },
    "PromptAltTokens": {1: Field("tokens", "Tensor"), 2: Field("logprobs", "Tensor")},
    "TopkLogprobs": {
        1: Field("token_ids", "bytes"),
        2: Field("logprobs", "bytes"),
        3: Field("k", "integer"),
        4: Field("length", "integer"),
    },
    "SampledSequence": {
        1: Field("stop_reason", "integer"),
        2: Field("tokens", "bytes"),
        3: Field("logprobs", "bytes"),
        4: Field("topk_sampled_logprobs", "TopkLogprobs"),
    },
}
"""Message -> number -> field."""

_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5
_WIRE_TYPES = {"string": _LENGTH, "bytes": _LENGTH, "integer": _VARINT, "bool": _VARINT, "double": _EIGHT_BYTES}

MOST_PIECES = 500_000
"""Fields of a message, with those of the messages in it: seven times those of 1,024 data with ten tensors each."""


class WireError(Exception):
    """The reason, in a few words, why bytes are no such message."""


class _Piece(NamedTuple):
    """A field as it lies in a message: its number, how it is encoded, and an integer or its bytes."""

    number: int
    wire: int
    value: int | memoryview


def decode(
    name: str, data: bytes | memoryview, *, only: Collection[str] | None = None, most: int | None = None
) -> Message:
    """Returns a message.

    Args:
        name: of the message, a key of `MESSAGES`.
        data: its encoding.
        only: names of the fields that are read; None for all.
        most: fields that it may have, with those of the messages in it that are read; None for `MOST_PIECES`.

    Raises:
        WireError: the bytes are no message of that name, or it has more fields.
    """
    return _Reader(MOST_PIECES if most is None else most).message(name, memoryview(data), only)


def encode(name: str, message: Mapping[str, Any]) -> bytes:
    """Returns the encoding of a message.

    Args:
        name: of the message, a key of `MESSAGES`.
        message: its fields; None and absent are the same.
    """
    out = bytearray()
    known = {field.name: (number, field) for number, field in MESSAGES[name].items()}
    for key, value in message.items():
        if value is None:
            continue
        number, field = known[key]
        if field.form == "map":
            for one, own in value.items():
                entry = _field(1, "string", one) + _field(2, field.kind, own)
                out += _tag(number, _LENGTH) + _varint(len(entry)) + entry
        elif field.form == "list":
            for own in value:
                out += _field(number, field.kind, own)
        else:
            out += _field(number, field.kind, value)
    return bytes(out)


class _Reader:
    """Reads a message. A field takes a hundred times its bytes in memory, so that fields are counted."""

    def __init__(self, most: int) -> None:
        self._most = self._left = most

    def message(self, name: str, data: memoryview, only: Collection[str] | None = None) -> Message:
        fields, found = MESSAGES[name], Message()
        for piece in self._pieces(data):
            field = fields.get(piece.number)
            if field is None or (only is not None and field.name not in only):
                continue
            if field.form == "map":
                key, value = self._entry(field, piece)
                found.setdefault(field.name, {})[key] = value
            elif field.form == "list":
                found.setdefault(field.name, []).extend(self._values(field, piece))
            else:
                found[field.name] = self._value(field.kind, piece)
        return found

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise WireError(f"it has more than {self._most} fields, with those of the messages in it")

    def _pieces(self, data: memoryview) -> Iterator[_Piece]:
        place = 0
        while place < len(data):
            self._count()
            tag, place = _read_varint(data, place)
            number, wire = tag >> 3, tag & 7
            if number == 0:
                raise WireError("a field has number 0")
            if wire == _VARINT:
                value, place = _read_varint(data, place)
                yield _Piece(number, wire, value)
                continue
            if wire == _LENGTH:
                length, place = _read_varint(data, place)
            elif wire in (_EIGHT_BYTES, _FOUR_BYTES):
                length = 8 if wire == _EIGHT_BYTES else 4
            else:
                raise WireError(f"field {number} has wire type {wire}, which is not used")
            if length > len(data) - place:
                raise WireError(f"field {number} ends {length - (len(data) - place)} bytes behind the message")
            yield _Piece(number, wire, data[place : place + length])
            place += length

    def _value(self, kind: str, piece: _Piece) -> Any:
        if piece.wire != _WIRE_TYPES.get(kind, _LENGTH):
            raise WireError(f"field {piece.number} has wire type {piece.wire}, not that of {kind}")
        value = piece.value
        if isinstance(value, int):
            return bool(value) if kind == "bool" else value - (1 << 64) if value >= 1 << 63 else value
        if kind == "double":
            return struct.unpack("<d", value)[0]
        if kind == "bytes":
            return bytes(value)
        if kind == "string":
            try:
                return bytes(value).decode("utf-8")
            except UnicodeDecodeError:
                raise WireError(f"field {piece.number} is not UTF-8") from None
        return self.message(kind, value)

    def _values(self, field: Field, piece: _Piece) -> list[Any]:
        """Returns the values of one piece of a list: integers may be packed in one."""
        if field.kind != "integer" or isinstance(piece.value, int):
            return [self._value(field.kind, piece)]
        found, place = list[int](), 0
        while place < len(piece.value):
            self._count()
            value, place = _read_varint(piece.value, place)
            found.append(self._value("integer", _Piece(piece.number, _VARINT, value)))
        return found

    def _entry(self, field: Field, piece: _Piece) -> tuple[str, Any]:
        if isinstance(piece.value, int):
            raise WireError(f"field {piece.number} is no map")
        key, value = "", None
        for part in self._pieces(piece.value):
            if part.number == 1:
                key = self._value("string", part)
            elif part.number == 2:
                value = self._value(field.kind, part)
        return key, ({} if field.kind in MESSAGES else 0.0) if value is None else value


def _field(number: int, kind: str, value: Any) -> bytes:
    if kind in ("integer", "bool"):
        return _tag(number, _VARINT) + _varint(int(value) % (1 << 64))
    if kind == "double":
        return _tag(number, _EIGHT_BYTES) + struct.pack("<d", value)
    data = value if kind == "bytes" else value.encode() if kind == "string" else encode(kind, value)
    return _tag(number, _LENGTH) + _varint(len(data)) + data


def _tag(number: int, wire: int) -> bytes:
    return _varint(number << 3 | wire)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: memoryview, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(data):
            raise WireError("it ends inside of a number")
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            if value >= 1 << 64:
                break
            return value, place
    raise WireError("a number has more than 64 bits")
