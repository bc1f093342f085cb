"""The messages between a tokenizer's process and the process that uses it, and the limits of each call.

| request | bytes                                    | answers                                          |
|---------|------------------------------------------|--------------------------------------------------|
| OPEN    | JSON: path, options of chats, limits     | VALUE: what `Tokenizer` has as attributes        |
| CALL    | JSON: a method's name and its arguments  | VALUE: what it returns                           |
| ENCODE  | texts (`pack_texts`)                     | TEXT_IDS: lengths and ids                        |
| CHATS   | JSON: conversations, learn, images     | for each CHAT_IDS: ids and targets, or REFUSAL   |

In place of an answer comes REFUSAL, a sentence and whether it is a `Runaway`, or DEFECT, a traceback. TEMPLATE and
TOKENIZER come in between: what the process works with from there on, and is to blame where it ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.errors import UserError

OPEN, CALL, ENCODE, CHATS = b"O", b"M", b"E", b"C"
VALUE, TEXT_IDS, CHAT_IDS, REFUSAL, DEFECT = b"V", b"I", b"J", b"R", b"D"
TEMPLATE, TOKENIZER = b"T", b"K"

WAITS = 6.0
"""The wait for an answer, in multiples of the processor time that it may take: other processes take some, too."""

REQUEST_CHARACTERS = 1 << 22
"""Characters in one request of several texts or conversations."""
MOST_TEMPLATE = 1 << 22
"""Maximum characters of a chat template's own text."""


class Runaway(UserError):
    """Raised where a template or a tokenizer exceeds its limits. It would again with the next text: none is tried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallLimits:
    """The limits of each call. Seconds are of processor time; bytes are on top of what the process has.

    Args:
        open_seconds, open_bytes: of opening a tokenizer.
        template_seconds, template_bytes: of what a template does for one conversation.
        text_seconds, text_bytes: of encoding or decoding, without what the length of a text adds.
        characters_per_second: a tokenizer that is slower is taken for one without end; the slowest real ones do ten
            times as many.
        bytes_per_character: memory that a character adds; a token takes about 100 bytes while a text is encoded.
    """

    open_seconds: float = 120.0
    open_bytes: int = 4 << 30
    template_seconds: float = 10.0
    template_bytes: int = 2 << 30
    text_seconds: float = 10.0
    text_bytes: int = 2 << 30
    characters_per_second: int = 20_000
    bytes_per_character: int = 1024

    def of_text(self, characters: int) -> tuple[float, int]:
        """Returns the seconds and bytes that encoding so many characters may take."""
        return (
            self.text_seconds + characters / self.characters_per_second,
            self.text_bytes + characters * self.bytes_per_character,
        )


LIMITS = CallLimits()


def pack_texts(texts: Sequence[str]) -> bytes:
    """Returns texts as bytes: their number, their lengths, and the texts end to end."""
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    lengths = np.array([len(encoded), *map(len, encoded)], dtype=np.int64)
    return b"".join([lengths.tobytes(), *encoded])


def unpack_texts(data: bytes) -> list[str]:
    """Returns the texts that `pack_texts` packed."""
    count = int(np.frombuffer(data, np.int64, 1)[0])
    ends = np.cumsum(np.frombuffer(data, np.int64, count, 8)) + 8 * (count + 1)
    starts = [8 * (count + 1), *ends[:-1].tolist()] if count else []
    return [data[a:b].decode("utf-8", "surrogatepass") for a, b in zip(starts, ends.tolist(), strict=True)]


def pack_ids(encoded: Sequence[Sequence[int]]) -> bytes:
    """Returns the token ids of several texts as bytes: the number of texts, their lengths, and the ids end to end."""
    lengths = np.array([len(encoded), *map(len, encoded)], dtype=np.int64)
    return b"".join([lengths.tobytes(), *(np.array(ids, dtype=np.int32).tobytes() for ids in encoded)])


def unpack_ids(data: bytes) -> list[list[int]]:
    """Returns the token ids that `pack_ids` packed."""
    count = int(np.frombuffer(data, np.int64, 1)[0])
    lengths = np.frombuffer(data, np.int64, count, 8)
    ids = np.frombuffer(data, np.int32, offset=8 * (count + 1)).tolist()
    ends = np.cumsum(lengths).tolist()
    return [ids[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]


def pack_chat(ids: Sequence[int], targets: Sequence[bool]) -> bytes:
    """Returns the token ids of a conversation, and which of them are targets, as bytes."""
    return np.array(ids, dtype=np.int32).tobytes() + np.array(targets, dtype=bool).tobytes()


def unpack_chat(data: bytes) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Returns what `pack_chat` packed: int32 [T] and bool [T]."""
    count = len(data) // 5
    return np.frombuffer(data, np.int32, count), np.frombuffer(data, np.bool_, count, 4 * count)
