"""The chat template of a run whose conversations a client drives, and the turns that the model samples in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.choices import ToolFormat
from engine.data.tokenizer import Tokenizer
from engine.errors import UserError
from engine.rollouts.turns.stand_ins import StandIns
from engine.rollouts.turns.tool_calls import Turn, format_of_template, parse_turn

Schemas = Sequence[Mapping[str, Any]]
_WORDS = "Following words"


class AgentChat:
    """Renders what clients send, and reads what the model answers.

    Args:
        tokenizer: of the model.
        ends: tokens that end a turn.
        tool_format: how the model writes calls; None for the one that the template asks for.
    """

    def __init__(self, tokenizer: Tokenizer, ends: frozenset[int], tool_format: ToolFormat | None) -> None:
        self._tokenizer, self._ends = tokenizer, ends
        self._format = tool_format or format_of_template(tokenizer.chat_template or "")
        self._stand_ins = StandIns(tokenizer, ends)

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: Schemas) -> list[int]:
        """Returns the token ids of a conversation up to where the assistant's turn begins.

        Raises:
            UserError: the template refuses these messages.
        """
        return self._tokenizer.chat_ids([dict(one) for one in messages], tools=tools or None, prompt=True)

    def between(self, messages: Sequence[dict[str, Any]], *, ended: bool) -> list[int]:
        """Returns the token ids behind a turn; see `StandIns.between`."""
        return self._stand_ins.between(messages, ended=ended)

    def note(self) -> str | None:
        """Returns a note on a template by which a conversation cannot be continued; None where it can, or where there
        is no template, so that programs send texts or token ids."""
        if not self._tokenizer.has_chat_template:
            return None
        try:
            if _WORDS in self._tokenizer.show(self.between([{"role": "user", "content": _WORDS}], ended=True)):
                return None
            why = "a user's message behind a turn is not in what it writes behind the turn"
        except UserError as error:
            why = str(error).rstrip(".")
        return (
            f"the chat template cannot continue a conversation ({why}): set data.chat_template to one that can, where "
            "rollout.agent sends messages"
        )

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text that is continued."""
        return self._tokenizer.encode(text, bos=self._tokenizer.adds_bos)

    def text(self, ids: Sequence[int]) -> str:
        """Returns the text of some tokens, without the one that ended a turn."""
        return self._tokenizer.show(ids[:-1] if ids and ids[-1] in self._ends else ids)

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Returns the text of each token."""
        return self._tokenizer.decode_many([[one] for one in ids])

    def turn(self, ids: Sequence[int], *, calls: bool) -> Turn:
        """Returns the turn that the model sampled.

        Args:
            calls: whether it may call tools. A turn with a call that cannot be read is a text.
        """
        text = self.text(ids)
        plain = parse_turn(text, None) if self._format != "harmony" else parse_turn(text, "harmony")
        if not calls or self._format is None:
            return plain
        found = parse_turn(text, self._format)
        return plain if any(one.problem is not None for one in found.calls) else found
