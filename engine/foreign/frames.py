"""Messages between two processes: frames of a length and bytes, which may be JSON, over one socket."""

from __future__ import annotations

import json
from typing import Any

from engine.files.strict_json import ANSWER_LIMITS, JsonLimits, parse_json
from engine.foreign.streams import LimitedStream

HEADER_BYTES = 8
"""Bytes of a frame's length, in front of it."""


def send_frame(stream: LimitedStream, message: object) -> None:
    """Sends a message.

    Raises:
        OSError: the other end is gone, or does not read in time (TimeoutError).
    """
    send_bytes(stream, json.dumps(message).encode())


def receive_frame(stream: LimitedStream, limits: JsonLimits = ANSWER_LIMITS) -> Any:
    """Receives a message.

    Raises:
        JsonFlaw: it is too long, no JSON, or beyond the limits.
        EOFError: the other end is closed.
        OSError: the connection failed, or the time is over (TimeoutError).
    """
    return parse_json(receive_bytes(stream), limits)


def send_bytes(stream: LimitedStream, *parts: bytes) -> None:
    """Sends a message of some parts, one behind the other; see `send_frame`."""
    stream.send(b"".join([sum(map(len, parts)).to_bytes(HEADER_BYTES, "big"), *parts]))


def receive_bytes(stream: LimitedStream) -> bytes:
    """Receives the bytes of a message; see `receive_frame`."""
    return stream.receive(int.from_bytes(stream.receive(HEADER_BYTES), "big"))
