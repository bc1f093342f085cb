"""The token ids between a turn that the model sampled and its next turn.

The messages between them are rendered behind a stand-in for the turn, a small conversation of two messages, and what
the template writes behind the end of the stand-in's turn follows the sampled tokens. It is found by counting end
tokens, so that templates which write earlier turns differently once others follow do not matter to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.data.tokenizer import Tokenizer
from engine.errors import UserError

QUESTION = {"role": "user", "content": "?"}
CALL_ID = "call00000"
"""The identifier of every call, where a template wants one: nine letters or digits, as Mistral's do."""


class StandIns:
    """The stand-ins of a chat template.

    Args:
        tokenizer: with the template.
        ends: tokens that end a turn.
    """

    def __init__(self, tokenizer: Tokenizer, ends: frozenset[int]) -> None:
        self._tokenizer, self._ends = tokenizer, ends
        self._known: dict[str | None, tuple[list[int], int]] = {}
        """By the name of a tool, None for a turn that calls none: the tokens of the stand-in, and its end tokens."""

    def between(self, messages: Sequence[dict[str, Any]], *, ended: bool = True) -> list[int]:
        """Returns the token ids between the end of a turn and the begin of the model's next turn.

        Args:
            messages: of others than the model, at least one; a result of a tool has the tool's name.
            ended: whether a token ended the turn; where none did, that of the template is the first one returned.

        Raises:
            UserError: the template refuses these messages.
        """
        name = messages[0]["name"] if messages[0]["role"] == "tool" else None
        if name not in self._known:
            ids = self._tokenizer.chat_ids([QUESTION, _turn(name)])
            self._known[name] = ids, sum(token in self._ends for token in ids)
        before, ends = self._known[name]
        given = [{**one, "tool_call_id": CALL_ID} if one["role"] == "tool" else one for one in messages]
        whole = self._tokenizer.chat_ids([QUESTION, _turn(name), *given], prompt=True)
        if ends == 0:  # turns end without a token of their own
            if whole[: len(before)] != before:
                raise UserError(
                    "the chat template writes a turn differently where other messages follow, and ends it with no "
                    "token: set data.chat_template to one that does not."
                )
            return whole[len(before) :]
        places = [place for place, token in enumerate(whole) if token in self._ends]
        if len(places) < ends:
            raise UserError(
                "the chat template ends a turn with fewer tokens where other messages follow: set data.chat_template "
                "to one that does not."
            )
        return whole[places[ends - 1] + ended :]


def call_message(name: str, arguments: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns a turn of the assistant that calls a tool."""
    function = {"name": name, "arguments": dict(arguments or {})}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "id": CALL_ID, "function": function}],
    }


def answer_message() -> dict[str, Any]:
    """Returns a turn of the assistant that calls none."""
    return {"role": "assistant", "content": "."}


def _turn(name: str | None) -> dict[str, Any]:
    return answer_message() if name is None else call_message(name)
